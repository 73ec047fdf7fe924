"""All rows of a table, block by block: ids, values, or all that is known of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell.wire.row_state import RowState
from shardwell.wire.rows import rows_per_scan_message_max
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import await_version
from shardwell_server.shard.table.snapshot import TableSnapshot, too_late
from shardwell_server.shard.table.state import TableState


class StateBatch(NamedTuple):
    """Some rows of a scan."""

    state: RowState
    version: int
    """Synchronous: that of the rows. Asynchronous: the table's when they were read."""
    learning_rate: float
    """Rate of the update that follows."""


class TableScan:
    """Reads the rows of one table. Any thread may call it."""

    def __init__(self, state: TableState) -> None:
        self.snapshots = state.snapshots
        self._spec = state.spec
        self._storage = state.storage
        self._tracker = state.tracker
        self._register = state.register
        self._rows = state.rows
        self._places = state.places
        self._changed = state.changed
        self._batch = rows_per_scan_message_max(state.spec)

    def values(self, *, with_values: bool) -> Iterator[tuple[Ids, Float32 | None]]:
        """Yields all rows that exist, a message's worth at a time: ids, and values if wanted.

        Each row is as it is when its turn comes; one that is evicted and comes again meanwhile may
        be missing.
        """
        start = 0
        while start < self._places.used:
            ids, values = self._rows.scan(start, start + self._batch, with_values=with_values)
            if ids.size:
                yield ids, values
            start += self._batch

    @contextlib.contextmanager
    def under_way(
        self, version: int, is_wanted: Callable[[], bool]
    ) -> Iterator[TableSnapshot | None]:
        """Yields a snapshot with which `states` has all rows at `version`; asynchronous: None.

        Any thread calls `is_wanted`, which is True while the client still reads.
        """
        if not self._tracker.is_sync:
            yield None
            return
        with self.snapshots.under_way(version, is_wanted) as snapshot:
            with self._changed.lock:
                found = self._tracker.version
                if found == version and self._is_between_steps():
                    self.begin_snapshots()
                elif found >= version:
                    raise too_late(self._spec, version, found)
            yield snapshot

    def begin_snapshots(self) -> None:
        """Begins the snapshots that wait for the version reached now; `changed` is held."""
        version = self._tracker.version
        counts = self._storage.update_counts[: self._places.used]
        self.snapshots.begin_at(version, counts, self._register.rates.at(version))

    def _is_between_steps(self) -> bool:
        """Returns True if rows are as the last step left them; `changed` is held."""
        if self._spec.sums_gradients:  # beside the rows, until it closes
            return not self._tracker.is_decided(self._storage.record)
        seats = self._tracker.crew.seats
        return not any(self._tracker.next_part(seat.worker_id)[1] for seat in seats)

    def check_begun(self, snapshot: TableSnapshot | None, deadline: RequestDeadline) -> None:
        """Waits, as `RequestDeadline.wait` does, until `states` can have all rows."""
        with self._changed.lock:
            if snapshot is not None and not snapshot.has_begun:
                if snapshot.failure is not None:
                    raise snapshot.failure
                await_version(self._tracker, snapshot.version, self._changed, deadline)

    def states(self, snapshot: TableSnapshot | None) -> Iterator[StateBatch]:
        """Yields all rows with state: those of a snapshot, or for None each in its turn."""
        if snapshot is None:
            start = 0
            while start < self._places.used:
                state = self._rows.states(start, start + self._batch)
                version = self._tracker.version
                yield StateBatch(state, version, self._register.rates.at(version))
                start += self._batch
            return
        for start in range(0, snapshot.place_count, self._batch):
            state = self._rows.states(start, start + self._batch, snapshot.claim)
            yield StateBatch(state, snapshot.version, snapshot.learning_rate)
        for kept in snapshot.kept():
            for piece in kept.pieces(self._batch):
                yield StateBatch(piece, snapshot.version, snapshot.learning_rate)
