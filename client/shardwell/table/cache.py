"""Rows that a worker fetched lately, so that it need not ask for them again. Pure.

A set-associative cache in whole-array NumPy: an id has one set of four places, chosen by a hash,
and a new row takes the place in turn. For one thread at a time; `view` locks, decides what
may be added, and passes the step.

Invariants: a row is found at most `staleness_steps` steps after the one at which it was added, and
never once `drop` received its id. An `add` that is cut off anywhere leaves places that are empty,
and none that has one row's id and another one's values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwell.errors import ArgumentError
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids, mix

WAY_COUNT = 4
"""Places of a set. Of as many ids as there are places, 63 % find one with 1, 81 % with 4."""
CACHE_ROW_COUNT_MAX = 2**32
_NEVER = -(2**62)


class RowCache:
    """The kept rows by id, each for `staleness_steps` steps after that of its fetch.

    `row_count` is rounded up to a multiple of 4. ArgumentError: there is no memory for so many.
    """

    def __init__(self, row_count: int, dim: int, staleness_steps: int) -> None:
        self._set_count = np.uint64(-(-row_count // WAY_COUNT))
        capacity = int(self._set_count) * WAY_COUNT
        self._staleness_steps = staleness_steps
        try:  # the largest first, so that nothing is touched in vain
            self._rows: Float32 = np.empty((capacity, dim), np.float32)
            self._keys: Ids = np.zeros((int(self._set_count), WAY_COUNT), np.int64)
            self._steps: Ids = np.full(capacity, _NEVER, np.int64)
            self._versions: Ids = np.zeros(capacity, np.int64)
            self._next_ways = np.zeros(int(self._set_count), np.int64)
        except MemoryError:
            raise ArgumentError(
                f"cache_row_count={row_count} with dim {dim} takes "
                f"{capacity * (4 * dim + 26):,} bytes, more than there are; choose fewer"
            ) from None
        self.hit_count = 0
        """Rows that were found; repeated ids of a call count once."""
        self.miss_count = 0

    def find(self, ids: Ids, step: int, rows: Float32) -> tuple[Ids, int | None]:
        """Copies kept rows for `ids`, (u,) int64 without repeats, into `rows`, (u, dim).

        Returns the places in `ids` of the missing ones, ascending, and the lowest version of the
        others; None if there are none.
        """
        found, places = self._located(ids, self._sets_of(ids))
        is_fresh = self._steps[places] >= step - self._staleness_steps
        found, places = found[is_fresh], places[is_fresh]
        if found.size == ids.size:
            np.take(self._rows, places, axis=0, out=rows, mode="clip")
        else:
            rows[found] = self._rows.take(places, axis=0)
        is_missing = np.ones(ids.size, np.bool_)
        is_missing[found] = False
        self.hit_count += found.size
        self.miss_count += ids.size - found.size
        version = int(self._versions[places].min()) if places.size else None
        return np.flatnonzero(is_missing), version

    def add(self, ids: Ids, rows: Float32, step: int, version: int) -> None:
        """Keeps copies of `rows`, (u, dim), fetched for `ids`, (u,) int64 without repeats.

        `step` is the worker's when it asked for them; each has seen `version` at least.
        """
        if not ids.size:
            return
        sets = self._sets_of(ids)
        found, places = self._located(ids, sets)
        is_new = np.ones(ids.size, np.bool_)
        is_new[found] = False
        new, new_places = self._take_places(sets, np.flatnonzero(is_new))
        kept, places = np.concatenate([found, new]), np.concatenate([places, new_places])
        self._steps[places] = _NEVER
        self._keys.reshape(-1)[places] = ids[kept]
        self._rows[places] = rows.take(kept, axis=0)
        self._versions[places] = version
        self._steps[places] = step

    def drop(self, ids: Ids) -> None:
        """Forgets rows."""
        _, places = self._located(ids, self._sets_of(ids))
        self._steps[places] = _NEVER

    def clear(self) -> None:
        """Forgets all rows."""
        self._steps[:] = _NEVER

    def _sets_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        words = mix(ids.view(np.uint64) ^ np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
        words *= self._set_count
        words >>= np.uint64(32)
        return words

    def _located(self, ids: Ids, sets: npt.NDArray[np.uint64]) -> tuple[Ids, Ids]:
        there = np.flatnonzero(self._keys.take(sets, axis=0) == ids[:, np.newaxis])
        found, ways = there // WAY_COUNT, there % WAY_COUNT
        places = sets[found].view(np.int64) * WAY_COUNT + ways
        is_used = self._steps[places] != _NEVER  # a place that was never used has some key, too
        return found[is_used], places[is_used]

    def _take_places(self, sets: npt.NDArray[np.uint64], new: Ids) -> tuple[Ids, Ids]:
        new = new[np.argsort(sets[new], kind="stable")]
        new_sets = sets[new].view(np.int64)
        is_first = np.ones(new.size, np.bool_)
        is_first[1:] = new_sets[1:] != new_sets[:-1]
        starts = np.flatnonzero(is_first)
        counts = np.diff(starts, append=new.size)
        number = np.arange(new.size) - np.repeat(starts, counts)
        has_room = number < WAY_COUNT
        turn = self._next_ways[new_sets] + number
        places = (new_sets * WAY_COUNT + turn % WAY_COUNT)[has_room]
        self._next_ways[new_sets[starts]] += np.minimum(counts, WAY_COUNT)
        return new[has_room], places
