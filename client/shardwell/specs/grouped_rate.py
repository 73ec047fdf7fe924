"""A learning rate with a factor for each group of tensors: a value, of no step."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Self

from typing_extensions import override

from shardwell.errors import ArgumentError
from shardwell.specs.checks import check_number

RATE_GROUP_COUNT_MAX = 64
"""Groups of a parameter whose rates may change apart: their factors travel with each chunk."""
_FLOAT = struct.Struct("<f")


class GroupedRate(float):
    """A parameter's learning rate, and each group's factor: `GroupedRate(0.1, [1.0, 0.25])`.

    A group is the tensors of `TensorGroup(..., rate_group=i)`, where i counts from 1. Their rate is
    the parameter's, times their `learning_rate_factor`, times the factor here. It is a float, the
    parameter's rate, for what knows no groups.

    Args:
        learning_rate: The parameter's.
        factors: By group, each at least 0; they travel and count as float32.

    Raises:
        ArgumentError: a value is out of its range.

    Examples:
        >>> rate = shardwell.GroupedRate(0.1, [1.0, 0.25])
        >>> float(rate), rate.factors
        (0.1, (1.0, 0.25))
    """

    factors: tuple[float, ...]
    """By group."""

    def __new__(cls, learning_rate: float, factors: Sequence[float]) -> Self:
        """Makes the rate, and checks the factors."""
        if not 0 < len(factors) <= RATE_GROUP_COUNT_MAX:
            raise ArgumentError(
                f"factors of a learning rate must be 1 to {RATE_GROUP_COUNT_MAX}; got "
                f"{len(factors)}"
            )
        made = super().__new__(cls, learning_rate)
        made.factors = tuple(map(_rounded, factors))
        return made

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return GroupedRate, (float(self), self.factors)

    @override
    def __eq__(self, other: object) -> bool:
        return float.__eq__(self, other) is True and self.factors == factors_of(other)

    @override
    def __ne__(self, other: object) -> bool:
        return not self == other

    @override
    def __hash__(self) -> int:
        return hash((float(self), self.factors))

    @override
    def __repr__(self) -> str:
        return f"GroupedRate({float(self)!r}, {list(self.factors)})"


def factors_of(learning_rate: object) -> tuple[float, ...]:
    """The factors of groups; none: each is 1."""
    return learning_rate.factors if isinstance(learning_rate, GroupedRate) else ()


def rate_of(learning_rate: float, factors: Sequence[float]) -> float:
    """Returns a learning rate that has these factors, or none."""
    return GroupedRate(learning_rate, factors) if factors else learning_rate


def _rounded(factor: float) -> float:
    """Rounds to float32, so that both ends of a wire have one value."""
    check_number("factor of a learning rate", factor)
    try:
        return float(_FLOAT.unpack(_FLOAT.pack(factor))[0])
    except OverflowError:
        raise ArgumentError(
            f"factor of a learning rate must be below 3.4e38, float32's largest; got {factor!r}"
        ) from None
