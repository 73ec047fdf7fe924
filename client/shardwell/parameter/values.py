"""The values that a parameter's verbs take and return: one vector, or its tensors by name.

Underneath it is one vector in either case. Tensors that lie one behind the other in one buffer, as
a parameter returns them, are that vector already; others are its pieces. Pure.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar, override

from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import as_flat, as_floats, as_output
from shardwell.numerics.codec import Float32
from shardwell.numerics.tensors import Found, Tensors, joined
from shardwell.specs.layout import TensorLayout, TensorSpec
from shardwell.specs.names import neighbour
from shardwell.specs.parameter import ParameterSpec

NamedArrays: TypeAlias = dict[str, Float32]
"""A parameter's tensors: arrays by name, each of its shape."""
_FLOAT32 = np.dtype(np.float32)
ValuesT = TypeVar("ValuesT", default=Float32)
_NAMED_MAX = 5
_STOP = operator.itemgetter(1)


class Pieces:
    """The ranges of arrays; one within a single array is moved without a copy.

    Arrays are (n,) floating point of any stride, to be read; a single one of float32 may be
    written, too. Any thread may read, and write ranges that no other thread writes.
    """

    def __init__(self, *arrays: npt.NDArray[Any]) -> None:
        self._arrays = arrays
        self._stops = list(itertools.accumulate([array.size for array in arrays]))
        self._tensors: tuple[Tensors, Found] | None = None
        self._copies: dict[tuple[int, int], Float32] = {}
        self._given = arrays

    @staticmethod
    def to_read(
        arrays: Sequence[npt.NDArray[Any]], tensors: Tensors, found: Found | None
    ) -> Pieces:
        """Makes pieces of tensors to read, of any strides; small neighbours are copied together."""
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
        """Makes pieces of writable tensors, which are written in place."""
        pieces = Pieces()
        pieces._arrays = pieces._given = tuple(arrays)
        pieces._stops = tensors.stops
        pieces._tensors = tensors, found
        return pieces

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Returns elements [start, stop): a view, or of several arrays a copy.

        Such a copy is kept, so the range reads alike each time; values that overflow float32 are
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
        """Returns all of it, as `read` does."""
        return self.read(0, self._stops[-1])

    def writing(self, start: int, stop: int) -> contextlib.AbstractContextManager[Float32]:
        """Gives memory whose contents elements [start, stop) have after the block."""
        view = self._view(start, stop)
        return self._scattering(start, stop) if view is None else contextlib.nullcontext(view)

    @contextlib.contextmanager
    def _scattering(self, start: int, stop: int) -> Iterator[Float32]:
        assert self._tensors is not None
        filled: Float32 = np.empty(stop - start, np.float32)
        yield filled
        self._tensors[0].part(filled, self._arrays, start)

    def overlaps(self, other: Pieces) -> bool:
        """Returns True if some memory may be in both."""
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
        if len(self._arrays) == 1 and stop <= self._stops[0]:
            return self._arrays[0].reshape(-1)[start:stop]
        number = bisect_right(self._stops, start)
        if stop > self._stops[number]:
            return None
        array = self._arrays[number]
        first = self._stops[number] - array.size
        return array.reshape(-1)[start - first : stop - first]

    def _views(self, start: int, stop: int) -> Sequence[npt.NDArray[Any]]:
        found = []
        for number in range(bisect_right(self._stops, start), len(self._arrays)):
            first = self._stops[number] - self._arrays[number].size
            if first >= stop:
                break
            found.append(self._arrays[number].reshape(-1)[max(start - first, 0) : stop - first])
        return found


class Values(ABC, Generic[ValuesT]):
    """The form in which the caller sees a parameter's values."""

    @abstractmethod
    def pieces(self, what: str, values: Any, *, in_place: bool = False) -> Pieces:
        """Returns the caller's values, as (size,) floating point, where they lie.

        `what` names them in messages ("gradient of 'model'"). With `in_place` they must be one
        piece of float32, and no copy. ArgumentError: they can't be used.
        """

    @abstractmethod
    def room(self, out: Any) -> tuple[Pieces, ValuesT]:
        """Returns memory for weights, of `out` or new for None, and the caller's view of it."""


class TensorViews(dict[str, Float32]):
    """A dict of tensors that are views of one buffer, as long as they are these very objects.

    Copies are plain dicts, whose arrays may be anywhere.
    """

    def __init__(self, layout: TensorLayout, flat: Float32) -> None:
        parts = map(flat.__getitem__, layout.slices)
        shaped = map(np.ndarray.reshape, parts, layout.shapes)
        super().__init__(zip(layout.by_name, shaped, strict=True))
        self._layout = layout
        self._flat = flat
        self._names = list(self)
        self._views = list(self.values())

    def buffer(self, layout: TensorLayout) -> Float32 | None:
        """Returns the buffer, if all views are still in it, as the layout has them."""
        is_known = layout is self._layout and list(self) == self._names
        if is_known and all(map(operator.is_, self.values(), self._views)):
            return self._flat
        return None

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


_PLAIN = (dict, collections.OrderedDict, TensorViews)
"""Mappings that can be looked into without running a caller's code."""


class VectorValues(Values[Float32]):
    """The values of a parameter that is one vector."""

    def __init__(self, size: int) -> None:
        self._size = size

    @override
    def pieces(self, what: str, values: Any, *, in_place: bool = False) -> Pieces:
        if isinstance(values, Mapping):
            raise ArgumentError(
                f"{what} must be an array of {self._size} elements, for the parameter has no "
                f"tensors; got a mapping of {_named(values)}; open another one with tensors="
            )
        if in_place:
            return Pieces(as_output(values, self._size, what))
        return Pieces(as_flat(what, values, self._size))

    @override
    def room(self, out: Any) -> tuple[Pieces, Float32]:
        if out is None:
            made: Float32 = np.empty(self._size, np.float32)
            return Pieces(made), made
        return Pieces(as_output(out, self._size)), out


class TensorValues(Values[NamedArrays]):
    """The values of a parameter with tensors by name."""

    def __init__(self, layout: TensorLayout) -> None:
        self._layout = layout
        self._tensors = Tensors(layout.shapes)
        first, *others = layout.by_name
        self._all_of: Callable[[Any], tuple[Any, ...]]
        if others:
            self._all_of = operator.itemgetter(first, *others)
        else:  # of one name it gets what that has, and no tuple
            self._all_of = lambda values: (values[first],)

    @override
    def pieces(self, what: str, values: Any, *, in_place: bool = False) -> Pieces:
        if isinstance(values, TensorViews) and (buffer := values.buffer(self._layout)) is not None:
            return Pieces(buffer)
        arrays: Sequence[npt.NDArray[Any]] | None = self._in_order(values)
        found = None if arrays is None else self._tensors.look_over(arrays)
        if arrays is None or found is None:
            arrays = self._converted(what, values)
            found = self._tensors.look_over(arrays)
        whole = None if found is None else self._tensors.as_one(arrays, found)
        if whole is not None:
            return Pieces(whole)
        if in_place:
            raise ArgumentError(
                f"{what} must lie in one buffer, its tensors one behind the other, float32; pass "
                "such as get_weights returns"
            )
        return Pieces.to_read(arrays, self._tensors, found)

    @override
    def room(self, out: Any) -> tuple[Pieces, NamedArrays]:
        if out is None:
            flat: Float32 = np.empty(self._layout.size, np.float32)
            return Pieces(flat), TensorViews(self._layout, flat)
        if isinstance(out, TensorViews) and (buffer := out.buffer(self._layout)) is not None:
            return Pieces(as_output(buffer, self._layout.size)), out
        arrays: Sequence[Float32] | None = self._in_order(out)
        found = None if arrays is None else self._tensors.look_over(arrays)
        if arrays is None or found is None or not found.are_writable or not found.are_aligned:
            arrays = self._outputs(out)
            found = self._tensors.look_over(arrays)
            assert found is not None
        whole = self._tensors.as_one(arrays, found)
        if whole is not None:
            return Pieces(whole), out
        return Pieces.to_write(arrays, self._tensors, found), out

    def _in_order(self, values: Any) -> tuple[Any, ...] | None:
        if type(values) not in _PLAIN or len(values) != len(self._layout):
            return None
        try:
            return self._all_of(values)
        except KeyError:
            return None

    def _converted(self, what: str, values: Any) -> list[npt.NDArray[Any]]:
        arrays = []
        for tensor, each in zip(self._layout, self._checked(what, values), strict=True):
            if type(each) is not np.ndarray or each.dtype is not _FLOAT32:
                each = as_floats(f"{what}: tensor {tensor.name!r}", each)
            if each.shape != tensor.shape:
                raise _misshapen(what, tensor, each.shape)
            arrays.append(each)
        return arrays

    def _outputs(self, out: Any) -> list[Float32]:
        arrays = []
        for tensor, each in zip(self._layout, self._checked("out", out), strict=True):
            flat = as_output(each, None, f"out: tensor {tensor.name!r}")
            if each.shape != tensor.shape:
                raise _misshapen("out", tensor, tuple(each.shape))
            arrays.append(flat.reshape(tensor.shape))
        return arrays

    def _checked(self, what: str, values: Any) -> list[Any]:
        if not isinstance(values, Mapping):
            raise ArgumentError(
                f"{what} must map the names of the parameter's {len(self._layout)} tensors to "
                f"arrays; got {type(values).__name__}"
            )
        missing = [name for name in self._layout.by_name if name not in values]
        unknown = [name for name in values if name not in self._layout.by_name]
        if missing:
            has = f" and has {_named(unknown)}" if unknown else ""
            meant = neighbour(str(unknown[0]), missing) if unknown else ""
            raise ArgumentError(
                f"{what} lacks {_named(missing)} of the parameter's tensors{has}{meant}"
            )
        if unknown:
            raise ArgumentError(
                f"{what} has {_named(unknown)}, which the parameter does not; it was opened with "
                f"{_named(self._layout.by_name)}"
            )
        return [values[name] for name in self._layout.by_name]


def _misshapen(what: str, tensor: TensorSpec, shape: tuple[int, ...]) -> ArgumentError:
    return ArgumentError(
        f"{what}: tensor {tensor.name!r} must have shape {tensor.shape}; got {shape}"
    )


def _named(names: Any) -> str:
    listed = [f"{name!r:.80}" for name in names]
    more = f" and {len(listed) - _NAMED_MAX} more" if len(listed) > _NAMED_MAX else ""
    return ", ".join(listed[:_NAMED_MAX]) + more


def zeros(size: int) -> Pieces:
    """Returns (size,) zeros to be read, which take no memory."""
    return Pieces(np.broadcast_to(np.float32(0), (size,)))


def values_of(spec: ParameterSpec) -> Values[Any]:
    """Returns the form of a parameter's values."""
    return VectorValues(spec.size) if spec.layout is None else TensorValues(spec.layout)
