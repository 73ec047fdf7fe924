"""The values of one collective: chunks of an array to messages, and messages to sums and results.

Pure arithmetic on memory; which chunk, when and to whom is `collective.py`'s. The array is written
by `store` and `finish` alone: with final values.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from shardwell.numerics.codec import CODECS, Bytes, Computed, Float32, canonical_nans
from shardwell.numerics.elementwise import Code, Operation, add_scaled, scale
from shardwell.numerics.reduction import pick
from shardwell.numerics.scratch import thread_scratch
from shardwell.numerics.weighted_mean import divide
from shardwell.placement.slices import Slice
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES, ChunkCodec, IntactChunk, check_chunk
from shardwell.wire.messages import OutgoingMessage, Room

Total: TypeAlias = Float32 | Computed
"""A sum: where it lies, or what it is computed from while it is written."""
_TOTAL, _STORED, _OWN = 0, 2, 3


class Reduction(enum.Enum):
    """The way in which elements are combined."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"


def chunk_element_count(codec_name: str) -> int:
    """The elements of a chunk of a collective."""
    return PAYLOAD_SIZE_MAX_BYTES // CODECS[codec_name].item_size


class ChunkArithmetic:
    """One rank's values in one call: (n,) float32, contiguous, read and written. For one thread."""

    def __init__(
        self,
        array: Float32,
        *,
        call_index: int,
        context: int,
        codec_name: str,
        reduction: Reduction,
        factor: float = 1.0,
        divisor: float = 1.0,
        may_have_nans: bool = False,
    ) -> None:
        self._array = array
        self._call_index = call_index
        self._context = context
        # Values that were finite when the call began may overflow as a sum, which is then infinite.
        self._codec = ChunkCodec(CODECS[codec_name], allow_non_finite=True)
        self._reduction = reduction
        self._factor = factor
        self._divisor = divisor
        self._may_have_nans = may_have_nans
        element_count = min(array.size, chunk_element_count(codec_name))
        self._total: Float32 = np.empty(element_count, np.float32)
        self._written: Bytes = np.empty(self._codec.codec.encoded_bytes(element_count), np.uint8)
        """Encoded bytes, before they go to shared memory, where they may change."""

    def payload_bytes(self, where: Slice) -> int:
        """The payload bytes of a message for a range."""
        return self._codec.codec.encoded_bytes(where.size)

    def contribution(self, index: int, where: Slice, room: Room | None = None) -> bytes:
        """The message with this rank's own values, as a partial sum; its payload in `room`."""
        own = self._own(where)
        total: Total = own
        if self._factor == 0.0:
            total = self.begin(where, self._total)
        elif self._factor != 1.0:
            operations = (Operation(Code.COPY, _TOTAL, _STORED), *scale(_TOTAL, self._factor))
            total = Computed(operations, (own,), self._total[: where.size])
        return self._message(pb.STAGE_PARTIAL, index, where, total, room)

    def begin(self, where: Slice, total: Float32 | None = None) -> Float32:
        """Returns this rank's own values as a sum: new memory, or the beginning of `total`."""
        total = np.empty(where.size, np.float32) if total is None else total[: where.size]
        if self._factor:
            np.multiply(self._own(where), np.float32(self._factor), out=total)
        else:
            total.fill(self._factor)  # whatever it holds, NaN included
        return total

    def checked(self, header: pb.ReceiveChunksResponse, payload: Bytes) -> IntactChunk:
        """Refuses a chunk that was damaged, or is not of this call; copies one in shared memory."""
        start = checksum.peer_chunk(self._context, header.stage)
        if payload.flags.writeable:
            return self._codec.check(header.chunk, payload, start, thread_scratch())
        return check_chunk(header.chunk, payload, start)

    def opened(self, intact: IntactChunk, where: Slice) -> Bytes:
        """Checks the payload for a range; returns the codec's bytes: a view."""
        return self._codec.open(intact, where)

    def kept(self, stored: Bytes) -> Bytes:
        """The result of `opened`, to remain as long as it is needed."""
        return stored.copy() if stored.flags.writeable else stored

    def combine(self, stored: Bytes, where: Slice, total: Float32 | None = None) -> Total:
        """Adds a chunk to `total`, or to this rank's values in memory until the next call."""
        own = total is None
        out = self._total[: where.size] if total is None else total
        added = self._own(where) if total is None else total
        codec = self._codec.codec
        if self._reduction in (Reduction.SUM, Reduction.MEAN):
            if own:
                operations = codec.reads(_TOTAL, _STORED, 1.0)
                operations += add_scaled(_TOTAL, _OWN, self._factor)
                return Computed(operations, (stored, added), out)
            codec.decode_add(stored, 1.0, added, 1.0, out)
            return out
        values = np.empty(where.size, np.float32)
        codec.decode(stored, values)
        pick(self._reduction.value, values, added, out)
        return out

    def partial(self, index: int, where: Slice, total: Total, room: Room | None = None) -> bytes:
        """The message with a partial sum; its payload in `room`."""
        return self._message(pb.STAGE_PARTIAL, index, where, total, room)

    def finish(
        self, index: int, where: Slice, total: Total | None, rooms: Sequence[Room | None]
    ) -> list[bytes]:
        """Makes a total final, writes it to the array, and returns a message for each of `rooms`.

        None for `total` is this rank's own values. With any room, all ranks have what was encoded.
        """
        into = self._own(where)
        if total is None:
            total = into if self._factor == 1.0 else self.begin(where, self._total)
        if self._divisor != 1.0:
            total = self._divided(total)
        if not rooms:
            self._settle(total, into)
            self._make_canonical(into)
            return []
        header = self._header(pb.STAGE_FINAL)
        if any(rooms):
            written = self._written[: self.payload_bytes(where)]
            self._encode(header, index, where, total, Room(0, written))
        else:
            message = self._encode(header, index, where, total)
            _, written = framing.parse(pb.ReceiveChunksResponse, message)
        if any(rooms) or self._codec.codec.name != "fp32" or total is not into:
            self.store(written, where, rooms)
        else:
            self._make_canonical(into)
        return self._for_each(header, written, rooms) if any(rooms) else [message] * len(rooms)

    def forwarded(
        self,
        header: pb.ReceiveChunksResponse,
        stored: Bytes,
        message: bytes,
        rooms: Sequence[Room | None],
    ) -> list[bytes]:
        """The messages that send on a stored chunk; `message` lacks a shared payload."""
        if any(rooms) or header.chunk.HasField("shared"):
            return self._for_each(header, stored, rooms)
        return [message] * len(rooms)

    def store(self, stored: Bytes, where: Slice, rooms: Sequence[Room | None] = ()) -> None:
        """Writes final values that came to the array, and as they are to rooms for other ranks."""
        copies = [room.memory for room in rooms if room is not None]
        self._codec.codec.decode(stored, self._own(where), copies)
        self._make_canonical(self._own(where))

    def _divided(self, total: Total) -> Total:
        is_power = math.frexp(self._divisor)[0] == 0.5  # as exact as to divide, and faster
        if isinstance(total, Computed):
            mean = Operation(Code.MEAN, _TOTAL, divisor=self._divisor)
            more = scale(_TOTAL, 1.0 / self._divisor) if is_power else (mean,)
            return total._replace(operations=total.operations + more)
        out = self._total[: total.size]
        if is_power:
            np.multiply(total, np.float32(1.0 / self._divisor), out=out)
        elif np.may_share_memory(total, out):
            divide(total.copy(), self._divisor, out)
        else:
            divide(total, self._divisor, out)
        return out

    def _settle(self, total: Total, into: Float32) -> None:
        values = total.values() if isinstance(total, Computed) else total
        if values is not into:
            np.copyto(into, values)

    def _make_canonical(self, values: Float32) -> None:
        if self._may_have_nans:
            canonical_nans(values)

    def _for_each(
        self, header: pb.ReceiveChunksResponse, payload: Bytes, rooms: Sequence[Room | None]
    ) -> list[bytes]:
        whole, messages = b"", []
        for room in rooms:
            if room is not None:
                header.chunk.shared.offset, header.chunk.shared.size = room.offset, payload.size
                messages.append(bytes(header.SerializeToString()))
                continue
            if not whole:
                header.chunk.ClearField("shared")
                inline = OutgoingMessage(header, payload.size)
                inline.payload[:] = payload
                whole = inline.seal()
            messages.append(whole)
        return messages

    def _own(self, where: Slice) -> Float32:
        return self._array[where.offset : where.stop]

    def _message(
        self, stage: pb.Stage, index: int, where: Slice, values: Total, room: Room | None = None
    ) -> bytes:
        return self._encode(self._header(stage), index, where, values, room)

    def _header(self, stage: pb.Stage) -> pb.ReceiveChunksResponse:
        return pb.ReceiveChunksResponse(call_index=self._call_index, stage=stage)

    def _encode(
        self,
        header: pb.ReceiveChunksResponse,
        index: int,
        where: Slice,
        values: Total,
        room: Room | None = None,
    ) -> bytes:
        start = checksum.peer_chunk(self._context, header.stage)
        return self._codec.encode(
            header, header.chunk, where, index, values, start=start, room=room
        )
