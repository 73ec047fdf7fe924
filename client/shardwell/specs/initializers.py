"""The values of a table's rows before their first gradient: value objects, checked when made.

The values are a function of seed, id and column alone: see `initial_rows`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from shardwell.errors import ArgumentError
from shardwell.specs.checks import check_number, check_whole_number
from shardwell.specs.wire_form import Alternative
from shardwell.v1 import table_pb2

_SEED_MAX = 2**64 - 1
_FLOAT32_MAX = float(2.0**128 - 2.0**104)
_SIGMA_MAX = 6.0
"""Values are at most 5.5 standard deviations from the mean."""


@dataclass(frozen=True, kw_only=True)
class Initializer(Alternative[table_pb2.Initializer]):
    """The base of all initializers.

    Examples:
        >>> initializer = shardwell.Normal(std=0.01)  # one of its kinds
        >>> isinstance(initializer, shardwell.Initializer)
        True
    """

    MESSAGE: ClassVar[Any] = table_pb2.Initializer
    ONEOF: ClassVar[str] = "kind"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            what, value = f"{type(self).__name__}.{field.name}", getattr(self, field.name)
            if field.name == "seed":
                check_whole_number(what, value, 0, _SEED_MAX)
            else:
                check_number(what, value, low=0.0 if field.name == "std" else -math.inf)


@dataclass(frozen=True, kw_only=True)
class Zeros(Initializer):
    """Every value 0.

    Examples:
        >>> rule, first = shardwell.Adagrad(lr=0.1), shardwell.Zeros()
        >>> rows = client.table("zeros", row_count=None, dim=2, optimizer=rule, initializer=first)
        >>> rows.get_rows([7]).shape
        (1, 2)
    """

    field_name: ClassVar[str] = "zeros"


@dataclass(frozen=True, kw_only=True)
class Uniform(Initializer):
    """A uniform distribution between low and high.

    Examples:
        >>> rule, first = shardwell.Adagrad(lr=0.1), shardwell.Uniform(low=-0.1, high=0.1)
        >>> rows = client.table("uniform", row_count=None, dim=2, optimizer=rule, initializer=first)
        >>> rows.get_rows([7]).shape
        (1, 2)
    """

    low: float = -0.05
    """Lower bound; -0.05 to 0.05 is what Keras gives embeddings."""
    high: float = 0.05
    """Upper bound, at least `low`."""
    seed: int = 0
    """0 to 2^64 - 1. The same seed gives the same rows on any cluster."""

    field_name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high < self.low:
            raise ArgumentError(
                f"Uniform.high must be at least low; got low={self.low}, high={self.high}"
            )
        if max(-self.low, self.high) > _FLOAT32_MAX:
            raise ArgumentError(
                f"Uniform.low and high must be at most {_FLOAT32_MAX:g} in magnitude, as rows are "
                f"float32; got low={self.low}, high={self.high}"
            )


@dataclass(frozen=True, kw_only=True)
class Normal(Initializer):
    """A normal distribution.

    Examples:
        >>> rule, first = shardwell.Adagrad(lr=0.1), shardwell.Normal(std=0.02, seed=1)
        >>> rows = client.table("normal", row_count=None, dim=2, optimizer=rule, initializer=first)
        >>> rows.get_rows([7]).shape
        (1, 2)
    """

    mean: float = 0.0
    """Mean of the distribution."""
    std: float = 0.01
    """Standard deviation, at least 0."""
    seed: int = 0
    """0 to 2^64 - 1. The same seed gives the same rows on any cluster."""

    field_name: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(self.mean) + _SIGMA_MAX * self.std > _FLOAT32_MAX:
            raise ArgumentError(
                f"Normal: |mean| + {_SIGMA_MAX:g} * std must be at most {_FLOAT32_MAX:g}, as rows "
                f"are float32; got mean={self.mean}, std={self.std}"
            )
