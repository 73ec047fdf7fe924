"""Where a shard keeps weights, sums and optimizer state. One contract, several kinds."""

from shardwell_server.store.contract import (
    ChunkChange,
    ChunkRecord,
    Layout,
    ParameterStorage,
    Store,
    Transition,
)
from shardwell_server.store.event import Event
from shardwell_server.store.table_contract import (
    FREE,
    Position,
    RowChange,
    TableLayout,
    TableRecord,
    TableStorage,
)

__all__ = [
    "FREE",
    "ChunkChange",
    "ChunkRecord",
    "Event",
    "Layout",
    "ParameterStorage",
    "Position",
    "RowChange",
    "Store",
    "TableLayout",
    "TableRecord",
    "TableStorage",
    "Transition",
]
