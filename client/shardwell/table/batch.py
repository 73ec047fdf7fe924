"""Ids of one call as they travel: each once, shard by shard, ascending; and back again.

And the gradients of these ids, all of them checked, those of repeated ids added up. The sum of an
id depends on its own gradients and their order alone, not on what else is in the batch nor on the
cluster, and is the same bits every time: see `row_batches.add_up`. Pure, and whole arrays at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from fastcrc import crc32

from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.numerics.arguments import as_floats, as_output
from shardwell.numerics.codec import Float32, first_non_finite
from shardwell.numerics.elementwise import INFINITY_BITS
from shardwell.numerics.row_batches import add_up, gather, sort_ids
from shardwell.placement.rows import Ids, RowPlacement

_NO_IDS: Ids = np.empty(0, np.int64)


def as_ids(ids: Any, row_count: int | None) -> tuple[Ids, tuple[int, ...]]:
    """Returns a caller's ids as (n,) int64, copied only where they must be, and their shape.

    They are an array of any integer dtype, shape and layout, what offers one, an integer, or a list
    of integers. Unsigned ones from 2^63 on mean the signed ones of the same bits. ArgumentError
    names the first that is out of range.
    """
    array = ids if type(ids) is np.ndarray else _as_array(ids)
    if array.dtype.kind not in "iu":
        advice = "convert them with .astype(np.int64)"
        if array.dtype.kind in "fc":
            advice = (
                "make them integers where they come from: floats round those from 2^53 on, and "
                ".astype(np.int64) would give other ids"
            )
        raise ArgumentError(f"ids must be integers; got {array.dtype}{_example(array)}; {advice}")
    flat = array.reshape(-1)
    if row_count is not None and flat.size:
        low, high = int(flat.min()), int(flat.max())
        if low < 0 or high >= row_count:
            place = int(np.argmax((flat < 0) | (flat >= row_count)))
            where = f"at place {place}" if array.ndim < 2 else f"at {_place(place, array.shape)}"
            raise ArgumentError(
                f"row id {flat[place]} {where} is out of range; the table's ids are 0 to "
                f"{row_count - 1}"
            )
    if flat.dtype == np.int64 and flat.dtype.isnative:
        return np.require(flat, None, ("C", "A", "E")), array.shape
    return flat.astype(np.int64), array.shape  # uint64 wraps: the same bits


def as_gradients(gradients: Any, shape: tuple[int, ...], dim: int, table: str) -> Float32:
    """Returns gradients for ids of `shape` as (n, dim) float32, C-contiguous."""
    what = f"gradients of rows of {table!r}"
    array = as_floats(what, gradients)
    if array.shape != (*shape, dim):
        raise ArgumentError(
            f"{what} must be of shape {(*shape, dim)}: that of the ids, and dim; got {array.shape}"
        )
    with np.errstate(over="ignore"):  # what becomes infinite is found by the check
        plain = np.require(array, np.float32, ("C", "A", "E"))
    return plain.reshape(-1, dim)


def as_row_output(out: Any, shape: tuple[int, ...]) -> Float32:
    """Returns the caller's `out=` for rows, checked, or a new array for None."""
    if out is None:
        return np.empty(shape, np.float32)
    as_output(out, math.prod(shape))
    if out.shape != shape:
        raise ArgumentError(f"out must be of shape {shape}; got {out.shape}")
    return out  # type: ignore[no-any-return]


def _as_array(ids: Any) -> npt.NDArray[Any]:
    if isinstance(ids, np.ma.MaskedArray) and np.ma.is_masked(ids):
        raise ArgumentError("ids have masked elements; leave them out with .compressed()")
    if isinstance(ids, (list, tuple)) and not ids:
        return _NO_IDS
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"ids must be an array of integers; {error}") from None
    if array.dtype.kind in "fO" and not isinstance(ids, np.ndarray):
        return _whole_numbers(ids, array)
    return array


def _whole_numbers(ids: Any, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns Python's integers that no one dtype holds as int64; all else unchanged.

    NumPy makes floats, which round, of a list with both a negative integer and one from 2^63 on.
    """
    exact = np.empty(array.shape, object)
    try:
        exact[...] = ids
    except ValueError:  # ragged
        return array
    flat = exact.reshape(-1)
    if not all(isinstance(one, (int, np.integer)) and type(one) is not bool for one in flat):
        return array
    for place, one in enumerate(flat):
        if not -(2**63) <= one < 2**64:
            where = place if array.ndim < 2 else _place(place, array.shape)
            raise ArgumentError(f"ids must be integers of 64 bits; got {one} at place {where}")
    signed = [int(one) if one < 2**63 else int(one) - 2**64 for one in flat]
    return np.array(signed, np.int64).reshape(array.shape)


def _example(array: npt.NDArray[Any]) -> str:
    return f" (the first is {array.flat[0]!r:.40})" if array.size else ""


def _place(flat_place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(flat_place, shape))


class Span(NamedTuple):
    """The rows from `start` to below `stop` of one call, in the order of `ShardedIds`."""

    start: int
    stop: int


class ShardedIds(NamedTuple):
    """The ids of a call without repeats, shard by shard, ascending on each."""

    ids: Ids
    """(u,) int64, contiguous."""
    bounds: list[int]
    """The ids of shard s are ids[bounds[s] : bounds[s + 1]]."""

    def messages(self, shard_index: int, row_count_max: int) -> list[Span]:
        """Cuts a shard's rows into messages; none if it has none."""
        start, stop = self.bounds[shard_index], self.bounds[shard_index + 1]
        return [
            Span(first, min(first + row_count_max, stop))
            for first in range(start, stop, row_count_max)
        ]

    def shards(self) -> Iterator[int]:
        """Yields the shards that have some of the ids."""
        for shard_index, (start, stop) in enumerate(
            zip(self.bounds, self.bounds[1:], strict=False)
        ):
            if start < stop:
                yield shard_index

    def subset(self, places: Ids) -> ShardedIds:
        """Returns the ids at these indexes, which ascend."""
        bounds = np.searchsorted(places, self.bounds)
        return ShardedIds(self.ids[places], bounds.tolist())


class RowBatch:
    """The ids of one call: (n,) int64, by `as_ids`, with the shape that the caller's had."""

    def __init__(self, ids: Ids, shape: tuple[int, ...], placement: RowPlacement) -> None:
        self.ids = ids
        self.shape = shape
        found = sort_ids(ids, placement)
        self.starts = found.starts
        """(u + 1,): where the places of each distinct id begin in `places`."""
        self.places = found.places
        """(n,): places in `ids`, in the order of `distinct` and then ascending."""
        self.is_plain = found.is_plain
        """True if rows in the order of `distinct` are in the caller's order too."""
        self.inverse = found.inverse
        """(n,): the row, in the order of `distinct`, of each of the caller's ids."""
        distinct = ids if self.is_plain else found.distinct
        self.distinct = ShardedIds(distinct, found.bounds)
        self.has_repeats = distinct.size < ids.size

    def spread(self, rows: Float32, out: Float32) -> None:
        """Gives every one of the caller's ids its row in `out`, (n, dim).

        `rows` are (u, dim), in the order of `distinct`; they may be `out` if `is_plain`.
        """
        if not self.is_plain:
            gather(rows, self.inverse, out)
        elif out is not rows:
            out[...] = rows


class RowSums:
    """The gradients of one call, by distinct id; NonFiniteError names the first that is not finite.

    `gradients` are (n, dim) float32, C-contiguous, in the caller's order; read until the call ends.
    """

    def __init__(
        self, batch: RowBatch, gradients: Float32, table: str, *, allow_non_finite: bool
    ) -> None:
        self._batch = batch
        self.gradients = gradients
        self._table = table
        self._sums: Float32 | None = None
        """(u, dim), in the order of `distinct`; None: no id occurs twice."""
        sums_bits = 0
        if batch.has_repeats:
            self._sums, sums_bits = add_up(gradients, batch.places, batch.starts)
        if not allow_non_finite:
            self._check(sums_bits)

    def rows(self, span: Span) -> Float32:
        """Returns the values of rows `span` of `batch.distinct`: (k, dim) float32, C-contiguous."""
        if self._sums is not None:
            return self._sums[span.start : span.stop]
        if self._batch.is_plain:
            return self.gradients[span.start : span.stop]
        rows = np.empty((span.stop - span.start, self.gradients.shape[1]), np.float32)
        gather(self.gradients, self._batch.places[span.start : span.stop], rows)
        return rows

    def element_index(self, span: Span, index: int) -> int:
        """Returns the index in the caller's array of element `index` of `rows(span)`; -1: none."""
        dim = int(self.gradients.shape[1])
        row, column = divmod(index, dim)
        if not 0 <= row < span.stop - span.start:
            return -1
        return self._first(span.start + row) * dim + column

    def digest(self) -> tuple[int, int]:
        """Returns numbers that tell these ids and gradients from others."""
        return (
            int(crc32.iscsi(self._batch.ids.view(np.uint8).data)),
            int(crc32.iscsi(self.gradients.reshape(-1).view(np.uint8).data)),
        )

    def _first(self, number: int) -> int:
        return int(self._batch.places[self._batch.starts[number]])

    def _check(self, bits: int) -> None:
        gradients = self.gradients
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
