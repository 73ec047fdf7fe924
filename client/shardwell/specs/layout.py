"""A parameter's layout: the named tensors that lie in it, one behind the other.

A value object, checked when made; the wire knows it through `to_proto` and `from_proto`.
"""

from __future__ import annotations

import collections
import fnmatch
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import lz4.block
from google.protobuf.message import DecodeError

from shardwell.errors import ArgumentError
from shardwell.specs.checks import brief, check_number, check_whole_number, differences_of
from shardwell.specs.grouped_rate import RATE_GROUP_COUNT_MAX
from shardwell.specs.names import neighbour
from shardwell.specs.wire_form import Record
from shardwell.v1 import types_pb2

SIZE_MAX = 2**48
"""The most elements of a parameter."""
DIMENSION_COUNT_MAX = 32
TENSOR_NAME_LENGTH_MAX = 256
TENSOR_COUNT_MAX = 2**16
"""Each takes about 1 KiB of a shard's memory."""
LAYOUT_SIZE_MAX_BYTES = 2**18
"""The limit on the wire: 5000 tensors with names of 40 characters. Larger ones are packed,
which takes a tenth, as names are alike."""
_PACKED_MAX_BYTES = 262_000
_UNPACKED_MAX_BYTES = 2**22
_RESERVED = "__metadata__"
"""The key that a safetensors file keeps for itself."""


@dataclass(frozen=True, kw_only=True)
class TensorOptions(Record[types_pb2.TensorOptions]):
    """The differences of a tensor's update from the optimizer's.

    Raises:
        ArgumentError: a value is out of its range.

    Examples:
        >>> frozen = shardwell.TensorOptions(frozen=True)
        >>> shardwell.TensorSpec("embedding", (1000, 8), options=frozen).options.frozen
        True
    """

    learning_rate_factor: float = 1.0
    """The learning rate is the parameter's, times this; at least 0."""
    weight_decay: float | None = None
    """In place of the optimizer's; None: that."""
    frozen: bool = False
    """Gradients change neither the tensor nor its optimizer state."""
    rate_group: int = 0
    """Number of the factor of a `GroupedRate` that its learning rate has, too, from 1; 0: none."""

    MESSAGE: ClassVar[Any] = types_pb2.TensorOptions

    def __post_init__(self) -> None:
        check_number("learning_rate_factor", self.learning_rate_factor)
        if self.weight_decay is not None:
            check_number("weight_decay", self.weight_decay)
        if not isinstance(self.frozen, bool):
            raise ArgumentError(f"frozen must be a bool; got {brief(self.frozen)}")
        check_whole_number("rate_group", self.rate_group, 0, RATE_GROUP_COUNT_MAX)


AS_THE_REST = TensorOptions()


class TensorGroup:
    """The tensors that are updated in their own way, as one of torch's parameter groups.

    Args:
        tensors: Their names, or patterns such as "*.bias", as of file names: `*`, `?`, `[ab]`. Of
            groups that name one tensor, the first counts.
        learning_rate_factor: Their learning rate is the parameter's, times this.
        weight_decay: In place of the optimizer's; None: that.
        frozen: Whether they stay as they are.
        rate_group: Number of the factor of a `GroupedRate`, given as `learning_rate` with a step,
            that their rate has, too, from 1; 0: none. So the ratio of groups' rates may change.

    Raises:
        ArgumentError: a value is out of its range.

    Examples:
        >>> no_decay = shardwell.TensorGroup("*bias", weight_decay=0.0)
        >>> net = client.parameter(
        ...     "grouped",
        ...     tensors={"weight": (2, 2), "bias": (2,)},
        ...     groups=[no_decay],
        ...     optimizer=shardwell.AdamW(lr=1e-3),
        ... )
        >>> net.spec.layout.by_name["bias"].options.weight_decay
        0.0
    """

    def __init__(
        self,
        tensors: str | Sequence[str],
        *,
        learning_rate_factor: float = 1.0,
        weight_decay: float | None = None,
        frozen: bool = False,
        rate_group: int = 0,
    ) -> None:
        patterns = [tensors] if isinstance(tensors, str) else tensors
        if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
            raise ArgumentError(
                f"tensors of a group must be names or patterns, as '*.bias'; got {brief(tensors)}"
            )
        self.patterns = tuple(patterns)
        self.options = TensorOptions(
            learning_rate_factor=learning_rate_factor,
            weight_decay=weight_decay,
            frozen=frozen,
            rate_group=rate_group,
        )

    def __repr__(self) -> str:
        return f"TensorGroup({list(self.patterns)}, {self.options})"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a parameter.

    Examples:
        >>> shardwell.TensorSpec("bias", (10,), offset=640).stop
        650
    """

    name: str
    """1 to 256 printable characters, such as "layers.0.weight"."""
    shape: tuple[int, ...]
    """Its dimensions; () is a single number."""
    offset: int = 0
    """Its first element in the parameter; elements are in C order."""
    options: TensorOptions = AS_THE_REST
    """How its update differs from the optimizer's."""

    @cached_property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """The place behind its last element."""
        return self.offset + self.size


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of a parameter, in order.

    Raises:
        ArgumentError: a name or shape can't be, or there is none, or it is too large.

    Examples:
        >>> layout = shardwell.TensorLayout.of({"weight": (64, 10), "bias": (10,)})
        >>> layout.size, layout.by_name["bias"].offset
        (650, 640)
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
        if len(self.tensors) > TENSOR_COUNT_MAX:
            raise _too_large(len(self.tensors), f"at most {TENSOR_COUNT_MAX}")
        if len(self.by_name) != len(self.tensors):
            counts = collections.Counter(tensor.name for tensor in self.tensors)
            raise ArgumentError(f"tensor {counts.most_common(1)[0][0]!r} occurs twice")
        check_whole_number("size (of all tensors)", self.size, 1, SIZE_MAX)
        self._checked_proto  # noqa: B018 (made, and so checked)

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
        return _laid(
            (check_tensor_name(name), _shape(name, value), AS_THE_REST)
            for name, value in tensors.items()
        )

    def with_groups(self, groups: Sequence[TensorGroup]) -> TensorLayout:
        """Returns the layout with options of their own for tensors of groups.

        Raises:
            ArgumentError: these are no groups, or a pattern fits no tensor.
        """
        if not isinstance(groups, Sequence) or not all(isinstance(g, TensorGroup) for g in groups):
            raise ArgumentError(
                f"groups must be a list of shardwell.TensorGroup; got {brief(groups)}"
            )
        options: dict[str, TensorOptions] = {}
        for group in groups:
            for pattern in group.patterns:
                fitting = [name for name in self.by_name if _fits(name, pattern)]
                if not fitting:
                    raise ArgumentError(
                        f"{pattern!r:.200} of a group fits none of the parameter's {len(self)} "
                        f"tensors, {brief(list(self.by_name))}"
                        f"{neighbour(pattern, self.by_name)}"
                    )
                for name in fitting:
                    options.setdefault(name, group.options)
        return TensorLayout(
            tuple(replace(t, options=options.get(t.name, AS_THE_REST)) for t in self)
        )

    @property
    def has_options(self) -> bool:
        """True if a tensor is not updated as the rest."""
        return any(tensor.options != AS_THE_REST for tensor in self)

    def __repr__(self) -> str:
        return f"TensorLayout({len(self.tensors)} tensors, size={self.size})"

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def size(self) -> int:
        """The elements of all tensors."""
        return self.tensors[-1].stop

    @cached_property
    def rate_group_count(self) -> int:
        """The factors that a `GroupedRate` of the parameter has."""
        return max(tensor.options.rate_group for tensor in self)

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """Each tensor by its name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor, in order."""
        return [tensor.shape for tensor in self.tensors]

    @cached_property
    def slices(self) -> list[slice]:
        """The elements of each tensor, in order."""
        return [slice(tensor.offset, tensor.stop) for tensor in self.tensors]

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
            if mine.options != theirs.options:
                return "; ".join(
                    differences_of(f"tensor {mine.name!r}", mine.options, theirs.options)
                )
        if len(self) < len(other):
            return f"there is no tensor {other.tensors[len(self)].name!r}, which was asked for"
        return f"there is a tensor {self.tensors[len(other)].name!r}, which was not asked for"

    def to_proto(self) -> types_pb2.TensorLayout:
        """The wire's form; not to be changed."""
        return self._checked_proto

    @cached_property
    def _checked_proto(self) -> types_pb2.TensorLayout:
        """The wire's form, kept: making it may take as long as a model has tensors."""
        plain = types_pb2.TensorLayout(
            tensors=[
                types_pb2.Tensor(
                    name=tensor.name,
                    shape=tensor.shape,
                    options=None if tensor.options == AS_THE_REST else tensor.options.to_proto(),
                )
                for tensor in self
            ]
        )
        return plain if plain.ByteSize() <= LAYOUT_SIZE_MAX_BYTES else _packed(plain)

    @staticmethod
    def from_proto(message: types_pb2.TensorLayout) -> TensorLayout:
        """The value that a message describes.

        Raises:
            ArgumentError: see the class.
        """
        return _laid(
            (
                each.name,
                tuple(each.shape),
                TensorOptions.from_proto(each.options) if each.HasField("options") else AS_THE_REST,
            )
            for each in _unpacked(message).tensors
        )


def _laid(tensors: Iterable[tuple[str, tuple[int, ...], TensorOptions]]) -> TensorLayout:
    laid: list[TensorSpec] = []
    for name, shape, options in tensors:
        laid.append(TensorSpec(name, shape, laid[-1].stop if laid else 0, options))
    return TensorLayout(tuple(laid))


def check_tensor_name(name: object) -> str:
    """Returns `name` if it is a string of 1 to 256 printable characters."""
    is_text = isinstance(name, str) and name.isprintable() and name != _RESERVED
    if not (isinstance(name, str) and is_text and 0 < len(name) <= TENSOR_NAME_LENGTH_MAX):
        raise ArgumentError(
            f"a tensor's name must be 1 to {TENSOR_NAME_LENGTH_MAX} printable characters, and not "
            f"{_RESERVED!r}; got {name!r:.80}"
        )
    return name


def _packed(layout: types_pb2.TensorLayout) -> types_pb2.TensorLayout:
    plain = layout.SerializeToString()
    if len(plain) > _UNPACKED_MAX_BYTES:
        limit = f"names and shapes that take at most {_UNPACKED_MAX_BYTES} bytes, not {len(plain)}"
        raise _too_large(len(layout.tensors), limit)
    packed = lz4.block.compress(plain, store_size=False)
    if len(packed) > _PACKED_MAX_BYTES:  # which takes ten times as long
        packed = lz4.block.compress(plain, "high_compression", store_size=False)
    if len(packed) > _PACKED_MAX_BYTES:
        limit = f"names and shapes that LZ4 packs into {_PACKED_MAX_BYTES} bytes, not {len(packed)}"
        raise _too_large(len(layout.tensors), limit)
    return types_pb2.TensorLayout(packed=types_pb2.PackedTensors(lz4=packed, size_bytes=len(plain)))


def _unpacked(layout: types_pb2.TensorLayout) -> types_pb2.TensorLayout:
    if not layout.HasField("packed"):
        if layout.ByteSize() > LAYOUT_SIZE_MAX_BYTES:
            limit = f"at most {LAYOUT_SIZE_MAX_BYTES} bytes that are not packed"
            raise _too_large(len(layout.tensors), limit)
        return layout
    packed = layout.packed
    if len(packed.lz4) > _PACKED_MAX_BYTES or packed.size_bytes > _UNPACKED_MAX_BYTES:
        raise ArgumentError(
            f"a packed layout must have at most {_PACKED_MAX_BYTES} bytes of LZ4, and "
            f"{_UNPACKED_MAX_BYTES} unpacked; got {len(packed.lz4)} and {packed.size_bytes}"
        )
    try:
        plain = lz4.block.decompress(packed.lz4, uncompressed_size=packed.size_bytes)
        found = types_pb2.TensorLayout.FromString(plain)
    except (lz4.block.LZ4BlockError, DecodeError, ValueError) as error:
        raise ArgumentError(f"a packed layout can't be read ({error}); send it again") from None
    if len(plain) != packed.size_bytes or layout.tensors or found.HasField("packed"):
        raise ArgumentError(
            f"a packed layout must hold tensors alone, in {packed.size_bytes} bytes; got "
            f"{len(plain)} bytes, {len(layout.tensors)} tensors beside it"
        )
    if len(found.tensors) > TENSOR_COUNT_MAX:  # before an object is made of each
        raise _too_large(len(found.tensors), f"at most {TENSOR_COUNT_MAX}")
    return found


def _too_large(tensor_count: int, limit: str) -> ArgumentError:
    return ArgumentError(
        f"{tensor_count} tensors are too many for one parameter, which has room for {limit}; make "
        "several parameters of them (a ServerOptimizer for each of several submodules, with a "
        "name= of its own)"
    )


def _fits(name: str, pattern: str) -> bool:
    """Returns True if a pattern is meant for a tensor; a name is for its own, whatever is in it."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _shape(name: str, value: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(each) for each in getattr(value, "shape", value))
    except TypeError:
        raise ArgumentError(
            f"tensor {name!r} must have a shape, such as (20, 64); got {brief(value)}"
        ) from None
