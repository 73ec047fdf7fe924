"""Gradients of one call's ids: those of repeated ids added up, all of them checked. Pure.

The sum of an id depends on its own gradients and their order alone, not on what else is in the
batch nor on the cluster, and is the same bits every time: in segments of up to 8, each added up
from its first on, and the segments' sums again like that.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from fastcrc import crc32

from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.numerics.arguments import as_floats
from shardwell.numerics.codec import Float32
from shardwell.numerics.finite import find_peak
from shardwell.placement.rows import Ids
from shardwell.table.batch import RowBatch, Span

_SEGMENT_ROW_COUNT = 8
"""Gradients that are added up one after another; bounds the rounding error, too."""


def as_gradients(gradients: Any, shape: tuple[int, ...], dim: int, table: str) -> Float32:
    """Gradients that a caller passed for ids of `shape`, as (n, dim) float32, C-contiguous.

    Args:
        gradients: (*shape, dim) float32, or float64 or float16, which are converted.
        shape: Of the ids.
        dim: Of the table.
        table: Its name, for messages.

    Raises:
        ArgumentError: another type, dtype or shape.
    """
    what = f"gradients of rows of {table!r}"
    array = as_floats(what, gradients)
    if array.shape != (*shape, dim):
        raise ArgumentError(
            f"{what} must be of shape {(*shape, dim)}: that of the ids, and dim; got {array.shape}"
        )
    with np.errstate(over="ignore"):  # what becomes infinite is found by the check
        plain = np.ascontiguousarray(array, np.float32)
    return plain.reshape(-1, dim)


class RowSums:
    """The gradients of one call, by distinct id.

    Args:
        batch: The ids.
        gradients: (n, dim) float32, C-contiguous, in the order of the caller's ids; read until the
            call ends.
        table: Its name, for messages.
        allow_non_finite: Let NaN and infinity through.

    Raises:
        NonFiniteError: a gradient, or a sum, is not finite; names the first.
    """

    def __init__(
        self, batch: RowBatch, gradients: Float32, table: str, *, allow_non_finite: bool
    ) -> None:
        self._batch = batch
        self.gradients = gradients
        """(n, dim): the caller's."""
        self._table = table
        self._repeated: Ids = np.empty(0, np.int64)
        self._sums = gradients[:0]
        self.peak: float | None = None
        """No value is larger; None: that is not known. All messages are scaled by it, so that what
        arrives is the same bits however rows are spread."""
        if batch.has_repeats:
            self._add_up()
        if not allow_non_finite:
            self.peak = max(self._peak(gradients), self._sums_peak())

    def rows(self, span: Span) -> Float32:
        """The values of rows `span` of `batch.distinct`: (k, dim) float32, C-contiguous, copied."""
        rows = self.gradients.take(self._firsts[span.start : span.stop], axis=0, mode="clip")
        if self._repeated.size:
            first, last = np.searchsorted(self._repeated, span)
            rows[self._repeated[first:last] - span.start] = self._sums[first:last]
        return rows

    def element_index(self, span: Span, index: int) -> int:
        """Where element `index` of `rows(span)` comes from in the caller's array; -1: nowhere."""
        dim = int(self.gradients.shape[1])
        row, column = divmod(index, dim)
        if not 0 <= row < span.stop - span.start:
            return -1
        return int(self._firsts[span.start + row]) * dim + column

    def digest(self) -> tuple[int, int]:
        """Tells these ids and gradients from others."""
        return (
            int(crc32.iscsi(self._batch.ids.view(np.uint8).data)),
            int(crc32.iscsi(self.gradients.reshape(-1).view(np.uint8).data)),
        )

    @cached_property
    def _firsts(self) -> Ids:
        """(u,): the first place of each distinct id, in the order of `distinct`."""
        starts, _ = self._batch.groups
        firsts = self._batch.places.take(starts)
        by_shard = self._batch.by_shard
        return firsts if by_shard is None else firsts.take(by_shard)

    def _add_up(self) -> None:
        """Sets `_repeated`, the rows of ids that are there twice, ascending, and their `_sums`."""
        starts, counts = self._batch.groups
        by_shard = self._batch.by_shard
        if by_shard is not None:
            starts, counts = starts.take(by_shard), counts.take(by_shard)
        self._repeated = np.flatnonzero(counts > 1)
        starts, counts = starts.take(self._repeated), counts.take(self._repeated)
        self._sums = add_groups(self.gradients, self._batch.places, starts, counts)

    def _peak(self, gradients: Float32) -> float:
        """Largest magnitude; refuses what is not finite."""
        flat = gradients.reshape(-1)
        peak, index = find_peak(flat)
        if index is not None:
            place, column = divmod(index, gradients.shape[1])
            raise NonFiniteError(
                f"gradient of row id {self._batch.ids[place]} of {self._table!r}: element {column} "
                f"of the one at place {place} is {flat[index]}, which is no finite float32; skip "
                "or mend the step, or open the table with allow_non_finite=True",
                element_index=index,
                table=self._table,
            )
        return peak

    def _sums_peak(self) -> float:
        """Largest magnitude of a sum; refuses those that float32 can't hold."""
        sums = self._sums
        if not sums.size:
            return 0.0
        peak, index = find_peak(sums.reshape(-1))
        if index is not None:
            row, column = divmod(index, sums.shape[1])
            number = int(self._repeated[row])
            raise NonFiniteError(
                f"gradients of row id {self._batch.distinct.ids[number]} of {self._table!r}, which "
                f"is there more than once, add up to more than a float32 can hold in element "
                f"{column}; scale the gradients, or open the table with allow_non_finite=True",
                element_index=int(self._firsts[number]) * sums.shape[1] + column,
                table=self._table,
            )
        return peak


def add_groups(rows: Float32, order: Ids, starts: Ids, counts: Ids) -> Float32:
    """(g, dim): the sum of each group of rows; it may not be finite. See the module.

    Args:
        rows: (n, dim).
        order: Places in `rows`, group by group.
        starts: (g,): where each group's begin in `order`.
        counts: (g,): how many each group has, at least 1.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        while True:
            rows, counts = _add_segments(rows, order, starts, counts)
            if rows.shape[0] == counts.size:
                return rows
            order, starts = np.arange(rows.shape[0]), np.cumsum(counts) - counts


def _add_segments(rows: Float32, order: Ids, starts: Ids, counts: Ids) -> tuple[Float32, Ids]:
    """Adds up the rows of each group in segments: all first rows, then all second ones to them, ...

    Args:
        rows: (m, dim).
        order: Places in `rows`, group by group.
        starts: Where each group's begin in `order`.
        counts: How many each group has.

    Returns:
        The segments' sums, group by group, and how many each group has.
    """
    segment_counts = -(-counts // _SEGMENT_ROW_COUNT)
    ends = np.cumsum(segment_counts)
    group = np.repeat(np.arange(counts.size), segment_counts)
    done = (np.arange(group.size) - (ends - segment_counts)[group]) * _SEGMENT_ROW_COUNT
    lengths = np.minimum(counts[group] - done, _SEGMENT_ROW_COUNT)
    longest_first = np.argsort((-lengths).astype(np.int16), kind="stable")
    starts = (starts[group] + done)[longest_first]
    lengths = -lengths[longest_first]
    sums = rows.take(order[starts], axis=0, mode="clip")
    for number in range(1, -int(lengths[0])):
        count = int(np.searchsorted(lengths, -number))
        sums[:count] += rows.take(order[starts[:count] + number], axis=0, mode="clip")
    in_order = np.empty_like(sums)
    in_order[longest_first] = sums
    return in_order, segment_counts
