"""The parts of a table's slice."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell.placement.rows import RowPlacement
from shardwell.specs.table import TableSpec
from shardwell_server.shard.deadline import Changes
from shardwell_server.shard.slice import SliceState
from shardwell_server.shard.table.register import TableRegister
from shardwell_server.shard.table.row_slots import RowSlots
from shardwell_server.shard.table.rows import TableRows
from shardwell_server.shard.table.snapshot import TableSnapshots
from shardwell_server.shard.table.step_tracker import TableSeat, TableStepTracker
from shardwell_server.store import TableLayout, TableStorage


@dataclass(frozen=True, kw_only=True)
class TableState(SliceState[TableSeat]):
    """The parts of one table's slice, guarded by one lock: that of `changed`."""

    spec: TableSpec
    layout: TableLayout
    storage: TableStorage
    placement: RowPlacement
    shard_index: int
    tracker: TableStepTracker
    register: TableRegister
    places: RowSlots
    rows: TableRows
    snapshots: TableSnapshots
    """Scans under way."""
    changed: Changes
