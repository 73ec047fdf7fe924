"""Batches cut among workers, and what came of their parts put together again. Pure.

A batch is one of:
    an array              one sample for each row (first axis); anything with a `shape` that can be
                          sliced, such as a tensor or a data frame, counts as one
    a list, range, ...    its items are the samples
    a tuple of arrays     columns of equal length, such as (images, labels): sample i is row i of
                          each. To have arrays taken as samples, pass a list of them
    any other tuple       its items are the samples
    a dict                columns by name, each itself a batch, of equal length
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import as_flat, check_integer
from shardwell.numerics.codec import Float32
from shardwell.specs.parameter import WORKER_COUNT_MAX

_MERGED_SAMPLE_COUNT_MAX = 2**62
"""More than can ever be processed: what was merged can be merged again."""


def split_batch(batch: Any, worker_count: int) -> list[Any]:
    """Deals the samples round-robin: sample i is worker (i % worker_count)'s, in the same order.

    So shares differ by one sample at most, and the last ones may be empty.

    Args:
        batch: See the module. It is not copied: shares of arrays are views.
        worker_count: At least 1.

    Returns:
        `worker_count` shares, each of the batch's kind; none of an empty batch.

    Raises:
        ArgumentError: it is no batch, or its columns have unequal lengths.

    Examples:
        >>> shardwell.split_batch(np.arange(5), worker_count=2)
        [array([0, 2, 4]), array([1, 3])]
    """
    check_integer("worker_count", worker_count, 1, WORKER_COUNT_MAX)
    if not count_samples(batch):
        return []
    return [_cut(batch, slice(rank, None, worker_count)) for rank in range(worker_count)]


def share_of(batch: Any, worker_count: int, rank: int) -> Any:
    """Returns `split_batch(batch, worker_count)[rank]`, without the others."""
    check_integer("rank", rank, 0, worker_count - 1)
    count_samples(batch)
    return _cut(batch, slice(rank, None, worker_count))


def micro_batches(batch: Any, size: int) -> list[Any]:
    """The batch in runs of `size` samples, the last one shorter; none of an empty batch."""
    count = count_samples(batch)
    return [_cut(batch, slice(start, start + size)) for start in range(0, count, size)]


def count_samples(batch: Any) -> int:
    """Counts samples; ArgumentError: it is no batch, or its columns have unequal lengths."""
    columns = _columns(batch)
    if columns is not None:
        counts = {name: count_samples(column) for name, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise ArgumentError(
                f"columns of a batch must have equal lengths; got {counts!r:.200}; to have a tuple "
                "of arrays taken as samples, pass a list"
            )
        return next(iter(counts.values()), 0)
    if _is_array(batch):
        return int(batch.shape[0])
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes, bytearray)):
        return len(batch)
    raise ArgumentError(
        "a batch must be an array with a first axis, a list of samples, or a tuple or dict of "
        f"arrays of equal length; got {type(batch).__name__}"
    )


@dataclass(frozen=True, kw_only=True)
class Update:
    """The result of some samples.

    Examples:
        >>> update = shardwell.Update(gradient=np.ones(2), loss=0.5, sample_count=32)
    """

    gradient: Any
    """Mean gradient of the samples: float32 (or float64, float16) of any shape."""
    loss: float
    """Their mean loss."""
    sample_count: int
    """The number of samples, 0 to 2^62; what is put into a sync has 2^24 at the most."""


def merge_updates(updates: Iterable[Update]) -> Update:
    """Averages gradients and losses, weighted by the samples processed.

    The updates are read one after another, and not kept. Lengths may differ: short gradients count
    as padded with zeros. Of no updates, or of no samples, come zeros. Sums are float64, in the
    order of the updates. NaN and infinity go through, except of an update without samples, whose
    values count for nothing.

    Returns:
        The mean: `gradient` is (n,) float32 and new, n the longest length.

    Raises:
        ArgumentError: a gradient or a count can't be used.

    Examples:
        >>> parts = [
        ...     shardwell.Update(gradient=np.ones(2), loss=1.0, sample_count=1),
        ...     shardwell.Update(gradient=np.zeros(2), loss=0.0, sample_count=3),
        ... ]
        >>> shardwell.merge_updates(parts).loss
        0.25
    """
    total: npt.NDArray[np.float64] = np.zeros(0)
    total_loss, total_count = 0.0, 0
    for update in updates:
        flat = as_flat("gradient of an update", update.gradient, None)
        what = "sample_count of an update"
        count = check_integer(what, update.sample_count, 0, _MERGED_SAMPLE_COUNT_MAX)
        if flat.size > total.size:
            total = np.concatenate((total, np.zeros(flat.size - total.size)))
        if count:
            with np.errstate(all="ignore"):
                total[: flat.size] += np.multiply(flat, float(count), dtype=np.float64)
            total_loss += count * float(update.loss)
            total_count += count
    whole = max(total_count, 1)
    with np.errstate(all="ignore"):
        gradient: Float32 = (total / whole).astype(np.float32)
    return Update(gradient=gradient, loss=total_loss / whole, sample_count=total_count)


def _is_array(batch: Any) -> bool:
    shape = getattr(batch, "shape", None)
    return shape is not None and len(shape) >= 1


def _columns(batch: Any) -> dict[Any, Any] | None:
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple) and batch and all(map(_is_array, batch)):
        return dict(enumerate(batch))
    return None


def _cut(batch: Any, rows: slice) -> Any:
    columns = _columns(batch)
    if columns is None:
        return batch[rows]
    parts = {name: _cut(column, rows) for name, column in columns.items()}
    if isinstance(batch, Mapping):
        return parts
    make = getattr(batch, "_make", tuple)  # a named tuple stays one
    return make(parts.values())
