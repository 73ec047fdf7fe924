"""How values are written: float32 to fp32, fp16 or bf16 and back, at memory speed.

Pure arithmetic on arrays; lengths are the caller's to check. Work goes in blocks that stay in the
core's cache, conversions are numkong's SIMD kernels, and every call lets go of the GIL.

Bounds for finite values (x: the value, peak: the largest magnitude of the chunk):
    fp32  exact
    fp16  |error| <= 2^-11 |x| + 2^-19 peak
    bf16  |error| <= 2^-8 |x|, or 2^-134 where that is more

fp16 carries a power-of-two scale for each chunk, so that float32's largest values neither overflow
nor its small ones vanish. The scale is guessed from the chunk's first values and verified on what
was written; only a chunk whose later blocks are thousands of times larger (or smaller) is written
twice. It depends on the chunk's values alone: the same chunk is always written with the same
bits.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeAlias

import numkong
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shardwell.errors import ArgumentError

Float32: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

BLOCK_ELEMENT_COUNT = 128 * 1024
"""Elements that a pass of several kernels works on at a time: 512 KiB of float32, so that a block
stays in a second-level cache from one kernel to the next and calls cost little beside it. Measured
in benchmarks/codec.py: a fifth faster than 256 KiB, and 1 MiB adds little."""

_GUESS_ELEMENT_COUNT = 64 * 1024
"""Elements that a scale is guessed from."""
_SMALL_ELEMENT_COUNT = 4096
"""Up to here one exact look costs less than a guess and its verification."""
_FP16_KEEP_LOW, _FP16_KEEP_HIGH = 2.0**-6, 2.0**12
"""Peaks in this range are written unscaled, which saves a pass."""
_FP16_TARGET = 9
"""Scaled peaks are brought to just below 2^9: a headroom of 2^7 for later blocks."""
_FP16_ACCEPT_LOW = 0x2400  # bits of 2^-6
_FP16_EXPONENT_MIN, _FP16_EXPONENT_MAX = -126, 119
_FP16_EXPONENT_SAFE = 112
"""Up to here no finite fp16 leaves float32's range."""
_FP16_LARGEST = float(2.0**128 * (1 - 2.0**-11))
_BF16_LARGEST = float(2.0**128 * (1 - 2.0**-8))
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Scratch:
    """Working memory for one thread: two float32 blocks, reused from call to call."""

    def __init__(self) -> None:
        self.values: Float32 = np.empty(BLOCK_ELEMENT_COUNT, np.float32)
        self.gradient: Float32 = np.empty(BLOCK_ELEMENT_COUNT, np.float32)


class NonFiniteValueError(ArithmeticError):
    """Not finite, and not allowed; `index` is the first such element's."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"element {index} is {value}")
        self.index = index
        self.value = value


def blocks(count: int) -> range:
    """Starts of the blocks of `count` elements."""
    return range(0, count, BLOCK_ELEMENT_COUNT)


class Codec:
    """One way of writing values. Stateless; safe to share among threads."""

    name: ClassVar[str]
    item_size: ClassVar[int]
    """Bytes per element."""
    _bits: ClassVar[Any]
    _infinity: ClassVar[int]
    """Bits of infinity: the smallest magnitude that is not finite."""

    def stored(self, payload: Bytes) -> Any:
        """The payload as an array (or numkong tensor) of the codec's type: a view."""
        raise NotImplementedError

    def write(self, values: Float32, stored: Any) -> None:
        """Converts contiguous float32 into a view of equal length."""
        raise NotImplementedError

    def read(self, stored: Any, values: Float32) -> None:
        """Converts back, unscaled."""
        raise NotImplementedError

    def encode(
        self,
        values: npt.NDArray[Any],
        payload: Bytes,
        scratch: Scratch,
        *,
        allow_non_finite: bool = False,
        peak: float | None = None,
    ) -> int:
        """Writes `values` into `payload`.

        Args:
            values: (n,) float32 (fastest), float64 or float16, any stride.
            payload: (n * item_size,) uint8, aligned to item_size, overwritten.
            scratch: This thread's.
            allow_non_finite: Write NaN and infinity as they are instead of refusing.
            peak: The largest magnitude, if it is known and finite: spares looking at them.

        Returns:
            The scale exponent e: value = written * 2^e.

        Raises:
            NonFiniteValueError: with the first index; `payload` is then of no use.
        """
        if peak is not None:
            exponent = self._exponent_for(peak)
            limit = math.inf if peak <= self._largest() else self._largest()
            self._write(values, payload, exponent, scratch, limit=limit)
            return exponent
        if values.size <= _SMALL_ELEMENT_COUNT:
            exponent, low_enough = self._exact_exponent(values)
            if low_enough:
                self._write(values, payload, exponent, scratch)
                return exponent
        exponent = self._guess_exponent(values[:_GUESS_ELEMENT_COUNT], scratch)
        self._write(values, payload, exponent, scratch)
        written = magnitude_of_bits(payload.view(self._bits))
        if self._accepts(written) and self._decodes_finite(written, exponent):
            return exponent
        found = _finite_peak(values, scratch, allow_non_finite=allow_non_finite)
        exact = self._exponent_for(found)
        if found > self._largest() or exact != exponent:
            self._write(values, payload, exact, scratch, limit=self._largest())
        return exact

    def decode(self, payload: Bytes, exponent: int, values: Float32) -> None:
        """Reads a payload into `values`: (n,) float32, contiguous, overwritten."""
        stored = self.stored(payload)
        if exponent == 0:
            self.read(stored, values)
            return
        factor = np.float32(math.ldexp(1.0, exponent))
        for start in blocks(values.size):
            into = values[start : start + BLOCK_ELEMENT_COUNT]
            self.read(stored[start : start + into.size], into)
            with np.errstate(over="ignore", under="ignore"):
                np.multiply(into, factor, out=into)

    def decode_add(
        self,
        payload: Bytes,
        factor: float,
        total: Float32,
        total_factor: float,
        out: Float32,
        scratch: Scratch,
        start: int = 0,
    ) -> None:
        """Out = factor * values + total_factor * total, in one pass over memory.

        Args:
            payload: The codec's bytes.
            factor: Of the written values: the scale and a weight.
            total: (n,) float32, contiguous; the payload's elements from `start` on belong to it.
            total_factor: Of what is in `total`.
            out: (n,) float32, contiguous; may be `total`.
            scratch: This thread's.
            start: First element of the payload.
        """
        stored = self.stored(payload)
        # numkong takes factors as float32; what that can't hold is applied in two steps.
        safe = factor == 0.0 or 2.0**-126 <= abs(factor) < 2.0**127
        mantissa, exponent = math.frexp(factor)
        for offset in blocks(total.size):
            into = out[offset : offset + BLOCK_ELEMENT_COUNT]
            values = scratch.values[: into.size]
            first = start + offset
            self.read(stored[first : first + into.size], values)
            if not safe:
                values *= np.float32(math.ldexp(1.0, exponent))
                values *= np.float32(mantissa)
            numkong.blend(
                values,
                total[offset : offset + into.size],
                alpha=factor if safe else 1.0,
                beta=total_factor,
                out=into,
            )

    def decode_block(self, payload: Bytes, start: int, factor: float, values: Float32) -> None:
        """Reads the payload's elements from `start` on, times `factor`."""
        self.read(self.stored(payload)[start : start + values.size], values)
        if factor != 1.0:
            np.multiply(values, np.float32(factor), out=values)

    def check_exponent(self, exponent: int) -> None:
        """Refuses a scale exponent that this codec never writes.

        Raises:
            ArgumentError: it is out of range.
        """
        if exponent != 0:
            raise ArgumentError(f"scale_exponent must be 0 with {self.name}; got {exponent}")

    def peak(self, payload: Bytes, exponent: int) -> float:
        """Largest magnitude of the values once decoded; infinity if one is not finite."""
        bits = magnitude_of_bits(payload.view(self._bits))
        if bits >= self._infinity or not self._decodes_finite(bits, exponent):
            return math.inf
        value = np.empty(1, np.float32)
        self.decode(np.array([bits], self._bits).view(np.uint8), exponent, value)
        return float(value[0])

    def first_non_finite(self, payload: Bytes, exponent: int) -> int | None:
        """Index of the first value that is not finite once decoded; None if all are finite."""
        if self.peak(payload, exponent) < math.inf:
            return None
        with np.errstate(over="ignore"):
            values = np.empty(payload.size // self.item_size, np.float32)
            self.decode(payload, exponent, values)
        return int(np.argmin(np.isfinite(values)))

    def _exact_exponent(self, values: npt.NDArray[Any]) -> tuple[int, bool]:
        """The exponent for a few values, and whether they are finite and round to finite ones."""
        peak = float(np.maximum.reduce(np.abs(values), initial=0.0))
        return self._exponent_for(peak), peak <= min(self._largest(), _FLOAT32_MAX)

    def _write(
        self,
        values: npt.NDArray[Any],
        payload: Bytes,
        exponent: int,
        scratch: Scratch,
        limit: float = math.inf,
    ) -> None:
        """Converts everything, divided by 2^exponent, finite values clipped to `limit`."""
        stored = self.stored(payload)
        if exponent == 0 and limit == math.inf and is_plain(values):
            self.write(values, stored)
            return
        factor = np.float32(math.ldexp(1.0, -exponent))
        for start in blocks(values.size):
            block = as_plain(values[start : start + BLOCK_ELEMENT_COUNT], scratch.values)
            if limit != math.inf:
                clipped = np.clip(block, np.float32(-limit), np.float32(limit))
                block = np.where(np.isinf(block), block, clipped)
            if exponent:
                with np.errstate(over="ignore", under="ignore"):  # what was written is checked
                    block = np.multiply(block, factor, out=scratch.values[: block.size])
            self.write(block, stored[start : start + block.size])

    def _guess_exponent(self, first_block: npt.NDArray[Any], scratch: Scratch) -> int:
        return 0

    def _exponent_for(self, peak: float) -> int:
        return 0

    def _accepts(self, peak_bits: int) -> bool:
        return peak_bits < self._infinity

    def _decodes_finite(self, peak_bits: int, exponent: int) -> bool:
        return True

    def _largest(self) -> float:
        """Larger finite magnitudes would round to infinity; they are written as this one."""
        return math.inf


class Fp32(Codec):
    """IEEE 754 binary32: exact."""

    name = "fp32"
    item_size = 4
    _bits = np.uint32
    _infinity = 0x7F800000

    @override
    def stored(self, payload: Bytes) -> Any:
        return payload.view(np.float32)

    @override
    def write(self, values: Float32, stored: Any) -> None:
        np.copyto(stored, values)

    @override
    def read(self, stored: Any, values: Float32) -> None:
        np.copyto(values, stored)


class Fp16(Codec):
    """IEEE 754 binary16, rounded to nearest even, with a power-of-two scale per chunk."""

    name = "fp16"
    item_size = 2
    _bits = np.uint16
    _infinity = 0x7C00

    @override
    def stored(self, payload: Bytes) -> Any:
        return payload.view(np.float16)

    @override
    def write(self, values: Float32, stored: Any) -> None:
        numkong.astype(values, "float16", out=stored)

    @override
    def read(self, stored: Any, values: Float32) -> None:
        numkong.astype(stored, "float32", out=values)

    @override
    def check_exponent(self, exponent: int) -> None:
        if not _FP16_EXPONENT_MIN <= exponent <= _FP16_EXPONENT_MAX:
            raise ArgumentError(
                f"scale_exponent must be from {_FP16_EXPONENT_MIN} to {_FP16_EXPONENT_MAX} "
                f"with fp16; got {exponent}"
            )

    def _guess_exponent(self, first_block: npt.NDArray[Any], scratch: Scratch) -> int:
        block = as_plain(first_block, scratch.values)
        low, high = float(np.minimum.reduce(block)), float(np.maximum.reduce(block))
        peak = max(-low, high)
        return self._exponent_for(peak) if math.isfinite(peak) else 0

    def _exponent_for(self, peak: float) -> int:
        if peak == 0.0 or _FP16_KEEP_LOW <= peak < _FP16_KEEP_HIGH:
            return 0
        exponent = math.frexp(peak)[1] - _FP16_TARGET
        return min(max(exponent, _FP16_EXPONENT_MIN), _FP16_EXPONENT_MAX)

    def _accepts(self, peak_bits: int) -> bool:
        return _FP16_ACCEPT_LOW <= peak_bits < self._infinity

    def _decodes_finite(self, peak_bits: int, exponent: int) -> bool:
        if exponent <= _FP16_EXPONENT_SAFE:
            return True
        peak = float(np.uint16(peak_bits).view(np.float16))
        return math.ldexp(peak, exponent) <= _FLOAT32_MAX

    def _largest(self) -> float:
        return _FP16_LARGEST


class Bf16(Codec):
    """bfloat16, rounded to nearest even; the largest finite value instead of an overflow."""

    name = "bf16"
    item_size = 2
    _bits = np.uint16
    _infinity = 0x7F80

    @override
    def stored(self, payload: Bytes) -> Any:
        # A numkong tensor: NumPy has no bfloat16.
        return numkong.from_pointer(
            payload.ctypes.data, payload.size // 2, "bfloat16", owner=payload
        )

    @override
    def write(self, values: Float32, stored: Any) -> None:
        numkong.astype(values, "bfloat16", out=stored)

    @override
    def read(self, stored: Any, values: Float32) -> None:
        numkong.astype(stored, "float32", out=values)

    def _largest(self) -> float:
        return _BF16_LARGEST


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Fp16(), Bf16())}


def _finite_peak(values: npt.NDArray[Any], scratch: Scratch, *, allow_non_finite: bool) -> float:
    """Largest finite magnitude, exactly; refuses others unless they are allowed."""
    peak = 0.0
    for start in blocks(values.size):
        block = as_plain(values[start : start + BLOCK_ELEMENT_COUNT], scratch.values)
        low, high = float(np.minimum.reduce(block)), float(np.maximum.reduce(block))
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = np.isfinite(block)
            if not allow_non_finite:
                index = int(np.argmin(finite))
                raise NonFiniteValueError(start + index, float(block[index]))
            magnitudes = np.abs(block[finite])
            low, high = 0.0, float(magnitudes.max(initial=0.0))
        peak = max(peak, -low, high)
    return peak


# Values as kernels read them.

_SIGNED: dict[Any, Any] = {
    np.dtype(np.uint16): np.dtype(np.int16),
    np.dtype(np.uint32): np.dtype(np.int32),
}


def is_plain(values: npt.NDArray[Any]) -> bool:
    """Whether the kernels can read the values as they lie."""
    flags = values.flags
    return bool(values.dtype == np.float32 and flags.c_contiguous and flags.aligned)


def as_plain(block: npt.NDArray[Any], into: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The block as contiguous native float32: itself, or a view of `into`, which it is copied to.

    Args:
        block: (n,) float32, float64 or float16, any stride.
        into: At least (n,), contiguous.
    """
    if is_plain(block):
        return block
    values = into[: block.size]
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(values, block, casting="same_kind")
    return values


def magnitude_of_bits(bits: npt.NDArray[Any]) -> int:
    """Largest value of (n,) uint16 or uint32 without their signs: two maxima, no temporary."""
    sign = 1 << (8 * bits.itemsize - 1)
    unsigned = int(np.maximum.reduce(bits))
    if unsigned < sign:
        return unsigned
    signed = int(np.maximum.reduce(bits.view(_SIGNED[bits.dtype])))
    return max(unsigned - sign, signed)
