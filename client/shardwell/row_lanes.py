"""One table's open streams to the shards: a set for each call that is under way, kept for the next.

A set has at most one lane to each shard, opened when it is first needed. A thread that calls again
and again uses the same set again and again; another one beside it, such as a prefetch, has its own,
so that it waits for nobody else's answers.
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
IDLE_LANE_SET_COUNT_MAX = 2
"""Sets that are kept for later calls: one for those of a thread, one for its prefetches. Each open
stream costs a shard a thread."""


class LaneSet:
    """The lanes of one call. For one thread at a time, but for `close`."""

    def __init__(self, table: str) -> None:
        self.siblings = Siblings()
        self._table = table
        self._lanes: dict[int, Lane] = {}
        self._closed = False

    def lane(self, channel: ShardChannel) -> tuple[Lane, bool]:
        """The lane to a shard, and whether it is new.

        Raises:
            ClosedError: the table was closed.
        """
        lane = self._lanes.get(channel.shard_index)
        if lane is not None:
            return lane, False
        lane = self._lanes[channel.shard_index] = Lane(
            channel, channel.exchange_rows, self.siblings
        )
        if self._closed:  # looked at after the lane could be seen by `close`
            lane.close()
            raise closed_error(self._table)
        return lane, True

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


class LanePool:
    """Any thread may use it."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._free = threading.Condition()
        self._idle: list[LaneSet] = []
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
        """Ends all lanes and lets no call begin. Safe to repeat."""
        with self._free:
            self._closed = True
            sets = [*self._idle, *self._busy]
            self._idle.clear()
            self._free.notify_all()
        for lanes in sets:
            lanes.close()

    def _taken(self, timeout_s: float) -> LaneSet:
        dead = None
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
            lanes = self._idle.pop() if self._idle else LaneSet(self._table)
            if not lanes.is_open:  # the shard went away between calls
                dead, lanes = lanes, LaneSet(self._table)
            self._busy.add(lanes)
        if dead is not None:
            dead.close()
        return lanes

    def _give_back(self, lanes: LaneSet, *, keep: bool) -> None:
        with self._free:
            self._busy.discard(lanes)
            keep = keep and not self._closed and len(self._idle) < IDLE_LANE_SET_COUNT_MAX
            if keep:
                self._idle.append(lanes)
            self._free.notify()
        if not keep:
            lanes.close()


def closed_error(table: str) -> ClosedError:
    """What calls of a table end with once it is closed."""
    return ClosedError(
        f"table {table!r} was closed, or its client was; open it again, or connect again",
        table=table,
    )
