"""The values of one collective: chunks of an array to messages, and messages to sums and results.

Pure arithmetic on memory; which chunk, when and to whom is `collective.py`'s. The array is written
by `store` and `finish` alone: with final values.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import numpy as np

from shardwell.numerics.codec import CODECS, Bytes, Float32
from shardwell.numerics.elementwise import blocks
from shardwell.numerics.scratch import thread_scratch
from shardwell.numerics.weighted_mean import divide
from shardwell.placement.slices import Slice
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES, ChunkCodec, IntactChunk, check_chunk

_SCALED_PEAK_MIN = 2.0**-90
"""Above it, fp16's scale has room for the factors of a mean, which are 2^-32 at the least."""


class Reduction(enum.Enum):
    """How elements are combined."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"


def chunk_element_count(codec_name: str) -> int:
    """Elements of a chunk of a collective."""
    return PAYLOAD_SIZE_MAX_BYTES // CODECS[codec_name].item_size


class ChunkArithmetic:
    """One rank's values in one call. For one thread.

    Args:
        array: (n,) float32, contiguous; read, and written where results belong.
        call_index: The call's, for headers.
        context: Of the call: see wire/checksum.py.
        codec_name: How chunks travel.
        reduction: How elements are combined.
        factor: What this rank's values are multiplied with before they are added.
        divisor: What totals are divided by.
        peaks: The largest magnitude of this rank's own values in chunks, by index, where known.
    """

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
        peaks: Mapping[int, float] | None = None,
    ) -> None:
        self._array = array
        self._call_index = call_index
        self._context = context
        # What was finite when the call began may overflow as a sum, which is then infinite.
        self._codec = ChunkCodec(CODECS[codec_name], allow_non_finite=True)
        self._reduction = reduction
        self._factor = factor
        self._divisor = divisor
        self._peaks = peaks or {}
        self._total: Float32 = np.empty(
            min(array.size, chunk_element_count(codec_name)), np.float32
        )

    def contribution(self, index: int, where: Slice) -> bytes:
        """The message with this rank's own values, as a partial sum."""
        own, peak = self._own(where), self._peaks.get(index)
        mantissa, exponent = math.frexp(self._factor)
        if mantissa == 0.5 and (self._factor == 1.0 or self._can_scale(peak)):
            return self._message(pb.STAGE_PARTIAL, index, where, own, peak, exponent - 1)
        return self._message(pb.STAGE_PARTIAL, index, where, self.begin(where, self._total))

    def begin(self, where: Slice, total: Float32 | None = None) -> Float32:
        """A sum that has this rank's own values: new memory, or the beginning of `total`."""
        total = np.empty(where.size, np.float32) if total is None else total[: where.size]
        if self._factor:
            np.multiply(self._own(where), np.float32(self._factor), out=total)
        else:
            total.fill(0.0)  # whatever is there, NaN included
        return total

    def checked(self, header: pb.ReceiveChunksResponse, payload: Bytes) -> IntactChunk:
        """Refuses what was damaged, or is not of this call.

        Raises:
            CorruptChunkError: the CRC32C does not fit.
        """
        return check_chunk(header.chunk, payload, checksum.peer_chunk(self._context, header.stage))

    def opened(self, intact: IntactChunk, where: Slice) -> Bytes:
        """Checks what came for a range; returns the codec's bytes: a view.

        Raises:
            CorruptChunkError, ArgumentError: see `ChunkCodec.open`.
        """
        return self._codec.open(intact, where)

    def combine(
        self, exponent: int, stored: Bytes, where: Slice, total: Float32 | None = None
    ) -> Float32:
        """Adds what came to `total`; without, to this rank's own values, in memory of its own.

        The result without `total` stands until the next call of this object.
        """
        own = total is None
        out = self._total[: where.size] if total is None else total
        added = self._own(where) if total is None else total
        codec = self._codec.codec
        if self._reduction in (Reduction.SUM, Reduction.MEAN):
            factor = self._factor if own else 1.0
            scale = math.ldexp(1.0, exponent)
            if not factor:
                codec.decode(stored, exponent, out)
                return out
            codec.decode_add(stored, scale, added, factor, out)
            return out
        pick = np.maximum if self._reduction is Reduction.MAX else np.minimum
        for start, stop in blocks(where.size):
            values = thread_scratch().values[: stop - start]
            codec.decode(stored[start * codec.item_size : stop * codec.item_size], exponent, values)
            pick(values, added[start:stop], out=out[start:stop])
        return out

    def partial(self, index: int, where: Slice, total: Float32) -> bytes:
        """The message with a partial sum."""
        return self._message(pb.STAGE_PARTIAL, index, where, total)

    def finish(self, index: int, where: Slice, total: Float32 | None, *, spreads: bool) -> bytes:
        """Makes a total final, and writes it to the array.

        Args:
            index: The chunk.
            where: Its range.
            total: The sum of all; None: this rank's own values.
            spreads: Whether other ranks get it, too. Then all, this one included, have what was
                encoded.

        Returns:
            The message for the others; nothing if there are none.
        """
        into = self._own(where)
        peak = self._peaks.get(index) if total is None and self._factor == 1.0 else None
        if total is None:
            total = into if self._factor == 1.0 else self.begin(where, self._total)
        if self._divisor != 1.0:
            out = self._total[: where.size] if total is into else into
            if math.frexp(self._divisor)[0] == 0.5:  # a power of two: as exact, and faster
                np.multiply(total, np.float32(1.0 / self._divisor), out=out)
            else:
                divide(total, self._divisor, out)
            total, peak = out, None
        message = self._message(pb.STAGE_FINAL, index, where, total, peak) if spreads else b""
        if message and self._codec.codec.name != "fp32":
            header, payload = framing.parse(pb.ReceiveChunksResponse, message)
            self._codec.codec.decode(payload, header.chunk.scale_exponent, into)
        elif total is not into:
            np.copyto(into, total)
        return message

    def store(self, exponent: int, stored: Bytes, where: Slice) -> None:
        """Writes final values that came to the array."""
        self._codec.codec.decode(stored, exponent, self._own(where))

    def _own(self, where: Slice) -> Float32:
        return self._array[where.offset : where.stop]

    def _can_scale(self, peak: float | None) -> bool:
        """Whether the scale that a chunk is written with can be halved a few times more."""
        return self._codec.codec.name == "fp16" and peak is not None and peak > _SCALED_PEAK_MIN

    def _message(
        self,
        stage: pb.Stage,
        index: int,
        where: Slice,
        values: Float32,
        peak: float | None = None,
        exponent_offset: int = 0,
    ) -> bytes:
        header = pb.ReceiveChunksResponse(call_index=self._call_index, stage=stage)
        return self._codec.encode(
            header,
            header.chunk,
            where,
            index,
            values,
            thread_scratch(),
            start=checksum.peer_chunk(self._context, stage),
            peak=peak,
            exponent_offset=exponent_offset,
        )
