"""Where a shard keeps weights, sums and optimizer state. One contract, several kinds."""

from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.store import ParameterStorage, Store

__all__ = ["MemoryStore", "ParameterStorage", "Store"]
