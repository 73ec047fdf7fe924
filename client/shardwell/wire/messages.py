"""Messages with a chunk, written and read without protobuf's copies.

A message is protobuf's own bytes of the header fields, `padding` and `payload`, in that order, the
payload last and aligned, so that any protobuf library reads it and the codec writes straight into
it. Layout (all of a message that has a payload):

    header fields | 0x72 len zeros | 0x7a len | payload      the payload at a multiple of 16

Invariant: what `OutgoingMessage.seal` returns parses, with any protobuf library, to the header, the
padding and the payload.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from shardwell.errors import CorruptChunkError
from shardwell.numerics.codec import Bytes

ALIGNMENT_BYTES = 16
_HEADER_MAX_BYTES = 1024
SCALES_MAX_BYTES = 4096
"""The scales of a payload, behind or before its values."""
MESSAGE_SIZE_MAX_BYTES = 2**20 + SCALES_MAX_BYTES + _HEADER_MAX_BYTES
"""Values of 1 MiB, their scales and 1 KiB of header: far below gRPC's default limit of 4 MiB."""

_PADDING_TAG = 14 << 3 | 2
_PAYLOAD_TAG = bytes((15 << 3 | 2,))
_HEADER_GROWTH_BYTES = 16  # crc32c (5), lz4 (2), sub-message lengths (<= 4)

# CPython lets the creator of a bytes object without contents fill it before other code sees it.
# This spares a copy of every payload.
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.restype = ctypes.c_void_p
_bytes_address.argtypes = (ctypes.py_object,)

HeaderT = TypeVar("HeaderT", bound=Message)


_SMALL_PAYLOAD_BYTES = 32 * 1024
"""Below it, copying a payload costs less than sparing the copy, in Python."""
_LARGE_SIZE_BYTES = 3
_PADDINGS = tuple(bytes((_PADDING_TAG, size)) + bytes(size) for size in range(128))


class Room(NamedTuple):
    """A part of an arena, where a payload goes instead of into its message."""

    offset: int
    memory: Bytes
    """(size,) uint8, aligned."""


class OutgoingMessage:
    """A message under construction: fill `payload`, complete the header, then `seal`."""

    __slots__ = ("_memory", "_message", "_payload_head", "_prefix_size", "header", "payload")

    def __init__(self, header: Message, payload_size_bytes: int) -> None:
        self._payload_head = _PAYLOAD_TAG + _varint(payload_size_bytes)
        fixed = header.ByteSize() + _HEADER_GROWTH_BYTES + 2 + len(self._payload_head)
        self._prefix_size = -(-fixed // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.header = header
        self.payload: Bytes
        """(payload_size_bytes,) uint8, aligned, uninitialised. Not to be used after `seal`."""
        if payload_size_bytes <= _SMALL_PAYLOAD_BYTES:
            self._message = b""
            self.payload = np.empty(payload_size_bytes, np.uint8)
            return
        size = self._prefix_size + payload_size_bytes
        self._message = _new_bytes(None, size)
        memory = (ctypes.c_uint8 * size).from_address(_bytes_address(self._message))
        self._memory: Bytes = np.frombuffer(memoryview(memory), np.uint8)
        self.payload = self._memory[self._prefix_size :]

    def seal(self) -> bytes:
        """Writes the header's fields, as they are now, and hands out the message."""
        head = self.header.SerializeToString()
        padding = self._prefix_size - len(head) - 2 - len(self._payload_head)
        assert padding >= 0, "the header grew more than was reserved"
        parts = (head, _PADDINGS[padding], self._payload_head)
        if not self._message:
            return b"".join((*parts, self.payload.data))
        self._memory[: self._prefix_size] = np.frombuffer(b"".join(parts), np.uint8)
        return self._message


def parse(header_type: type[HeaderT], message: bytes) -> tuple[HeaderT, Bytes]:
    """Returns the header of a message, and its payload as read-only uint8, aligned.

    It is not copied where the writer aligned it.
    """
    found = None if len(message) <= _SMALL_PAYLOAD_BYTES else _divided(header_type, message)
    if found is not None:
        header, start = found
        values = np.frombuffer(message, np.uint8, offset=start)
        return header, values if start % ALIGNMENT_BYTES == 0 else _own(values)
    try:
        header = header_type.FromString(message)
    except DecodeError as error:
        raise CorruptChunkError(
            f"{len(message)} bytes that are no {header_type.DESCRIPTOR.full_name}: {error}; "
            "send the message again"
        ) from None
    payload: bytes = header.payload  # type: ignore[attr-defined]
    if not payload:
        return header, _EMPTY
    header.ClearField("payload")
    # Copied: where bytes of protobuf's lie is Python's affair, and of one byte not aligned.
    return header, _own(np.frombuffer(payload, np.uint8))


def _divided(header_type: type[HeaderT], message: bytes) -> tuple[HeaderT, int] | None:
    """Returns the header, and where a payload that is last begins; None: parse it as a whole.

    Bytes at the place of a payload's head are one exactly if all before them parses: it would not,
    if it ended within a field.
    """
    after_tag = 0
    while after_tag := message.find(_PAYLOAD_TAG, after_tag, _HEADER_MAX_BYTES) + 1:
        start = after_tag + _LARGE_SIZE_BYTES
        if message[after_tag:start] != _varint(len(message) - start):
            continue
        try:
            header = header_type.FromString(message[: after_tag - 1])
        except DecodeError:
            continue
        header.ClearField("payload")  # of several, the last counts
        return header, start
    return None


def _own(values: Bytes) -> Bytes:
    values = values.copy()
    values.flags.writeable = False
    return values


BATCH_COUNT_MAX = 64


def parse_all(header_type: type[HeaderT], message: bytes) -> Iterator[tuple[HeaderT, Bytes, int]]:
    """Parses a message, or each one that is in it, and gives its size in bytes."""
    header, payload = parse(header_type, message)
    if not getattr(header, "batch", None):
        yield header, payload, len(message)
        return
    for each in _batch(header, payload):
        inner, payload = parse(header_type, each)
        if _batch(inner, payload):
            raise CorruptChunkError("a batch in a batch; send the message again")
        yield inner, payload, len(each)


def split(header_type: type[Message], message: bytes) -> Sequence[bytes]:
    """Returns a message, or each one that is in it, as they came."""
    if len(message) > _SMALL_PAYLOAD_BYTES:  # it has a payload
        return (message,)
    return _batch(*parse(header_type, message)) or (message,)


def _batch(header: Any, payload: Bytes) -> Sequence[bytes]:
    batch: Sequence[bytes] = header.batch
    if batch and (payload.size or len(header.ListFields()) > 1 or len(batch) > BATCH_COUNT_MAX):
        raise CorruptChunkError(
            f"a batch of {len(batch)} messages; expected at most {BATCH_COUNT_MAX}, and nothing "
            "besides; send the message again"
        )
    return batch


def joined(header_type: Any, messages: Sequence[bytes]) -> bytes:
    """Joins some messages to one."""
    if len(messages) == 1:
        return messages[0]
    return bytes(header_type(batch=messages).SerializeToString())


class Batch:
    """The messages that are to leave as one, of at most `count`."""

    def __init__(self, header_type: Any, count: int) -> None:
        self._header_type = header_type
        self._count = count
        self._held: list[bytes] = []

    def add(self, message: bytes, *, waits: bool) -> Sequence[bytes]:
        """The messages to send now, in order; one that does not wait leaves by itself."""
        if not waits:
            return *self.rest(), message
        leaving = self.rest() if len(self._held) == self._count else ()
        self._held.append(message)
        return leaving

    def rest(self) -> Sequence[bytes]:
        """Returns what has waited."""
        if not self._held:
            return ()
        message = joined(self._header_type, self._held)
        self._held.clear()
        return (message,)


_EMPTY: Bytes = np.frombuffer(b"", np.uint8)


@functools.lru_cache(maxsize=64)
def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
