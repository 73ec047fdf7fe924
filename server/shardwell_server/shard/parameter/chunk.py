"""A chunk of a slice in memory: its place, its arrays and the lock that guards them."""

from __future__ import annotations

from shardwell.numerics.codec import Float32, block_codec
from shardwell.placement.slices import Slice
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.shard.deadline import Changes
from shardwell_server.shard.parameter.averaging import ChunkState
from shardwell_server.shard.parameter.image import ChunkImage
from shardwell_server.store import ParameterStorage


class Chunk:
    """One chunk; hold `changed` to touch its arrays, counters or entries of the tracker."""

    def __init__(
        self,
        where: Slice,
        index: int,
        start: int,
        storage: ParameterStorage,
        spec: ParameterSpec,
    ) -> None:
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
        slots, weights = [slot[part] for slot in storage.slots], storage.weights[part]
        image: ChunkImage | None = None
        if spec.has_image:
            is_mean = isinstance(spec.optimizer, Average)
            codec = block_codec(spec.codec_name)
            image = ChunkImage(slots.pop(), weights, codec, is_mean=is_mean)
        self.state = ChunkState(
            offset=where.offset,
            weights=weights,
            gradient_sum=None if storage.gradient_sum is None else storage.gradient_sum[part],
            image=image,
            slots=tuple(slots),
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
        """What lasts: weights, optimizer state and image."""
        image = () if self.state.image is None else (self.state.image.values,)
        return (self.state.weights, *self.state.slots, *image)
