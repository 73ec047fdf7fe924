"""Memory that two processes of a machine share, for payloads: offered by a client, and then used.

See arena.proto. Here a client is a worker, whose server is a shard, or a member of a group that
reads another's stream. An arena belongs to one stream, and dies with it. It is never needed: where
none is to be had, payloads travel inline.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from shardwell.errors import CorruptChunkError
from shardwell.numerics.codec import Bytes
from shardwell.numerics.elementwise import copy_bytes
from shardwell.process.environment import variable
from shardwell.process.shared_memory import (
    HEAD_BYTES,
    IS_SUPPORTED,
    OwnMemory,
    SharedMemory,
    SharedMemoryError,
)
from shardwell.process.unix_sockets import connected
from shardwell.transport.neighbour import Neighbour
from shardwell.v1 import arena_pb2, types_pb2
from shardwell.wire import messages as framing
from shardwell.wire.chunks import PLACE_SIZE_BYTES
from shardwell.wire.messages import Room

SAME_HOST_VARIABLE = "SHARDWELL_SAME_HOST"
ARENA_BYTES_MAX = 256 << 20
"""Most bytes of one arena: a step of 128 M elements of fp16 to one shard. The rest travels
inline."""
SHARED_BYTES_MIN = 64 * 1024
"""A smaller payload costs no more inline."""
BATCH_COUNT = 4
"""Messages, at most, that leave as one if all payloads are shared: a message costs as much as
converting its chunk, and a chunk that waits for others makes no progress."""
_BATCHES = 4
"""Messages at least, where there are as many chunks."""
ANSWER_BYTES_MAX = 4096
_OFFER_S = 2.0
PAGE_BYTES = 4096
_ROOM_ALIGNMENT_BYTES = 64
_LOG = logging.getLogger("shardwell")


def same_host_setting(*, is_wanted: bool) -> str:
    """The place of memory's offers: "auto", "off", or a directory, as the environment says."""
    return (variable(SAME_HOST_VARIABLE) or "auto") if is_wanted else "off"


class Arena:
    """A client's shared memory, with the name by which the server knows it. For one stream."""

    def __init__(self, memory: SharedMemory, token: int) -> None:
        self.token = token
        self.is_announced = False
        self.memory = memory

    def holds(self, wanted_bytes: int) -> bool:
        """True if a larger one would have no more room for so many bytes."""
        return self.memory.size_bytes >= _arena_bytes(wanted_bytes)

    def has_room(self, wanted_bytes: int) -> bool:
        """True if it has room for so many bytes at once."""
        return self.memory.size_bytes >= HEAD_BYTES + wanted_bytes


def room_bytes(payload_bytes: int) -> int:
    """The bytes that a payload takes of an arena."""
    return -(-payload_bytes // _ROOM_ALIGNMENT_BYTES) * _ROOM_ALIGNMENT_BYTES


def wanted_bytes(payloads_bytes: Sequence[int]) -> int:
    """The size of an arena for payloads that are under way at once; 0: all are small."""
    if max(payloads_bytes, default=0) < SHARED_BYTES_MIN:
        return 0
    return sum(map(room_bytes, payloads_bytes))


def _arena_bytes(wanted_bytes: int) -> int:
    wanted = min(wanted_bytes + HEAD_BYTES, ARENA_BYTES_MAX)
    return -(-wanted // PAGE_BYTES) * PAGE_BYTES


def batch_count(chunk_count: int) -> int:
    """The number of chunks in a message: so few that both sides work at once."""
    return min(max(chunk_count // _BATCHES, 1), BATCH_COUNT)


def payload_of(chunk: types_pb2.Chunk, payload: Bytes, memory: SharedMemory | None) -> Bytes:
    """The payload of a chunk: the message's own, or a shared, writable one, which may change."""
    if not chunk.HasField("shared"):
        return payload
    if payload.size or memory is None:
        raise CorruptChunkError(
            f"chunk {chunk.chunk_index}: its payload is said to be shared, and "
            f"{'the message has one' if payload.size else 'the stream has no arena'}; send it again"
        )
    size = chunk.shared.size
    try:
        if size > PLACE_SIZE_BYTES:
            raise SharedMemoryError(
                f"a payload of {size} bytes; expected at most {PLACE_SIZE_BYTES}"
            )
        return memory.view(chunk.shared.offset, size)
    except SharedMemoryError as error:
        raise CorruptChunkError(f"chunk {chunk.chunk_index}: {error}; send it again") from None


class Places:
    """The places of an arena one behind the other, for the payloads of one call."""

    def __init__(self, memory: SharedMemory, before_bytes: int = 0) -> None:
        self._memory = memory
        self._next = HEAD_BYTES + before_bytes

    def room(self, size_bytes: int) -> Room | None:
        """The place of the next payload; None: it is small, or no room is left."""
        offset = self._next
        self._next += room_bytes(size_bytes)
        if size_bytes < SHARED_BYTES_MIN or offset + size_bytes > self._memory.size_bytes:
            return None
        return Room(offset, self._memory.view(offset, size_bytes))


def shared_message(
    message_type: Any, message: bytes, room_of: Callable[[int], Room | None]
) -> tuple[bytes, int]:
    """A message without its payload, which is shared if it may be; and the payload's bytes."""
    header, payload = framing.parse(message_type, message)
    room = room_of(payload.size)
    if room is None or header.chunk.lz4 or payload.size > room.memory.size:
        return message, 0
    copy_bytes(payload, room.memory[: payload.size])
    shared = header.chunk.shared
    shared.offset, shared.size = room.offset, payload.size
    return header.SerializeToString(), payload.size


class Arenas:
    """The client's side of one server's arenas. Any thread may use it."""

    def __init__(
        self,
        what: str,
        offer: Callable[[], arena_pb2.ArenaOffer],
        address: str = "",
        *,
        is_wanted: bool = True,
    ) -> None:
        self.server = Neighbour(address, is_wanted=is_wanted and IS_SUPPORTED)
        self._what = what
        self._offer = offer

    def arena(self, wanted_bytes: int, timeout_s: float = _OFFER_S) -> Arena | None:
        """An arena for that many bytes or fewer; None: there is none. Blocks up to `timeout_s`."""
        if not self.server.is_there:
            return None
        timeout_s = max(min(timeout_s, _OFFER_S), 0.001)
        try:
            with contextlib.closing(OwnMemory(_arena_bytes(wanted_bytes))) as own:
                return _offered(self.server.address, self._offer(), own, timeout_s)
        except (OSError, SharedMemoryError, DecodeError) as error:
            self.server.pause()
            _LOG.debug(
                "%s shares no memory with this process (%s); payloads go over the network",
                self._what,
                error,
            )
            return None


def _offered(address: str, offer: arena_pb2.ArenaOffer, own: OwnMemory, timeout_s: float) -> Arena:
    with connected(address, socket.SOCK_SEQPACKET, timeout_s) as connection:
        offer.size_bytes, offer.nonce = own.memory.size_bytes, secrets.randbits(64)
        own.memory.set_number(0, offer.nonce)
        socket.send_fds(connection, [offer.SerializeToString()], [own.file])
        answer = arena_pb2.ArenaAnswer.FromString(connection.recv(ANSWER_BYTES_MAX))
    if not answer.token or own.memory.number(1) != answer.token:
        raise SharedMemoryError(answer.refusal or "the memory is not the same at both ends")
    return Arena(own.memory, answer.token)
