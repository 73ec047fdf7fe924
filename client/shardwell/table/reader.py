"""Rows for one table's callers: from what the worker keeps, a prefetch, or the shards.

A prefetch asks for rows ahead of the call that needs them. Its result is taken once, and is as old
as `PREFETCH_CALL_COUNT_MAX` of the table's further calls at the most.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwell.errors import ClosedError, ShardwellError
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell.rpc.call_scope import CallScope
from shardwell.rpc.retry import Attempts
from shardwell.table.batch import RowBatch, ShardedIds
from shardwell.table.exchange import RowFetch, RowTransfer
from shardwell.table.view import TableView
from shardwell.threads.calls import cancelled_by

PREFETCH_COUNT_MAX = 4
"""Results that wait to be taken; the oldest gives way to one more."""
PREFETCH_CALL_COUNT_MAX = 16
"""Further calls for which a result waits: four steps of four calls each, for as many results. It
would else be taken by a call for the same ids an epoch later."""


class Prefetched(NamedTuple):
    """The rows of a prefetch."""

    rows: Float32
    version: int | None
    """Steps that all of them have seen; None: there are none."""


class _Entry(NamedTuple):
    ids: Ids
    future: Future[Prefetched]
    call_count: int


class Prefetches:
    """The results that wait to be taken. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []

    def keep(self, ids: Ids, call_count: int, future: Future[Prefetched]) -> None:
        """Keeps a fetch that has begun for `ids`, which do not change."""
        with self._lock:
            self._entries = [*self._entries, _Entry(ids, future, call_count)][-PREFETCH_COUNT_MAX:]

    def take(self, ids: Ids, call_count: int) -> Future[Prefetched] | None:
        """Returns the oldest fetch of these ids in this order; None: no such fetch."""
        oldest = call_count - PREFETCH_CALL_COUNT_MAX
        with self._lock:
            waiting = [each for each in self._entries if each.call_count >= oldest]
            taken = next((each for each in waiting if np.array_equal(each.ids, ids)), None)
            self._entries = [
                each for each in waiting if each is not taken and each.call_count > oldest
            ]
        return None if taken is None else taken.future

    def clear(self) -> None:
        """Drops all results."""
        with self._lock:
            self._entries = []


@dataclass(eq=False)
class RowReading:
    """The reading of one table's rows, on any thread."""

    dim: int
    every_shard: int
    """Of an elastic table, the number of shards: a fetch may ask them all for its step."""
    transfer: RowTransfer
    calls: CallScope
    view: TableView
    prefetches: Prefetches = field(default_factory=Prefetches)

    def read(
        self, batch: RowBatch, out: Float32, min_version: int, attempts: Attempts
    ) -> int | None:
        """Fills `out`, (n, dim); returns the steps that all rows have seen, None without rows."""
        if min_version or not self.view.keeps:
            return self._read_anew(batch, out, min_version, attempts)
        ids = batch.distinct
        rows = self._room(batch, out)
        found = self.view.find(ids.ids, rows)
        if found is None:
            return self._read_anew(batch, out, min_version, attempts)
        missing, version = found
        if missing.size:
            fetched = np.empty((missing.size, self.dim), np.float32)
            fetch = self._asking(ids.subset(missing), fetched, None)
            newer = self._fetched(fetch, 0, attempts)
            rows[missing] = fetched
            version = newer if version is None else min(version, newer)
        batch.spread(rows, out)
        return version

    def question(self, batch: RowBatch, out: Float32) -> RowFetch:
        """Returns a fetch of all rows of a batch, kept or not; `finish` ends it."""
        if self.view.keeps:
            return self._asking(batch.distinct, self._room(batch, out), None)
        return self._asking(batch.distinct, out, batch)

    def finish(self, batch: RowBatch, fetch: RowFetch, out: Float32) -> None:
        """Fills `out` with the rows that a `question` brought."""
        if self.view.keeps:
            batch.spread(fetch.rows, out)

    def _asking(self, ids: ShardedIds, rows: Float32, batch: RowBatch | None) -> RowFetch:
        if batch is None:
            places = np.arange(ids.ids.size + 1)
            places, starts = places[:-1], places
        else:
            places, starts = batch.places, batch.starts
        return RowFetch(ids, rows, places, starts, self.transfer.row_count_max)

    def forget(self) -> None:
        """Drops all that was fetched before."""
        self.prefetches.clear()
        self.view.clear()

    # Ahead of time.

    def prefetch(self, batch: RowBatch, ids: Ids, min_version: int) -> None:
        """Begins to fetch all rows of a batch, kept or not; `ids` must not change."""

        def fetch(attempts: Attempts) -> Prefetched:
            out = np.empty((ids.size, self.dim), np.float32)
            return Prefetched(out, self._read_anew(batch, out, min_version, attempts))

        call_count = self.view.call_count
        self.prefetches.keep(ids, call_count, self.calls.start(fetch))

    def prefetched(self, ids: Ids, min_version: int, attempts: Attempts) -> Prefetched | None:
        """Returns the rows prefetched for these ids, once they have come; None: read them.

        To be called once by each `get_rows`. A prefetch that failed, or has not come before the
        deadline, is None: the read, in the moment that any attempt has left, finds out which shard
        does not answer.
        """
        future = self.prefetches.take(ids, self.view.begin_get())
        if future is None:
            return None
        come = threading.Event()
        future.add_done_callback(lambda _: come.set())
        with cancelled_by(come.set):
            come.wait(attempts.rest_s)
        if not future.done():
            return None
        try:
            found = future.result()
        except ClosedError:
            raise
        except ShardwellError:
            return None
        return found if min_version <= (found.version or 0) else None

    def _room(self, batch: RowBatch, out: Float32) -> Float32:
        """Returns memory for a batch's distinct rows before they are spread: `out`, if it can."""
        if batch.is_plain:
            return out
        return np.empty((batch.distinct.ids.size, self.dim), np.float32)

    def _read_anew(
        self, batch: RowBatch, out: Float32, min_version: int, attempts: Attempts
    ) -> int | None:
        if not batch.distinct.ids.size:
            return None
        fetch = self.question(batch, out)
        version = self._fetched(fetch, min_version, attempts)
        self.finish(batch, fetch, out)
        return version

    def _fetched(self, fetch: RowFetch, min_version: int, attempts: Attempts) -> int:
        asked = self.view.moment()
        fetch.min_version, fetch.known_version = min_version, self.view.known_version
        fetch.max_version = self.view.max_version
        attempts.run(lambda: self.transfer.attempt(None, fetch, attempts))
        version = int(fetch.version)
        if fetch.shard_count == self.every_shard:  # a gradient of these rows is of their version
            self.view.go_on_at(version)
        self.view.keep(fetch.ids.ids, fetch.rows, version, asked)
        return version
