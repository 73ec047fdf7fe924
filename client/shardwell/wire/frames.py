"""Frames of a Unix stream: see unix_stream.proto."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

from shardwell.errors import CorruptChunkError
from shardwell.wire.messages import MESSAGE_SIZE_MAX_BYTES

_HEAD = struct.Struct("<II")
_HEAD_BYTES = _HEAD.size


class FrameKind(enum.IntEnum):
    """The kinds of a frame's contents."""

    MESSAGE = 0
    OPEN = 1
    END = 2


_KIND_COUNT = len(FrameKind)


def head(kind: FrameKind, size_bytes: int) -> bytes:
    """The bytes before a frame's contents."""
    return _HEAD.pack(size_bytes, kind)


class FrameReader:
    """Cuts into frames what comes in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields kind and contents of the frames that end in a piece; to be read to its end."""
        data: bytes | bytearray = piece
        if self._rest:
            self._rest += piece
            data = self._rest
        start, size = 0, len(data)
        while (contents := start + _HEAD_BYTES) <= size:
            length, kind = _HEAD.unpack_from(data, start)
            if length > MESSAGE_SIZE_MAX_BYTES or kind >= _KIND_COUNT:
                raise CorruptChunkError(
                    f"a frame of {length} bytes and kind {kind}; expected at most "
                    f"{MESSAGE_SIZE_MAX_BYTES} and a kind below {_KIND_COUNT}"
                )
            stop = contents + length
            if stop > size:
                break
            yield kind, bytes(data[contents:stop])
            start = stop
        if data is self._rest:
            del self._rest[:start]
        elif start < size:
            self._rest += memoryview(piece)[start:]
