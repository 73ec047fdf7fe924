"""Where a shard keeps weights, sums and optimizer state. One contract, several kinds."""

from shardwell_server.store.event import Event
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap_store import MmapStore
from shardwell_server.store.store import (
    ChunkChange,
    ChunkRecord,
    Layout,
    ParameterStorage,
    Store,
    Transition,
)
from shardwell_server.store.table_storage import (
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
    "MemoryStore",
    "MmapStore",
    "ParameterStorage",
    "Position",
    "RowChange",
    "Store",
    "TableLayout",
    "TableRecord",
    "TableStorage",
    "Transition",
]
