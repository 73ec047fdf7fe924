"""Sums of gradients by row, and which rows have one. Pure functions on whole arrays.

A row's sum has a meaning only while its flag is set; what the array holds of other rows may be
anything, NaN too. The results are the same bits however rows are put into batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwell.codec import Float32
from shardwell.reduction import first_non_finite

Flags = npt.NDArray[np.bool_]
"""(n,) bool."""
Rows = npt.NDArray[np.int64]
"""(n,) int64: numbers of rows."""


class Place(NamedTuple):
    """One value of a batch of rows."""

    row: int
    """Which row of the batch."""
    column: int


def add_rows(sums: Float32, has_sum: Flags, gradients: Float32, factor: float = 1.0) -> Float32:
    """New sums of a batch of rows: sum + factor * gradient, or just the latter where no sum is.

    Args:
        sums: (n, dim), C-contiguous: a copy of the sums so far, overwritten.
        has_sum: (n,): which of them have a meaning.
        gradients: (n, dim), overwritten unless `factor` is 1.
        factor: Of all gradients; float32 holds it exactly.

    Returns:
        `sums`. A value may be infinite where the sum is beyond float32: see `first_bad_place`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if factor != 1.0:
            np.multiply(gradients, np.float32(factor), out=gradients)
        if not has_sum.any():
            np.copyto(sums, gradients)
            return sums
        if not has_sum.all():
            sums[~has_sum] = -0.0  # adding to it gives any value unchanged, 0.0 and -0.0 too
        return np.add(sums, gradients, out=sums)


def merge_repeats(rows: Rows, gradients: Float32) -> tuple[Rows, Float32]:
    """Each row once, ascending, with the sum of its gradients.

    Of a row's gradients, in the order in which they come, neighbours are added, then neighbours
    of what remains, and so on: whole-array passes that get shorter, as many as the logarithm of
    the largest number of repeats, and errors that grow with it instead of with the number.

    Args:
        rows: (n,), in any order.
        gradients: (n, dim), unchanged.

    Returns:
        (m,) and (m, dim) float32, which is `gradients` itself where rows ascend without repeats.
    """
    if rows.size < 2 or bool((rows[1:] > rows[:-1]).all()):
        return rows, gradients
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
    merged: Float32 = np.take(gradients, order[starts], axis=0)
    sizes = np.diff(starts, append=rows.size)
    repeated = np.flatnonzero(sizes > 1)
    if repeated.size:
        sizes = sizes[repeated]
        numbers = _numbers_in_runs(sizes)
        several = np.take(gradients, order[numbers + np.repeat(starts[repeated], sizes)], axis=0)
        _add_neighbours(several, numbers)
        merged[repeated] = several[numbers == 0]
    return rows[starts], merged


def _numbers_in_runs(sizes: Rows) -> Rows:
    """0, 1, ... for each run, one after another."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)


def _add_neighbours(values: Float32, numbers: Rows) -> None:
    """Adds up each run of rows, which are numbered from 0, into its first row."""
    places = np.arange(numbers.size)
    with np.errstate(over="ignore", invalid="ignore"):
        while places.size:
            is_even = (numbers & 1) == 0
            odd = np.flatnonzero(~is_even)
            into = places[odd - 1]
            values[into] = values[into] + values[places[odd]]
            places, numbers = places[is_even], numbers[is_even] >> 1
            # Runs of which one row is left are done with.
            is_first = numbers == 0
            is_left = ~(is_first & np.append(is_first[1:], True))
            places, numbers = places[is_left], numbers[is_left]


def touched_rows(has_sum: Flags, row_count: int) -> Rows:
    """(n,) int64, ascending: rows below `row_count` that have a sum."""
    return np.flatnonzero(has_sum[:row_count])


def first_bad_place(values: Float32) -> Place | None:
    """The first NaN or infinity of (n, dim) values, C-contiguous; None if all are finite."""
    index = first_non_finite(values.reshape(-1))
    return None if index is None else Place(*divmod(index, values.shape[1]))
