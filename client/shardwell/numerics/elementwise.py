"""Elementwise arithmetic on float32: a few operations after each other, block by block. Pure.

A computation is written once, as operations on places; native code performs it where that could be
built (see native/), and keeps a block in the core's first cache from one operation to the next;
NumPy with fastcrc does elsewhere. Both give the same bits, NaN's own aside:
every product and every sum is rounded by itself, to nearest, so that a result depends neither on
the machine nor on how an array is cut.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from fastcrc import crc32

from shardwell.numerics import native
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT, thread_scratch
from shardwell.numerics.weighted_mean import divide

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = tuple[Array | None, ...]
"""The arrays of a run, by place: (n,) float32, or (n * item size,) uint8 of payloads, contiguous.
None, and what is beyond the end: a temporary, which has no meaning after a run."""

_PACKED_OPERATION = struct.Struct("<4Bfd")
INFINITY_BITS = 0x7F800000
"""The smallest magnitude of float32 that is not finite."""
_LARGEST = 2**31 - 1
_NEARLY_INFINITE = 0x7F7F8000
"""Finite magnitudes from here on are beyond the largest of bf16."""


def blocks(count: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of the blocks of elements [start, count)."""
    for first in range(start, count, BLOCK_ELEMENT_COUNT):
        yield first, min(first + BLOCK_ELEMENT_COUNT, count)


class Code(enum.IntEnum):
    """The effect of an operation on place `to`; as in native/kernels.h."""

    READ_FP32 = 0
    """Is `factor` times the values of the payload `source`."""
    READ_FP16 = 1
    """Is `factor` times the values of the fp16 payload `source`, in blocks of `divisor` elements,
    which have an exponent each: behind the values; or where `other` is not 0, there."""
    READ_BF16 = 2
    WRITE_FP32 = 3
    """A payload, is `factor` times `source`."""
    WRITE_FP16 = 4
    """A payload of `source`, in whole blocks of `divisor` elements; looks at `source`."""
    WRITE_BF16 = 5
    """A payload of `source`, which it looks at; the largest finite value instead of one that
    rounding makes infinite."""
    LOOK_32 = 6
    """Changes nothing; looks at `source`, which is float32 or a payload of it."""
    LOOK_16 = 7
    """Changes nothing; looks at `source`, a payload of bf16."""
    COPY = 8
    FILL = 9
    SCALE = 10
    ADD_SCALED = 11
    """Grows by `factor` times `source`; by nothing where that is 0, whatever `source` is."""
    ADD_CONSTANT = 12
    MULTIPLY = 13
    DIVIDE = 14
    SQUARE_ROOT = 15
    MEAN = 16
    """Is divided by `divisor`; a quotient that rounding takes beyond float32 is its largest."""
    CLIP = 17
    """Is brought to [-factor, factor]; NaN stays."""
    COPY_32 = 18
    """Is `source`, both payloads of four bytes an element."""
    COPY_16 = 19
    """Is `source`, both payloads of two bytes an element."""
    CHECK_32 = 20
    """Changes nothing; the run's CRC32C goes on over `source`, of four bytes an element."""
    CHECK_16 = 21
    """Changes nothing; the CRC32C goes on over `source`, of two bytes an element."""
    LOOK_FP16 = 22
    """Changes nothing; looks at the values of `source`, in blocks of `divisor`, as float32."""
    COPY_FP16 = 23
    """Is `source`, both payloads in blocks of `divisor`."""
    CHECK_FP16 = 24
    """CHECK_16, and where a run ends with the payload, over the exponents behind the values."""


_CHECKS = (Code.CHECK_32, Code.CHECK_16, Code.CHECK_FP16)
EXPONENT_MIN, _EXPONENT_MAX = -126, 113
"""The exponents that a block of fp16 may have."""
_TOP = 15
"""A block's largest magnitude is written as 2^14 or more, and less than 2^15."""


class Operation(NamedTuple):
    """One operation on places, which are numbers below 9. See Code."""

    code: Code
    to: int
    source: int = 0
    other: int = 0
    factor: float = 1.0
    """Rounded to float32."""
    divisor: float = 1.0
    """The divisor of MEAN; of fp16, the elements of a block."""


Operations: TypeAlias = tuple[Operation, ...]
_COPIES_PAIRS: Operations = (Operation(Code.COPY_16, 0, 1),)


def scale(to: int, factor: float) -> Operations:
    """The operations that multiply a place with `factor`: none where that is 1."""
    return () if factor == 1.0 else (Operation(Code.SCALE, to, factor=factor or 0.0),)


def add_scaled(to: int, source: int, factor: float = 1.0) -> Operations:
    """The operations that add `factor` times `source` to a place: none where it is 0 as float32."""
    if ctypes.c_float(factor).value == 0.0:
        return ()
    return (Operation(Code.ADD_SCALED, to, source, factor=factor),)


def run(operations: Operations, arrays: Arrays, start: int, stop: int) -> int:
    """Runs operations on elements [start, stop) of all arrays.

    Returns the largest magnitude that looks have seen, as bits; NaN is larger than infinity.
    """
    return run_checked(operations, arrays, start, stop, 0)[0]


def copy_bytes(source: Array, to: Array) -> None:
    """Copies (n,) uint8, as quickly as operations do: see dispatch.c of what is much."""
    if source.size % 2:
        np.copyto(to, source)
    else:
        run(_COPIES_PAIRS, (to, source), 0, source.size // 2)


def run_checked(
    operations: Operations, arrays: Arrays, start: int, stop: int, crc: int
) -> tuple[int, int]:
    """Does what `run` does, and returns besides `crc` gone on over what operations check."""
    if not operations or start == stop:
        return 0, crc
    library = native.LIBRARY
    if library is None or (not library.checks and any(each.code in _CHECKS for each in operations)):
        return _run_by_numpy(operations, arrays, start, stop, crc)
    return _run_natively(library, operations, arrays, start, stop, crc)


def _run_natively(
    library: native.Library,
    operations: Operations,
    arrays: Arrays,
    start: int,
    stop: int,
    crc: int = 0,
) -> tuple[int, int]:
    found = library.run(packed(operations), len(operations), arrays, start, stop, crc)
    if found < 0:
        raise ValueError(f"operations that do not fit their arrays: {operations}")
    return found & _LARGEST, found >> 31


@functools.lru_cache(maxsize=1024)
def packed(operations: Operations) -> bytes:
    """Returns the operations in native code's form."""
    return b"".join(map(_packed_one, operations))


@functools.lru_cache(maxsize=1024)
def _packed_one(operation: Operation) -> bytes:
    code, to, source, other, factor, divisor = operation
    return _PACKED_OPERATION.pack(code, to, source, other, ctypes.c_float(factor).value, divisor)


# Payloads of fp16: values, and behind them an exponent for each block.


def half_bytes(count: int, block_size: int) -> int:
    """The bytes of a payload of fp16 of so many elements."""
    return 2 * count + -(-count // block_size)


def half_count(size_bytes: int, block_size: int) -> int:
    """The elements of a payload of fp16; -1 where none has that size."""
    count = (size_bytes + -size_bytes // (2 * block_size + 1)) // 2
    return count if half_bytes(count, block_size) == size_bytes else -1


# Without native code.

_PRODUCT, _ROUNDED = -1, -2


class _Halves(NamedTuple):
    bits: Array
    exponents: Array
    """(n,) int8, of their blocks."""
    begin: int
    block_size: int

    def times_powers(self, values: Array) -> None:
        powers = np.repeat(_powers_of_two(self.exponents), self.block_size)
        values *= powers[self.begin : self.begin + values.size]

    def peaks(self, bits: Array) -> Array:
        starts = np.arange(0, self.begin + bits.size, self.block_size) - self.begin
        found: Array = np.maximum.reduceat(bits, np.maximum(starts, 0))
        return found


class _Part(NamedTuple):
    arrays: Sequence[Array | None]
    first: int
    stop: int

    def block(self, place: int, dtype: Any = np.float32) -> Array:
        array = self.arrays[place] if place < len(self.arrays) else None
        if array is None:
            temporary: Array = thread_scratch().temporary(place).view(dtype)
            return temporary[: self.stop - self.first]
        values: Array = array.view(dtype)[self.first : self.stop]
        return values

    def halves(self, place: int, block_size: float, exponents_place: int = 0) -> _Halves:
        payload, size = self.arrays[place], int(block_size)
        assert payload is not None
        if exponents_place:
            values, exponents = payload[: 2 * self.stop], self.arrays[exponents_place]
        else:
            count = half_count(payload.size, size)
            values, exponents = payload[: 2 * count], payload[2 * count :]
        assert exponents is not None
        return _Halves(
            values.view(np.uint16)[self.first : self.stop],
            exponents.view(np.int8)[self.first // size : -(-self.stop // size)],
            self.first % size,
            size,
        )


def _run_by_numpy(
    operations: Operations, arrays: Arrays, start: int, stop: int, crc: int = 0
) -> tuple[int, int]:
    largest, unit, places = 0, 1, list(arrays)
    for each in operations:
        if each.code in (Code.WRITE_FP16, Code.COPY_FP16):
            unit = int(each.divisor)
        if each.code is Code.COPY_FP16 and places[each.to] is None:
            places[each.to] = np.empty_like(places[each.source])
    step = max(BLOCK_ELEMENT_COUNT // unit, 1) * unit
    with np.errstate(all="ignore"):
        for first in range(start, stop, step):
            part = _Part(places, first, min(first + step, stop))
            for operation in operations:
                if operation.code in _CHECKS:
                    if operation.code is Code.CHECK_FP16:
                        checked = part.halves(operation.source, operation.divisor).bits
                    else:
                        kind = np.float32 if operation.code is Code.CHECK_32 else np.uint16
                        checked = part.block(operation.source, kind)
                    crc = crc32.iscsi(checked.view(np.uint8).data, crc)
                    continue
                found = _NUMPY[operation.code](operation, part)
                if isinstance(found, int):
                    largest = max(largest, found)
    for each in operations:  # exponents come behind all values
        payload = places[each.source] if each.code is Code.CHECK_FP16 else None
        if payload is not None and half_count(payload.size, int(each.divisor)) == stop:
            crc = crc32.iscsi(payload[2 * stop :].data, crc)
    return largest, crc


def _powers_of_two(exponents: Array) -> Array:
    powers: Array = np.ldexp(np.float32(1), exponents.astype(np.int32))
    return powers


def _product(values: Array, factor: float) -> Array:
    if factor == 1.0:
        return values
    out = thread_scratch().temporary(_PRODUCT)[: values.size]
    return np.multiply(values, np.float32(factor), out=out)


def _scale(values: Array, factor: float) -> None:
    if factor != 1.0:
        np.multiply(values, np.float32(factor), out=values)


def _read_fp32(each: Operation, part: _Part) -> None:
    values = part.block(each.to)
    np.copyto(values, part.block(each.source, np.float32))
    _scale(values, each.factor)


def _read_fp16(each: Operation, part: _Part) -> None:
    values, halves = part.block(each.to), part.halves(each.source, each.divisor, each.other)
    np.copyto(values, halves.bits.view(np.float16))
    halves.times_powers(values)
    _scale(values, each.factor)


def _read_bf16(each: Operation, part: _Part) -> None:
    values = part.block(each.to)
    bits = values.view(np.uint32)  # a bfloat16 is the upper half of a float32
    np.copyto(bits, part.block(each.source, np.uint16))
    np.left_shift(bits, 16, out=bits)
    _scale(values, each.factor)


def _write_fp32(each: Operation, part: _Part) -> None:
    np.copyto(part.block(each.to, np.float32), _product(part.block(each.source), each.factor))


def _write_fp16(each: Operation, part: _Part) -> int:
    source, halves = part.block(each.source), part.halves(each.to, each.divisor)
    magnitudes = thread_scratch().temporary(_ROUNDED).view(np.uint32)[: source.size]
    np.bitwise_and(source.view(np.uint32), _LARGEST, out=magnitudes)
    peaks = halves.peaks(magnitudes)
    largest = int(peaks.max())
    if largest >= INFINITY_BITS:  # the exponent is that of what is finite
        magnitudes[magnitudes >= INFINITY_BITS] = 0
        peaks = halves.peaks(magnitudes)
    exponents = np.clip((peaks >> 23).astype(np.int32) - 126 - _TOP, EXPONENT_MIN, _EXPONENT_MAX)
    np.copyto(halves.exponents, np.where(peaks == 0, 0, exponents), casting="unsafe")
    values = thread_scratch().temporary(_PRODUCT)[: source.size]
    np.copyto(values, source)
    halves._replace(exponents=-halves.exponents).times_powers(values)
    np.copyto(halves.bits.view(np.float16), values)
    if largest > INFINITY_BITS:  # processors make a NaN quiet and keep its upper bits
        is_nan = np.isnan(values)
        found = values.view(np.uint32)[is_nan]
        halves.bits[is_nan] = found >> 16 & 0x8000 | 0x7E00 | found >> 13 & 0x1FF
    if (exponents == _EXPONENT_MAX).any():  # 2^128 is beyond float32: the largest below it
        is_most = np.repeat(exponents == _EXPONENT_MAX, halves.block_size)[: source.size]
        halves.bits[is_most & (halves.bits & 0x7FFF == 0x7800)] -= 1
    return largest


def _look_fp16(each: Operation, part: _Part) -> int:
    halves = part.halves(each.source, each.divisor)
    peaks = halves.peaks(halves.bits & 0x7FFF).view(np.float16).astype(np.float32)
    return _magnitude((peaks * _powers_of_two(halves.exponents)).view(np.uint32))


def _copy_fp16(each: Operation, part: _Part) -> None:
    to, source = (part.halves(place, each.divisor) for place in (each.to, each.source))
    np.copyto(to.bits, source.bits)
    np.copyto(to.exponents, source.exponents)


def _write_bf16(each: Operation, part: _Part) -> int:
    values = part.block(each.source)
    bits, rounded = values.view(np.uint32), thread_scratch().temporary(_ROUNDED).view(np.uint32)
    rounded = rounded[: bits.size]
    # To nearest, to even between two: half of the last place, less one where that is even.
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    np.right_shift(rounded, 16, out=rounded)
    largest = _magnitude(bits)
    if largest >= _NEARLY_INFINITE:  # the largest below infinity
        magnitudes = bits & _LARGEST
        rounded -= (magnitudes >= _NEARLY_INFINITE) & (magnitudes < INFINITY_BITS)
    if largest > INFINITY_BITS:  # rounding would take NaN to infinity, or zero
        is_nan = np.isnan(values)
        rounded[is_nan] = bits[is_nan] >> 16 | 0x40
    np.copyto(part.block(each.to, np.uint16), rounded, casting="same_kind")
    return largest


def _add_scaled(each: Operation, part: _Part) -> None:
    to, factor = part.block(each.to), ctypes.c_float(each.factor).value
    if factor == 0.0:
        return
    to += _product(part.block(each.source), factor)


def _mean(each: Operation, part: _Part) -> None:
    values = part.block(each.to)
    total = thread_scratch().temporary(_PRODUCT)[: values.size]
    np.copyto(total, values)
    divide(total, each.divisor, values)


def _copy_payload(each: Operation, part: _Part, *, dtype: Any) -> None:
    np.copyto(part.block(each.to, dtype), part.block(each.source, dtype))


def _clip(each: Operation, part: _Part) -> None:
    values, bound = part.block(each.to), np.float32(each.factor)
    np.clip(values, -bound, bound, out=values)


def _magnitude(bits: Array) -> int:
    """Returns the largest without signs: two maxima, no temporary."""
    sign = 1 << (8 * bits.itemsize - 1)
    unsigned = int(np.maximum.reduce(bits, initial=0))
    if unsigned < sign:
        return unsigned
    signed = int(np.maximum.reduce(bits.view(f"i{bits.itemsize}")))
    return max(unsigned - sign, signed)


_NUMPY: dict[Code, Callable[[Operation, _Part], Any]] = {
    Code.READ_FP32: _read_fp32,
    Code.READ_FP16: _read_fp16,
    Code.READ_BF16: _read_bf16,
    Code.WRITE_FP32: _write_fp32,
    Code.WRITE_FP16: _write_fp16,
    Code.WRITE_BF16: _write_bf16,
    Code.LOOK_32: lambda each, part: _magnitude(part.block(each.source, np.uint32)),
    Code.LOOK_FP16: _look_fp16,
    Code.COPY_FP16: _copy_fp16,
    Code.LOOK_16: lambda each, part: _magnitude(part.block(each.source, np.uint16)),
    Code.COPY: lambda each, part: np.copyto(part.block(each.to), part.block(each.source)),
    Code.FILL: lambda each, part: part.block(each.to).fill(each.factor),
    Code.SCALE: lambda each, part: _scale(part.block(each.to), each.factor),
    Code.ADD_SCALED: _add_scaled,
    Code.ADD_CONSTANT: lambda each, part: np.add(
        part.block(each.to), np.float32(each.factor), out=part.block(each.to)
    ),
    Code.MULTIPLY: lambda each, part: np.multiply(
        part.block(each.source), part.block(each.other), out=part.block(each.to)
    ),
    Code.DIVIDE: lambda each, part: np.divide(
        part.block(each.source), part.block(each.other), out=part.block(each.to)
    ),
    Code.SQUARE_ROOT: lambda each, part: np.sqrt(part.block(each.source), out=part.block(each.to)),
    Code.MEAN: _mean,
    Code.CLIP: _clip,
    Code.COPY_32: partial(_copy_payload, dtype=np.uint32),
    Code.COPY_16: partial(_copy_payload, dtype=np.uint16),
}
