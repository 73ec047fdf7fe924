"""A member's server: PeerService, for the other members of its group."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shardwell.connection.error_codes import Status
from shardwell.connection.handlers import Handlers, parsed, status_of
from shardwell.connection.options import check_fork, listen_on, server_options
from shardwell.connection.tls import TlsFiles
from shardwell.errors import (
    ArgumentError,
    CorruptChunkError,
    LimitError,
    ShardUnavailableError,
    WorkerLostError,
    WorkerUnreachableError,
)
from shardwell.group.generation import Generation
from shardwell.group.transport.links import Link, Links
from shardwell.group.transport.peers import RECEIVE_CHUNKS, SERVICE_NAME
from shardwell.threads.daemon_threads import DaemonThreads
from shardwell.transport.arena import ARENA_BYTES_MAX
from shardwell.transport.arena_offers import ArenaOffers
from shardwell.v1 import arena_pb2
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire.checksum import check_version

_LOOK_INTERVAL_S = 0.1
_LOG = logging.getLogger("shardwell.group")
_GENERATION_WAIT_S = 30.0
"""The longest wait of a stream for a generation that this member does not know yet."""
_GRACE_S = 0.5
"""The time that streams at their end have to close; gRPC logs those that it cuts."""
_OPEN_TIMEOUT_S = 5.0
"""The time that a stream has to say which rank's it is."""
_UNOPENED_COUNT_MAX = 12
"""Streams that have not said it yet: fewer than the spare threads, so that members find room."""
_WAITING_COUNT_MAX = 1024
"""Calls that may wait for a thread: what strangers open is refused as soon as it is looked at."""
_SPARE_THREAD_COUNT = 16
"""Threads beyond those of streams: for greetings, and for a rendezvous that is served here."""


class Watch:
    """One deadline, a context manager around what it bounds; `expired` once it has acted."""

    __slots__ = ("_lock", "_watches", "act", "deadline_s", "expired")

    def __init__(
        self,
        deadline_s: float,
        act: Callable[[], None],
        watches: dict[int, Watch],
        lock: threading.Lock,
    ) -> None:
        self.deadline_s = deadline_s
        self.act = act
        self.expired = False
        self._watches = watches
        self._lock = lock

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._watches.pop(id(self), None)


class Watchdog:
    """Calls back when a watched block of code takes too long. Any thread may watch.

    One thread; it sleeps while nothing is watched. Once a block has been left, `expired` says for
    good whether its watch has acted, or is about to.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, timeout_s: float, act: Callable[[], None]) -> Watch:
        """Calls `act` from the watchdog's thread if the block has not ended after `timeout_s`."""
        watch = Watch(time.monotonic() + timeout_s, act, self._watches, self._lock)
        with self._lock:
            self._watches[id(watch)] = watch
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="shardwell-watchdog", daemon=True
                )
                self._thread.start()
        if not self._wake.is_set():
            self._wake.set()
        return watch

    def close(self) -> None:
        """Ends the thread. Watches that are left never expire."""
        with self._lock:
            self._closed.set()
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():  # whose wake the last round may have cleared
            self._wake.wait()
            if self._closed.wait(_LOOK_INTERVAL_S):
                return
            now = time.monotonic()
            with self._lock:
                watches = self._watches.values()
                late = [w for w in watches if w.deadline_s <= now and not w.expired]
                for watch in late:
                    watch.expired = True
                if not self._watches:
                    self._wake.clear()
            for watch in late:
                watch.act()


class PeerServer:
    """The server of this member's streams, of a generation at a time; listens from the start."""

    def __init__(
        self,
        listen: str,
        *,
        group: str,
        member_id: str,
        size: int,
        same_host: str = "off",
        tls: TlsFiles | None = None,
        more: tuple[grpc.GenericRpcHandler, ...] = (),
    ) -> None:
        check_fork()
        self._group = group
        self._member_id = member_id
        self._generation: Generation | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._unopened_count = 0
        self._watchdog = Watchdog()
        thread_count = 2 * size + _SPARE_THREAD_COUNT
        self.arenas = ArenaOffers(self._check_offer, bytes_max=size * ARENA_BYTES_MAX, log=_LOG)
        self._threads = DaemonThreads(thread_count, "shardwell-peer")
        self.links = Links(self._serve_link, self._threads, 2 * size, _LOG)
        pool: Any = self._threads  # any executor will do, whatever gRPC's types say
        self._server = grpc.server(
            pool,
            options=server_options(),
            maximum_concurrent_rpcs=thread_count + _WAITING_COUNT_MAX,
        )
        self._server.add_generic_rpc_handlers((self._handler(), *more))
        host = listen.rpartition(":")[0]
        try:
            port = listen_on(self._server, listen, tls)
        except OSError as error:
            self._threads.shutdown()
            raise ShardUnavailableError(
                f"can't listen on {listen} for the other workers of group {group!r}: "
                f"{error.strerror}; pass listen= with a free port, or 0, of this machine"
            ) from None
        self.address = f"{host}:{port}"
        self._server.start()
        # Any process on this machine may read the name of a socket.
        name = hashlib.blake2b(member_id.encode(), digest_size=16).hexdigest()
        self.arenas.start(same_host, f"shardwell-{name}")
        self.links.start(same_host, f"shardwell-{name}-streams")

    def begin(self, generation: Generation | None) -> None:
        """Takes streams of this generation from now on, and no others."""
        with self._changed:
            self._generation = generation
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all streams and threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.links.close()
        try:
            self._server.stop(_GRACE_S).wait()
        except RuntimeError:  # gRPC waits on a thread, which Python starts no more at its end
            self._server.stop(None).wait()
        self.arenas.close()
        self._threads.shutdown()
        self._watchdog.close()

    def _handler(self) -> grpc.GenericRpcHandler:
        answering = Handlers(_LOG, shard_index=None, place="worker")
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Greet": answering.unary(self._greet, pb.GreetRequest),
                "Agree": grpc.stream_stream_rpc_method_handler(
                    answering.streaming(self._agree),  # parsed here: gRPC hangs on what is none
                    response_serializer=pb.AgreeResponse.SerializeToString,
                ),
                "ReceiveChunks": grpc.unary_stream_rpc_method_handler(
                    answering.streaming(parsed(self._receive_chunks, pb.ReceiveChunksRequest)),
                ),
            },
        )

    def _greet(self, request: pb.GreetRequest, context: grpc.ServicerContext) -> pb.GreetResponse:
        if not self._is_meant(request.group, request.member_id):
            raise WorkerUnreachableError("another worker answers here; is the address right?")
        return pb.GreetResponse()

    def _agree(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.AgreeResponse]:
        requests = map(_agree_request, messages)
        with self._opening(context):
            first = next(requests, None)
        if first is not None:
            generation = self._generation_of(first.open)
            yield from generation.serve_agreement(first.open, _with_event(first, requests), context)

    def _serve_link(self, link: Link) -> None:
        try:
            with self._opening(link):
                opened = link.opened()
                check_version(opened)
                method = opened.method
                if method != RECEIVE_CHUNKS:
                    raise ArgumentError(f"{method!r:.80} is not to be called here")
                request = pb.ReceiveChunksRequest.FromString(link.accept())
            for message in self._receive_chunks(request, link):
                if not link.write(message):
                    return
            link.end(Status(grpc.StatusCode.OK, "", ()))
        except (OSError, DecodeError, CorruptChunkError) as error:
            _LOG.debug("a stream of this machine is broken: %s", error)
        except Exception as error:
            link.end(status_of(error, _LOG, shard_index=None, place="worker", peer="unix:"))

    def _receive_chunks(
        self, request: pb.ReceiveChunksRequest, context: grpc.ServicerContext | Link
    ) -> Iterator[bytes]:
        memory = self.arenas.take(request.arena) if request.arena else None
        generation = self._generation_of(request.open)
        yield from generation.serve_chunks(request.open, context, memory)

    def _check_offer(self, offer: arena_pb2.ArenaOffer) -> None:
        if not self._is_meant(self._group, offer.member_id):
            raise WorkerUnreachableError("another worker answers here")

    @contextlib.contextmanager
    def _opening(self, context: grpc.ServicerContext | Link) -> Iterator[None]:
        """Bounds how long a stream, and how many of them, may be open without saying who it is."""
        with self._changed:
            if self._unopened_count >= _UNOPENED_COUNT_MAX:
                raise LimitError(
                    f"limit unopened_count_max={_UNOPENED_COUNT_MAX}: as many streams have not "
                    "said who they are; send `open` at once"
                )
            self._unopened_count += 1
        try:
            with self._watchdog.watch(_OPEN_TIMEOUT_S, lambda: _cancel(context)):
                yield
        finally:
            with self._changed:
                self._unopened_count -= 1

    def _generation_of(self, opening: pb.PeerOpen) -> Generation:
        deadline_s = time.monotonic() + _GENERATION_WAIT_S
        with self._changed:
            while not self._closed:
                generation = self._generation
                number = 0 if generation is None else generation.number
                if not self._is_meant(opening.group, opening.to_member_id):
                    break
                if generation is not None and number == opening.generation:
                    return generation
                rest_s = deadline_s - time.monotonic()
                if opening.generation < number or rest_s <= 0:
                    break
                self._changed.wait(rest_s)
        raise WorkerLostError(
            f"generation {opening.generation} of group {opening.group!r:.80} is not, or no more, "
            "what this worker is in"
        )

    def _is_meant(self, group: str, member_id: str) -> bool:
        """True if a call is for this member.

        Its id is drawn at random, and only the rendezvous gives it to the members of its group; so
        a caller that has it was let in there.
        """
        is_known = hmac.compare_digest(member_id.encode(), self._member_id.encode())
        return is_known and group == self._group


def _agree_request(message: bytes) -> pb.AgreeRequest:
    try:
        return pb.AgreeRequest.FromString(message)
    except DecodeError as error:
        raise ArgumentError(f"{len(message)} bytes that are no AgreeRequest: {error}") from None


def _with_event(
    first: pb.AgreeRequest, rest: Iterator[pb.AgreeRequest]
) -> Iterator[pb.AgreeRequest]:
    if first.WhichOneof("event") is not None:
        yield first
    yield from rest


def _cancel(context: grpc.ServicerContext | Link) -> None:
    context.cancel()
