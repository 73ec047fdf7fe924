"""Rows for one table's callers: from the worker's cache, from a prefetch, or from the shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np

from shardwell.codec import Float32
from shardwell.errors import ClosedError, ShardwellError
from shardwell.prefetches import Prefetched, Prefetches
from shardwell.retry import Attempts
from shardwell.row_batches import RowBatch, ShardedIds
from shardwell.row_cache import RowCache
from shardwell.row_placement import Ids
from shardwell.row_transfer import RowFetch, RowTransfer
from shardwell.table_streams import TableStreams
from shardwell.turns import Turns


class RowReading:
    """Any thread may use it.

    Args:
        dim: The table's.
        transfer: Of its rows.
        streams: To its shards.
        turns: Its.
        executor: Whose threads prefetch.
        cache: None: every row is asked for.
        known_version: Steps that this worker knows to have closed on every shard.
    """

    def __init__(
        self,
        dim: int,
        *,
        transfer: RowTransfer,
        streams: TableStreams,
        turns: Turns,
        executor: Executor,
        cache: RowCache | None,
        known_version: Callable[[], int],
    ) -> None:
        self._dim = dim
        self._transfer = transfer
        self._streams = streams
        self._turns = turns
        self._prefetches = Prefetches(executor)
        self._cache = cache
        self._known_version = known_version
        self._lock = threading.Lock()
        self._step = 0
        self._has_put = False

    def read(
        self, batch: RowBatch, out: Float32, min_version: int, attempts: Attempts
    ) -> int | None:
        """Fills `out`, (n, dim), with the rows of a batch.

        Returns:
            Steps that what was fetched has seen, at least; None if nothing was.
        """
        ids = batch.distinct
        rows = self._room(batch, out)
        version: int | None = None
        if self._cache is None:
            version = self._fetch(ids, rows, min_version, attempts)
        else:
            step, begun, missing = self._found(self._cache, ids.ids, rows, min_version)
            if missing.size:
                fetched = np.empty((missing.size, self._dim), np.float32)
                wanted = ids.subset(missing)
                version = self._fetch(wanted, fetched, min_version, attempts)
                rows[missing] = fetched
                with self._lock:
                    self._cache.add(wanted.ids, fetched, step, begun)
        batch.spread(rows, out)
        return version

    def question(self, batch: RowBatch, out: Float32) -> RowFetch:
        """A fetch of all rows of a batch, whatever is in the cache; `answered` ends it."""
        return RowFetch(
            batch.distinct,
            self._room(batch, out),
            row_count_max=self._transfer.row_count_max,
        )

    def answered(self, batch: RowBatch, fetch: RowFetch, out: Float32) -> None:
        """Fills `out` with what a question has brought after this worker's last gradient."""
        batch.spread(fetch.rows, out)
        if self._cache is not None:
            with self._lock:
                self._cache.add(batch.distinct.ids, fetch.rows, self._step, self._cache.begin())

    def pushed(self, ids: Ids) -> None:
        """Notes that this worker has sent gradients for rows, which ends one of its steps."""
        self._prefetches.passed_by()
        with self._lock:
            self._step += 1
            self._has_put = True
            if self._cache is not None:
                self._cache.drop(ids)

    def forget(self) -> None:
        """Drops all that was fetched before."""
        self._prefetches.clear()
        with self._lock:
            if self._cache is not None:
                self._cache.clear()

    # Ahead of time.

    def prefetch(self, batch: RowBatch, ids: Ids) -> None:
        """Begins to fetch a batch, whose ids `ids` nobody writes to."""

        def fetch() -> Prefetched:
            out = np.empty((ids.size, self._dim), np.float32)
            version = self.read(batch, out, 0, self._turns.attempts(None))
            return Prefetched(out, version)

        self._turns.check_open()
        try:
            self._prefetches.begin(ids, fetch)
        except RuntimeError as error:  # the executor's, when it was shut down meanwhile
            self._turns.check_open(error)
            raise

    def prefetched(self, ids: Ids, min_version: int, attempts: Attempts) -> Prefetched | None:
        """What was prefetched for the same ids, once it has come; None: they are to be read.

        One that failed, or has not come before the deadline, is none: whoever reads, in the moment
        that is left to any attempt, is told which shard does not answer.

        Raises:
            ClosedError: the table or the client was closed.
        """
        future = self._prefetches.take(ids)
        if future is None:
            return None
        try:
            found = future.result(attempts.rest_s)
        except ClosedError:
            raise
        except (FutureTimeoutError, ShardwellError, CancelledError):
            return None
        return found if min_version <= (found.version or 0) else None

    def _room(self, batch: RowBatch, out: Float32) -> Float32:
        """Where a batch's distinct rows are put before they are spread: `out` itself, if it can."""
        if batch.is_plain:
            return out
        return np.empty((batch.distinct.ids.size, self._dim), np.float32)

    def _found(
        self, cache: RowCache, ids: Ids, rows: Float32, min_version: int
    ) -> tuple[int, int, Ids]:
        """Takes what is in the cache; the step, what `begin` said, and places that are missing."""
        with self._lock:
            self._step += not self._has_put  # one who puts nothing grows older by its fetches
            self._has_put = False
            begun = cache.begin()
            if min_version:  # of a row in the cache it isn't known
                return self._step, begun, np.arange(ids.size)
            return self._step, begun, cache.find(ids, self._step, rows)

    def _fetch(
        self, ids: ShardedIds, rows: Float32, min_version: int, attempts: Attempts
    ) -> int | None:
        fetch = RowFetch(
            ids,
            rows,
            row_count_max=self._transfer.row_count_max,
            min_version=min_version,
            known_version=self._known_version(),
        )
        self._turns.run(attempts, lambda: self._streams.attempt(None, fetch, attempts.rest_s))
        return int(fetch.version) if ids.ids.size else None
