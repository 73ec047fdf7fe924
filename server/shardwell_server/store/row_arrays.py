"""The arrays of a table, all indexed by place, and batches of rows gathered out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwell.errors import LimitError
from shardwell.numerics import row_batches
from shardwell.numerics.codec import Float32
from shardwell_server.store.contract import Int64, Places, TableLayout

Rows: TypeAlias = npt.NDArray[Any]
"""(rows,) or (rows, width), C-contiguous, of any dtype."""


class RowArrays(NamedTuple):
    """The arrays of a table, as TableStorage describes them."""

    keys: Int64
    update_counts: Int64
    last_steps: Int64
    weights: Float32
    slots: tuple[Float32, ...]
    sums: Float32 | None
    has_sum: npt.NDArray[np.bool_]

    @property
    def of_values(self) -> tuple[Rows, ...]:
        return (self.keys, self.update_counts, self.last_steps, self.weights, *self.slots)

    @property
    def of_sums(self) -> tuple[Rows, ...]:
        return (self.has_sum,) if self.sums is None else (self.sums, self.has_sum)

    @property
    def all(self) -> tuple[Rows, ...]:
        return (*self.of_values, *self.of_sums)


def make_arrays(
    layout: TableLayout,
    row_count: int,
    array: Callable[[str, tuple[int, ...], npt.DTypeLike], Rows],
) -> RowArrays:
    """Makes arrays of `row_count` rows, each by `array(name, shape, dtype)`."""
    sums = array("sums", (row_count, layout.dim), np.float32) if layout.with_sum else None
    return RowArrays(
        keys=array("keys", (row_count,), np.int64),
        update_counts=array("update_counts", (row_count,), np.int64),
        last_steps=array("last_steps", (row_count,), np.int64),
        weights=array("weights", (row_count, layout.dim), np.float32),
        slots=tuple(
            array(f"slot-{number}", (row_count, width), np.float32)
            for number, width in enumerate(layout.slot_widths)
        ),
        sums=sums,
        has_sum=array("has_sum", (row_count,), np.bool_),
    )


class WrittenRows(NamedTuple):
    """The rows as a change wrote them."""

    places: Places
    values: Sequence[Rows]
    sums: Sequence[Rows]
    """Sums and has_sum; empty: none was written, or all were cleared."""
    clears: bool
    new_start: int
    new_rows: Sequence[Rows]
    """Rows of all arrays from `new_start` to below the record's row_used."""


def write_again(rows: WrittenRows, arrays: RowArrays, row_used: int) -> None:
    """Writes the rows of a change that made `row_used` hold; the arrays have room."""
    for into, written in ((arrays.of_values, rows.values), (arrays.of_sums, rows.sums)):
        for array, batch in zip(into, written, strict=False):
            array[rows.places] = batch
    if rows.clears:
        arrays.has_sum[rows.places] = False
    for array, batch in zip(arrays.all, rows.new_rows, strict=False):
        array[rows.new_start : row_used] = batch


def gather(array: Rows, places: Places, into: Rows, *, may_wait: bool = False) -> Rows:
    """Copies rows to the beginning of `into`, and returns that part; places are in range."""
    row_batches.gather(array, places, into, may_wait=may_wait)
    return into[: places.size]


def scatter(arrays: Sequence[Rows], places: Places, saved: Sequence[Rows]) -> None:
    """Writes rows back where `gather` found them."""
    for array, rows in zip(arrays, saved, strict=True):
        row_batches.scatter(array, places, rows)


def check_capacity(layout: TableLayout, row_count: int) -> None:
    """Raises LimitError if a table has no room for so many rows."""
    if row_count > layout.row_capacity:
        raise LimitError(
            f"table {layout.name!r} can't have {row_count} rows on this shard; its capacity is "
            f"{layout.row_capacity}: evict rows, or add shards",
            table=layout.name,
        )
