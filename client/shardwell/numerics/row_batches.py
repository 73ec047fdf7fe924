"""Rows of a call or a message: ids put in order, rows gathered, scattered, added up, spread. Pure.

As in elementwise.py, native code does it where it could be built (native/rows.c), and NumPy
elsewhere, with the same results, bit for bit. Rows are those of an array's first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwell.numerics import native
from shardwell.numerics.elementwise import Code, Operation, Operations, packed, run
from shardwell.placement.rows import Ids, RowPlacement

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

_DIGIT_BITS = 16
"""NumPy sorts 16-bit integers by radix, in linear time."""
_RADIX_COUNT_MIN = 1024
"""For fewer ids one sort of 64-bit integers is faster than two by radix."""
_RADIX_COUNT_MIN_OF_WIDE = 16 * 1024
"""The count from which radix sorts are faster, where ids take more than two digits."""
_SEGMENT_ROW_COUNT = 8
"""Rows that are added up one after another; bounds the rounding error, too."""
_LEVEL_COUNT = 12
"""The number in rows.c."""
_LOOKS = (Operation(Code.LOOK_32, 0, 0),)


class SortedIds(NamedTuple):
    """Ids without repeats, shard by shard, ascending on each; and where they come from."""

    distinct: Ids
    bounds: list[int]
    """Shard s has distinct[bounds[s] : bounds[s + 1]]."""
    starts: Ids
    """(u + 1,): where the places of each begin in `places`."""
    places: Ids
    """(n,): places in the ids as they were, by distinct id and then ascending."""
    inverse: Ids
    """(n,): the number in `distinct` of each of the ids as they were."""
    is_plain: bool
    """True if they were as `distinct` is."""


def sort_ids(ids: Ids, placement: RowPlacement) -> SortedIds:
    """Puts the ids of a call, (n,) int64, contiguous, in the order in which they travel."""
    library = native.LIBRARY
    if library is None:
        return _sort_ids_by_numpy(ids, placement)
    count, shard_count = ids.size, placement.shard_count
    numbers = np.empty(8 * count + shard_count + 2, np.int64)
    found = _checked(library.sort_ids(ids, placement.row_count or 0, shard_count, numbers))
    distinct_count, start = found >> 1, shard_count + 1
    places = start + 2 * count + 1
    return SortedIds(
        numbers[start : start + distinct_count],
        numbers[:start].tolist(),
        numbers[start + count : start + count + distinct_count + 1],
        numbers[places : places + count],
        numbers[places + count : places + 2 * count],
        bool(found & 1),
    )


def _sort_ids_by_numpy(ids: Ids, placement: RowPlacement) -> SortedIds:
    count, shard_count = ids.size, placement.shard_count
    if not count:
        return SortedIds(ids, [0] * (shard_count + 1), np.zeros(1, np.int64), ids, ids, True)
    order = stable_order(ids)
    ascending = ids[order]
    is_first = np.ones(count, np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    begins = np.flatnonzero(is_first)
    counts = np.diff(begins, append=count)
    shards = placement.shards_of(ascending[begins])
    by_shard = np.argsort(shards.astype(np.uint16), kind="stable")
    bounds = np.bincount(shards, minlength=shard_count).cumsum().tolist()
    starts = np.zeros(begins.size + 1, np.int64)
    np.cumsum(counts[by_shard], out=starts[1:])
    number = np.empty(begins.size, np.int64)
    number[by_shard] = np.arange(begins.size)
    inverse = np.empty(count, np.int64)
    inverse[order] = number[np.cumsum(is_first) - 1]
    places = np.argsort(inverse, kind="stable")
    is_plain = begins.size == count and bool((places == np.arange(count)).all())
    return SortedIds(ascending[begins][by_shard], [0, *bounds], starts, places, inverse, is_plain)


def stable_order(ids: Ids) -> Ids:
    """The places of the ids, (n,), ascending, equal ones by place: radix sorts of 16-bit digits."""
    low = ids.min()
    digit_count = -(-(int(ids.max()) - int(low)).bit_length() // _DIGIT_BITS)
    if ids.size < (_RADIX_COUNT_MIN if digit_count <= 2 else _RADIX_COUNT_MIN_OF_WIDE):
        return np.argsort(ids, kind="stable")
    words = ids.view(np.uint64) - low.view(np.uint64)
    order = np.argsort(words.astype(np.uint16), kind="stable")
    for digit in range(1, digit_count):
        digits = (words >> np.uint64(_DIGIT_BITS * digit)).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def are_fit(ids: Ids, placement: RowPlacement, shard_index: int) -> bool:
    """True if (n,) ids ascend without repeats, are in range, and of a shard."""
    library = native.LIBRARY
    if library is not None:
        row_count = placement.row_count or 0
        found = library.check_ids(ids, row_count, placement.shard_count, shard_index)
        return found != _REFUSED and _checked(found) == 0
    if not ids.size:
        return True
    if not bool((ids[1:] > ids[:-1]).all()):
        return False
    if placement.row_count is not None and not 0 <= ids[0] <= ids[-1] < placement.row_count:
        return False
    is_one = placement.shard_count == 1
    return is_one or bool((placement.shards_of(ids) == shard_index).all())


def find(ids: Ids, placement: RowPlacement, marks: Array) -> tuple[Ids, int]:
    """The place of each id of this shard, or -1, and how many have none.

    `marks` are (local rows,): a place plus 1, or 0, by number among the shard's rows.
    """
    library = native.LIBRARY
    if library is not None:
        places = np.empty(ids.size, np.int64)
        found = library.find(ids, placement.shard_count, marks, marks.itemsize, places)
        return places, _checked(found)
    taken = np.take(marks, placement.local_rows(ids), mode="clip")
    places = np.subtract(taken, 1, dtype=np.int64)
    return places, int(np.count_nonzero(places < 0))


def gather(array: Array, places: Ids, into: Array, *, may_wait: bool = False) -> None:
    """Copies rows to the beginning of `into`, C-contiguous; those of places at -1 have no meaning.

    With `may_wait` the array may have to come from a disk, so that the GIL is let go of.
    """
    library = native.LIBRARY
    if library is not None:
        _checked(library.gather(array, array.strides[0], places, into, may_wait))
    elif places.size:  # "clip", unlike "raise", is unbuffered
        np.take(array, places, axis=0, out=into[: places.size], mode="clip")


def scatter(array: Array, places: Ids, rows: Array) -> None:
    """Sets array[places] = rows, of (n, width) and without repeats, each row as one item."""
    library = native.LIBRARY
    if library is not None:
        _checked(library.scatter(array, array.strides[0], places, rows, 0))
        return
    item = np.dtype((np.void, array.strides[0]))
    array.view(item).reshape(-1)[places] = rows.view(item).reshape(-1)


def update(
    operations: Operations,
    gradients: Float32,
    places: Ids,
    arrays: Sequence[Float32],
    saved: Sequence[Float32],
) -> None:
    """Runs an optimizer's operations (update_rules.py) on rows where they lie, C-contiguous.

    `gradients` are (n, dim), overwritten; `places` (n,), without repeats; `arrays` weights, and at
    most one array of state: (rows, dim); `saved`, for each, is filled with the rows before.
    """
    library = native.LIBRARY
    if library is not None:
        code = packed(operations)
        slots, saved_slots = (arrays[1], saved[1]) if len(arrays) > 1 else (None, None)
        what = (code, len(operations), gradients, places, gradients.shape[1])
        _checked(library.update(*what, arrays[0], saved[0], slots is not None, slots, saved_slots))
        return
    rows = []
    for array, kept in zip(arrays, saved, strict=True):
        gather(array, places, kept)
        rows.append(kept[: places.size].copy())
    of_elements = (rows[0], gradients, None, *rows[1:])
    every = tuple(None if each is None else each.reshape(-1) for each in of_elements)
    run(operations, every, 0, gradients.size)
    for array, new in zip(arrays, rows, strict=True):
        scatter(array, places, new)


def can_spread() -> bool:
    """True if `spread` is one pass here."""
    return native.LIBRARY is not None and native.LIBRARY.checks


def spread(
    reads: Operations,
    payload: Array,
    places: Ids,
    starts: Ids,
    first: int,
    stop: int,
    into: Float32,
    crc: int,
) -> int:
    """Reads rows [first, stop) of distinct ids into all places that each has, in one pass.

    To be called where `can_spread`. Returns `crc` gone on over the payload.
    """
    library = native.LIBRARY
    assert library is not None
    code = packed(reads)
    dim = into.shape[1]
    return _checked(library.spread(code, payload, dim, places, starts, first, stop, into, crc))


def add_up(rows: Float32, places: Ids, starts: Ids) -> tuple[Float32, int]:
    """The sum of each group of rows, which depends on those and their order alone.

    In segments of up to 8, each added up from its first on, and the segments' sums again like that.
    Returns (g, dim) sums, and the largest magnitude of those of several rows, as bits.
    """
    group_count, dim = starts.size - 1, rows.shape[1]
    sums = np.empty((group_count, dim), np.float32)
    library = native.LIBRARY
    if library is not None:
        levels = np.empty((_LEVEL_COUNT, dim), np.float32)
        return sums, _checked(library.add_up(rows, dim, places, starts, sums, levels))
    counts = np.diff(starts)
    np.take(rows, places[starts[:-1]], axis=0, out=sums, mode="clip")
    several = np.flatnonzero(counts > 1)
    if not several.size:
        return sums, 0
    with np.errstate(over="ignore", invalid="ignore"):
        found = _groups_added(rows, places, starts[several], counts[several])
    sums[several] = found
    return sums, run(_LOOKS, (found.reshape(-1),), 0, found.size)


def _groups_added(rows: Float32, order: Ids, starts: Ids, counts: Ids) -> Float32:
    while True:
        rows, counts = _segments_added(rows, order, starts, counts)
        if rows.shape[0] == counts.size:
            return rows
        order, starts = np.arange(rows.shape[0]), np.cumsum(counts) - counts


def _segments_added(rows: Float32, order: Ids, starts: Ids, counts: Ids) -> tuple[Float32, Ids]:
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


_REFUSED = -3


def _checked(found: Any) -> int:
    if found < 0:
        raise ValueError("rows that do not fit their arrays")
    return int(found)
