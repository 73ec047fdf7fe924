"""Batches of rows that callers pass: accepted, converted or refused with a reason."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.numerics.arguments import as_flat, as_output
from shardwell.numerics.codec import Float32
from shardwell_server.store.gradient_rows import Rows, first_bad_cell, merge_repeats


def check_row_id(row_id: Any) -> int:
    """An integer of any integer type; ArgumentError: it is none."""
    if not isinstance(row_id, (bool, np.bool_)):
        try:
            return operator.index(row_id)
        except TypeError:
            pass
    raise ArgumentError(f"row_id must be an integer; got {row_id!r:.80}")


def check_row(row_id: Any, row_count: int) -> int:
    """The number of a row; ArgumentError: it is no integer, or out of range."""
    row = check_row_id(row_id)
    if not 0 <= row < row_count:
        raise ArgumentError(f"row_id must be from 0 to {row_count - 1}; got {row}")
    return row


def check_gradient(row: int, gradient: Any, dim: int) -> Float32:
    """(1, dim) float32: one row's gradient, which may be the caller's array.

    ArgumentError: another type, dtype or length. NonFiniteError: it has NaN or infinity.
    """
    return _finite(f"gradient of row {row}", gradient, (1, dim), "skip it, or mend it")


def check_batch(row_ids: Any, gradients: Any, row_count: int, dim: int) -> tuple[Rows, Float32]:
    """Rows, ascending without repeats, and (n, dim) float32: the sums of their gradients.

    `row_ids` are an array of any shape, or a list; `gradients` have one dimension more.
    ArgumentError names the first bad row. NonFiniteError: a gradient, or their sum for one row, is
    not finite; `element_index` is the first one's place in `gradients`, or -1.
    """
    ids = np.asarray(row_ids)
    if ids.size == 0 and not hasattr(row_ids, "dtype"):
        ids = ids.astype(np.int64)  # an empty list
    if ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"row_ids must be integers; got {ids.dtype}; convert them with .astype(np.int64)"
        )
    shape = (*ids.shape, dim)
    found = getattr(gradients, "shape", None)
    if found is not None and tuple(found) != shape:
        raise ArgumentError(
            f"gradients must have shape {shape}, that of row_ids {ids.shape} and dim; got "
            f"{tuple(found)}"
        )
    flat = ids.reshape(-1)
    if flat.size and not (flat.min() >= 0 and flat.max() < row_count):
        first = int(np.argmax((flat < 0) | (flat >= row_count)))
        raise ArgumentError(
            f"row_ids must be from 0 to {row_count - 1}; got {flat[first]} at place {first}"
        )
    values = _finite("gradients", gradients, (flat.size, dim), "skip the batch, or mend it")
    rows, merged = merge_repeats(np.require(flat, np.int64, ("C", "A", "E")), values)
    if merged is not values:
        bad = first_bad_cell(merged)
        if bad is not None:
            raise NonFiniteError(
                f"the gradients of row {rows[bad.row]} add up to {merged[bad]} in column "
                f"{bad.column}, beyond float32; scale them down"
            )
    return rows, merged


def check_rows(rows: Any, row_count: int, dim: int) -> Float32:
    """The caller's (row_count, dim) array, to be written in place; ArgumentError: it can't be."""
    as_output(rows, row_count * dim, "rows")
    if rows.shape != (row_count, dim):
        raise ArgumentError(f"rows must have shape {(row_count, dim)}; got {rows.shape}")
    return np.asarray(rows)


def _finite(what: str, values: Any, shape: tuple[int, int], remedy: str) -> Float32:
    flat = as_flat(what, values, shape[0] * shape[1])
    with np.errstate(over="ignore"):
        floats: Float32 = np.require(flat, np.float32, ("C", "A", "E")).reshape(shape)
    bad = first_bad_cell(floats)
    if bad is not None:
        index = bad.row * shape[1] + bad.column
        raise NonFiniteError(
            f"{what}: element {index} is {flat[index]}, which is not a finite float32; {remedy}",
            element_index=index,
        )
    return floats
