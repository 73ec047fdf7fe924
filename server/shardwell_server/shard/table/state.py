"""What the slice of a table is made of."""

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
    """One lock guards all of it: that of `changed`."""

    spec: TableSpec
    layout: TableLayout
    storage: TableStorage
    placement: RowPlacement
    shard_index: int
    tracker: TableStepTracker
    register: TableRegister
    places: RowSlots
    """Places of the storage."""
    rows: TableRows
    snapshots: TableSnapshots
    """Scans under way."""
    changed: Changes
    """Where requests wait."""
