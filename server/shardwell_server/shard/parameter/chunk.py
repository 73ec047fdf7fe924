"""Chunks of a slice in memory, each with the lock that guards it; and images of all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from shardwell.numerics.codec import Float32, block_codec
from shardwell.placement.slices import Slice
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.shard.deadline import Changes
from shardwell_server.shard.parameter.averaging import ChunkState
from shardwell_server.shard.parameter.image import ChunkImage
from shardwell_server.store.contract import ParameterStorage


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
        """True once the arrays that an earlier process left were checked."""
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
        """Checks the arrays that an earlier process left, once; `changed` is held."""
        if not self.is_verified:
            self._storage.verify(self._index)
            self.is_verified = True

    @property
    def arrays(self) -> tuple[Float32, ...]:
        """The arrays that last: weights, optimizer state and image."""
        image = () if self.state.image is None else (self.state.image.values,)
        return (self.state.weights, *self.state.slots, *image)


class _BrokenOffError(Exception):
    """The signal that an image is not wanted any more."""


class ImageWriter:
    """Writes images of a slice, from which its storage goes on after a loss of power.

    It calls `imaged` when an image has all chunks, before the image is in force.
    """

    def __init__(
        self, storage: ParameterStorage, chunks: Sequence[Chunk], imaged: Callable[[], None]
    ) -> None:
        self._storage = storage
        self._chunks = chunks
        self._imaged = imaged
        self._lock = threading.Lock()

    def write(self, is_stopping: Callable[[], bool]) -> None:
        """Writes an image, unless the shard is stopping meanwhile."""
        with (
            contextlib.suppress(_BrokenOffError),
            self._lock,
            self._storage.imaging() as add,
        ):
            for index, chunk in enumerate(self._chunks):
                if is_stopping():
                    raise _BrokenOffError
                with chunk.changed.lock:
                    chunk.verify()
                    add(index)
            self._imaged()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Keeps images from being written in the block, and begins once no chunk is changing."""
        with self._lock:
            come_to_rest(self._chunks)
            yield


def come_to_rest(chunks: Sequence[Chunk]) -> None:
    """Waits until the calls that change a chunk now have ended."""
    for chunk in chunks:
        with chunk.changed.lock:
            pass
