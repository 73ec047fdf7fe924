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


class _BrokenOffError(Exception):
    """An image is not wanted any more."""


class ImageWriter:
    """Writes images of a slice, from which its storage goes on after a loss of power.

    Args:
        storage: The slice's storage.
        chunks: Its chunks.
        imaged: Called when an image has all chunks, before it is in force.
    """

    def __init__(
        self, storage: ParameterStorage, chunks: Sequence[Chunk], imaged: Callable[[], None]
    ) -> None:
        self._storage = storage
        self._chunks = chunks
        self._imaged = imaged
        self._lock = threading.Lock()

    def write(self, is_stopping: Callable[[], bool]) -> None:
        """Writes an image, unless the shard is stopping meanwhile.

        Raises:
            StorageError: the disk failed, or is full; or a chunk was damaged.
        """
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
        """No image is written in the block, and what was changing a chunk has ended."""
        with self._lock:
            come_to_rest(self._chunks)
            yield


def come_to_rest(chunks: Sequence[Chunk]) -> None:
    """Returns when what is changing a chunk now has ended."""
    for chunk in chunks:
        with chunk.changed.lock:
            pass
