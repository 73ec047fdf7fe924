"""Rows with state that are put into a table: a checkpoint is restored.

From `begin` to `finish` the table's record says that it is loading, on disk too: it takes no
gradients and gives no rows, and what came of a load that was cut off is dropped when the next one
begins, or the shard starts again. The record that ends it is the instant at which all rows stand.
"""

from __future__ import annotations

from shardwell.errors import NotInitializedError, StepOrderError
from shardwell.specs.parameter import STEP_MAX
from shardwell.wire.row_state import RowState
from shardwell.wire.rows import check_ids
from shardwell_server.shard.table.state import TableState
from shardwell_server.store.contract import LOADING

_DROP_ROW_COUNT = 2**20


class TableLoading:
    """Fills one table. Any thread may call it."""

    def __init__(self, state: TableState) -> None:
        self._spec = state.spec
        self._storage = state.storage
        self._placement = state.placement
        self._shard_index = state.shard_index
        self._tracker = state.tracker
        self._register = state.register
        self._rows = state.rows
        self._places = state.places
        self._changed = state.changed
        self._batch_row_count_max = state.layout.rows_per_change_max
        self._number = 0

    @property
    def is_under_way(self) -> bool:
        """True if a load has begun that has not finished."""
        return self._storage.record.is_loading

    def check_committed(self) -> None:
        """Refuses a call that needs the rows while a load is under way."""
        if self._storage.record.is_loading:
            raise NotInitializedError(
                f"table {self._spec.name!r} is being restored on shard {self._shard_index}, or a "
                "restore of it was cut off: restore the checkpoint again, or use another name",
                shard_index=self._shard_index,
                table=self._spec.name,
            )

    def begin(self, load_id: int = 0, incarnation: int = 0) -> int:
        """Empties the table, which counted no gradient; returns the load's number.

        An earlier load is at its end. One that has finished is, too: it is restored again, because
        not all shards had finished. `load_id` is noted when nothing is committed any more: so a
        table that is committed with it has finished that load. `incarnation`, unless 0, is the
        table's from then on.
        """
        with self._changed.lock:
            if self._register.has_counted:
                raise StepOrderError(
                    f"table {self._spec.name!r} has counted gradients on shard "
                    f"{self._shard_index}; restore into a cluster without it, before workers start",
                    shard_index=self._shard_index,
                    table=self._spec.name,
                )
            self._number += 1
            record = self._storage.record
            self._rows.settle(record._replace(version=0, contribution_count=LOADING), None)
            self._tracker.version = 0
            self._drop()
            # Events outlive a loss of power at once; the record must not come after them.
            self._storage.sync()
            self._register.begin_load(load_id, incarnation)
            return self._number

    def drop_unfinished(self) -> None:
        """Drops rows of a load that an earlier process did not finish; `changed` is held."""
        if self._storage.record.is_loading:
            self._drop()

    def _drop(self) -> None:
        start = 0
        while start < self._places.used:
            self._rows.evict(start, start + _DROP_ROW_COUNT, STEP_MAX + 1)
            start += _DROP_ROW_COUNT

    def add(self, number: int, state: RowState) -> None:
        """Adds rows of a load, each id once, unless another load has begun since."""
        order = state.ids.argsort()
        state = state.take(order)
        check_ids(state.ids, self._placement, self._shard_index)
        for piece in state.pieces(self._batch_row_count_max):
            with self._changed.lock:
                self._check_newest(number)
                self._rows.load(piece, self._storage.record)

    def finish(self, number: int, version: int, learning_rate: float | None) -> int:
        """Commits all rows of a load, at a version and a rate, or the spec's; returns how many."""
        with self._changed.lock:
            self._check_newest(number)
            if learning_rate is not None:
                from_step = version if self._spec.mode == "sync" else None
                self._register.change_learning_rate(from_step, learning_rate)
            record = self._storage.record
            self._rows.settle(record._replace(version=version, contribution_count=0), None)
            self._tracker.version = version
            self._changed.notify_all()
            return self._places.row_count

    def _check_newest(self, number: int) -> None:
        if number != self._number or not self._storage.record.is_loading:
            raise StepOrderError(
                f"table {self._spec.name!r}: another client has begun to load it since; let one "
                "restore it",
                table=self._spec.name,
            )
