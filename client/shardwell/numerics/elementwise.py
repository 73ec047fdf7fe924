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
from collections.abc import Callable, Iterator
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
"""Of a run, by place: (n,) float32, or (n * item size,) uint8 of payloads, contiguous and aligned.
None, and what is beyond the end: a temporary, which has no meaning after a run."""

_PACKED_OPERATION = struct.Struct("<4Bfd")
INFINITY_BITS = 0x7F800000
"""Of float32: the smallest magnitude that is not finite."""
_LARGEST = 2**31 - 1


def blocks(count: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """(start, stop) of the blocks of elements [start, count)."""
    for first in range(start, count, BLOCK_ELEMENT_COUNT):
        yield first, min(first + BLOCK_ELEMENT_COUNT, count)


class Code(enum.IntEnum):
    """The effect of an operation on place `to`; as in native/kernels.h."""

    READ_FP32 = 0
    """Is `factor` times the values of the payload `source`."""
    READ_FP16 = 1
    READ_BF16 = 2
    WRITE_FP32 = 3
    """A payload, is `factor` times `source`."""
    WRITE_FP16 = 4
    WRITE_BF16 = 5
    LOOK_32 = 6
    """Changes nothing; looks at `source`, which is float32 or a payload of it."""
    LOOK_16 = 7
    """Changes nothing; looks at `source`, a payload of fp16 or bf16."""
    COPY = 8
    """Is `source`."""
    FILL = 9
    """Is `factor`."""
    SCALE = 10
    """Is multiplied with `factor`."""
    ADD_SCALED = 11
    """Grows by `factor` times `source`; by nothing where that is 0, whatever `source` is."""
    ADD_CONSTANT = 12
    """Grows by `factor`."""
    MULTIPLY = 13
    """Is `source` times `other`."""
    DIVIDE = 14
    """Is `source` by `other`."""
    SQUARE_ROOT = 15
    """Is the root of `source`."""
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


_CHECKS = (Code.CHECK_32, Code.CHECK_16)


class Operation(NamedTuple):
    """One operation on places, which are numbers below 8. See Code."""

    code: Code
    to: int
    source: int = 0
    other: int = 0
    factor: float = 1.0
    """Rounded to float32."""
    divisor: float = 1.0


Operations: TypeAlias = tuple[Operation, ...]
_COPIES_PAIRS: Operations = (Operation(Code.COPY_16, 0, 1),)


def scale(to: int, factor: float) -> Operations:
    """The operations that multiply a place with `factor`: none where that is 1."""
    return () if factor == 1.0 else (Operation(Code.SCALE, to, factor=factor or 0.0),)


def add_scaled(to: int, source: int, factor: float = 1.0) -> Operations:
    """The operations that add `factor` times `source` to a place: none where it is 0 as float32."""
    if _float32(factor) == 0.0:
        return ()
    return (Operation(Code.ADD_SCALED, to, source, factor=factor),)


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def run(operations: Operations, arrays: Arrays, start: int, stop: int) -> int:
    """Runs operations on elements [start, stop) of all arrays; returns what looks have seen.

    That is the largest magnitude, as bits of what they look at; NaN is larger than infinity.
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
    """As native code takes them."""
    return b"".join(map(_packed_one, operations))


@functools.lru_cache(maxsize=1024)
def _packed_one(operation: Operation) -> bytes:
    code, to, source, other, factor, divisor = operation
    return _PACKED_OPERATION.pack(code, to, source, other, _float32(factor), divisor)


# Without native code.


_PRODUCT, _ROUNDED = -1, -2


def _at(arrays: Arrays, place: int) -> Array | None:
    return arrays[place] if place < len(arrays) else None


def _run_by_numpy(
    operations: Operations, arrays: Arrays, start: int, stop: int, crc: int = 0
) -> tuple[int, int]:
    largest = 0
    with np.errstate(all="ignore"):
        for first, end in blocks(stop, start):

            def block(place: int, first: int = first, end: int = end) -> Array:
                array = _at(arrays, place)
                if array is None:
                    return thread_scratch().temporary(place)[: end - first]
                return array[first:end]

            def payload(place: int, dtype: Any, first: int = first, end: int = end) -> Array:
                array = _at(arrays, place)
                if array is None:
                    temporary: Array = thread_scratch().temporary(place).view(dtype)
                    return temporary[: end - first]
                values: Array = array.view(dtype)[first:end]
                return values

            for operation in operations:
                if operation.code in _CHECKS:
                    dtype = np.float32 if operation.code is Code.CHECK_32 else np.uint16
                    crc = crc32.iscsi(payload(operation.source, dtype).view(np.uint8).data, crc)
                    continue
                found = _NUMPY[operation.code](operation, block, payload)
                if isinstance(found, int):
                    largest = max(largest, found)
    return largest, crc


_Block: TypeAlias = Callable[[int], Array]
_Payload: TypeAlias = Callable[[int, Any], Array]


def _product(values: Array, factor: float) -> Array:
    """Values times a factor, in memory of this thread; the values themselves where that is 1."""
    if factor == 1.0:
        return values
    out = thread_scratch().temporary(_PRODUCT)[: values.size]
    return np.multiply(values, np.float32(factor), out=out)


def _scale(values: Array, factor: float) -> None:
    if factor != 1.0:
        np.multiply(values, np.float32(factor), out=values)


def _read_fp32(each: Operation, block: _Block, payload: _Payload) -> None:
    values = block(each.to)
    np.copyto(values, payload(each.source, np.float32))
    _scale(values, each.factor)


def _read_fp16(each: Operation, block: _Block, payload: _Payload) -> None:
    values = block(each.to)
    np.copyto(values, payload(each.source, np.float16))
    _scale(values, each.factor)


def _read_bf16(each: Operation, block: _Block, payload: _Payload) -> None:
    values = block(each.to)
    bits = values.view(np.uint32)  # a bfloat16 is the upper half of a float32
    np.copyto(bits, payload(each.source, np.uint16))
    np.left_shift(bits, 16, out=bits)
    _scale(values, each.factor)


def _write_fp32(each: Operation, block: _Block, payload: _Payload) -> None:
    np.copyto(payload(each.to, np.float32), _product(block(each.source), each.factor))


def _write_fp16(each: Operation, block: _Block, payload: _Payload) -> None:
    values = _product(block(each.source), each.factor)
    written = payload(each.to, np.float16)
    np.copyto(written, values)
    bits = values.view(np.uint32)
    if _magnitude(bits) > INFINITY_BITS:  # processors make a NaN quiet and keep its upper bits
        is_nan = np.isnan(values)
        found = bits[is_nan]
        written.view(np.uint16)[is_nan] = found >> 16 & 0x8000 | 0x7E00 | found >> 13 & 0x1FF


def _write_bf16(each: Operation, block: _Block, payload: _Payload) -> None:
    values = _product(block(each.source), each.factor)
    bits, rounded = values.view(np.uint32), thread_scratch().temporary(_ROUNDED).view(np.uint32)
    rounded = rounded[: bits.size]
    # To nearest, to even between two: half of the last place, less one where that is even.
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    np.right_shift(rounded, 16, out=rounded)
    if _magnitude(bits) > INFINITY_BITS:  # rounding would take NaN to infinity, or zero
        is_nan = np.isnan(values)
        rounded[is_nan] = bits[is_nan] >> 16 | 0x40
    np.copyto(payload(each.to, np.uint16), rounded, casting="same_kind")


def _add_scaled(each: Operation, block: _Block, payload: _Payload) -> None:
    to, factor = block(each.to), _float32(each.factor)
    if factor == 0.0:
        return
    to += _product(block(each.source), factor)


def _add_constant(values: Array, constant: float) -> None:
    np.add(values, np.float32(constant), out=values)


def _mean(each: Operation, block: _Block, payload: _Payload) -> None:
    values = block(each.to)
    total = thread_scratch().temporary(_PRODUCT)[: values.size]
    np.copyto(total, values)
    divide(total, each.divisor, values)


def _copy_payload(each: Operation, block: _Block, payload: _Payload, *, dtype: Any) -> None:
    np.copyto(payload(each.to, dtype), payload(each.source, dtype))


def _clip(each: Operation, block: _Block, payload: _Payload) -> None:
    values, bound = block(each.to), np.float32(each.factor)
    np.clip(values, -bound, bound, out=values)


_SIGNED: dict[Any, Any] = {
    np.dtype(np.uint16): np.dtype(np.int16),
    np.dtype(np.uint32): np.dtype(np.int32),
}


def _magnitude(bits: Array) -> int:
    """Largest of (n,) uint16 or uint32 without their signs: two maxima, no temporary."""
    sign = 1 << (8 * bits.itemsize - 1)
    unsigned = int(np.maximum.reduce(bits, initial=0))
    if unsigned < sign:
        return unsigned
    signed = int(np.maximum.reduce(bits.view(_SIGNED[bits.dtype])))
    return max(unsigned - sign, signed)


_NUMPY: dict[Code, Callable[[Operation, _Block, _Payload], Any]] = {
    Code.READ_FP32: _read_fp32,
    Code.READ_FP16: _read_fp16,
    Code.READ_BF16: _read_bf16,
    Code.WRITE_FP32: _write_fp32,
    Code.WRITE_FP16: _write_fp16,
    Code.WRITE_BF16: _write_bf16,
    Code.LOOK_32: lambda each, _, payload: _magnitude(payload(each.source, np.uint32)),
    Code.LOOK_16: lambda each, _, payload: _magnitude(payload(each.source, np.uint16)),
    Code.COPY: lambda each, block, _: np.copyto(block(each.to), block(each.source)),
    Code.FILL: lambda each, block, _: block(each.to).fill(each.factor),
    Code.SCALE: lambda each, block, _: _scale(block(each.to), each.factor),
    Code.ADD_SCALED: _add_scaled,
    Code.ADD_CONSTANT: lambda each, block, _: _add_constant(block(each.to), each.factor),
    Code.MULTIPLY: lambda each, block, _: np.multiply(
        block(each.source), block(each.other), out=block(each.to)
    ),
    Code.DIVIDE: lambda each, block, _: np.divide(
        block(each.source), block(each.other), out=block(each.to)
    ),
    Code.SQUARE_ROOT: lambda each, block, _: np.sqrt(block(each.source), out=block(each.to)),
    Code.MEAN: _mean,
    Code.CLIP: _clip,
    Code.COPY_32: partial(_copy_payload, dtype=np.uint32),
    Code.COPY_16: partial(_copy_payload, dtype=np.uint16),
}
