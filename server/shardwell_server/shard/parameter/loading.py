"""First weights as they come in, of a new parameter or of a checkpoint that is restored.

Each claim of the right to set them has an epoch; what one of an earlier epoch has written is
written over. They stand once shard 0 has all of its own: first_weights.py has the states.
"""

from __future__ import annotations

import numpy as np

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics.codec import CODECS, Bytes, Float32
from shardwell.placement.slices import Slice
from shardwell.specs.optimizers import Average, check_learning_rate
from shardwell.specs.parameter import STEP_MAX
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec, check_chunk
from shardwell_server.shard.errors import non_finite
from shardwell_server.shard.parameter.chunk import Chunk, ImageWriter
from shardwell_server.shard.parameter.state import ParameterState
from shardwell_server.store.contract import ChunkRecord, check_not_retired

_CODEC = ChunkCodec(CODECS["fp32"], allow_non_finite=True)


class ParameterLoading:
    """Fills one parameter's slice. Any thread may call it."""

    def __init__(self, state: ParameterState, images: ImageWriter) -> None:
        self.spec = state.spec
        self.where = state.where
        self._storage = state.storage
        self._tracker = state.tracker
        self._register = state.register
        self._chunks = state.chunks
        self._rules = state.rules
        self._encoded = state.encoded
        self._images = images
        self.claim = state.register.claim
        self.array_count = 1 + len(state.storage.slots)
        """Weights and the arrays of optimizer state."""

    def set(self, epoch: int, where: Slice, values: Float32, *, array_index: int = 0) -> None:
        """Writes one range of first weights, or of the optimizer's array `array_index` - 1."""
        if isinstance(self.spec.optimizer, Average):
            raise ArgumentError(f"parameter {self.spec.name!r} averages; it has no first weights")
        if not self.where.offset <= where.offset <= where.stop <= self.where.stop:
            raise ArgumentError(
                f"first weights for elements {where.offset} to {where.stop - 1}; this shard owns "
                f"{self.where.offset} to {self.where.stop - 1}"
            )
        with self._register.lock:
            check_not_retired(self._storage)
            if self._register.take_first(epoch):
                start = where.offset - self.where.offset
                array = (self._storage.weights, *self._storage.slots)[array_index]
                array[start : start + where.size] = values

    def finish(
        self,
        epoch: int,
        *,
        version: int = 0,
        learning_rate: float | None = None,
        load_id: int = 0,
        with_slots: bool = False,
    ) -> int:
        """Notes that all first weights of an epoch are here; shard 0 commits them at once.

        Without `with_slots` optimizer state begins anew. Returns the version.
        """
        if not 0 <= version <= STEP_MAX or (version and self._storage.slots and not with_slots):
            raise ArgumentError(
                f"first weights of {self.spec.name!r} at version {version}: versions are 0 to "
                f"{STEP_MAX}, and above 0 come with {len(self._storage.slots)} arrays of state"
            )
        if learning_rate is not None and self._rules.learning_rate is None:
            raise ArgumentError(f"parameter {self.spec.name!r} has no learning rate to be set")
        with self._register.lock:
            if self._register.take_first(epoch):
                record = ChunkRecord(version)
                for index, chunk in enumerate(self._chunks):
                    if not with_slots:
                        self._begin_slots(chunk)
                    self._storage.settle(index, record)
                    self._tracker.records[index] = record
                    chunk.is_verified = True
                self._images.write(lambda: False)  # before any client learns that they are here
                self._encoded.forget()
                self._register.finish_first(epoch, learning_rate, load_id)
            return self._tracker.version_min()

    def _begin_slots(self, chunk: Chunk) -> None:
        """Sets the optimizer's first state, bit for bit, over what a cut-off restore or disk left.

        The image is that of the first weights, which have come.
        """
        if chunk.state.image is not None:
            chunk.state.image.begin_first()
        for slot, value in zip(chunk.state.slots, self._rules.initial_slots, strict=True):
            bits = slot.view(np.uint32)
            first = np.float32(value)
            if (bits != first.view(np.uint32)).any():  # a page that is not written takes no memory
                slot[:] = first

    def confirm(self, epoch: int) -> int:
        """Commits first weights that shard 0 has accepted; returns the version."""
        with self._register.lock:
            self._encoded.forget()
            self._register.confirm_first(epoch)
            return self._tracker.version_min()


class ParameterLoad:
    """The messages of one InitWeights stream: ranges that follow one another, array by array."""

    def __init__(self, loading: ParameterLoading, opening: pb.InitWeightsRequest) -> None:
        self._loading = loading
        self._opening = opening
        self._context = checksum.first_weights_context(opening)
        self._array_count = max(opening.array_count, 1)
        self._array_index = 0
        self._expected = loading.where.offset
        """The element that comes next."""
        self._has_ranges = False

    def take(self, request: pb.InitWeightsRequest, payload: Bytes) -> None:
        """Writes the range of a message, if it has one."""
        if not request.HasField("chunk"):
            if payload.size:
                raise CorruptChunkError("a message has a payload and no `chunk`; send it again")
            return
        loading, spec, own = self._loading, self._loading.spec, self._loading.where
        chunk, array_index = request.chunk, request.array_index
        intact = check_chunk(chunk, payload, checksum.first_weights(self._context, array_index))
        self._has_ranges = True
        if self._array_count not in (1, loading.array_count):
            raise ArgumentError(
                f"first weights of {spec.name!r}: expected 1 array, the weights, or all "
                f"{loading.array_count}; got {self._array_count}"
            )
        where = Slice(chunk.element_offset, chunk.element_count)
        is_next_array = self._array_index + 1 == array_index < self._array_count
        if self._expected == own.stop and is_next_array:
            self._array_index, self._expected = array_index, own.offset
        if (array_index, where.offset) != (self._array_index, self._expected):
            raise ArgumentError(
                f"first weights must follow one another: expected element {self._expected} of "
                f"array {self._array_index}, got {where.offset} of {array_index}"
            )
        values = _CODEC.open(intact, where).view(np.float32)
        # Optimizer state may be infinite where no weight is: squares overflow.
        if array_index == 0 and not spec.allow_non_finite:
            finite = np.isfinite(values)
            if not finite.all():
                index = where.offset + int(np.argmin(finite))
                raise non_finite(spec, index, "first weights", "mend them and send them again")
        loading.set(self._opening.epoch, where, values, array_index=array_index)
        self._expected = where.stop

    def end(self) -> int:
        """Ends the load, of which all has come; returns the version."""
        loading, opening = self._loading, self._opening
        if not self._has_ranges:
            raise ArgumentError(
                "an InitWeights stream must have a `chunk`, whose CRC32C covers `open`: of 0 "
                "elements, if this slice is empty"
            )
        last_array_index = 0 if loading.where.size == 0 else self._array_count - 1
        if self._expected != loading.where.stop or self._array_index != last_array_index:
            raise ArgumentError(
                f"first weights ended before element {self._expected} of array "
                f"{self._array_index}; this slice ends before {loading.where.stop}, and "
                f"{self._array_count} arrays were to come; send all of it"
            )
        rate = opening.learning_rate if opening.HasField("learning_rate") else None
        return loading.finish(
            opening.epoch,
            version=opening.version,
            learning_rate=None if rate is None else check_learning_rate("learning_rate", rate),
            load_id=opening.load_id,
            with_slots=self._array_count == loading.array_count,
        )
