"""The other members of a group, as one of them calls them: PeerService's client side."""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc

from shardwell.connection.channel import Channel
from shardwell.connection.credentials import Credentials
from shardwell.connection.error_codes import from_rpc_error
from shardwell.connection.options import unary_stub
from shardwell.connection.tls import TlsFiles
from shardwell.errors import ArgumentError, ClosedError, ShardUnavailableError, ShardwellError
from shardwell.group.inbox import Inbox
from shardwell.group.transport import links
from shardwell.group.transport.links import Link
from shardwell.numerics.codec import Bytes
from shardwell.process.shared_memory import HEAD_BYTES, SharedMemory
from shardwell.process.spans import Traffic
from shardwell.process.unix_sockets import connected
from shardwell.transport import arena
from shardwell.transport.arena import BATCH_COUNT, Arenas
from shardwell.transport.neighbour import Neighbour
from shardwell.transport.unix_call import UnixCall, UnixCalls
from shardwell.v1 import arena_pb2, group_pb2, peer_pb2
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import messages as framing
from shardwell.wire.chunks import PLACE_SIZE_BYTES
from shardwell.wire.messages import Room

PENDING_COUNT_MAX = 16
"""Chunks that wait to be sent to one rank, in calls where chunks go one way."""

LEAVE_TIMEOUT_S = 60.0
"""The longest wait of a leaving rank until the others have received all."""

SERVICE_NAME = peer_pb2.DESCRIPTOR.services_by_name["PeerService"].full_name
RECEIVE_CHUNKS = f"/{SERVICE_NAME}/ReceiveChunks"

_ACCEPT_S = 2.0
"""The longest wait for a member on this machine to accept a stream over its Unix socket."""
_LOG = logging.getLogger("shardwell.group")

_PLACE_COUNT = 8
"""Payloads that may lie between two ranks at once; further ones go over the network."""
_COPIED = 2
"""The number in the memory's head that counts payloads that the reader has copied."""
_LAST = pb.ReceiveChunksResponse(last=True).SerializeToString()


class Peer:
    """The connection to one other member. Any thread may call it."""

    def __init__(
        self,
        member: group_pb2.Member,
        *,
        same_host: bool = False,
        tls: TlsFiles | None = None,
    ) -> None:
        self.member = member
        self.arenas = Arenas(
            f"the worker at {member.address}",
            lambda: arena_pb2.ArenaOffer(member_id=member.member_id),
            member.arena_address,
            is_wanted=same_host,
        )
        is_wanted = same_host and links.IS_SUPPORTED
        self._streams = Neighbour(member.stream_address, is_wanted=is_wanted)
        self._connection = Channel(member.address, Credentials(tls))
        self._channel = self._connection.current
        self.agree: Any = self._channel.stream_stream(
            f"/{SERVICE_NAME}/Agree",
            request_serializer=pb.AgreeRequest.SerializeToString,
            response_deserializer=pb.AgreeResponse.FromString,
        )
        self.receive_chunks: Any = self._channel.unary_stream(
            RECEIVE_CHUNKS,
            request_serializer=pb.ReceiveChunksRequest.SerializeToString,
        )

    def greet(self, group: str, timeout_s: float) -> None:
        """Asks the server for its identity, and returns if it is this member. Blocks."""
        greet = unary_stub(self._channel, f"/{SERVICE_NAME}/Greet", pb.GreetResponse)
        request = pb.GreetRequest(group=group, member_id=self.member.member_id)
        try:
            if greet(request, timeout=timeout_s) is None:
                raise ShardUnavailableError("its answer was lost on its way")
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"worker at {self.member.address}") from None
        except ValueError as error:  # what gRPC raises for a closed channel
            raise ClosedError(f"the connection was closed ({error})") from None

    def link(self) -> UnixCall | None:
        """An accepted call of ReceiveChunks on this machine, or None; blocks for seconds."""
        if not self._streams.is_there:
            return None
        try:
            connection = connected(self._streams.address, socket.SOCK_STREAM, _ACCEPT_S)
            call = UnixCall(connection, RECEIVE_CHUNKS, UnixCalls())
            answers = select.poll()
            answers.register(connection, select.POLLIN)
            if answers.poll(_ACCEPT_S * 1000) and call.read() == links.ACCEPTED:
                return call
            call.cancel()
            why = "it did not accept the stream"
        except (OSError, grpc.RpcError) as error:
            why = str(error)
        self._streams.pause()
        _LOG.debug("the worker at %s is called over the network: %s", self.member.address, why)
        return None

    def close(self) -> None:
        """Ends the connection and every call on it."""
        self._connection.close()


class Outgoing:
    """The chunks for one rank of a generation; gRPC's threads call `on_failure`."""

    def __init__(self, traffic: Traffic, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._traffic = traffic
        # Bounded by the calls: see `group/schedule/collective.py`, and `await_room`.
        self._messages: queue.SimpleQueue[tuple[bytes, int, int] | None] = queue.SimpleQueue()
        self._places: _Places | None = None
        """Open once the stream shares memory; the engine's thread alone puts there."""
        self._changed = threading.Condition()
        self._link: Link | None = None
        """Open once the stream is a link: short messages need not go through the queue."""
        self._queued_count = 0
        """Messages that the stream's thread is to send; written by the engine's thread alone."""
        self._taken_count = 0
        """The messages that it has taken; written by the stream's thread alone."""
        self._written_count = 0
        """The messages that have left; written by the stream's thread alone."""
        self._waits_for_room = False
        self._is_open = False
        self._is_cut = False
        self._is_finished = False
        self._has_ended = threading.Event()

    def room(self, size_bytes: int) -> Room | None:
        """The place of the next payload; None: in its message. For the thread that sends."""
        places = self._places
        return None if places is None else places.room(size_bytes)

    def send(self, message: bytes, element_count: int, shared_bytes: int = 0) -> None:
        """Sends a chunk, of whose payload so many bytes are in a room; does not block."""
        link = self._link
        if (
            link is not None
            and self._queued_count == self._written_count
            and len(message) <= links.SHORT_BYTES_MAX
            and link.write_now(message)
        ):
            self._traffic.add_sent(len(message) + shared_bytes, element_count, shared_bytes)
            return
        self._queued_count += 1
        self._messages.put((message, element_count, shared_bytes))

    def await_room(self, timeout_s: float) -> bool:
        """Blocks while many chunks wait to be sent; returns True if a further one may."""
        if self._has_room():
            return True
        with self._changed:
            self._waits_for_room = True
            has_room = self._changed.wait_for(self._has_room, max(timeout_s, 0.0))
            self._waits_for_room = False
        return has_room

    def serve(
        self, context: grpc.ServicerContext | Link, memory: SharedMemory | None = None
    ) -> Iterator[bytes]:
        """The stream that the other rank opened; ArgumentError: it has one already."""
        with self._changed:
            if self._is_open:
                raise ArgumentError("this rank has a stream of chunks already")
            self._is_open = True
        if memory is not None and not self._is_cut:
            self._places = _Places(memory)
        if isinstance(context, Link):
            self._link = context
        if not context.add_callback(self._ended):
            self._ended()
        held: list[bytes] = []
        while True:
            try:
                entry = self._messages.get_nowait()
            except queue.Empty:
                if held:
                    yield from self._leaving(held)
                entry = self._messages.get()
            if entry is None:
                break
            message, element_count, shared_bytes = entry
            self._traffic.add_sent(len(message) + shared_bytes, element_count, shared_bytes)
            if held and (not shared_bytes or len(held) == BATCH_COUNT):
                yield from self._leaving(held)
            if shared_bytes:
                held.append(message)
            else:
                yield from self._leaving([message])
        if held:
            yield from self._leaving(held)
        # A rank may open its stream when all is done and this rank is about to leave.
        if self._is_finished or not self._is_cut:
            yield _LAST
            self._has_ended.wait(LEAVE_TIMEOUT_S)

    def _leaving(self, messages: list[bytes]) -> Iterator[bytes]:
        self._taken_count += len(messages)
        if self._waits_for_room:
            with self._changed:
                self._changed.notify_all()
        message = framing.joined(pb.ReceiveChunksResponse, messages)
        messages.clear()
        yield message
        self._written_count = self._taken_count

    def finish(self) -> None:
        """Ends sending; does not block."""
        self._is_finished = True
        self._messages.put(None)

    def await_received(self, timeout_s: float) -> None:
        """Waits after `finish` until all has been received, at most so long; ends the stream."""
        if self._is_open or self._queued_count > self._taken_count:
            self._has_ended.wait(timeout_s)
        self.cut()

    def cut(self) -> None:
        """Ends the stream at once. Safe to repeat, from any thread."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()
        self._messages.put(None)
        self._has_ended.set()
        self._places = None

    def _has_room(self) -> bool:
        return self._is_cut or self._queued_count - self._taken_count < PENDING_COUNT_MAX

    def _ended(self) -> None:
        # The mark of `finish` may not be taken yet.
        finished = self._taken_count == self._queued_count or self._is_cut
        self._messages.put(None)
        self._has_ended.set()
        self._places = None
        if not finished:
            self._on_failure("it no longer takes what is sent to it")


class Incoming:
    """The stream of chunks from one rank, which a thread reads, or the inbox a Unix socket's.

    `take` is called with each message, and whether it may wait; `is_full` says that it waits until
    something was taken.
    """

    def __init__(
        self,
        peer: Peer,
        opening: pb.PeerOpen,
        take: Callable[[Received, bool], None],
        on_failure: Callable[[str], None],
        inbox: Inbox,
        is_full: Callable[[], bool],
    ) -> None:
        self._take = take
        self._inbox = inbox
        self._is_full = is_full
        self._on_failure = on_failure
        self._peer = peer
        self._opening = opening
        self._is_cut = False
        self._call: Any = None
        self._lock = threading.Lock()
        self._memory: SharedMemory | None = None
        self._copied_count = 0
        self._thread = threading.Thread(target=self._read, name="shardwell-incoming", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Ends the stream at once. Safe to repeat, from any thread."""
        with self._lock:
            self._is_cut = True
            call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Ends the stream and its thread."""
        self.cut()
        self._thread.join()

    @property
    def is_full(self) -> bool:
        """True if the queue of arrivals is full."""
        return self._is_full()

    def receive(self) -> bool:
        """Reads from the socket without waiting; returns whether the stream goes on."""
        link: UnixCall = self._call
        link.receive()
        return self._guarded(lambda: self._take_all(link))

    def _take_all(self, link: UnixCall) -> bool:
        while link.has_come:
            if not self._taken(link.read(), waits=False):
                return False
        return True

    def _begun(self) -> Iterator[bytes]:
        shared = self._peer.arenas.arena(_PLACE_COUNT * PLACE_SIZE_BYTES)
        request = pb.ReceiveChunksRequest(open=self._opening)
        if shared is not None:
            self._memory, request.arena = shared.memory, shared.token
        link = self._peer.link() if self._inbox.open() else None
        with self._lock:
            if not self._is_cut:
                self._call = self._peer.receive_chunks(request) if link is None else link
        if self._call is None:
            if link is not None:
                link.cancel()
        elif link is None:
            yield from self._call
        else:
            link.send(iter([request.SerializeToString()]), is_short=True)
            self._inbox.add(link.file, self)

    def _read(self) -> None:
        self._guarded(self._read_all)

    def _read_all(self) -> bool:
        for message in self._begun():
            if not self._taken(message, waits=True):
                return True
        return isinstance(self._call, UnixCall)

    def _taken(self, message: bytes, *, waits: bool) -> bool:
        header, payload = framing.parse(pb.ReceiveChunksResponse, message)
        if header.last:
            self.cut()
            return False
        if not header.batch:
            self._take(self._received(header, payload, message), waits)
            return True
        for each in framing.split(pb.ReceiveChunksResponse, message):
            header, payload = framing.parse(pb.ReceiveChunksResponse, each)
            self._take(self._received(header, payload, each), waits)
        return True

    def _guarded(self, act: Callable[[], bool]) -> bool:
        why = "it ended its stream"
        try:
            if act():
                return True
        except grpc.RpcError as error:
            why = str(error.details() or error.code().name)[:200]
        except ShardwellError as error:
            why = error.message
        except Exception as error:  # or it would be lost
            why = f"{type(error).__name__}: {error}"[:200]
        if not self._is_cut:
            self._on_failure(why)
        return False

    def _received(
        self, header: pb.ReceiveChunksResponse, payload: Bytes, message: bytes
    ) -> Received:
        if not header.chunk.HasField("shared"):
            return Received(header, payload, message)
        payload = arena.payload_of(header.chunk, payload, self._memory)
        return Received(header, payload, message, payload.size, self._release)

    def _release(self) -> None:
        assert self._memory is not None
        self._copied_count += 1
        self._memory.set_number(_COPIED, self._copied_count)


class Received(NamedTuple):
    """A message from another rank: see `Arrival`."""

    header: pb.ReceiveChunksResponse
    payload: Bytes
    message: bytes
    shared_bytes: int = 0
    release: Callable[[], None] | None = None


class _Places:
    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._count = (memory.size_bytes - HEAD_BYTES) // PLACE_SIZE_BYTES
        self._put_count = 0

    def room(self, size_bytes: int) -> Room | None:
        if size_bytes < arena.SHARED_BYTES_MIN:
            return None
        under_way_count = self._put_count - self._memory.number(_COPIED)
        if not 0 <= under_way_count < self._count:
            return None
        offset = HEAD_BYTES + self._put_count % self._count * PLACE_SIZE_BYTES
        self._put_count += 1
        return Room(offset, self._memory.view(offset, size_bytes))
