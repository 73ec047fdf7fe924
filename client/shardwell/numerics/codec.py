"""The codecs of values: float32 to fp32, fp16 or bf16 and back, at memory speed.

Pure arithmetic on arrays; lengths are the caller's to check. What it costs is passes over memory,
each of which `elementwise` makes.

Bounds for finite values (x: the value, peak: the largest magnitude of the chunk; of int8, of its
block of 4,096 elements: int8.py):
    fp32  exact
    fp16  |error| <= 2^-11 |x| + 2^-19 peak
    bf16  |error| <= 2^-8 |x|, or 2^-134 where that is more
    int8  |error| <= peak / 254 * (1 + 2^-15), or 2^-100 where that is more

fp16 carries a power-of-two scale for each chunk, so that float32's largest values do not overflow,
and a chunk of small ones alone keeps them. Beside a large value, one of at most 2^-19 of the peak
may be written as 0, and none above that; bf16 and fp32 keep such values. The scale is guessed from
the chunk's first values and verified on what was written; only a chunk whose later blocks are
thousands of times larger (or smaller) is written twice. It depends on the chunk's values alone: the
same chunk is always written with the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from fastcrc import crc32
from typing_extensions import override

from shardwell.errors import ArgumentError
from shardwell.numerics import int8
from shardwell.numerics.elementwise import (
    INFINITY_BITS,
    Arrays,
    Code,
    Operation,
    Operations,
    add_scaled,
    blocks,
    run,
    run_checked,
    scale,
)
from shardwell.numerics.scratch import Scratch

Float32: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_VALUES, _PAYLOAD, _TOTAL = range(3)
"""Places of the arrays of a run."""
_COPY_COUNT_MAX = 5
"""Copies of a payload that one run has places for, besides its own."""
_SOURCE = _TOTAL
_LOOKS = (Operation(Code.LOOK_32, _PAYLOAD, _VALUES),)

GUESS_ELEMENT_COUNT = 64 * 1024
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


class NonFiniteValueError(ArithmeticError):
    """Not finite, and not allowed; `index` is the first such element's."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"element {index} is {value}")
        self.index = index
        self.value = value


class Written(NamedTuple):
    """The result of `Codec.encode` for a payload."""

    exponent: int
    """The scale: value = written * 2^exponent."""
    crc: int
    peak_bits: int = 0


class Computed(NamedTuple):
    """Values that are computed in the pass that writes them, and so need not lie anywhere."""

    operations: Operations
    """The operations that leave them in place 0."""
    arrays: tuple[npt.NDArray[Any], ...]
    """The operands of these: the places from 2 on, all with as many elements."""
    memory: Float32
    """(n,), contiguous; where they go if they have to lie somewhere after all."""

    def values(self) -> Float32:
        """The values: `memory`, filled."""
        run(self.operations, (self.memory, None, *self.arrays), 0, self.memory.size)
        return self.memory


class Codec:
    """One way of writing values. Stateless; safe to share among threads."""

    name: ClassVar[str]
    item_size: ClassVar[int]
    """Bytes per element; of a payload that has more than elements, of those."""
    block_size: ClassVar[int] = 1
    """Elements that are written together: slices and chunks begin with a block."""
    _exponents: ClassVar[str] = "0"
    _has_scale: ClassVar[bool] = False
    _infinity: ClassVar[int]
    """Bits of infinity: the smallest magnitude that is not finite."""
    _read: ClassVar[Code]
    _write: ClassVar[Code]
    _looks: ClassVar[Operations]
    _checks: ClassVar[Operations]
    _takes: ClassVar[Operations]

    def encoded_bytes(self, count: int) -> int:
        """Bytes of the payload of so many elements."""
        return count * self.item_size

    @property
    def summed(self) -> Codec:
        """The codec in which payloads are summed: itself, or what they are read to before."""
        return self

    def element_count(self, size_bytes: int) -> int:
        """Elements of a payload; -1 where no payload has that size."""
        count, rest = divmod(size_bytes, self.item_size)
        return -1 if rest else count

    def encode(
        self,
        values: npt.NDArray[Any],
        payload: Bytes,
        scratch: Scratch,
        *,
        allow_non_finite: bool = False,
        peak: float | None = None,
        first_peak: float | None = None,
        is_exact: bool = False,
        start: Callable[[int], int] | None = None,
    ) -> Written:
        """Writes `values` into `payload`.

        Args:
            values: (n,) float32 (fastest), float64 or float16, any stride.
            payload: (encoded_bytes(n),) uint8, aligned to 4, overwritten.
            scratch: This thread's.
            allow_non_finite: Write NaN and infinity as they are instead of refusing.
            peak: The largest magnitude, if it is known and finite: spares looking at them.
            first_peak: The largest magnitude of the first GUESS_ELEMENT_COUNT of them, which may be
                infinite or NaN, if it is known: spares looking at those.
            is_exact: To write what would be written if `peak` were known: all values are looked at,
                in the pass that writes them. Nothing that is not finite is written then.
            start: What the payload's CRC32C begins with, by scale exponent; None: it is not wanted.

        Raises:
            NonFiniteValueError: with the first index; `payload` is then of no use.
        """

        def written(exponent: int, limit: float = math.inf, looks: Operations = ()) -> Written:
            begin = None if start is None else start(exponent)
            peak_bits, crc = self._written(values, payload, exponent, scratch, limit, looks, begin)
            return Written(exponent, crc, peak_bits)

        if peak is None and values.size <= _SMALL_ELEMENT_COUNT:
            if first_peak is not None and math.isfinite(first_peak):
                peak = first_peak
            else:
                may_be_odd = allow_non_finite and not is_exact
                peak = _finite_peak(values, scratch, allow_non_finite=may_be_odd)
        if is_exact and peak is None:
            found = written(
                self._guess_exponent(values[:GUESS_ELEMENT_COUNT], scratch), looks=_LOOKS
            )
            peak = float_of(found.peak_bits)
            if not math.isfinite(peak):
                # Says where; or it has gone meanwhile, as the caller writes there.
                peak = _finite_peak(values, scratch, allow_non_finite=False)
            if self._exponent_for(peak) == found.exponent and peak <= self._largest():
                return found
        if peak is not None:
            is_low = peak <= self._largest()
            return written(self._exponent_for(peak), math.inf if is_low else self._largest())
        if first_peak is None:
            guessed = self._guess_exponent(values[:GUESS_ELEMENT_COUNT], scratch)
        else:
            guessed = self._exponent_for(first_peak) if math.isfinite(first_peak) else 0
        guess = written(guessed, looks=self._looks)
        if self._accepts(guess.peak_bits) and self._decodes_finite(guess.peak_bits, guess.exponent):
            return guess
        found_peak = _finite_peak(values, scratch, allow_non_finite=allow_non_finite)
        exact = self._exponent_for(found_peak)
        if found_peak > self._largest() or exact != guess.exponent:
            return written(exact, self._largest())
        return guess

    def encode_computed(
        self, values: Computed, payload: Bytes, start: Callable[[int], int]
    ) -> Written | None:
        """Encodes values that are computed meanwhile, finite or not: the bits of `encode`.

        None: they have to be looked at once more, by `encode`; `payload` is then of no use.
        """
        count = values.memory.size
        if count <= _SMALL_ELEMENT_COUNT:
            return None
        arrays = (None, payload, *values.arrays)
        exponent = 0
        if self._has_scale:
            first_count = min(count, GUESS_ELEMENT_COUNT)
            peak = float_of(run(values.operations + _LOOKS, arrays, 0, first_count))
            exponent = self._exponent_for(peak) if math.isfinite(peak) else 0
        write = Operation(self._write, _PAYLOAD, _VALUES, factor=math.ldexp(1.0, -exponent))
        operations = (*values.operations, write, *self._looks, *self._checks)
        peak_bits, crc = run_checked(operations, arrays, 0, count, start(exponent))
        if self._accepts(peak_bits) and self._decodes_finite(peak_bits, exponent):
            return Written(exponent, crc, peak_bits)
        return None

    def decode(
        self, payload: Bytes, exponent: int, values: Float32, copies: Sequence[Bytes] = ()
    ) -> None:
        """Reads a payload into `values`, in one pass with copies of it; all are overwritten.

        `payload` is (encoded_bytes(n),) uint8, aligned, as are `copies`; `values` (n,), contiguous.
        """
        operations = self.reads(_VALUES, _PAYLOAD, math.ldexp(1.0, exponent))
        for place in range(_TOTAL, _TOTAL + len(copies[:_COPY_COUNT_MAX])):
            operations += self.copies(place, _PAYLOAD)
        run(operations, (values, payload, *copies[:_COPY_COUNT_MAX]), 0, values.size)
        for copy in copies[_COPY_COUNT_MAX:]:
            np.copyto(copy, payload)

    def decode_checked(
        self, payload: Bytes, exponent: int, values: Float32, crc: int, *, may_change: bool
    ) -> int:
        """Decodes, and in the same pass goes on with `crc` over the payload, which it returns.

        If the CRC turns out to be another, `values` are of no use. With `may_change`, another
        process may write to the payload: the decoded bytes are the checked ones nevertheless.
        """
        operations = self._checks + self.reads(_VALUES, _PAYLOAD, math.ldexp(1.0, exponent))
        arrays: Arrays = (values, payload)
        if may_change:
            operations = self._takes + operations
            arrays = (values, None, payload)
        return run_checked(operations, arrays, 0, values.size, crc)[1]

    def decode_looked(
        self, payload: Bytes, exponent: int, values: Float32, crc: int
    ) -> tuple[int, int]:
        """`decode`, and in the same pass what `take` returns of a payload that does not change."""
        reads = self.reads(_VALUES, _PAYLOAD, math.ldexp(1.0, exponent))
        operations = self._checks + self._looks + reads
        return run_checked(operations, (values, payload), 0, values.size, crc)

    def take(self, payload: Bytes, into: Bytes | None, crc: int) -> tuple[int, int]:
        """Looks at a payload and checks it, in one pass, copying it before if it may change.

        `into` has as many bytes; None: the payload does not change. Returns the largest magnitude,
        as bits, for `peak_of_bits`; and `crc` gone on over the payload.
        """
        operations = self._checks + self._looks
        arrays: Arrays = (None, payload)
        if into is not None:
            operations, arrays = self._takes + operations, (None, into, payload)
        return run_checked(operations, arrays, 0, payload.size // self.item_size, crc)

    def reads(self, to: int, payload: int, factor: float) -> Operations:
        """The operations that read a payload, times `factor`, to a place: see elementwise.py."""
        return _reads(self._read, to, payload, factor or 0.0)

    def copies(self, to: int, payload: int) -> Operations:
        """The operations that copy a payload to another place: see elementwise.py."""
        (copying,) = self._takes
        return (copying._replace(to=to, source=payload),)

    def decode_add(
        self, payload: Bytes, factor: float, total: Float32, total_factor: float, out: Float32
    ) -> None:
        """Out = factor * values + total_factor * total, in one pass over memory.

        `total` and `out`, which may be one array, are (n,) float32, contiguous. `factor` has the
        scale and a weight; a `total_factor` of 0 leaves `total` out, whatever it is.
        """
        in_place = np.may_share_memory(out, total)
        into = _TOTAL if in_place else _VALUES
        if not total_factor:
            operations = self.reads(into, _PAYLOAD, factor)
        elif not factor:
            kept = () if in_place else (Operation(Code.COPY, _VALUES, _TOTAL),)
            operations = (*kept, *scale(into, total_factor))
        elif in_place:
            added = self.reads(_VALUES, _PAYLOAD, factor) + add_scaled(_TOTAL, _VALUES)
            operations = scale(_TOTAL, total_factor) + added
        else:
            added = add_scaled(_VALUES, _TOTAL, total_factor)
            operations = self.reads(_VALUES, _PAYLOAD, factor) + added
        run(operations, (None if in_place else out, payload, total), 0, total.size)

    def check_exponent(self, exponent: int) -> None:
        """Raises ArgumentError for a scale exponent that this codec never writes."""
        if not self.has_exponent(exponent):
            raise ArgumentError(
                f"scale_exponent must be {self._exponents} with {self.name}; got {exponent}"
            )

    def has_exponent(self, exponent: int) -> bool:
        """True if this codec writes such a scale exponent."""
        return exponent == 0

    def peak(self, payload: Bytes, exponent: int) -> float:
        """Largest magnitude of the values once decoded; infinity if one is not finite."""
        bits = run(self._looks, (None, payload), 0, payload.size // self.item_size)
        return self.peak_of_bits(bits, exponent)

    def peak_of_bits(self, bits: int, exponent: int) -> float:
        """The peak from the largest magnitude that was written, as bits."""
        if bits >= self._infinity or not self._decodes_finite(bits, exponent):
            return math.inf
        return ctypes.c_float(math.ldexp(self._value_of(bits), exponent)).value

    def first_non_finite(self, payload: Bytes, exponent: int) -> int | None:
        """Index of the first value that is not finite once decoded; None if all are finite."""
        if self.peak(payload, exponent) < math.inf:
            return None
        with np.errstate(over="ignore"):
            values = np.empty(self.element_count(payload.size), np.float32)
            self.decode(payload, exponent, values)
        return int(np.argmin(np.isfinite(values)))

    def _written(
        self,
        values: npt.NDArray[Any],
        payload: Bytes,
        exponent: int,
        scratch: Scratch,
        limit: float,
        looks: Operations,
        crc: int | None,
    ) -> tuple[int, int]:
        """Converts everything, divided by 2^exponent, finite values clipped to `limit`.

        Returns the largest magnitude that `looks` see, as bits; and `crc` gone on over what was
        written, if there is one.
        """
        factor = math.ldexp(1.0, -exponent)
        writes: Operations = (Operation(self._write, _PAYLOAD, _VALUES, factor=factor),)
        # The first look brings values into the cache for NumPy's conversions.
        writes = looks + writes if looks is _LOOKS else writes + looks
        if crc is not None:
            writes += self._checks
        crc = crc or 0
        if limit == math.inf and is_plain(values):
            return run_checked(writes, (values, payload), 0, values.size, crc)
        largest = 0
        for start, stop in blocks(values.size):
            block = as_plain(values[start:stop], scratch.values)
            if limit != math.inf:
                clipped = np.clip(block, np.float32(-limit), np.float32(limit))
                block = np.where(np.isinf(block), block, clipped)
            part = payload[start * self.item_size : stop * self.item_size]
            found, crc = run_checked(writes, (block, part), 0, block.size, crc)
            largest = max(largest, found)
        return largest, crc

    def _guess_exponent(self, first_block: npt.NDArray[Any], scratch: Scratch) -> int:
        return 0

    def _exponent_for(self, peak: float) -> int:
        return 0

    def _accepts(self, peak_bits: int) -> bool:
        return peak_bits < self._infinity

    def _value_of(self, bits: int) -> float:
        return float_of(bits << (32 - 8 * self.item_size))

    def _decodes_finite(self, peak_bits: int, exponent: int) -> bool:
        return True

    def _largest(self) -> float:
        """Larger finite magnitudes would round to infinity; they are written as this one."""
        return math.inf


class Fp32(Codec):
    """IEEE 754 binary32: exact."""

    name = "fp32"
    item_size = 4
    _infinity = INFINITY_BITS
    _read, _write = Code.READ_FP32, Code.WRITE_FP32
    _looks = (Operation(Code.LOOK_32, _VALUES, _PAYLOAD),)
    _checks = (Operation(Code.CHECK_32, _VALUES, _PAYLOAD),)
    _takes = (Operation(Code.COPY_32, _PAYLOAD, _SOURCE),)


class Fp16(Codec):
    """IEEE 754 binary16, rounded to nearest even, with a power-of-two scale per chunk."""

    name = "fp16"
    item_size = 2
    _exponents = f"from {_FP16_EXPONENT_MIN} to {_FP16_EXPONENT_MAX}"
    _has_scale = True
    _infinity = 0x7C00
    _read, _write = Code.READ_FP16, Code.WRITE_FP16
    _looks = (Operation(Code.LOOK_16, _VALUES, _PAYLOAD),)
    _checks = (Operation(Code.CHECK_16, _VALUES, _PAYLOAD),)
    _takes = (Operation(Code.COPY_16, _PAYLOAD, _SOURCE),)

    @override
    def has_exponent(self, exponent: int) -> bool:
        return _FP16_EXPONENT_MIN <= exponent <= _FP16_EXPONENT_MAX

    def _guess_exponent(self, first_block: npt.NDArray[Any], scratch: Scratch) -> int:
        peak = peak_of(as_plain(first_block, scratch.values))
        return self._exponent_for(peak) if math.isfinite(peak) else 0

    def _exponent_for(self, peak: float) -> int:
        if peak == 0.0 or _FP16_KEEP_LOW <= peak < _FP16_KEEP_HIGH:
            return 0
        exponent = math.frexp(peak)[1] - _FP16_TARGET
        return min(max(exponent, _FP16_EXPONENT_MIN), _FP16_EXPONENT_MAX)

    @override
    def _value_of(self, bits: int) -> float:
        (value,) = struct.unpack("<e", bits.to_bytes(2, "little"))
        return float(value)

    def _accepts(self, peak_bits: int) -> bool:
        return _FP16_ACCEPT_LOW <= peak_bits < self._infinity

    def _decodes_finite(self, peak_bits: int, exponent: int) -> bool:
        if exponent <= _FP16_EXPONENT_SAFE:
            return True
        return math.ldexp(self._value_of(peak_bits), exponent) <= _FLOAT32_MAX

    def _largest(self) -> float:
        return _FP16_LARGEST


class Bf16(Codec):
    """bfloat16, rounded to nearest even; the largest finite value instead of an overflow."""

    name = "bf16"
    item_size = 2
    _infinity = 0x7F80
    _read, _write = Code.READ_BF16, Code.WRITE_BF16
    _looks = (Operation(Code.LOOK_16, _VALUES, _PAYLOAD),)
    _checks = (Operation(Code.CHECK_16, _VALUES, _PAYLOAD),)
    _takes = (Operation(Code.COPY_16, _PAYLOAD, _SOURCE),)

    def _largest(self) -> float:
        return _BF16_LARGEST


class BlockCodec(Codec):
    """A codec that writes blocks of elements, which have a scale each: see `arithmetic`.

    Encoded blocks have no sum and no operation of their own: they are read to float32 first.
    """

    arithmetic: ClassVar[BlockArithmetic]

    @property
    @override
    def summed(self) -> Codec:
        return CODECS["fp32"]

    @override
    def encoded_bytes(self, count: int) -> int:
        return self.arithmetic.encoded_bytes(count)

    @override
    def element_count(self, size_bytes: int) -> int:
        return self.arithmetic.element_count(size_bytes)

    @override
    def encode(
        self,
        values: npt.NDArray[Any],
        payload: Bytes,
        scratch: Scratch,
        *,
        allow_non_finite: bool = False,
        peak: float | None = None,
        first_peak: float | None = None,
        is_exact: bool = False,
        start: Callable[[int], int] | None = None,
    ) -> Written:
        plain: Float32 = values if is_plain(values) else _as_float32(values)
        found = self.arithmetic.quantize(plain, payload)
        if not math.isfinite(found):
            index = int(np.argmin(np.isfinite(plain)))
            raise NonFiniteValueError(index, float(plain[index]))
        crc = 0 if start is None else int(crc32.iscsi(payload.data, start(0)))
        return Written(0, crc, bits_of(found))

    @override
    def encode_computed(
        self, values: Computed, payload: Bytes, start: Callable[[int], int]
    ) -> Written | None:
        return None

    @override
    def decode(
        self, payload: Bytes, exponent: int, values: Float32, copies: Sequence[Bytes] = ()
    ) -> None:
        self.arithmetic.dequantize(payload, values)
        for copy in copies:
            np.copyto(copy, payload)

    @override
    def decode_checked(
        self, payload: Bytes, exponent: int, values: Float32, crc: int, *, may_change: bool
    ) -> int:
        if may_change:
            payload = payload.copy()
        self.arithmetic.dequantize(payload, values)
        return int(crc32.iscsi(payload.data, crc))

    @override
    def decode_looked(
        self, payload: Bytes, exponent: int, values: Float32, crc: int
    ) -> tuple[int, int]:
        self.arithmetic.dequantize(payload, values)
        return self.take(payload, None, crc)

    @override
    def take(self, payload: Bytes, into: Bytes | None, crc: int) -> tuple[int, int]:
        if into is not None:
            np.copyto(into, payload)
            payload = into
        peak = self.arithmetic.peak(payload)
        return bits_of(peak), int(crc32.iscsi(payload.data, crc))

    @override
    def peak(self, payload: Bytes, exponent: int) -> float:
        return self.arithmetic.peak(payload)

    @override
    def peak_of_bits(self, bits: int, exponent: int) -> float:
        return float_of(bits)

    def residual(self, values: Float32) -> Float32:
        """The loss of writing (n,) values: they, less what is read again."""
        plain, read = np.ascontiguousarray(values), np.empty(values.size, np.float32)
        payload = np.empty(self.encoded_bytes(values.size), np.uint8)
        self.arithmetic.quantize(plain, payload)
        self.arithmetic.dequantize(payload, read)
        with np.errstate(all="ignore"):
            return np.subtract(plain, read, out=read)


class BlockArithmetic(Protocol):
    """The functions of a module such as int8.py, which says what each does."""

    BLOCK_SIZE: int

    def encoded_bytes(self, count: int, /) -> int:
        """Bytes of the payload of so many elements."""

    def element_count(self, size_bytes: int, /) -> int:
        """Elements of a payload; -1 where no payload has that size."""

    def quantize(self, values: Float32, payload: Bytes, start: int = 0, /) -> float:
        """Writes values from an element on; returns the largest magnitude."""

    def dequantize(self, payload: Bytes, values: Float32, start: int = 0, /) -> None:
        """Reads values from an element on."""

    def peak(self, payload: Bytes, /) -> float:
        """The largest magnitude of the values once read."""


class Int8(BlockCodec):
    """A byte an element, and a float32 scale for each block of 4,096."""

    name = "int8"
    item_size = 1
    block_size = int8.BLOCK_SIZE
    arithmetic: ClassVar[BlockArithmetic] = int8


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Fp16(), Bf16(), Int8())}
SUMMED_CODECS: dict[str, Codec] = {
    name: codec for name, codec in CODECS.items() if codec.summed is codec
}
"""Those whose elements are written one by one, so that groups and rows have them, and sums."""


def block_codec(name: str) -> BlockCodec:
    """The codec of that name, which writes blocks."""
    codec = CODECS[name]
    assert isinstance(codec, BlockCodec)
    return codec


def _as_float32(values: npt.NDArray[Any]) -> Float32:
    """A contiguous copy; what overflows is infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32)


@functools.lru_cache(maxsize=1024)
def _reads(code: Code, to: int, payload: int, factor: float) -> Operations:
    if factor == 0.0 or 2.0**-126 <= abs(factor) < 2.0**127:
        return (Operation(code, to, payload, factor=factor),)
    # What float32 can't hold is applied in two steps.
    mantissa, exponent = math.frexp(factor)
    unscaled = Operation(code, to, payload, factor=math.ldexp(1.0, exponent))
    return (unscaled, *scale(to, mantissa))


def _finite_peak(values: npt.NDArray[Any], scratch: Scratch, *, allow_non_finite: bool) -> float:
    peak = 0.0
    for start, stop in blocks(values.size):
        block = as_plain(values[start:stop], scratch.values)
        found = peak_of(block)
        if not math.isfinite(found):
            finite = np.isfinite(block)
            if not allow_non_finite:
                index = int(np.argmin(finite))
                raise NonFiniteValueError(start + index, float(block[index]))
            found = float(np.abs(block[finite]).max(initial=0.0))
        peak = max(peak, found)
    return peak


# Values as kernels read them.


def is_plain(values: npt.NDArray[Any]) -> bool:
    """True if the kernels can read the values as they lie."""
    flags = values.flags
    return bool(values.dtype == np.float32 and flags.c_contiguous and flags.aligned)


def as_plain(block: npt.NDArray[Any], into: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A block as contiguous native float32: itself, or a view of `into`, which it is copied to."""
    if is_plain(block):
        return block
    values = into[: block.size]
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(values, block, casting="same_kind")
    return values


def peak_of(values: Float32) -> float:
    """The largest magnitude of (n,) contiguous float32, 0 of none; infinite or NaN if one is."""
    bits = run(_LOOKS, (values,), 0, values.size)
    return float_of(bits)


def bits_of(value: float) -> int:
    """The bits of a float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)


def float_of(bits: int) -> float:
    """The float32 that has these bits."""
    (value,) = struct.unpack("<f", bits.to_bytes(4, "little"))
    return float(value)
