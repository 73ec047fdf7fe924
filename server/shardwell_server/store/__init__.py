"""The storage of a shard's weights, sums and optimizer state. One contract, several kinds."""

from shardwell_server.store.contract import (
    FREE,
    NO_SEAT,
    ChunkChange,
    ChunkRecord,
    Event,
    Layout,
    ParameterStorage,
    Position,
    RowChange,
    Storage,
    Store,
    TableLayout,
    TableRecord,
    TableStorage,
    Transition,
    check_not_retired,
)

__all__ = [
    "FREE",
    "NO_SEAT",
    "ChunkChange",
    "ChunkRecord",
    "Event",
    "Layout",
    "ParameterStorage",
    "Position",
    "RowChange",
    "Storage",
    "Store",
    "TableLayout",
    "TableRecord",
    "TableStorage",
    "Transition",
    "check_not_retired",
]
