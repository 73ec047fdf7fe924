"""What a parameter's verbs take and return: one vector, or its tensors by name.

Underneath it is one vector in either case. Tensors that lie one behind the other in one buffer, as
a parameter returns them, are that vector already; others are its pieces.
"""

from __future__ import annotations

import collections
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar, override

from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import as_flat, as_floats, as_output
from shardwell.numerics.codec import Float32
from shardwell.numerics.tensors import Tensors
from shardwell.parameter.pieces import Pieces
from shardwell.specs.layout import TensorLayout, TensorSpec
from shardwell.specs.names import neighbour
from shardwell.specs.parameter import ParameterSpec

NamedArrays: TypeAlias = dict[str, Float32]
"""A parameter's tensors: arrays by name, each of its shape."""
_FLOAT32 = np.dtype(np.float32)
ValuesT = TypeVar("ValuesT", default=Float32)
"""What a parameter's values are: one array, or NamedArrays."""
_NAMED_MAX = 5
"""Of more names, a message has as many and counts the rest."""


@dataclass(frozen=True)
class Room(Generic[ValuesT]):
    """Where weights go."""

    pieces: Pieces
    """(size,), to be filled."""
    result: ValuesT
    """What the caller gets, which has these."""


class Values(ABC, Generic[ValuesT]):
    """How a parameter's values look to the caller."""

    @abstractmethod
    def pieces(self, what: str, values: Any, *, in_place: bool = False) -> Pieces:
        """What the caller passed, as (size,) floating point, where it lies.

        Args:
            what: What it is, for messages ("gradient of 'model'").
            values: What he passed.
            in_place: Whether it must be one piece of float32, and no copy.

        Raises:
            ArgumentError: it can't be used.
        """

    @abstractmethod
    def room(self, out: Any) -> Room[ValuesT]:
        """Where weights go: to `out`, or to new memory for None.

        Raises:
            ArgumentError: `out` can't be written.
        """


class TensorViews(dict[str, Float32]):
    """Tensors that are views of one buffer, and known as such as long as they are the same ones.

    Copies are plain dicts, whose arrays may be anywhere.

    Args:
        layout: The tensors' layout.
        flat: The buffer, (size,).
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
        """The buffer, if all views are still in it, as the layout has them."""
        is_known = layout is self._layout and list(self) == self._names
        if is_known and all(map(operator.is_, self.values(), self._views)):
            return self._flat
        return None

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


_PLAIN = (dict, collections.OrderedDict, TensorViews)
"""Mappings of which it is known what looking into them does."""


class VectorValues(Values[Float32]):
    """One vector."""

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
    def room(self, out: Any) -> Room[Float32]:
        if out is None:
            made: Float32 = np.empty(self._size, np.float32)
            return Room(Pieces(made), made)
        return Room(Pieces(as_output(out, self._size)), out)


class TensorValues(Values[NamedArrays]):
    """Tensors by name."""

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
        joined = None if found is None else self._tensors.as_one(arrays, found)
        if joined is not None:
            return Pieces(joined)
        if in_place:
            raise ArgumentError(
                f"{what} must lie in one buffer, its tensors one behind the other, float32; pass "
                "such as get_weights returns"
            )
        return Pieces.to_read(arrays, self._tensors, found)

    @override
    def room(self, out: Any) -> Room[NamedArrays]:
        if out is None:
            flat: Float32 = np.empty(self._layout.size, np.float32)
            return Room(Pieces(flat), TensorViews(self._layout, flat))
        if isinstance(out, TensorViews) and (buffer := out.buffer(self._layout)) is not None:
            return Room(Pieces(as_output(buffer, self._layout.size)), out)
        arrays: Sequence[Float32] | None = self._in_order(out)
        found = None if arrays is None else self._tensors.look_over(arrays)
        if arrays is None or found is None or not found.are_writable or not found.are_aligned:
            arrays = self._outputs(out)
            found = self._tensors.look_over(arrays)
            assert found is not None
        joined = self._tensors.as_one(arrays, found)
        if joined is not None:
            return Room(Pieces(joined), out)
        return Room(Pieces.to_write(arrays, self._tensors, found), out)

    def _in_order(self, values: Any) -> tuple[Any, ...] | None:
        """The tensors in the order of the layout; None: that takes a closer look."""
        if type(values) not in _PLAIN or len(values) != len(self._layout):
            return None
        try:
            return self._all_of(values)
        except KeyError:
            return None

    def _converted(self, what: str, values: Any) -> list[npt.NDArray[Any]]:
        """The tensors in the order of the layout, as floating point.

        Raises:
            ArgumentError: one can't be used.
        """
        arrays = []
        for tensor, each in zip(self._layout, self._checked(what, values), strict=True):
            if type(each) is not np.ndarray or each.dtype is not _FLOAT32:
                each = as_floats(f"{what}: tensor {tensor.name!r}", each)
            if each.shape != tensor.shape:
                raise _misshapen(what, tensor, each.shape)
            arrays.append(each)
        return arrays

    def _outputs(self, out: Any) -> list[Float32]:
        """The tensors in the order of the layout, as what can be written.

        Raises:
            ArgumentError: one can't be.
        """
        arrays = []
        for tensor, each in zip(self._layout, self._checked("out", out), strict=True):
            flat = as_output(each, None, f"out: tensor {tensor.name!r}")
            if each.shape != tensor.shape:
                raise _misshapen("out", tensor, tuple(each.shape))
            arrays.append(flat.reshape(tensor.shape))
        return arrays

    def _checked(self, what: str, values: Any) -> list[Any]:
        """The tensors in the order of the layout.

        Raises:
            ArgumentError: it is no mapping of exactly these names.
        """
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
    """Such as "'w', 'b' and 3 more"."""
    listed = [f"{name!r:.80}" for name in names]
    more = f" and {len(listed) - _NAMED_MAX} more" if len(listed) > _NAMED_MAX else ""
    return ", ".join(listed[:_NAMED_MAX]) + more


def values_of(spec: ParameterSpec) -> Values[Any]:
    """How a parameter's values look."""
    return VectorValues(spec.size) if spec.layout is None else TensorValues(spec.layout)
