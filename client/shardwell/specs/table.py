"""The spec of a table, on which all its workers agree. A value object, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shardwell.errors import ArgumentError
from shardwell.specs.checks import brief, check_whole_number
from shardwell.specs.initializers import Initializer
from shardwell.specs.members import Elastic
from shardwell.specs.names import check_name
from shardwell.specs.optimizers import FTRL, SGD, Adagrad, Adam, AdamW, Optimizer, RowWiseAdagrad
from shardwell.specs.parameter import (
    BLOCK_SIZES,
    CodecName,
    ModeName,
    TrainingSpec,
)
from shardwell.specs.wire_form import Form
from shardwell.v1 import table_pb2

ROW_COUNT_MAX = 2**62
DIM_MAX = 2**16
OPTIMIZERS = (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, FTRL)
"""Optimizers with a form for rows."""


@dataclass(frozen=True, kw_only=True)
class TableSpec(TrainingSpec):
    """The properties of a table on which all its workers must agree; checked when made.

    Raises:
        ArgumentError: a value is out of its range.

    Examples:
        >>> rule = shardwell.Adagrad(lr=0.1)
        >>> users = client.table("spec", row_count=None, dim=2, optimizer=rule)
        >>> users.spec.dim, users.spec.codec
        (2, 'fp16')
    """

    name: str
    """1 to 128 letters, digits, `.`, `_`, `-`."""
    row_count: int | None
    """Ids are 0 to row_count - 1, row_count at most 2^62; None: any 64-bit integer is a key."""
    dim: int
    """Values of a row, 1 to 65536."""
    optimizer: Optimizer
    """The update rule of rows that have a gradient."""
    initializer: Initializer
    """What rows are before their first gradient."""
    worker_count: int
    """Workers that make a synchronous step; 0 in asynchronous mode, where it has no meaning. With
    `members`, their max_count."""
    codec: CodecName = "fp16"
    """How values travel."""
    mode: ModeName = "sync"
    """`sync`: the mean of worker_count gradients a step; `async`: each gradient as it arrives."""
    allow_non_finite: bool = False
    """Let NaN and infinity through; the default refuses them, with their index."""
    members: Elastic | None = None
    """Workers that come and go make its steps; None: worker_count of them, for good."""

    MESSAGE: ClassVar[Any] = table_pb2.TableSpec
    FORMS: ClassVar[Mapping[str, Any]] = {
        **TrainingSpec.FORMS,
        "initializer": Initializer,
        "row_count": Form(
            lambda found: found.row_count or None, lambda count: {"row_count": count or 0}
        ),
    }

    def __post_init__(self) -> None:
        check_name("table name", self.name)
        if self.row_count is not None:
            check_whole_number("row_count", self.row_count, 1, ROW_COUNT_MAX)
        check_whole_number("dim", self.dim, 1, DIM_MAX)
        if type(self.optimizer) not in OPTIMIZERS:
            raise ArgumentError(
                f"optimizer of a table must be one of {', '.join(k.__name__ for k in OPTIMIZERS)}; "
                f"got {brief(self.optimizer)}"
            )
        if self.optimizer.clip_norm:
            raise ArgumentError(
                "clip_norm is of parameters, for no shard sees all rows of a step; clip a table's "
                f"gradients with clip_value, or before they are sent; got {brief(self.optimizer)}"
            )
        if not isinstance(self.initializer, Initializer) or type(self.initializer) is Initializer:
            raise ArgumentError(
                "initializer must be one of shardwell.Zeros, Uniform, Normal; "
                f"got {brief(self.initializer)}"
            )
        self.check_training()
        if self.codec_name in BLOCK_SIZES:
            raise ArgumentError(
                f"table {self.name!r}: codec {self.codec} is of parameters, whose weights all "
                "travel in each step; rows are touched one by one: choose fp16"
            )

    @property
    def slot_widths(self) -> tuple[int, ...]:
        """The values that a row has of each array of optimizer state."""
        width = 1 if isinstance(self.optimizer, RowWiseAdagrad) else self.dim
        return (width,) * len(self.optimizer.slot_names)

    @property
    def sums_gradients(self) -> bool:
        """True if several workers may give gradients of a step, which are summed beforehand."""
        return self.step_size_max > 1
