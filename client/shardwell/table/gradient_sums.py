"""Gradients of one call's ids: those of repeated ids added up, all of them checked. Pure.

The sum of an id depends on its own gradients and their order alone, not on what else is in the
batch nor on the cluster, and is the same bits every time: see `row_batches.add_up`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fastcrc import crc32

from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.numerics.arguments import as_floats
from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import INFINITY_BITS
from shardwell.numerics.finite import first_non_finite
from shardwell.numerics.row_batches import add_up, gather
from shardwell.table.batch import RowBatch, Span


def as_gradients(gradients: Any, shape: tuple[int, ...], dim: int, table: str) -> Float32:
    """Gradients that a caller passed for ids of `shape`, as (n, dim) float32, C-contiguous.

    Args:
        gradients: (*shape, dim) float32, or float64 or float16, which are converted.
        shape: Shape of the ids.
        dim: Elements of a row.
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
        plain = np.require(array, np.float32, ("C", "A", "E"))
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
        self._sums: Float32 | None = None
        """(u, dim), in the order of `distinct`; None: no id occurs twice."""
        sums_bits = 0
        if batch.has_repeats:
            self._sums, sums_bits = add_up(gradients, batch.places, batch.starts)
        if not allow_non_finite:
            self._check(gradients)
            self._check_sums(sums_bits)

    def rows(self, span: Span) -> Float32:
        """The values of rows `span` of `batch.distinct`: (k, dim) float32, C-contiguous."""
        if self._sums is not None:
            return self._sums[span.start : span.stop]
        if self._batch.is_plain:
            return self.gradients[span.start : span.stop]
        rows = np.empty((span.stop - span.start, self.gradients.shape[1]), np.float32)
        gather(self.gradients, self._batch.places[span.start : span.stop], rows)
        return rows

    def element_index(self, span: Span, index: int) -> int:
        """Where element `index` of `rows(span)` comes from in the caller's array; -1: nowhere."""
        dim = int(self.gradients.shape[1])
        row, column = divmod(index, dim)
        if not 0 <= row < span.stop - span.start:
            return -1
        return self._first(span.start + row) * dim + column

    def digest(self) -> tuple[int, int]:
        """Tells these ids and gradients from others."""
        return (
            int(crc32.iscsi(self._batch.ids.view(np.uint8).data)),
            int(crc32.iscsi(self.gradients.reshape(-1).view(np.uint8).data)),
        )

    def _first(self, number: int) -> int:
        """The first place of a distinct id, by its number."""
        return int(self._batch.places[self._batch.starts[number]])

    def _check(self, gradients: Float32) -> None:
        """Refuses what is not finite."""
        flat = gradients.reshape(-1)
        index = first_non_finite(flat)
        if index is not None:
            place, column = divmod(index, gradients.shape[1])
            raise NonFiniteError(
                f"gradient of row id {self._batch.ids[place]} of {self._table!r}: element {column} "
                f"of the one at place {place} is {flat[index]}, which is no finite float32; skip "
                "or mend the step, or open the table with allow_non_finite=True",
                element_index=index,
                table=self._table,
            )

    def _check_sums(self, bits: int) -> None:
        """Refuses sums that float32 can't hold; `bits` are those of their largest magnitude."""
        if bits >= INFINITY_BITS:
            assert self._sums is not None
            repeated = np.flatnonzero(np.diff(self._batch.starts) > 1)
            is_bad = ~np.isfinite(self._sums[repeated])
            row, column = divmod(int(np.argmax(is_bad)), is_bad.shape[1])
            number = int(repeated[row])
            raise NonFiniteError(
                f"gradients of row id {self._batch.distinct.ids[number]} of {self._table!r}, which "
                f"occurs more than once, add up to more than a float32 can hold in element "
                f"{column}; scale the gradients, or open the table with allow_non_finite=True",
                element_index=self._first(number) * is_bad.shape[1] + column,
                table=self._table,
            )
