"""A vector that lies in one piece of memory, or in several, and is read and written by ranges."""

from __future__ import annotations

import contextlib
import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import Float32
from shardwell.numerics.tensors import Found, Tensors, joined

_STOP = operator.itemgetter(1)


class Pieces:
    """The ranges of arrays; one within a single array is moved without a copy.

    Any thread may read, and write what no other one does.

    Args:
        arrays: One behind the other, each (n,), to be read: floating point of any stride; one
            alone that is float32 may be written, too.
    """

    def __init__(self, *arrays: npt.NDArray[Any]) -> None:
        self._arrays = arrays
        self._stops = list(itertools.accumulate([array.size for array in arrays]))
        self._tensors: tuple[Tensors, Found] | None = None
        """What arrays that are to be written are, and where."""
        self._copies: dict[tuple[int, int], Float32] = {}
        """Copies of ranges that several arrays share, by range."""
        self._given = arrays
        """The caller's arrays; not copied."""

    @staticmethod
    def to_read(
        arrays: Sequence[npt.NDArray[Any]], tensors: Tensors, found: Found | None
    ) -> Pieces:
        """Makes pieces of tensors to read; small neighbours are copied into one piece.

        Args:
            arrays: Arrays of the tensors' shapes, floating point of any strides.
            tensors: What they are.
            found: What `tensors.look_over` has found of them.
        """
        parts: list[npt.NDArray[Any]] = []
        large: list[npt.NDArray[Any]] = []
        for run in tensors.runs:
            if run.is_large:
                large.append(arrays[run.first].reshape(-1))
                parts.append(large[-1])
            else:
                parts.append(tensors.join(arrays, run, found))
        pieces = Pieces(*parts)
        pieces._given = tuple(large)
        return pieces

    @staticmethod
    def to_write(arrays: Sequence[Float32], tensors: Tensors, found: Found) -> Pieces:
        """Makes pieces of tensors that are written in place.

        Args:
            arrays: Arrays of the tensors' shapes, writable.
            tensors: What they are.
            found: What `tensors.look_over` has found of them.
        """
        pieces = Pieces()
        pieces._arrays = pieces._given = tuple(arrays)
        pieces._stops = tensors.stops
        pieces._tensors = tensors, found
        return pieces

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements [start, stop): a view, or, where several arrays have them, a copy.

        A copy is kept: it is the same whenever the range is read. What overflows float32 in it is
        infinite.
        """
        view = self._view(start, stop)
        if view is not None:
            return view
        copy = self._copies.get((start, stop))
        if copy is None:
            copy = joined(self._views(start, stop))
            self._copies[start, stop] = copy
        return copy

    def whole(self) -> npt.NDArray[Any]:
        """All of it; see `read`."""
        return self.read(0, self._stops[-1])

    def writing(self, start: int, stop: int) -> contextlib.AbstractContextManager[Float32]:
        """Memory for elements [start, stop), which have what it is filled with after the block."""
        view = self._view(start, stop)
        return self._scattering(start, stop) if view is None else contextlib.nullcontext(view)

    @contextlib.contextmanager
    def _scattering(self, start: int, stop: int) -> Iterator[Float32]:
        """`writing` of elements that several arrays have."""
        assert self._tensors is not None
        filled: Float32 = np.empty(stop - start, np.float32)
        yield filled
        self._tensors[0].part(filled, self._arrays, start)

    def overlaps(self, other: Pieces) -> bool:
        """Whether some memory may be in both."""
        if len(self._given) == len(other._given) == 1:
            return np.may_share_memory(self._given[0], other._given[0])
        if not self._given or not other._given:
            return False
        few, many = sorted([sorted(self._spans()), sorted(other._spans())], key=len)
        stops = list(itertools.accumulate(map(_STOP, many), max))
        for start, stop in few:
            before = bisect_left(many, (stop,))  # how many start before it ends
            if before and stops[before - 1] > start:
                return True
        return False

    def _spans(self) -> Iterable[tuple[int, int]]:
        """The addresses of the caller's memory."""
        if self._tensors is not None:
            tensors, found = self._tensors
            return tensors.spans(self._given, found)
        return self._spans_of_arrays()

    def _spans_of_arrays(self) -> Iterator[tuple[int, int]]:
        for array in self._given:
            if array.size:
                start: int = array.__array_interface__["data"][0]
                (stride,) = array.strides
                reach = (array.size - 1) * stride
                if stride < 0:
                    start, reach = start + reach, -reach
                yield start, start + reach + array.itemsize

    def _view(self, start: int, stop: int) -> npt.NDArray[Any] | None:
        """Elements [start, stop), if one array has all of them."""
        if len(self._arrays) == 1 and stop <= self._stops[0]:
            return self._arrays[0].reshape(-1)[start:stop]
        number = bisect_right(self._stops, start)
        if stop > self._stops[number]:
            return None
        array = self._arrays[number]
        first = self._stops[number] - array.size
        return array.reshape(-1)[start - first : stop - first]

    def _views(self, start: int, stop: int) -> Sequence[npt.NDArray[Any]]:
        """Elements [start, stop), array by array."""
        found = []
        for number in range(bisect_right(self._stops, start), len(self._arrays)):
            first = self._stops[number] - self._arrays[number].size
            if first >= stop:
                break
            found.append(self._arrays[number].reshape(-1)[max(start - first, 0) : stop - first])
        return found
