"""The parts of a table's slice."""

from __future__ import annotations

import threading
import time

from shardwell.placement.rows import RowPlacement
from shardwell.specs.table import TableSpec
from shardwell_server.shard.deadline import Changes
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.shard.slice import SharedParts, SliceState
from shardwell_server.shard.step_times import StepTimes
from shardwell_server.shard.table.register import TableRegister
from shardwell_server.shard.table.row_slots import RowSlots
from shardwell_server.shard.table.rows import TableRows
from shardwell_server.shard.table.snapshot import TableSnapshots
from shardwell_server.shard.table.step_tracker import TableSeat, TableStepTracker
from shardwell_server.store.contract import TableStorage


class TableState(SliceState[TableSeat]):
    """The parts of one table's slice, guarded by one lock: that of `changed`."""

    def __init__(
        self,
        spec: TableSpec,
        storage: TableStorage,
        stored_bytes: OwnedBytes,
        shared: SharedParts,
    ) -> None:
        config, limits = shared.config, shared.config.limits
        self.spec = spec
        self.storage: TableStorage = storage
        self.spans = shared.spans
        self.layout = layout = storage.layout
        self.placement = RowPlacement(spec.row_count, config.shard_count)
        self.shard_index = config.shard_index
        self.times = StepTimes(1, time.monotonic)
        self.lock: threading.Lock = threading.Lock()
        self.changed = Changes(self.lock)
        record = storage.record
        self.tracker: TableStepTracker = TableStepTracker(
            spec,
            record.version,
            shared.sessions,
            limits.worker_count_max,
            is_closing=record.is_closing,
        )
        self.register: TableRegister = TableRegister(spec, storage, self.tracker, limits)
        self.places = RowSlots(layout, storage, stored_bytes, limits.table_row_count_max)
        self.snapshots = TableSnapshots(
            spec, spool_dir=shared.spool_dir, count_max=limits.snapshot_count_max
        )
        """Scans under way."""
        self.rows = TableRows(
            spec,
            self.placement,
            self.shard_index,
            storage,
            self.places,
            batch_row_count_max=layout.rows_per_change_max,
            snapshots=self.snapshots,
        )
