"""Rows that were asked for ahead of the call that needs them. Each result is taken once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np

from shardwell.codec import Float32
from shardwell.row_placement import Ids

PREFETCH_COUNT_MAX = 4
"""Results that wait to be taken; the oldest gives way to one more."""


class Prefetched(NamedTuple):
    """What a prefetch brought."""

    rows: Float32
    """(n, dim), in the order of the ids."""
    version: int | None
    """See `Table.version`; None: no shard was asked."""


class _Entry(NamedTuple):
    ids: Ids
    future: Future[Prefetched]


class Prefetches:
    """Any thread may use it.

    Args:
        executor: Whose threads fetch.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []

    def begin(self, ids: Ids, fetch: Callable[[], Prefetched]) -> None:
        """Begins a fetch for `ids`, which nobody writes to."""
        entry = _Entry(ids, self._executor.submit(fetch))
        with self._lock:
            self._entries.append(entry)
            dropped = self._entries[:-PREFETCH_COUNT_MAX]
            del self._entries[:-PREFETCH_COUNT_MAX]
        for each in dropped:
            each.future.cancel()  # if it has not begun

    def take(self, ids: Ids) -> Future[Prefetched] | None:
        """The oldest result of a fetch for the same ids in the same order; None: there is none."""
        with self._lock:
            for place, entry in enumerate(self._entries):
                if np.array_equal(entry.ids, ids):
                    del self._entries[place]
                    return entry.future
        return None

    def clear(self) -> None:
        """Drops all results."""
        with self._lock:
            dropped, self._entries = self._entries, []
        for each in dropped:
            each.future.cancel()
