"""Chunks on the wire: values to a sealed message, and a message's payload to checked bytes.

Here CRC, compression and geometry are written and checked; the arithmetic is numerics/codec.py's,
the layout messages.py's, and what a CRC covers checksum.py's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import lz4.block
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics.codec import CODECS, Bytes, Codec, Computed, Float32, canonical_nans
from shardwell.numerics.scratch import Scratch
from shardwell.placement.slices import Slice
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import table_pb2, types_pb2
from shardwell.wire import checksum
from shardwell.wire.messages import SCALES_MAX_BYTES, OutgoingMessage, Room

PAYLOAD_SIZE_MAX_BYTES = 2**20
"""Encoded bytes of a chunk's elements, without their scales. Large enough for gRPC's full speed
(docs/adr/0002-chunking.md)."""
PLACE_SIZE_BYTES = PAYLOAD_SIZE_MAX_BYTES + SCALES_MAX_BYTES
HEAD_SIZE_MAX_BYTES = 256
"""Most bytes of a message of a chunk of weights, beside its payload."""


class IntactChunk(NamedTuple):
    """A chunk as its sender wrote it, for the stream or call that it came on."""

    header: types_pb2.Chunk
    payload: Bytes
    peak_bits: int | None = None


def check_chunk(chunk: types_pb2.Chunk, payload: Bytes, start: int) -> IntactChunk:
    """Refuses a damaged chunk, before anything that its message says is used.

    Payload memory that can be written to may be changed by others: it is copied, and the copy
    returned.
    """
    if payload.flags.writeable:
        payload = payload.copy()
        payload.flags.writeable = False
    checksum.check(chunk, payload, checksum.of_chunk(start, chunk, payload))
    return IntactChunk(chunk, payload)


def unpacked(
    message: types_pb2.Chunk | table_pb2.Rows, payload: Bytes, size: int, *, is_allowed: bool
) -> Bytes:
    """Returns the `size` bytes of an LZ4 block; ArgumentError: the spec allows none."""
    if not is_allowed:
        raise ArgumentError(
            f"{checksum.named(message)}: the payload is compressed, but the spec says "
            "COMPRESSION_NONE"
        )
    try:
        found = lz4.block.decompress(payload, uncompressed_size=size)
    except (lz4.block.LZ4BlockError, ValueError, MemoryError) as error:
        raise CorruptChunkError(
            f"{checksum.named(message)}: the payload is no LZ4 block of {size} bytes: {error}"
        ) from None
    return np.frombuffer(found, np.uint8)


class ChunkCodec:
    """The form of one parameter's chunks. Stateless; any thread may use it."""

    def __init__(self, codec: Codec, *, lz4: bool = False, allow_non_finite: bool = False) -> None:
        self.codec = codec
        self.lz4 = lz4
        self._allow_non_finite = allow_non_finite

    @staticmethod
    def of(spec: ParameterSpec) -> ChunkCodec:
        """Returns the codec that a spec asks for."""
        codec = CODECS[spec.codec_name].in_blocks_of(spec.block_size)
        return ChunkCodec(codec, lz4=spec.lz4, allow_non_finite=spec.allow_non_finite)

    def encode(
        self,
        header: Message,
        chunk: types_pb2.Chunk,
        where: Slice,
        chunk_index: int,
        values: npt.NDArray[Any] | Computed,
        *,
        start: int,
        room: Room | None = None,
    ) -> bytes:
        """Returns a sealed message of one chunk, whose Chunk lies inside `header` and is filled in.

        `values` may have any stride, or be computed; `room` is for the payload, or the message is.
        NonFiniteValueError: a value is not finite and the spec refuses it.
        """
        chunk.chunk_index = chunk_index
        chunk.element_offset = where.offset
        chunk.element_count = where.size
        message = None
        if room is None or self.lz4:
            message = OutgoingMessage(header, self.codec.encoded_bytes(where.size))
            payload = message.payload
        else:
            payload = room.memory

        chunk.crc32c = self.codec.encode(
            values,
            payload,
            allow_non_finite=self._allow_non_finite,
            crc=None if self.lz4 else checksum.before_payload(start, chunk),
        )
        if message is None:
            assert room is not None
            shared = chunk.shared
            shared.offset, shared.size = room.offset, payload.size
            return bytes(header.SerializeToString())
        if self.lz4:
            packed = lz4.block.compress(message.payload, mode="fast", store_size=False)
            if len(packed) < message.payload.size:
                chunk.lz4 = True
                message = OutgoingMessage(header, len(packed))
                message.payload[:] = np.frombuffer(packed, np.uint8)
            chunk.crc32c = checksum.of_chunk(start, chunk, message.payload)
        return message.seal()

    def check(
        self, chunk: types_pb2.Chunk, payload: Bytes, start: int, scratch: Scratch
    ) -> IntactChunk:
        """Checks as `check_chunk`, and looks at values, in one pass; a copy lies in `scratch`."""
        if chunk.lz4 or payload.size != self.codec.encoded_bytes(chunk.element_count):
            return check_chunk(chunk, payload, start)
        copied = scratch.payload(payload.size) if payload.flags.writeable else None
        head = checksum.before_payload(start, chunk)
        peak_bits, crc = self.codec.take(payload, copied, head)
        checksum.check(chunk, payload, crc)
        return IntactChunk(chunk, payload if copied is None else copied, peak_bits)

    def read(
        self, chunk: types_pb2.Chunk, payload: Bytes, start: int, where: Slice, values: Float32
    ) -> None:
        """Checks a chunk and decodes it in one pass; `values` are undefined after an error."""
        size = self.codec.encoded_bytes(where.size)
        place = (chunk.element_offset, chunk.element_count)
        is_plain = place == (where.offset, where.size) and not chunk.lz4
        if not is_plain or payload.size != size:
            self.codec.decode(self.open(check_chunk(chunk, payload, start), where), values)
        else:
            head = checksum.before_payload(start, chunk)
            may_change = payload.flags.writeable
            crc = self.codec.decode_checked(payload, values, head, may_change=may_change)
            checksum.check(chunk, payload, crc)
        if self._allow_non_finite:
            canonical_nans(values)

    def open(self, intact: IntactChunk, where: Slice) -> Bytes:
        """Checks a chunk against the range where it belongs; returns the codec's bytes.

        CorruptChunkError: the length does not fit, or an LZ4 block is broken. ArgumentError:
        offset, count or compression do not fit the spec.
        """
        chunk, payload = intact.header, intact.payload
        if (chunk.element_offset, chunk.element_count) != (where.offset, where.size):
            raise ArgumentError(
                f"chunk {chunk.chunk_index} covers elements {where.offset} to {where.stop - 1}; "
                f"got offset {chunk.element_offset} and count {chunk.element_count}; "
                "check slice_of and chunk_element_count"
            )
        size = self.codec.encoded_bytes(where.size)
        if chunk.lz4:
            payload = unpacked(chunk, payload, size, is_allowed=self.lz4)
        if payload.size != size:
            raise CorruptChunkError(
                f"chunk {chunk.chunk_index}: {where.size} elements of {self.codec.name} are "
                f"{size} bytes; the payload has {payload.size}; check the codec"
            )
        return payload

    def peak(self, intact: IntactChunk, opened: Bytes) -> float:
        """Returns the largest magnitude of the opened values; infinity if one is not finite."""
        if intact.peak_bits is None:
            return self.codec.peak(opened)
        return self.codec.peak_of_bits(intact.peak_bits)

    def first_non_finite(self, payload: Bytes) -> int | None:
        """Returns the index of the first value that the spec refuses; None if none is."""
        return None if self._allow_non_finite else self.codec.first_non_finite(payload)
