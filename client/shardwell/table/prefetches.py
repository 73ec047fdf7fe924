"""Rows that were asked for ahead of the call that needs them. Each result is taken once.

Invariant: a result is as old as `PREFETCH_CALL_COUNT_MAX` of the table's further calls at the most.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids

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
    """Steps that all of them have seen; None: there are none."""


class _Entry(NamedTuple):
    ids: Ids
    future: Future[Prefetched]
    call_count: int
    """Calls before it."""


class Prefetches:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []

    def keep(self, ids: Ids, call_count: int, future: Future[Prefetched]) -> None:
        """Keeps a fetch that has begun.

        Args:
            ids: The ids; nobody writes to them.
            call_count: Calls of the table so far.
            future: What comes of it.
        """
        with self._lock:
            self._entries.append(_Entry(ids, future, call_count))
            self._drop(len(self._entries) - PREFETCH_COUNT_MAX)

    def take(self, ids: Ids, call_count: int) -> Future[Prefetched] | None:
        """The oldest result of a fetch for the same ids in the same order; None: there is none.

        Args:
            ids: The ids.
            call_count: Calls of the table before the one that takes.
        """
        with self._lock:
            self._drop_old(call_count)
            found = [np.array_equal(entry.ids, ids) for entry in self._entries]
            future = self._entries.pop(found.index(True)).future if any(found) else None
            self._drop_old(call_count + 1)
        return future

    def clear(self) -> None:
        """Drops all results."""
        with self._lock:
            self._drop(len(self._entries))

    def _drop_old(self, call_count: int) -> None:
        oldest = call_count - PREFETCH_CALL_COUNT_MAX
        self._drop(sum(entry.call_count < oldest for entry in self._entries))

    def _drop(self, count: int) -> None:
        """Drops the oldest."""
        for _ in range(count):
            self._entries.pop(0)
