"""Where a shard keeps weights, sums and optimizer state. One contract, several kinds."""

from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap_store import MmapStore
from shardwell_server.store.store import (
    ChunkChange,
    ChunkRecord,
    Event,
    Layout,
    ParameterStorage,
    Store,
    Transition,
)

__all__ = [
    "ChunkChange",
    "ChunkRecord",
    "Event",
    "Layout",
    "MemoryStore",
    "MmapStore",
    "ParameterStorage",
    "Store",
    "Transition",
]
