"""A chunk of a slice in memory: its place, its arrays and the lock that guards them."""

from __future__ import annotations

from shardwell.numerics.codec import Float32
from shardwell.placement.slices import Slice
from shardwell_server.shard.deadline import Changes
from shardwell_server.shard.parameter.averaging import ChunkState
from shardwell_server.store import ParameterStorage


class Chunk:
    """One chunk; whoever touches its arrays, counters or entries of the tracker holds `changed`."""

    def __init__(self, where: Slice, index: int, start: int, storage: ParameterStorage) -> None:
        self._index = index
        self._storage = storage
        part = slice(start, start + where.size)
        self.where = where
        self.changed = Changes()
        self.is_verified = False
        """Whether what an earlier process left of it was checked."""
        self.counted_count = 0
        self.duplicate_count = 0
        self.late_count = 0
        self.state = ChunkState(
            offset=where.offset,
            weights=storage.weights[part],
            gradient_sum=None if storage.gradient_sum is None else storage.gradient_sum[part],
            slots=tuple(slot[part] for slot in storage.slots),
        )

    def verify(self) -> None:
        """Checks what an earlier process left of it, once; `changed` is held.

        Raises:
            StorageError: it was damaged.
        """
        if not self.is_verified:
            self._storage.verify(self._index)
            self.is_verified = True

    @property
    def arrays(self) -> tuple[Float32, ...]:
        """What lasts: weights and optimizer state."""
        return (self.state.weights, *self.state.slots)
