"""Memory that two processes of a machine share, for payloads: offered by a client, and then used.

See arena.proto. Here a client is a worker, whose server is a shard, or a member of a group that
reads another's stream. An arena belongs to one stream, and dies with it. It is never needed: where
none is to be had, payloads travel inline.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from shardwell.errors import CorruptChunkError
from shardwell.numerics.codec import Bytes
from shardwell.process.shared_memory import (
    HEAD_BYTES,
    IS_SUPPORTED,
    SharedMemory,
    SharedMemoryError,
    check_same_user,
    new_memory,
    socket_path,
)
from shardwell.v1 import arena_pb2, types_pb2
from shardwell.wire import messages as framing
from shardwell.wire.messages import Room

SAME_HOST_VARIABLE = "SHARDWELL_SAME_HOST"
ARENA_BYTES_MAX = 256 << 20
"""Of one arena: a step of 128 M elements of fp16 to one shard. What is beyond it travels inline."""
SHARED_BYTES_MIN = 64 * 1024
"""A smaller payload costs no more inline."""
ANSWER_BYTES_MAX = 4096
"""Of a message over the Unix socket."""
_DESCRIPTOR_BYTES_MAX = 1024
"""A longer message has its payload in it."""
_OFFER_S = 2.0
"""How long a server may take to look at an offer."""
_PAUSE_S = 60.0
"""For so long nothing is offered to a server that refused."""
PAGE_BYTES = 4096
_ROOM_ALIGNMENT_BYTES = 64
_LOG = logging.getLogger("shardwell")


def same_host_setting(*, is_wanted: bool) -> str:
    """Where memory is offered: "auto", "off", or a directory, as the environment says."""
    return (os.environ.get(SAME_HOST_VARIABLE) or "auto") if is_wanted else "off"


class Arena:
    """A client's: the memory, and how the shard knows it. For one stream's calls."""

    def __init__(self, memory: SharedMemory, token: int) -> None:
        self.token = token
        """Its name on the stream."""
        self.is_announced = False
        """Whether a message has named it."""
        self.memory = memory
        """What is shared."""

    def room(self, start: int, size_bytes: int) -> Room | None:
        """Where the payload of `size_bytes` goes that has `start` before it; None: not here."""
        offset = HEAD_BYTES + start
        if size_bytes < SHARED_BYTES_MIN or offset + size_bytes > self.memory.size_bytes:
            return None
        return Room(offset, self.memory.view(offset, size_bytes))

    def holds(self, wanted_bytes: int) -> bool:
        """Whether a larger one would have no more room for so many bytes."""
        return self.memory.size_bytes >= _arena_bytes(wanted_bytes)


def room_bytes(payload_bytes: int) -> int:
    """What a payload takes of an arena."""
    return -(-payload_bytes // _ROOM_ALIGNMENT_BYTES) * _ROOM_ALIGNMENT_BYTES


def wanted_bytes(payloads_bytes: Sequence[int]) -> int:
    """What an arena should have for payloads that are under way at once; 0: all are small."""
    if max(payloads_bytes, default=0) < SHARED_BYTES_MIN:
        return 0
    return sum(map(room_bytes, payloads_bytes))


def _arena_bytes(wanted_bytes: int) -> int:
    wanted = min(wanted_bytes + HEAD_BYTES, ARENA_BYTES_MAX)
    return -(-wanted // PAGE_BYTES) * PAGE_BYTES


def payload_of(chunk: types_pb2.Chunk, payload: Bytes, memory: SharedMemory | None) -> Bytes:
    """The payload of a chunk that came: the message's own, or a copy of what is shared.

    Args:
        chunk: The header.
        payload: What is in the message.
        memory: The stream's, if it has one.

    Raises:
        CorruptChunkError: it says that the payload is where there is none.
    """
    if not chunk.HasField("shared"):
        return payload
    if payload.size or memory is None:
        raise CorruptChunkError(
            f"chunk {chunk.chunk_index}: its payload is said to be shared, and "
            f"{'the message has one' if payload.size else 'the stream has no arena'}; send it again"
        )
    try:
        copied = memory.view(chunk.shared.offset, chunk.shared.size).copy()
    except SharedMemoryError as error:
        raise CorruptChunkError(f"chunk {chunk.chunk_index}: {error}; send it again") from None
    copied.flags.writeable = False
    return copied


def shared_message(message_type: Any, message: bytes, room: Room) -> tuple[bytes, int]:
    """A message with a chunk, without its payload, which is in the room then; and how many bytes.

    As it is where its payload has no room, or may not be shared.
    """
    header, payload = framing.parse(message_type, message)
    if header.chunk.lz4 or payload.size > room.memory.size:
        return message, 0
    room.memory[: payload.size] = payload
    header.chunk.shared.offset, header.chunk.shared.size = room.offset, payload.size
    return bytes(header.SerializeToString()), payload.size


def inline_message(message_type: Any, message: bytes, memory: SharedMemory) -> tuple[bytes, int]:
    """The opposite: a message that has its payload; as it is if it had; and how many bytes.

    Raises:
        CorruptChunkError: it is no such message, or its payload is nowhere.
    """
    if len(message) > _DESCRIPTOR_BYTES_MAX:
        return message, 0
    header, payload = framing.parse(message_type, message)
    if not header.chunk.HasField("shared"):
        return message, 0
    copied = payload_of(header.chunk, payload, memory)
    header.chunk.ClearField("shared")
    whole = framing.OutgoingMessage(header, copied.size)
    whole.payload[:] = copied
    return whole.seal(), copied.size


class Arenas:
    """Where a client asks for arenas of one server. Any thread may use it.

    Args:
        what: The server, for the log.
        offer: Says who is meant.
        address: Where it takes offers; empty: nowhere.
        is_wanted: Whether anything is to be shared.
    """

    def __init__(
        self,
        what: str,
        offer: Callable[[], arena_pb2.ArenaOffer],
        address: str = "",
        *,
        is_wanted: bool = True,
    ) -> None:
        self.address = address
        """See Args; may be set once it is known."""
        self._what = what
        self._offer = offer
        self._is_wanted = is_wanted and IS_SUPPORTED
        self._next_try_s = 0.0

    def arena(self, wanted_bytes: int, timeout_s: float = _OFFER_S) -> Arena | None:
        """An arena for that many bytes, or for as many as there may be; None: there is none.

        Blocks for 2 s, or `timeout_s`, at the most, and mostly for a millisecond a few megabytes.
        """
        if not (self._is_wanted and self.address) or time.monotonic() < self._next_try_s:
            return None
        try:
            return _offered(
                self.address,
                self._offer(),
                _arena_bytes(wanted_bytes),
                max(min(timeout_s, _OFFER_S), 0.001),
            )
        except (OSError, SharedMemoryError, DecodeError) as error:
            self._next_try_s = time.monotonic() + _PAUSE_S
            _LOG.debug(
                "%s shares no memory with this process (%s); payloads go over the network",
                self._what,
                error,
            )
            return None


def _offered(address: str, offer: arena_pb2.ArenaOffer, size_bytes: int, timeout_s: float) -> Arena:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(socket_path(address))
        check_same_user(connection)
        file, memory = new_memory(size_bytes)
        try:
            offer.size_bytes, offer.nonce = size_bytes, secrets.randbits(64)
            memory.set_number(0, offer.nonce)
            socket.send_fds(connection, [offer.SerializeToString()], [file])
        finally:
            os.close(file)
        answer = arena_pb2.ArenaAnswer.FromString(connection.recv(ANSWER_BYTES_MAX))
    if not answer.token or memory.number(1) != answer.token:
        raise SharedMemoryError(answer.refusal or "the memory is not the same at both ends")
    return Arena(memory, answer.token)
