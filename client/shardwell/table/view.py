"""One worker's view of one table: its next step, and the rows that it keeps, with their age.

One object that all calls share: those that send gradients report when a step begins and ends, those
that fetch take rows out of it and leave rows in it. Pure except its lock.

Time is counted by this worker's clock. It goes on by one when a step of this worker ends, and with
each `get_rows` that follows another one without a step between them.

Invariants, whatever threads do, and wherever Ctrl-C comes:

- A row that is found was asked for at most `staleness_steps` of the clock ago.
- It includes every gradient that this worker has sent for it in a step that has ended. So nothing
  is kept of what was fetched while a step of this worker was being sent or was begun by a call that
  failed, of what was asked for before `clear`, or of a version that this worker's last step is not
  in yet.
- The version that comes with found rows is none that one of them has not seen.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell.table.cache import RowCache


class Moment(NamedTuple):
    """The time at which rows were asked for."""

    clock: int
    era: int
    """A number that changes whenever rows asked for before must not be kept any more."""


class TableView:
    """The next step and kept rows of one worker.

    Any thread may use it; steps are for one thread at a time. With `is_sync` versions count steps
    that all workers have ended; with `is_elastic` steps may close without this worker.
    """

    def __init__(self, cache: RowCache | None, *, is_sync: bool, is_elastic: bool = False) -> None:
        self._cache = cache
        self._is_sync = is_sync
        self._reads_back = is_sync and not is_elastic
        """True if rows are read as they were before a step that was begun."""
        self._lock = threading.Lock()
        self._clock = 0
        self._has_put = False
        self._era = 0
        self._is_sending = False
        self.next_step = 0
        self.version = 0
        """Steps that all rows of the last answer have seen."""
        self.max_version: int | None = None
        """The version that this worker reads while some of its next step may be counted; None: the
        newest."""
        self.call_count = 0
        """Calls that fetched rows or sent gradients; prefetches do not count."""

    @property
    def keeps(self) -> bool:
        """True if rows are kept here."""
        return self._cache is not None

    @property
    def known_version(self) -> int:
        """The steps that every shard has seen: all before this worker's last one.

        A shard counts a worker's step when those before it have closed; in asynchronous mode each
        is one.
        """
        return max(self.next_step - 1, 0)

    @property
    def cache_hit_rate(self) -> float:
        """The part of the asked rows that the cache had; 0.0 without a cache."""
        if self._cache is None:
            return 0.0
        asked = self._cache.hit_count + self._cache.miss_count
        return self._cache.hit_count / max(asked, 1)

    # Rows.

    def begin_get(self) -> int:
        """Notes a call of `get_rows`; returns the number of calls before it."""
        with self._lock:
            self._clock += not self._has_put
            self._has_put = False
            self.call_count += 1
            return self.call_count - 1

    def moment(self) -> Moment:
        """Returns the time for `keep`; to be called before rows are asked for."""
        with self._lock:
            return Moment(self._clock, self._era)

    def find(self, ids: Ids, rows: Float32) -> tuple[Ids, int | None] | None:
        """Copies the rows that are kept and new enough into `rows`, (u, dim).

        `ids` are (u,) int64, without repeats. Returns the places of those that are missing,
        ascending, and the version that the others have seen; None if no rows are kept at all.
        """
        if self._cache is None:
            return None
        with self._lock:
            return self._cache.find(ids, self._clock, rows)

    def keep(self, ids: Ids, rows: Float32, version: int, asked: Moment) -> None:
        """Keeps copies of fetched rows, if they may still be used.

        All have seen `version`; `asked` is the result of `moment` before the fetch.
        """
        if self._cache is None:
            return
        with self._lock:
            has_own = not self._is_sync or version >= self.next_step
            if has_own and asked.era == self._era and not self._is_sending:
                self._cache.add(ids, rows, asked.clock, version)

    def clear(self) -> None:
        """Forgets all rows, and those that were asked for and have not come yet."""
        with self._lock:
            self._era += 1
            if self._cache is not None:
                self._cache.clear()

    # Steps.

    def resume(self, next_step: int, *, is_begun: bool, has_seat: bool) -> None:
        """Goes on at another step, which a failed call has begun if `is_begun`.

        With `has_seat` this worker has contributed before, in whichever process.
        """
        with self._lock:
            self.next_step = next_step
            self.max_version = next_step if has_seat and self._reads_back else None
            self._is_sending = is_begun

    def begin_step(self, ids: Ids | None) -> Moment:
        """Begins the next step, before any of it is sent; returns the moment for `end_step`.

        `ids` are the rows that it has gradients for; None: unknown.
        """
        with self._lock:
            self._is_sending = True
            self._era += 1
            self.call_count += 1
            if self._cache is not None:
                if ids is None:
                    self._cache.clear()
                else:
                    self._cache.drop(ids)
            return Moment(self._clock, self._era)

    def go_on_at(self, step: int) -> None:
        """Goes on at a later step than the next one: every shard has closed those before it."""
        with self._lock:
            self.next_step = max(self.next_step, step)

    def end_step(
        self,
        begun: Moment,
        ids: Ids | None = None,
        rows: Float32 | None = None,
        version: int = 0,
        *,
        next_step: int | None = None,
    ) -> None:
        """Ends the step, which all shards have counted; `next_step` None: the next.

        Rows that were fetched after it, without repeats, are kept as copies; all have seen
        `version`.
        """
        with self._lock:
            if self._cache is not None and ids is not None and begun.era == self._era:
                assert rows is not None
                self._cache.add(ids, rows, begun.clock + 1, version)
            self._clock += 1
            self._has_put = True
            self._era += 1  # what was asked for meanwhile may lack the step
            self._is_sending = False
            self.next_step = self.next_step + 1 if next_step is None else next_step
            self.max_version = None

    def fail_step(self, step: int, *, is_begun: bool) -> None:
        """Notes a step that did not end; shards may count some of it if `is_begun`."""
        with self._lock:
            self.next_step = step
            self._is_sending = is_begun
            if is_begun and self._reads_back:
                self.max_version = step
