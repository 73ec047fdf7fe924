"""One parameter's slice on this shard: chunks under their locks, steps that close, weights out.

The ledger decides, averaging.py moves bytes, the storage keeps them; here threads meet. Locks: a
chunk's condition guards its arrays and its entries of the ledger; the register's lock guards what
changes rarely. Order: the register's lock is never taken while a chunk's is held.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardwell.chunk_codec import ChunkCodec
from shardwell.codec import Bytes, Float32, NonFiniteValueError
from shardwell.errors import ArgumentError, NonFiniteError, StorageError, WorkersMissingError
from shardwell.partition import Slice
from shardwell.scratch import thread_scratch
from shardwell.specs import SAMPLE_COUNT_MAX, STEP_MAX, Average, ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server.config import Limits
from shardwell_server.shard.averaging import Contribution, add_to_sum, close_step, shift_for
from shardwell_server.shard.chunk import Chunk
from shardwell_server.shard.ledger import Decision, Seat, StepLedger
from shardwell_server.shard.patience import Patience
from shardwell_server.shard.register import Register
from shardwell_server.shard.snapshot import Snapshot, Snapshots
from shardwell_server.shard.update_rules import UpdateRule
from shardwell_server.store import ChunkRecord, ParameterStorage, Transition


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
            Chunk(where.chunk(index, chunk_element_count), index * chunk_element_count, storage)
            for index in range(where.chunk_count(chunk_element_count))
        ]
        self._ledger = StepLedger(
            storage.records(),
            worker_count=spec.worker_count,
            worker_count_max=limits.worker_count_max,
        )
        self._register = Register(
            spec,
            storage,
            self._ledger,
            learning_rate=rule.learning_rate,
            is_first_shard=is_first_shard,
            limits=limits,
        )
        self.snapshots = Snapshots(
            spec.name,
            self._chunks,
            self._ledger,
            self._register,
            spool_dir=spool_dir,
            count_max=limits.snapshot_count_max,
        )
        """Of this slice, under way."""
        self._encoded: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._encoded_lock = threading.Lock()
        self._replay()

    # Opening and initializing.

    def join(self, worker_id: str, *, take_seat: bool = False) -> pb.CreateParameterResponse:
        """Notes that a worker opened the parameter, if it has a name; tells it where it stands.

        Raises:
            NotInitializedError, SeatsTakenError: it asked for a seat and can't have one.
            LimitError: too many workers.
            StorageError: it can't be noted.
        """
        with self._register.lock:
            if take_seat:
                self._register.seat(worker_id)
            if worker_id:
                self._register.remember(worker_id)
            standing = self._register.is_standing  # what is only staged may have any version
            return pb.CreateParameterResponse(
                slice_offset=self.where.offset,
                slice_size=self.where.size,
                chunk_element_count=self.chunk_element_count,
                version=self._ledger.version_min() if standing else 0,
                next_step=self._ledger.next_step(worker_id) if standing else 0,
                initialized=standing,
                init_epoch=self._register.standing_epoch,
            )

    def claim_init(self, worker_id: str, patience: Patience) -> pb.ClaimInitResponse:
        """Grants the right to set the first weights, or waits until another has set them."""
        return self._register.claim(worker_id, patience)

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
        with_slots: bool = False,
    ) -> int:
        """Notes that all first weights of an epoch are here; on shard 0 they stand now.

        Args:
            epoch: Of the claim.
            version: Updates that they have seen.
            learning_rate: From that version on; None: the spec's.
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
                    self._ledger.records[index] = record
                    chunk.is_verified = True
                self._make_image()  # before anybody is told that they are here
                self._forget_encoded()
                self._register.finish_first(epoch, learning_rate)
            return self._ledger.version_min()

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
            self._forget_encoded()
            self._register.confirm_first(epoch)
            return self._ledger.version_min()

    def _forget_encoded(self) -> None:
        """Encodings of other weights are not to be answered."""
        with self._encoded_lock:
            self._encoded.clear()

    # Keeping.

    def _replay(self) -> None:
        """Counts again what the storage lacks, having lost it with the machine's power."""
        seats = self._ledger.seats
        for entry in self.storage.replay():
            chunk, index = self._chunks[entry.chunk_index], entry.chunk_index
            contribution = Contribution(entry.payload, entry.exponent, entry.sample_count)
            if (
                entry.seat_index >= len(seats)
                or entry.payload.size != chunk.where.size * self._codec.codec.item_size
                or self._ledger.decide(seats[entry.seat_index], index, entry.step)
                is not Decision.COUNT
            ):
                raise StorageError(
                    f"parameter {self.spec.name!r}: its journal has step {entry.step} of seat "
                    f"{entry.seat_index} for chunk {index}, which does not go on from its image; "
                    "restore a checkpoint",
                    parameter=self.spec.name,
                )
            self._verify(chunk, index)
            with np.errstate(all="ignore"):
                self._count(
                    chunk,
                    index,
                    contribution,
                    seats[entry.seat_index],
                    entry.step,
                    entry.learning_rate,  # the register may have forgotten it
                )
        if self.storage.is_torn:
            for index in range(self.chunk_count):
                self.verify(index)

    def make_durable(self) -> None:
        """Returns when what was counted may be acknowledged.

        Raises:
            StorageError: the disk failed.
        """
        self.storage.make_durable()

    def tend(self) -> None:
        """Writes the journal to disk, and an image when it is time; to be called now and then.

        Raises:
            StorageError: the disk failed, or is full.
        """
        self.storage.sync()
        if self.storage.wants_image and self._register.is_standing:
            self._make_image()

    def _make_image(self) -> None:
        with self.storage.imaging() as add:
            for index, chunk in enumerate(self._chunks):
                with chunk.changed:
                    self._verify(chunk, index)
                    add(index)

    # Gradients in.

    def _seat(self, worker_id: str) -> Seat:
        with self._register.lock:
            return self._register.seat(worker_id)

    def _verify(self, chunk: Chunk, index: int) -> None:
        """Checks a chunk that an earlier process left, once; its lock is held."""
        if not chunk.is_verified:
            self.storage.verify(index)
            chunk.is_verified = True

    def verify(self, chunk_index: int) -> None:
        """Checks a chunk that an earlier process left, ahead of its first use.

        Raises:
            StorageError: it was damaged.
        """
        if self._register.is_standing:
            chunk = self._chunks[chunk_index]
            with chunk.changed:
                self._verify(chunk, chunk_index)

    def contribute(
        self, worker_id: str, gradient: types_pb2.GradientChunk, payload: Bytes, patience: Patience
    ) -> bool:
        """Counts a gradient chunk, once; blocks while an earlier step is open.

        Everything is checked before anything is changed; the worker's seat is taken only then.

        Returns:
            False if it had been counted before.

        Raises:
            ArgumentError, CorruptChunkError, NonFiniteError: the chunk is refused.
            NotInitializedError, SeatsTakenError, LimitError: see `StepLedger.seat`.
            StepOrderError: see the ledger.
            WorkersMissingError: the earlier step did not close in time.
        """
        header = gradient.chunk
        index, step = header.chunk_index, gradient.step
        chunk = self._chunk(index)
        if gradient.sample_count > SAMPLE_COUNT_MAX:
            raise ArgumentError(
                f"sample_count must be at most {SAMPLE_COUNT_MAX}; got {gradient.sample_count}"
            )
        values = self._codec.open(header, chunk.where, payload)
        bad = self._codec.first_non_finite(header, values)
        if bad is not None:
            raise self.non_finite(chunk.where.offset + bad, f"gradient of {worker_id!r}")
        contribution = Contribution(values, header.scale_exponent, gradient.sample_count)
        seat = self._seat(worker_id)
        with chunk.changed:
            while (decision := self._ledger.decide(seat, index, step)) is Decision.WAIT:
                if not patience.wait(chunk.changed):
                    raise self._workers_missing(index, step, patience)
            if decision is Decision.DUPLICATE:
                chunk.duplicate_count += 1
                return False
            self._verify(chunk, index)
            learning_rate = self._register.learning_rate(self._ledger.records[index].version)
            self.storage.journal(
                index,
                seat.index,
                step,
                contribution.sample_count,
                contribution.exponent,
                learning_rate,
                contribution.payload,
            )
            with np.errstate(all="ignore"):  # overflows are found where weights are encoded
                self._count(chunk, index, contribution, seat, step, learning_rate)
            chunk.counted_count += 1
            chunk.changed.notify_all()
            return True

    def _count(
        self,
        chunk: Chunk,
        index: int,
        contribution: Contribution,
        seat: Seat,
        step: int,
        learning_rate: float,
    ) -> None:
        """Adds a contribution, closes the step if it is the last, and records both."""
        ledger, codec, scratch = self._ledger, self._codec.codec, thread_scratch()
        record = ledger.records[index]
        total_factor, shift = record.total_factor, record.shift
        needed = shift_for(contribution.sample_count, self.spec.worker_count)
        if total_factor == 0.0:
            shift = needed
        elif needed > shift:
            total_factor, shift = math.ldexp(total_factor, shift - needed), needed
        closes = ledger.completes(index)
        if closes and self.snapshots.pending:
            self.snapshots.before_close(index, learning_rate)
        transition = Transition.FIRST if total_factor == 0.0 else Transition.ADD
        with self.storage.change(index, Transition.CLOSE if closes else transition) as change:
            if closes:
                sample_total = record.sample_total + contribution.sample_count
                close_step(
                    contribution,
                    codec,
                    chunk.state,
                    self._rule,
                    scratch,
                    change,
                    total_factor=total_factor,
                    shift=shift,
                    # An asynchronous gradient is applied as it is: there is nothing to weigh it
                    # against.
                    sample_total=sample_total if ledger.is_sync else 1,
                    update_count=record.version + 1,
                    learning_rate=learning_rate,
                )
            else:
                assert chunk.state.gradient_sum is not None
                total_factor = add_to_sum(
                    contribution,
                    codec,
                    chunk.state.gradient_sum,
                    total_factor,
                    scratch,
                    change,
                    shift=shift,
                )
            following = ledger.following(
                index, contribution.sample_count, total_factor=total_factor, shift=shift
            )
            change.commit(following, seat.index, step)
        ledger.record(seat, index, step, following)

    # Weights out.

    @property
    def chunk_count(self) -> int:
        """Chunks of the slice."""
        return len(self._chunks)

    def is_ready(self, chunk_index: int, min_version: int) -> bool:
        """Whether `weights_message` would not wait."""
        return self._ledger.records[chunk_index].version >= min_version

    def weights_message(self, chunk_index: int, min_version: int, patience: Patience) -> bytes:
        """A chunk's weights as a sealed message, once it has seen `min_version` updates.

        GetWeightsResponse and ExchangeResponse have the same fields, so it serves both.

        Raises:
            NotInitializedError, WorkersMissingError.
            NonFiniteError: training diverged; the weights are not finite.
            StorageError: an earlier process left a damaged chunk.
        """
        self._register.check_initialized()
        chunk = self._chunks[chunk_index]
        with chunk.changed:
            while not self.is_ready(chunk_index, min_version):
                if not patience.wait(chunk.changed):
                    raise self._workers_missing(chunk_index, min_version, patience)
            version = self._ledger.records[chunk_index].version
            with self._encoded_lock:
                kept = self._encoded.get(chunk_index)
            if kept is not None and kept[0] == version:
                return kept[1]
            self._verify(chunk, chunk_index)
            message = self._encode(chunk, chunk_index, version)
            with self._encoded_lock:
                self._encoded[chunk_index] = (version, message)
                self._encoded.move_to_end(chunk_index)
                if len(self._encoded) > self._limits.encoded_chunk_count_max:
                    self._encoded.popitem(last=False)
            return message

    def _encode(self, chunk: Chunk, chunk_index: int, version: int) -> bytes:
        header = pb.ExchangeResponse(version=version)
        try:
            return self._codec.encode(
                header,
                header.chunk,
                chunk.where,
                chunk_index,
                chunk.state.weights,
                thread_scratch(),
            )
        except NonFiniteValueError as error:
            raise self.non_finite(
                chunk.where.offset + error.index, f"weights at version {version}"
            ) from None

    def capture(
        self,
        chunk_index: int,
        snapshot: Snapshot | None,
        patience: Patience,
        into: Sequence[Float32],
    ) -> tuple[int, float]:
        """See `Snapshots.capture`."""
        return self.snapshots.capture(
            chunk_index,
            snapshot,
            patience,
            into,
            verify=self._verify,
            missing=self._workers_missing,
        )

    # The rest.

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        """See `Register.change_learning_rate`."""
        self._register.change_learning_rate(from_step, learning_rate)

    def describe(self, name_count_max: int) -> pb.ParameterStatus:
        """What GetStatus tells of it, with at most so many names of each kind."""
        with self._register.lock:
            ledger = self._ledger
            standing = self._register.is_standing
            oldest = ledger.version_min() if standing else 0
            missing, unknown = ledger.missing(oldest)
            contributed = ledger.contributed(oldest) if ledger.is_sync else []
            return pb.ParameterStatus(
                spec=self.spec.to_proto(),
                slice_offset=self.where.offset,
                slice_size=self.where.size,
                initialized=standing,
                version_min=oldest,
                version_max=ledger.version_max() if standing else 0,
                contributed_worker_ids=contributed[:name_count_max],
                contributed_worker_count=len(contributed),
                missing_worker_ids=missing[:name_count_max],
                missing_worker_count=len(missing),
                unknown_worker_count=unknown,
                counted_chunk_count=sum(chunk.counted_count for chunk in self._chunks),
                duplicate_chunk_count=sum(chunk.duplicate_count for chunk in self._chunks),
                learning_rate=self._register.learning_rate(oldest),
            )

    def _chunk(self, index: int) -> Chunk:
        if index >= len(self._chunks):
            raise ArgumentError(
                f"chunk {index} of parameter {self.spec.name!r}: this shard's slice of "
                f"{self.where.size} elements has {len(self._chunks)} chunks",
                parameter=self.spec.name,
            )
        return self._chunks[index]

    def non_finite(self, element_index: int, what: str) -> NonFiniteError:
        """The error for a value that is not finite, `what` saying whose."""
        return NonFiniteError(
            f"{what}, parameter {self.spec.name!r}: element {element_index} is not finite; "
            "lower the learning rate or clip, or open with allow_non_finite=True",
            element_index=element_index,
            parameter=self.spec.name,
        )

    def _workers_missing(
        self, chunk_index: int, version: int, patience: Patience
    ) -> WorkersMissingError:
        """Why a chunk has not reached `version`."""
        step = self._ledger.records[chunk_index].version
        missing, unknown = self._ledger.missing(step, chunk_index)
        named = ", ".join(repr(worker_id) for worker_id in missing[:8])
        if len(missing) > 8:
            named += f" and {len(missing) - 8} more"
        if unknown:
            named += (" and " if named else "") + f"{unknown} that never opened the parameter"
        return WorkersMissingError(
            f"parameter {self.spec.name!r}: waited {patience.timeout_s:g} s for version {version} "
            f"of chunk {chunk_index}, which is at {step}; missing of "
            f"{self.spec.worker_count} workers: {named or 'none (asynchronous)'}; "
            "start them, or raise timeout_s",
            missing_worker_ids=tuple(missing),
            parameter=self.spec.name,
        )
