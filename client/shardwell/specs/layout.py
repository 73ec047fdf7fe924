"""A parameter's layout: the named tensors that lie in it, one behind the other.

A value object, checked when made; the wire knows it through `to_proto` and `from_proto`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwell.errors import ArgumentError
from shardwell.specs.checks import brief, check_whole_number
from shardwell.v1 import types_pb2

SIZE_MAX = 2**48
"""Elements of a parameter."""
DIMENSION_COUNT_MAX = 32
TENSOR_NAME_LENGTH_MAX = 256
LAYOUT_SIZE_MAX_BYTES = 2**18
"""On the wire, so that a message with one stays small: 5000 tensors with names of 40 characters."""
_RESERVED = "__metadata__"
"""What a safetensors file keeps for itself."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a parameter."""

    name: str
    """1 to 256 printable characters, such as "layers.0.weight"."""
    shape: tuple[int, ...]
    """Its dimensions; () is a single number."""
    offset: int = 0
    """Its first element in the parameter; elements are in C order."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Behind its last element."""
        return self.offset + self.size


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of a parameter, in order.

    Raises:
        ArgumentError: a name or shape can't be, or there is none, or it is too large.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ArgumentError("tensors must have a tensor at least; it is empty")
        offset = 0
        for tensor in self.tensors:
            check_tensor_name(tensor.name)
            what = f"shape of tensor {tensor.name!r}"
            if len(tensor.shape) > DIMENSION_COUNT_MAX:
                raise ArgumentError(
                    f"{what} has {len(tensor.shape)} dimensions; at most {DIMENSION_COUNT_MAX}"
                )
            for dimension in tensor.shape:
                check_whole_number(what, dimension, 0, SIZE_MAX)
            if tensor.offset != offset:
                raise ArgumentError(
                    f"tensor {tensor.name!r} begins at element {tensor.offset}; expected {offset}"
                )
            offset = tensor.stop
        if len(self.by_name) != len(self.tensors):
            names = [tensor.name for tensor in self.tensors]
            twice = next(name for name in names if names.count(name) > 1)
            raise ArgumentError(f"tensor {twice!r} is there twice")
        check_whole_number("size (of all tensors)", self.size, 1, SIZE_MAX)
        if (size_bytes := self.to_proto().ByteSize()) > LAYOUT_SIZE_MAX_BYTES:
            raise ArgumentError(
                f"names and shapes of {len(self.tensors)} tensors take {size_bytes} bytes; a "
                f"parameter has room for {LAYOUT_SIZE_MAX_BYTES}; make several parameters of them"
            )

    @staticmethod
    def of(tensors: Mapping[str, Any]) -> TensorLayout:
        """The layout of tensors by name, in the mapping's order.

        Args:
            tensors: Shapes, or what has one, such as arrays.

        Raises:
            ArgumentError: it is no such mapping.
        """
        if not isinstance(tensors, Mapping):
            raise ArgumentError(
                f"tensors must map names to shapes, as {{'w': (20, 64)}}; got {brief(tensors)}"
            )
        laid: list[TensorSpec] = []
        for name, value in tensors.items():
            offset = laid[-1].stop if laid else 0
            laid.append(TensorSpec(check_tensor_name(name), _shape(name, value), offset))
        return TensorLayout(tuple(laid))

    def __repr__(self) -> str:
        return f"TensorLayout({len(self.tensors)} tensors, size={self.size})"

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def size(self) -> int:
        """Elements of all tensors."""
        return self.tensors[-1].stop

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """Each tensor by its name."""
        return {tensor.name: tensor for tensor in self.tensors}

    def at(self, element: int) -> TensorSpec:
        """The tensor that an element of the parameter lies in."""
        return next(tensor for tensor in self.tensors if element < tensor.stop)

    def difference(self, other: TensorLayout | None) -> str:
        """The first thing in which another layout, or none, differs from this one."""
        if other is None:
            return f"{len(self)} tensors exist, a flat vector was asked for"
        for number, (mine, theirs) in enumerate(zip(self, other, strict=False)):
            if mine.name != theirs.name:
                return (
                    f"tensor {number} is {mine.name!r}; {theirs.name!r} was asked for in its place"
                )
            if mine.shape != theirs.shape:
                return f"tensor {mine.name!r} has shape {mine.shape}; {theirs.shape} was asked for"
        if len(self) < len(other):
            return f"there is no tensor {other.tensors[len(self)].name!r}, which was asked for"
        return f"there is a tensor {self.tensors[len(other)].name!r}, which was not asked for"

    def to_proto(self) -> types_pb2.TensorLayout:
        """The wire's form."""
        return types_pb2.TensorLayout(
            tensors=[
                types_pb2.Tensor(name=tensor.name, shape=tensor.shape) for tensor in self.tensors
            ]
        )

    @staticmethod
    def from_proto(message: types_pb2.TensorLayout) -> TensorLayout:
        """The value that a message describes.

        Raises:
            ArgumentError: see the class.
        """
        laid: list[TensorSpec] = []
        for tensor in message.tensors:
            offset = laid[-1].stop if laid else 0
            laid.append(TensorSpec(tensor.name, tuple(tensor.shape), offset))
        return TensorLayout(tuple(laid))


def check_tensor_name(name: object) -> str:
    """Returns `name` if a tensor may be called so.

    Raises:
        ArgumentError: it is no string of 1 to 256 printable characters.
    """
    is_name = isinstance(name, str) and 0 < len(name) <= TENSOR_NAME_LENGTH_MAX
    if not is_name or not name.isprintable() or name == _RESERVED:  # type: ignore[attr-defined]
        raise ArgumentError(
            f"a tensor's name must be 1 to {TENSOR_NAME_LENGTH_MAX} printable characters, and not "
            f"{_RESERVED!r}; got {name!r:.80}"
        )
    return str(name)


def _shape(name: str, value: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(each) for each in getattr(value, "shape", value))
    except TypeError:
        raise ArgumentError(
            f"tensor {name!r} must have a shape, such as (20, 64); got {brief(value)}"
        ) from None
