"""The codecs of values: float32 to fp32, fp16, bf16 or int8 and back, at memory speed.

Pure arithmetic on arrays; lengths are the caller's to check. What it costs is passes over memory,
each of which `elementwise` makes.

Bounds for finite values (x: the value, peak: the largest magnitude of its block):
    fp32  exact
    fp16  |error| <= 2^-11 |x|, or 2^-39 peak where that is more; 2^-150 at the most near 0
    bf16  |error| <= 2^-8 |x|, or 2^-134 where that is more
    int8  |error| <= peak / 254 * (1 + 2^-15), or 2^-100 where that is more

A payload of n elements of fp16 is n values, little-endian, and behind them a signed byte for each
block: the exponent of the power of two that its values were divided by, so that the largest of them
is written as 2^14 or more, and less than 2^15. It depends on the block's values alone. Blocks are
counted from the payload's first element, and a parameter's slices and chunks begin with one: the
bits do not depend on how it is cut. In a payload of rows a row is a block.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from fastcrc import crc32
from typing_extensions import override

from shardwell.numerics import int8
from shardwell.numerics.elementwise import (
    INFINITY_BITS,
    Arrays,
    Code,
    Operation,
    Operations,
    add_scaled,
    copy_bytes,
    half_bytes,
    half_count,
    run,
    run_checked,
    scale,
)

Float32: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_VALUES, _PAYLOAD, _TOTAL = range(3)
"""Places of the arrays of a run."""
_COPY_COUNT_MAX = 5
"""Copies of a payload that one run has places for, besides its own."""
_SOURCE = _TOTAL
_LOOK = Operation(Code.LOOK_32, _PAYLOAD, _VALUES)
CANONICAL_NAN = np.uint32(0x7FC00000).view(np.float32)
"""Every NaN that reaches a program: which bits arithmetic leaves in one depends on the order of
operands that a compiler chose."""
_LOOK_ELEMENT_COUNT = 256 * 1024
"""1 MiB of float32: fetched from memory once, read twice."""
GROUP_BLOCK_SIZE = 256
"""Elements of a block of fp16 of what is no parameter's and no table's."""


class NonFiniteValueError(ArithmeticError):
    """A value that is not finite, and not allowed; `index` is the first such element's."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"element {index} is {value}")
        self.index = index
        self.value = value


class Computed(NamedTuple):
    """The values that are computed in the pass that writes them, and so need not lie anywhere."""

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
    _infinity: ClassVar[int] = INFINITY_BITS
    """Bits of infinity: the smallest magnitude that is not finite."""
    _writes: Operations
    _read: Operation
    _looks: Operations
    _checks: Operations
    _copy: Operation

    def encoded_bytes(self, count: int) -> int:
        """The bytes of the payload of so many elements."""
        return count * self.item_size

    def in_blocks_of(self, block_size: int) -> Codec:
        """The codec for blocks of so many elements, where the number is not the codec's own."""
        return self

    @property
    def summed(self) -> Codec:
        """The codec in which payloads are summed: itself, or what they are read to before."""
        return self

    def element_count(self, size_bytes: int) -> int:
        """The elements of a payload; -1 where no payload has that size."""
        count, rest = divmod(size_bytes, self.item_size)
        return -1 if rest else count

    def encode(
        self,
        values: npt.NDArray[Any] | Computed,
        payload: Bytes,
        *,
        allow_non_finite: bool = False,
        crc: int | None = None,
    ) -> int:
        """Writes `values` into `payload`, and returns `crc` gone on over it (None: 0).

        `values` are (n,) float32 (fastest), float64 or float16, any stride; or what computes them.
        `payload` is (encoded_bytes(n),) uint8, aligned to 4; of no use after NonFiniteValueError.
        """
        operations = self._writes if crc is None else self._writes + self._checks
        if isinstance(values, Computed):
            arrays: Arrays = (None, payload, *values.arrays)
            operations, count = values.operations + operations, values.memory.size
        else:
            plain = values if is_plain(values) else _as_float32(values)
            arrays, count = (plain, payload), values.size
        largest, found = run_checked(operations, arrays, 0, count, crc or 0)
        if largest >= INFINITY_BITS and not allow_non_finite:
            given = values.values() if isinstance(values, Computed) else plain
            index = int(np.argmin(np.isfinite(given)))
            raise NonFiniteValueError(index, float(given[index]))
        return found

    def decode(self, payload: Bytes, values: Float32, copies: Sequence[Bytes] = ()) -> None:
        """Reads a payload into `values`, in one pass with copies of it; all are overwritten."""
        operations = self.reads(_VALUES, _PAYLOAD, 1.0)
        for place in range(_TOTAL, _TOTAL + len(copies[:_COPY_COUNT_MAX])):
            operations += self.copies(place, _PAYLOAD)
        run(operations, (values, payload, *copies[:_COPY_COUNT_MAX]), 0, values.size)
        for copy in copies[_COPY_COUNT_MAX:]:
            np.copyto(copy, payload)

    def decode_checked(self, payload: Bytes, values: Float32, crc: int, *, may_change: bool) -> int:
        """Decodes, and in the same pass goes on with `crc` over the payload, which it returns.

        If the CRC turns out to be another, `values` are of no use. With `may_change`, another
        process may write to the payload: the decoded bytes are the checked ones nevertheless.
        """
        operations = self._checks + self.reads(_VALUES, _PAYLOAD, 1.0)
        arrays: Arrays = (values, payload)
        if may_change:
            operations = self.copies(_PAYLOAD, _SOURCE) + operations
            arrays = (values, None, payload)
        return run_checked(operations, arrays, 0, values.size, crc)[1]

    def decode_looked(self, payload: Bytes, values: Float32, crc: int) -> tuple[int, int]:
        """Decodes a payload that does not change, and returns what `take` does, in one pass."""
        operations = self._checks + self._looks + self.reads(_VALUES, _PAYLOAD, 1.0)
        return run_checked(operations, (values, payload), 0, values.size, crc)

    def take(self, payload: Bytes, into: Bytes | None, crc: int) -> tuple[int, int]:
        """Checks a payload in one pass, copying it to `into` before if it may change.

        Returns the largest magnitude, as bits, for `peak_of_bits`, and `crc` gone on over it.
        """
        operations = self._checks + self._looks
        arrays: Arrays = (None, payload)
        if into is not None:
            operations = self.copies(_PAYLOAD, _SOURCE) + operations
            arrays = (None, into, payload)
        return run_checked(operations, arrays, 0, self.element_count(payload.size), crc)

    def reads(self, to: int, payload: int, factor: float) -> Operations:
        """The operations that read a payload, times `factor`, to a place: see elementwise.py."""
        return _reads(self._read, to, payload, factor or 0.0)

    def keep(self, payload: Bytes, memory: Float32) -> None:
        """Stores a payload of n elements in (n,) float32, its values at the end: see `kept`."""
        copy_bytes(payload, memory.view(np.uint8)[-payload.size :])

    def kept(self, memory: Float32) -> tuple[Bytes, Bytes | None]:
        """The values of a payload that is kept, where they lie, and a copy of their exponents.

        `reads_kept` reads them. So a sum may be written over them, block by block from the start.
        """
        return memory.view(np.uint8)[(memory.itemsize - self.item_size) * memory.size :], None

    def reads_kept(self, to: int, values: int, exponents: int) -> Operations:
        """The operations that read what `kept` returned, from two places: see elementwise.py."""
        return (self._read._replace(to=to, source=values),)

    def upgraded(self, payload: Bytes, exponent: int, count: int) -> Bytes:
        """A journal's payload of n elements; an earlier version's has one exponent for all."""
        return payload

    def copies(self, to: int, payload: int) -> Operations:
        """The operations that copy a payload to another place: see elementwise.py."""
        return (self._copy._replace(to=to, source=payload),)

    def decode_add(
        self, payload: Bytes, factor: float, total: Float32, total_factor: float, out: Float32
    ) -> None:
        """Sets out = factor * values + total_factor * total, in one pass over memory.

        `total` and `out` may be one array. A `total_factor` of 0 leaves `total` out.
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

    def peak(self, payload: Bytes) -> float:
        """The largest magnitude of the values once decoded; infinity if one is not finite."""
        count = self.element_count(payload.size)
        return self.peak_of_bits(run(self._looks, (None, payload), 0, count))

    def peak_of_bits(self, bits: int) -> float:
        """The peak from the largest magnitude that a look at a payload saw, as bits."""
        return math.inf if bits >= self._infinity else float_of(bits)

    def first_non_finite(self, payload: Bytes) -> int | None:
        """The index of the first value that is not finite once decoded; None if all are finite."""
        if self.peak(payload) < math.inf:
            return None
        values = np.empty(self.element_count(payload.size), np.float32)
        self.decode(payload, values)
        return int(np.argmin(np.isfinite(values)))


class Fp32(Codec):
    """The format IEEE 754 binary32: exact."""

    name = "fp32"
    item_size = 4
    _writes = (_LOOK, Operation(Code.WRITE_FP32, _PAYLOAD, _VALUES))
    _read = Operation(Code.READ_FP32, _VALUES, _PAYLOAD)
    _looks = (Operation(Code.LOOK_32, _VALUES, _PAYLOAD),)
    _checks = (Operation(Code.CHECK_32, _VALUES, _PAYLOAD),)
    _copy = Operation(Code.COPY_32, _PAYLOAD)


class Fp16(Codec):
    """The format IEEE 754 binary16, rounded to nearest even, with a power of two per block."""

    name = "fp16"
    item_size = 2

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        size = float(block_size)
        self._writes = (Operation(Code.WRITE_FP16, _PAYLOAD, _VALUES, divisor=size),)
        self._read = Operation(Code.READ_FP16, _VALUES, _PAYLOAD, divisor=size)
        self._looks = (Operation(Code.LOOK_FP16, _VALUES, _PAYLOAD, divisor=size),)
        self._checks = (Operation(Code.CHECK_FP16, _VALUES, _PAYLOAD, divisor=size),)
        self._copy = Operation(Code.COPY_FP16, _PAYLOAD, divisor=size)

    @override
    def in_blocks_of(self, block_size: int) -> Codec:
        return _fp16(block_size)

    @override
    def encoded_bytes(self, count: int) -> int:
        return half_bytes(count, self._block_size)

    @override
    def element_count(self, size_bytes: int) -> int:
        return half_count(size_bytes, self._block_size)

    @override
    def keep(self, payload: Bytes, memory: Float32) -> None:
        size, into = 2 * memory.size, memory.view(np.uint8)
        np.copyto(into[: payload.size - size], payload[size:])
        copy_bytes(payload[:size], into[-size:])

    @override
    def kept(self, memory: Float32) -> tuple[Bytes, Bytes | None]:
        values, _ = super().kept(memory)
        return values, memory.view(np.uint8)[: -(-memory.size // self._block_size)].copy()

    @override
    def reads_kept(self, to: int, values: int, exponents: int) -> Operations:
        return (self._read._replace(to=to, source=values, other=exponents),)

    @override
    def upgraded(self, payload: Bytes, exponent: int, count: int) -> Bytes:
        if payload.size != 2 * count:
            return payload
        exponents = np.full(self.encoded_bytes(count) - payload.size, exponent, np.int8)
        return np.concatenate([payload, exponents.view(np.uint8)])


_fp16 = functools.lru_cache(maxsize=None)(Fp16)


class Bf16(Codec):
    """The format bfloat16, rounded to nearest even; the largest finite value for an overflow."""

    name = "bf16"
    item_size = 2
    _infinity = 0x7F80
    _writes = (Operation(Code.WRITE_BF16, _PAYLOAD, _VALUES),)
    _read = Operation(Code.READ_BF16, _VALUES, _PAYLOAD)
    _looks = (Operation(Code.LOOK_16, _VALUES, _PAYLOAD),)
    _checks = (Operation(Code.CHECK_16, _VALUES, _PAYLOAD),)
    _copy = Operation(Code.COPY_16, _PAYLOAD)

    @override
    def peak_of_bits(self, bits: int) -> float:
        return math.inf if bits >= self._infinity else float_of(bits << 16)


class BlockCodec(Codec):
    """A codec of blocks of elements with a scale each; they are read to float32 before a sum."""

    arithmetic = int8
    """The module of the functions on payloads."""

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
        values: npt.NDArray[Any] | Computed,
        payload: Bytes,
        *,
        allow_non_finite: bool = False,
        crc: int | None = None,
    ) -> int:
        given = values.values() if isinstance(values, Computed) else values
        plain: Float32 = given if is_plain(given) else _as_float32(given)
        found = self.arithmetic.quantize(plain, payload)
        if not math.isfinite(found):
            index = int(np.argmin(np.isfinite(plain)))
            raise NonFiniteValueError(index, float(plain[index]))
        return 0 if crc is None else int(crc32.iscsi(payload.data, crc))

    @override
    def decode(self, payload: Bytes, values: Float32, copies: Sequence[Bytes] = ()) -> None:
        self.arithmetic.dequantize(payload, values)
        for copy in copies:
            np.copyto(copy, payload)

    @override
    def decode_checked(self, payload: Bytes, values: Float32, crc: int, *, may_change: bool) -> int:
        if may_change:
            payload = payload.copy()
        self.arithmetic.dequantize(payload, values)
        return int(crc32.iscsi(payload.data, crc))

    @override
    def decode_looked(self, payload: Bytes, values: Float32, crc: int) -> tuple[int, int]:
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
    def peak(self, payload: Bytes) -> float:
        return self.arithmetic.peak(payload)

    def residual(self, values: Float32) -> Float32:
        """The loss of writing (n,) values: they, less what is read again."""
        plain, read = np.ascontiguousarray(values), np.empty(values.size, np.float32)
        payload = np.empty(self.encoded_bytes(values.size), np.uint8)
        self.arithmetic.quantize(plain, payload)
        self.arithmetic.dequantize(payload, read)
        with np.errstate(all="ignore"):
            return np.subtract(plain, read, out=read)


class Int8(BlockCodec):
    """A byte an element, and a float32 scale for each block of 4,096."""

    name = "int8"
    item_size = 1


CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Fp32(), _fp16(GROUP_BLOCK_SIZE), Bf16(), Int8())
}
SUMMED_CODECS: dict[str, Codec] = {
    name: codec for name, codec in CODECS.items() if codec.summed is codec
}
"""The codecs whose elements are written one by one, so that groups and rows have them, and sums."""


def block_codec(name: str) -> BlockCodec:
    """The codec of that name, which writes blocks."""
    codec = CODECS[name]
    assert isinstance(codec, BlockCodec)
    return codec


def _as_float32(values: npt.NDArray[Any]) -> Float32:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32)


@functools.lru_cache(maxsize=1024)
def _reads(reading: Operation, to: int, payload: int, factor: float) -> Operations:
    if factor == 0.0 or 2.0**-126 <= abs(factor) < 2.0**127:
        return (reading._replace(to=to, source=payload, factor=factor),)
    # What float32 can't hold is applied in two steps.
    mantissa, exponent = math.frexp(factor)
    unscaled = reading._replace(to=to, source=payload, factor=math.ldexp(1.0, exponent))
    return (unscaled, *scale(to, mantissa))


# Values as kernels read them.


def is_plain(values: npt.NDArray[Any]) -> bool:
    """True if the kernels can read the values as they lie."""
    flags = values.flags
    return bool(values.dtype == np.float32 and flags.c_contiguous and flags.aligned)


def peak_of(values: Float32) -> float:
    """The largest magnitude of (n,) contiguous float32, 0 of none; infinite or NaN if one is."""
    return float_of(run((_LOOK,), (values,), 0, values.size))


def bits_of(value: float) -> int:
    """The bits of a float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)


def float_of(bits: int) -> float:
    """The float32 that has these bits."""
    (value,) = struct.unpack("<f", bits.to_bytes(4, "little"))
    return float(value)


def first_non_finite(values: npt.NDArray[Any]) -> int | None:
    """The index of the first of (n,) values that is no finite float32; None if all are."""
    if is_plain(values) and math.isfinite(peak_of(values)):
        return None
    for first in range(0, values.size, _LOOK_ELEMENT_COUNT):
        block = values[first : first + _LOOK_ELEMENT_COUNT]
        if block.dtype.itemsize > 4:
            with np.errstate(over="ignore"):
                block = block.astype(np.float32)
        # Two reductions without a temporary; NaN and infinity survive one of them.
        low, high = float(np.minimum.reduce(block)), float(np.maximum.reduce(block))
        if not (math.isfinite(low) and math.isfinite(high)):
            return first + int(np.argmin(np.isfinite(block)))
    return None


def canonical_nans(values: Float32) -> bool:
    """Gives every NaN of an array the bits of CANONICAL_NAN, in place; whether there was one."""
    is_nan = np.isnan(values)
    found = bool(is_nan.any())
    if found:
        values[is_nan] = CANONICAL_NAN
    return found
