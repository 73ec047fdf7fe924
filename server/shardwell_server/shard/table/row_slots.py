"""The places of a table's rows in the storage: free ones, new ones, and their limits."""

from __future__ import annotations

import numpy as np

from shardwell.errors import LimitError
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.store.contract import FREE, Places, TableLayout, TableStorage

_SMALLEST_STACK = 1024


class RowSlots:
    """The places of one table. For one thread at a time, except `row_count`.

    Places that rows have left are given out before new ones. Room counts against the owner's budget
    as soon as it is made.
    """

    def __init__(
        self,
        layout: TableLayout,
        storage: TableStorage,
        stored_bytes: OwnedBytes,
        row_count_max: int,
    ) -> None:
        self._layout = layout
        self._storage = storage
        self._stored_bytes = stored_bytes
        self._row_count_max = row_count_max
        self.used = storage.record.row_used
        """Places from 0 to below it have, or had, a row."""
        left = np.flatnonzero(storage.update_counts[: self.used] == FREE)
        self._free: Places = np.empty(max(left.size, _SMALLEST_STACK), np.int64)
        self._free[: left.size] = left
        self._free_count = left.size
        stored_bytes.add(storage.reserved_row_count * layout.row_size_bytes)

    @property
    def row_count(self) -> int:
        return self.used - self._free_count

    def plan(self, count: int) -> Places:
        """Reserves places for new rows, or changes nothing and raises; `take` hands them out."""
        if self.row_count + count > self._row_count_max:
            raise LimitError(
                f"limit table_row_count_max={self._row_count_max}: table {self._layout.name!r} has "
                f"{self.row_count} rows here, {count} more do not fit; evict rows, add shards, or "
                "raise it",
                table=self._layout.name,
            )
        reused = min(count, self._free_count)
        places = np.empty(count, np.int64)
        places[:reused] = self._free[self._free_count - reused : self._free_count]
        needed = self.used + count - reused
        places[reused:] = np.arange(self.used, needed)
        if needed > self._storage.reserved_row_count:
            self._reserve(needed)
        return places

    def take(self, places: Places) -> None:
        """Marks the places of the last `plan` as taken by rows."""
        fresh = int(np.count_nonzero(places >= self.used))
        self.used += fresh
        self._free_count -= places.size - fresh

    def give_back(self, places: Places) -> None:
        """Takes back places that have no rows any more."""
        needed = self._free_count + places.size
        if needed > self._free.size:
            grown = np.empty(max(needed, 2 * self._free.size), np.int64)
            grown[: self._free_count] = self._free[: self._free_count]
            self._free = grown
        self._free[self._free_count : needed] = places
        self._free_count = needed

    def _reserve(self, row_count: int) -> None:
        size_bytes, before = self._layout.row_size_bytes, self._storage.reserved_row_count
        stored = self._stored_bytes
        stored.take(
            (row_count - before) * size_bytes,
            f"table {self._layout.name!r} needs {{}} bytes here",
            "evict rows, add shards, or raise it",
            table=self._layout.name,
        )
        try:
            self._storage.reserve(row_count, row_count + stored.left_bytes // size_bytes)
        except BaseException:
            stored.add((before - row_count) * size_bytes)
            raise
        # The storage may make more room than it was asked for.
        stored.add((self._storage.reserved_row_count - row_count) * size_bytes)
