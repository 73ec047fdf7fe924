"""Sums of gradients by row, and which rows have one. Pure functions on whole arrays.

A row's sum has a meaning only while its flag is set; what the array holds of other rows may be
anything, NaN too. The results are the same bits however rows are put into batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import Float32, first_non_finite
from shardwell.numerics.row_batches import add_up, stable_order

Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


class Cell(NamedTuple):
    """A value of a batch of rows."""

    row: int
    column: int


def add_rows(
    sums: Float32,
    has_sum: Flags,
    gradients: Float32,
    factor: float = 1.0,
    out: Float32 | None = None,
) -> Float32:
    """Returns a batch's new sums: sum + factor * gradient, or that product without a sum.

    `gradients` are overwritten unless `factor` is 1; float32 holds the factor exactly. `out` is by
    default `sums`. A sum beyond float32 is infinite, which `first_bad_cell` finds.
    """
    out = sums if out is None else out
    with np.errstate(over="ignore", invalid="ignore"):
        if factor != 1.0:
            np.multiply(gradients, np.float32(factor), out=gradients)
        sum_count = np.count_nonzero(has_sum)
        if sum_count == 0:
            np.copyto(out, gradients)
            return out
        np.add(sums, gradients, out=out)
    if sum_count < has_sum.size:
        fresh = np.flatnonzero(~has_sum)
        out[fresh] = gradients[fresh]
    return out


def merge_repeats(rows: Rows, gradients: Float32) -> tuple[Rows, Float32]:
    """Returns each row once, ascending, its gradients added up as a worker does."""
    if rows.size < 2 or bool((rows[1:] > rows[:-1]).all()):
        return rows, gradients
    order = stable_order(rows)
    rows = rows[order]
    starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1], [True])))
    merged, _ = add_up(np.ascontiguousarray(gradients), order, starts)
    return rows[starts[:-1]], merged


def touched_rows(has_sum: Flags, row_count: int) -> Rows:
    """Returns the rows below `row_count` that have a sum: (n,) int64, ascending."""
    return np.flatnonzero(has_sum[:row_count])


def first_bad_cell(values: Float32) -> Cell | None:
    """Returns the first NaN or infinity of (n, dim) values, C-contiguous; None: all are finite."""
    index = first_non_finite(values.reshape(-1))
    return None if index is None else Cell(*divmod(index, values.shape[1]))
