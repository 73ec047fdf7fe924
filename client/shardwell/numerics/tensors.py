"""Tensors that lie anywhere, as the one vector that they are: looked over, joined, parted. Pure.

As in elementwise.py, native code does it where it could be built (native/tensors.c), and NumPy
elsewhere, with the same results.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwell.numerics import native

Float32 = npt.NDArray[np.float32]

LARGE_ELEMENT_COUNT = 1 << 18
"""Smaller arrays take longer to look at one by one than to copy."""
_FLOAT32 = np.dtype(np.float32)
_ADJACENT, _WRITABLE, _ALIGNED = 1, 2, 4
_BASE = operator.attrgetter("base")


class Found(NamedTuple):
    """The layout of arrays in memory."""

    addresses: npt.NDArray[np.int64] | None
    """(tensors,): where each begins, to be compared with others; None: not asked for."""
    are_adjacent: bool
    """True if each begins where the one before it ends, apart from those without an element."""
    are_writable: bool
    are_aligned: bool


class Run(NamedTuple):
    """The neighbours among tensors: a large one, or small ones."""

    first: int
    last: int
    is_large: bool


class Tensors:
    """The tensors of these shapes that are one vector. Any thread may use it."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.sizes = [math.prod(shape) for shape in shapes]
        self.stops = list(itertools.accumulate(self.sizes))
        self.runs: list[Run] = []
        for number, size in enumerate(self.sizes):
            is_large = size >= LARGE_ELEMENT_COUNT
            if not is_large and self.runs and not self.runs[-1].is_large:
                self.runs[-1] = self.runs[-1]._replace(last=number + 1)
            else:
                self.runs.append(Run(number, number + 1, is_large))
        self._shapes = list(shapes)
        numbers = [number for shape in shapes for number in (len(shape), *shape)]
        self._packed_shapes = np.array(numbers, np.int64)
        self._packed_sizes = np.array(self.sizes, np.int64)
        self._packed_stops = np.array(self.stops, np.int64)

    def look_over(self, arrays: Sequence[Any]) -> Found | None:
        """The arrays' layout; None: one is no contiguous float32 `np.ndarray` of its shape."""
        library = native.LIBRARY
        if library is None:
            return self._look_over_by_numpy(arrays)
        addresses = np.empty(len(self.sizes), np.int64)
        try:
            found = library.look_over(tuple(arrays), np.ndarray, self._packed_shapes, addresses)
        except (ValueError, BufferError):  # what NumPy says of gaps, and of some dtypes
            return None
        if found < 0:
            return None
        return Found(
            addresses, found & _ADJACENT != 0, found & _WRITABLE != 0, found & _ALIGNED != 0
        )

    def _look_over_by_numpy(self, arrays: Sequence[Any]) -> Found | None:
        if len(arrays) != len(self.sizes):
            return None
        are_adjacent = are_writable = are_aligned = True
        begin = offset = 0
        for array, shape in zip(arrays, self._shapes, strict=True):
            if type(array) is not np.ndarray or array.shape != shape:
                return None
            if array.dtype is not _FLOAT32 and array.dtype != _FLOAT32:
                return None
            flags = array.flags
            if not flags.c_contiguous:
                return None
            if not flags.carray:
                are_writable = are_writable and flags.writeable
                are_aligned = are_aligned and flags.aligned
            if are_adjacent and array.size:
                address = array.__array_interface__["data"][0]
                begin = begin if offset else address
                are_adjacent = address - offset == begin
                offset += array.nbytes
        return Found(None, are_adjacent, are_writable, are_aligned)

    def as_one(self, arrays: Sequence[npt.NDArray[Any]], found: Found) -> Float32 | None:
        """Returns a (size,) view of the arrays where they are one array's; None: they are not."""
        if not found.are_adjacent:
            return None
        nonempty = list(itertools.compress(arrays, self.sizes))
        base = nonempty[0].base
        if not all(map(operator.is_, map(_BASE, nonempty), itertools.repeat(base))):
            return None  # neighbours by chance
        first = nonempty[0].reshape(-1)
        if len(nonempty) == 1:
            return first
        if base is None:
            return None
        return np.lib.stride_tricks.as_strided(
            first, (self.stops[-1],), (4,), writeable=found.are_writable
        )

    def spans(self, arrays: Sequence[npt.NDArray[Any]], found: Found) -> Iterable[tuple[int, int]]:
        """The addresses of each array with elements: the first one, and behind the last."""
        addresses = found.addresses
        if addresses is None:
            begins = [array.__array_interface__["data"][0] for array in arrays]
            addresses = np.array(begins, np.int64)
        ends = addresses + 4 * self._packed_sizes
        return itertools.compress(zip(addresses.tolist(), ends.tolist(), strict=True), self.sizes)

    def join(self, arrays: Sequence[npt.NDArray[Any]], run: Run, found: Found | None) -> Float32:
        """A copy of a run of arrays, one behind the other; what overflows float32 is infinite."""
        library = native.LIBRARY
        if library is None or found is None:
            return joined([array.reshape(-1) for array in arrays[run.first : run.last]])
        start = self.stops[run.first] - self.sizes[run.first]
        stop = self.stops[run.last - 1]
        copy = np.empty(stop - start, np.float32)
        _check(library.move(tuple(arrays), np.ndarray, self._packed_stops, start, stop, copy, 0))
        return copy

    def part(self, values: Float32, arrays: Sequence[Float32], start: int) -> None:
        """Writes elements of the vector, from `start` on, into the arrays that have them."""
        library = native.LIBRARY
        stop = start + values.size
        if library is not None:
            _check(
                library.move(tuple(arrays), np.ndarray, self._packed_stops, start, stop, values, 1)
            )
            return
        done = 0
        for number in range(bisect_right(self.stops, start), len(arrays)):
            first = self.stops[number] - self.sizes[number]
            if first >= stop:
                break
            part = arrays[number].reshape(-1)[max(start - first, 0) : stop - first]
            end = done + part.size
            part[...] = values[done:end]  # which takes a third of copyto's time, where it is short
            done = end


def joined(arrays: Sequence[npt.NDArray[Any]]) -> Float32:
    """A copy of (n,) arrays, one behind the other; what overflows float32 is infinite."""
    copy: Float32 = np.empty(sum(array.size for array in arrays), np.float32)
    with np.errstate(over="ignore"):
        np.concatenate(arrays, out=copy, casting="same_kind")
    return copy


def _check(result: Any) -> None:
    if result < 0:
        raise ValueError("arrays that do not fit their tensors")
