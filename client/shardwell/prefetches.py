"""Rows that were asked for ahead of the call that needs them. Each result is taken once.

Invariant: a result is as old as `PREFETCH_CALL_COUNT_MAX` of the table's further calls at the most.
"""

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
PREFETCH_CALL_COUNT_MAX = 16
"""Further calls for which a result waits: four steps of four calls each, for as many results. It
would else be taken by a call for the same ids an epoch later."""


class Prefetched(NamedTuple):
    """What a prefetch brought."""

    rows: Float32
    """(n, dim), in the order of the ids."""
    version: int | None
    """See `Table.version`; None: no shard was asked."""


class _Entry(NamedTuple):
    ids: Ids
    future: Future[Prefetched]
    call_count: int
    """Calls before it."""


class Prefetches:
    """Any thread may use it.

    Args:
        executor: Whose threads fetch.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._call_count = 0

    def begin(self, ids: Ids, fetch: Callable[[], Prefetched]) -> None:
        """Begins a fetch for `ids`, which nobody writes to."""
        future = self._executor.submit(fetch)
        with self._lock:
            self._entries.append(_Entry(ids, future, self._call_count))
            self._drop(len(self._entries) - PREFETCH_COUNT_MAX)

    def take(self, ids: Ids) -> Future[Prefetched] | None:
        """The oldest result of a fetch for the same ids in the same order; None: there is none.

        To be called by each call that fetches rows, which counts as `passed_by`.
        """
        with self._lock:
            found = [np.array_equal(entry.ids, ids) for entry in self._entries]
            future = self._entries.pop(found.index(True)).future if any(found) else None
            self._passed_by()
        return future

    def passed_by(self) -> None:
        """To be called by each other call, which makes results older."""
        with self._lock:
            self._passed_by()

    def _passed_by(self) -> None:
        self._call_count += 1
        oldest = self._call_count - PREFETCH_CALL_COUNT_MAX
        self._drop(sum(entry.call_count < oldest for entry in self._entries))

    def clear(self) -> None:
        """Drops all results."""
        with self._lock:
            self._drop(len(self._entries))

    def _drop(self, count: int) -> None:
        """Drops the oldest."""
        for _ in range(count):
            self._entries.pop(0).future.cancel()  # if it has not begun
