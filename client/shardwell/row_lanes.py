"""Open streams of rows to the shards: a set for each call that is under way, kept for the next.

A set has at most one lane to each shard, opened when it is first needed. A thread that calls again
and again uses the same set again and again, whichever tables it calls: one that trains thirty has
one stream to each shard. Another call beside it, such as a prefetch, has its own set, so that it
waits for nobody else's answers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from shardwell.channel import ShardChannel
from shardwell.errors import ClosedError, DeadlineError
from shardwell.lane import Lane
from shardwell.siblings import Siblings

LANE_SET_COUNT_MAX = 8
"""Calls on one table that are under way at once; further ones wait."""
IDLE_LANE_SET_COUNT_MAX = 4
"""Sets that a client keeps for later calls: one for those of a thread, others for its prefetches.
Each open stream costs a shard a thread."""


class LaneSet:
    """The lanes of one call. For one thread at a time, but for `close`."""

    def __init__(self) -> None:
        self.siblings = Siblings()
        self._lanes: dict[int, Lane] = {}
        self._tables: dict[int, str] = {}
        """Which table each was used for last."""
        self._closed = False

    def lane(self, channel: ShardChannel, table: str) -> tuple[Lane, bool]:
        """The lane to a shard, and whether the next message must say that it is for this table.

        Raises:
            ClosedError: the table was closed.
        """
        index = channel.shard_index
        lane = self._lanes.get(index)
        if lane is None:
            lane = self._lanes[index] = Lane(channel, channel.exchange_rows, self.siblings)
            if self._closed:  # looked at after the lane could be seen by `close`
                lane.close()
                raise closed_error(table)
        opens = self._tables.get(index) != table
        self._tables[index] = table
        return lane, opens

    @property
    def is_open(self) -> bool:
        """Whether all lanes are alive, as far as is known."""
        return all(lane.is_open for lane in self._lanes.values())

    @property
    def failure(self) -> BaseException | None:
        """What went wrong while messages were made, if anything."""
        return next((lane.failure for lane in self._lanes.values() if lane.failure), None)

    def close(self) -> None:
        """Ends all lanes, and lets none be opened. From any thread; safe to repeat."""
        self._closed = True
        for lane in list(self._lanes.values()):
            lane.close()


class IdleLanes:
    """The sets of a client that no call uses now. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: list[LaneSet] = []
        self._closed = False

    def take(self) -> LaneSet | None:
        """The one that was kept last, if a shard has not ended it since."""
        while True:
            with self._lock:
                if not self._sets:
                    return None
                lanes = self._sets.pop()
            if lanes.is_open:
                return lanes
            lanes.close()

    def keep(self, lanes: LaneSet) -> bool:
        """Keeps a set for another call; False if there are enough."""
        with self._lock:
            if self._closed or len(self._sets) >= IDLE_LANE_SET_COUNT_MAX:
                return False
            self._sets.append(lanes)
            return True

    def close(self) -> None:
        """Ends all, and keeps none from now on. Safe to repeat."""
        with self._lock:
            self._closed = True
            sets, self._sets = self._sets, []
        for lanes in sets:
            lanes.close()


class LanePool:
    """The sets of one table's calls. Any thread may use it.

    Args:
        table: The table's name.
        idle: The client's, of which they come, and to which they go.
    """

    def __init__(self, table: str, idle: IdleLanes) -> None:
        self._table = table
        self._idle = idle
        self._free = threading.Condition()
        self._busy: set[LaneSet] = set()
        self._closed = False

    @contextlib.contextmanager
    def borrowed(self, timeout_s: float) -> Iterator[LaneSet]:
        """A set for the block, kept for another if it ends without an error, and closed if not.

        So no late answer is ever taken for another one's.

        Raises:
            ClosedError: the table was closed.
            DeadlineError: as many calls as there can be are under way, and none ended in time.
        """
        lanes = self._taken(timeout_s)
        try:
            yield lanes
        except BaseException:
            self._give_back(lanes, keep=False)
            raise
        self._give_back(lanes, keep=True)

    def close(self) -> None:
        """Ends the lanes of all calls and lets none begin. Safe to repeat."""
        with self._free:
            self._closed = True
            sets = list(self._busy)
            self._free.notify_all()
        for lanes in sets:
            lanes.close()

    def _taken(self, timeout_s: float) -> LaneSet:
        with self._free:
            if not self._free.wait_for(
                lambda: self._closed or len(self._busy) < LANE_SET_COUNT_MAX, timeout_s
            ):
                raise DeadlineError(
                    f"{LANE_SET_COUNT_MAX} calls of other threads on table {self._table!r} took "
                    f"longer than {timeout_s:.3g} s; raise timeout_s, or call from fewer threads",
                    table=self._table,
                )
            if self._closed:
                raise closed_error(self._table)
            lanes = self._idle.take() or LaneSet()
            self._busy.add(lanes)
        return lanes

    def _give_back(self, lanes: LaneSet, *, keep: bool) -> None:
        with self._free:
            self._busy.discard(lanes)
            is_kept = keep and not self._closed and self._idle.keep(lanes)
            self._free.notify()
        if not is_kept:
            lanes.close()


def closed_error(table: str) -> ClosedError:
    """What calls of a table end with once it is closed."""
    return ClosedError(
        f"table {table!r} was closed, or its client was; open it again, or connect again",
        table=table,
    )
