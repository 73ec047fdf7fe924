"""One parameter's slice on this shard: chunks under their locks, steps that close, weights out.

The tracker decides, averaging.py moves bytes, the storage keeps them; here threads meet. Locks: a
chunk's lock guards its arrays and its entries of the tracker; the register's lock guards what
changes rarely. Order: the register's lock is never taken while a chunk's is held.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwell.errors import ArgumentError
from shardwell.numerics.codec import Bytes, Float32
from shardwell.numerics.update_rules import UpdateRule
from shardwell.placement.slices import Slice
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import STEP_MAX, ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.config import Limits
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import workers_missing
from shardwell_server.shard.members import Contributor, Liveness
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.contributions import Contributions
from shardwell_server.shard.parameter.encoded_weights import EncodedWeights
from shardwell_server.shard.parameter.register import Register
from shardwell_server.shard.parameter.snapshot import Snapshots
from shardwell_server.shard.step_tracker import Seat, StepTracker
from shardwell_server.store import ChunkRecord, ParameterStorage


class _BrokenOffError(Exception):
    """An image is not wanted any more."""


class ParameterSlice:
    """See the module. All methods may be called from any thread."""

    def __init__(
        self,
        spec: ParameterSpec,
        where: Slice,
        storage: ParameterStorage,
        rule: UpdateRule,
        *,
        chunk_element_count: int,
        is_first_shard: bool,
        limits: Limits,
        sessions: Liveness,
        spool_dir: Path | None = None,
    ) -> None:
        self.spec = spec
        self.where = where
        self.chunk_element_count = chunk_element_count
        self.storage = storage
        self._limits = limits
        self._rule = rule
        self._codec = ChunkCodec.of(spec)
        self._chunks = [
            Chunk(
                where.chunk(index, chunk_element_count), index, index * chunk_element_count, storage
            )
            for index in range(where.chunk_count(chunk_element_count))
        ]
        self._tracker = StepTracker(
            storage.records(),
            worker_count=spec.worker_count,
            worker_count_max=limits.worker_count_max,
            sessions=sessions,
        )
        self._register = Register(
            spec,
            storage,
            self._tracker,
            learning_rate=rule.learning_rate,
            is_first_shard=is_first_shard,
            limits=limits,
        )
        self.snapshots = Snapshots(
            spec,
            self._chunks,
            self._tracker,
            self._register,
            spool_dir=spool_dir,
            count_max=limits.snapshot_count_max,
        )
        """Of this slice, under way."""
        self._image_lock = threading.Lock()
        self._encoded = EncodedWeights(spec, count_max=limits.encoded_chunk_count_max)
        self._contributions = Contributions(
            spec, self._chunks, self._tracker, self._register, storage, rule, self.snapshots
        )
        self._contributions.replay()
        if storage.is_torn:
            for index in range(self.chunk_count):
                self.verify(index)

    # Opening and initializing.

    def join(
        self,
        worker_id: str,
        session_number: int = 0,
        *,
        seat_for: Contributor[Seat] | None = None,
        incarnation: int = 0,
    ) -> pb.CreateParameterResponse:
        """Notes that a worker opened the parameter, if it has a name; tells it where it stands.

        Args:
            worker_id: Who; empty: somebody who will not contribute.
            session_number: Of the worker's session, by which it is known while that is alive; 0: it
                has none.
            seat_for: The worker as it asks for its seat, if it does.
            incarnation: Shard 0's, which is this shard's too if nothing has begun here; 0: not
                given.

        Raises:
            StepOrderError: the parameter has begun with another incarnation.
            NotInitializedError, SeatsTakenError, WorkerIdInUseError, LimitError: it asked for a
                seat and can't have one.
            StorageError: it can't be noted.
        """
        took_over = False
        with self._register.lock:
            incarnation = self._register.meet_incarnation(incarnation)
            if seat_for is not None:
                took_over = self._contributions.seat(seat_for).was_taken_over
            elif worker_id and session_number:
                self._tracker.remember(worker_id, session_number)
            standing = self._register.is_standing  # what is only staged may have any version
            response = pb.CreateParameterResponse(
                slice_offset=self.where.offset,
                slice_size=self.where.size,
                chunk_element_count=self.chunk_element_count,
                version=self._tracker.version_min() if standing else 0,
                next_step=self._tracker.next_step(worker_id) if standing else 0,
                initialized=standing,
                init_epoch=self._register.standing_epoch,
                incarnation=incarnation,
                begun=self._register.has_begun,
                took_over=took_over,
                tenure=self._tracker.tenure_of(worker_id),
            )
        self.make_durable()  # next_step tells that the steps before it were counted
        return response

    def end_session(self, number: int) -> None:
        """Notes that a session, by its number, has ended in order.

        Raises:
            StorageError: it can't be noted.
        """
        with self._register.lock:
            self._register.end_session(number)

    def claim_init(
        self, worker_id: str, deadline: RequestDeadline, above_epoch: int = 0
    ) -> pb.ClaimInitResponse:
        """Grants the right to set the first weights, or waits until another has set them.

        Raises:
            ArgumentError: no epoch is above `above_epoch`.
        """
        return self._register.claim(worker_id, deadline, above_epoch=above_epoch)

    @property
    def array_count(self) -> int:
        """Weights and the arrays of optimizer state."""
        return 1 + len(self.storage.slots)

    def set_first_weights(
        self, epoch: int, where: Slice, values: Float32, *, array_index: int = 0
    ) -> None:
        """Writes one range of first weights, or of the optimizer's array `array_index` - 1.

        Raises:
            ArgumentError: the range is not in the slice, or the optimizer has no weights.
            InitSupersededError: a claim with a higher epoch came in between.
            StepOrderError: first weights stand, or shard 0 did not grant the epoch.
        """
        if isinstance(self.spec.optimizer, Average):
            raise ArgumentError(f"parameter {self.spec.name!r} averages; it has no first weights")
        if not self.where.offset <= where.offset <= where.stop <= self.where.stop:
            raise ArgumentError(
                f"first weights for elements {where.offset} to {where.stop - 1}; this shard owns "
                f"{self.where.offset} to {self.where.stop - 1}"
            )
        with self._register.lock:
            if self._register.take_first(epoch):
                start = where.offset - self.where.offset
                array = (self.storage.weights, *self.storage.slots)[array_index]
                array[start : start + where.size] = values

    def finish_init(
        self,
        epoch: int,
        *,
        version: int = 0,
        learning_rate: float | None = None,
        load_id: int = 0,
        with_slots: bool = False,
    ) -> int:
        """Notes that all first weights of an epoch are here; on shard 0 they stand now.

        Args:
            epoch: Of the claim.
            version: Updates that they have seen.
            learning_rate: From that version on; None: the spec's.
            load_id: See InitWeightsRequest.
            with_slots: Whether optimizer state came too; else it begins anew.

        Returns:
            The version.

        Raises:
            ArgumentError: the version is none, or is without its optimizer state; or there is a
                rate for an optimizer without one.
            InitSupersededError, StepOrderError: see `set_first_weights`.
        """
        if not 0 <= version <= STEP_MAX or (version and self.storage.slots and not with_slots):
            raise ArgumentError(
                f"first weights of {self.spec.name!r} at version {version}: versions are 0 to "
                f"{STEP_MAX}, and above 0 come with {len(self.storage.slots)} arrays of state"
            )
        if learning_rate is not None and self._rule.learning_rate is None:
            raise ArgumentError(f"parameter {self.spec.name!r} has no learning rate to be set")
        with self._register.lock:
            if self._register.take_first(epoch):
                record = ChunkRecord(version)
                for index, chunk in enumerate(self._chunks):
                    if not with_slots:
                        self._begin_slots(chunk)
                    self.storage.settle(index, record)
                    self._tracker.records[index] = record
                    chunk.is_verified = True
                self._write_image(lambda: False)  # before anybody is told that they are here
                self._encoded.forget()
                self._register.finish_first(epoch, learning_rate, load_id)
            return self._tracker.version_min()

    def _begin_slots(self, chunk: Chunk) -> None:
        """Makes it what the optimizer begins with, bit for bit, whatever is there.

        A restore that did not come to its end may have left something, or a disk.
        """
        for slot, value in zip(chunk.state.slots, self._rule.initial_slots, strict=True):
            bits = slot.view(np.uint32)
            first = np.float32(value)
            if (bits != first.view(np.uint32)).any():  # a page that is not written takes no memory
                slot[:] = first

    def confirm_init(self, epoch: int) -> int:
        """Makes first weights stand that shard 0 has accepted; returns the version.

        Raises:
            StepOrderError: this shard has no complete values of that epoch.
        """
        with self._register.lock:
            self._encoded.forget()
            self._register.confirm_first(epoch)
            return self._tracker.version_min()

    # Keeping.

    def make_durable(self) -> None:
        """Returns when what was counted may be acknowledged.

        Raises:
            StorageError: the disk failed.
        """
        self.storage.make_durable()

    def sync(self) -> None:
        """Writes the journal to disk.

        Raises:
            StorageError: the disk failed.
        """
        self.storage.sync()

    def make_image(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Writes an image if it is time, and unless the shard is stopping meanwhile.

        Raises:
            StorageError: the disk failed, or is full.
        """
        if self.storage.wants_image and self._register.is_standing:
            with contextlib.suppress(_BrokenOffError):
                self._write_image(is_stopping)

    def _write_image(self, is_stopping: Callable[[], bool]) -> None:
        with self._image_lock, self.storage.imaging() as add:
            for index, chunk in enumerate(self._chunks):
                if is_stopping():
                    raise _BrokenOffError
                with chunk.changed:
                    chunk.verify()
                    add(index)

    def verify(self, chunk_index: int) -> None:
        """Checks a chunk that an earlier process left, ahead of its first use.

        Raises:
            StorageError: it was damaged.
        """
        if self._register.is_standing:
            chunk = self._chunks[chunk_index]
            with chunk.changed:
                chunk.verify()

    # Gradients in.

    def contribute(
        self,
        contributor: Contributor[Seat],
        gradient: types_pb2.GradientChunk,
        payload: Bytes,
        deadline: RequestDeadline,
    ) -> bool:
        """Counts a gradient chunk, once; blocks while an earlier step is open.

        Everything is checked before anything is changed; the worker's seat is taken only then.

        Returns:
            False if it had been counted before.

        Raises:
            ArgumentError, CorruptChunkError, NonFiniteError: the chunk is refused.
            NotInitializedError, SeatsTakenError, LimitError: see `Seats.seat`.
            WorkerIdInUseError, SessionUnknownError: the seat is another session's, or nobody's.
            StepOrderError: see the tracker.
            WorkersMissingError: the earlier step did not close in time.
        """
        return self._contributions.take(contributor, gradient, payload, deadline)

    # Weights out.

    @property
    def chunk_count(self) -> int:
        """Chunks of the slice."""
        return len(self._chunks)

    def is_ready(self, chunk_index: int, min_version: int) -> bool:
        """Whether `weights_message` would not wait."""
        return self._tracker.records[chunk_index].version >= min_version

    def weights_message(
        self, chunk_index: int, min_version: int, deadline: RequestDeadline
    ) -> bytes:
        """A chunk's weights as a sealed message, once it has seen `min_version` updates.

        GetWeightsResponse and ExchangeResponse have the same fields, so it serves both.

        Raises:
            NotInitializedError, WorkersMissingError.
            DivergedError: training diverged; the weights are not finite.
            StorageError: an earlier process left a damaged chunk.
        """
        self._register.check_initialized()
        chunk = self._chunks[chunk_index]
        with chunk.changed:
            if not self.is_ready(chunk_index, min_version):
                deadline.wait(chunk.changed)
                raise workers_missing(self.spec, self._tracker, chunk_index, min_version, deadline)
            version = self._tracker.records[chunk_index].version
            message = self._encoded.get(chunk_index, version)
            if message is None:
                chunk.verify()
                message = self._encoded.make(chunk, chunk_index, version)
            return message

    # The rest.

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        self._register.change_learning_rate(from_step, learning_rate)

    def describe(self, name_count_max: int) -> pb.ParameterStatus:
        """What GetStatus tells of it, with at most so many names of each kind."""
        with self._register.lock:
            tracker = self._tracker
            standing = self._register.is_standing
            oldest = tracker.version_min() if standing else 0
            missing, unknown = tracker.missing(oldest)
            done = tracker.done_worker_ids
            if not tracker.has_begun(oldest):
                missing = [worker_id for worker_id in missing if worker_id not in done]
            contributed = tracker.contributed(oldest) if tracker.is_sync else []
            return pb.ParameterStatus(
                spec=self.spec.to_proto(),
                slice_offset=self.where.offset,
                slice_size=self.where.size,
                initialized=standing,
                version_min=oldest,
                version_max=tracker.version_max() if standing else 0,
                contributed_worker_ids=contributed[:name_count_max],
                contributed_worker_count=len(contributed),
                missing_worker_ids=missing[:name_count_max],
                missing_worker_count=len(missing),
                unknown_worker_count=unknown,
                counted_chunk_count=sum(chunk.counted_count for chunk in self._chunks),
                duplicate_chunk_count=sum(chunk.duplicate_count for chunk in self._chunks),
                learning_rate=self._register.learning_rate(oldest),
                done_worker_ids=done[:name_count_max],
                load_id=self._register.standing_load_id,
            )
