"""One parameter's slice on this shard: gradients in, each counted once, in its turn; weights out.

The tracker decides, averaging.py moves bytes, the storage keeps them; here threads meet. Locks: a
chunk's lock guards its arrays and its entries of the tracker; the register's lock guards what
changes rarely. Order: the register's lock is never taken while a chunk's is held.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from shardwell.errors import ArgumentError, StorageError
from shardwell.numerics.codec import Bytes, Float32, peak_of
from shardwell.numerics.scratch import thread_scratch
from shardwell.numerics.update_rules import SAFE_MAGNITUDE, TensorRules
from shardwell.numerics.weighted_mean import shift_for
from shardwell.placement.slices import Slice
from shardwell.process.spans import Spans, now_ns
from shardwell.specs.learning_rate import rate_of
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, STEP_MAX, ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.v1.trace_pb2 import (
    SPAN_KIND_ADD,
    SPAN_KIND_LATE,
    SPAN_KIND_UPDATE,
)
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.config import Limits
from shardwell_server.shard import errors as refusals
from shardwell_server.shard.crews import Contributor, Liveness
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import non_finite, workers_missing
from shardwell_server.shard.parameter.averaging import (
    Contribution,
    Total,
    add_to_sum,
    close_step,
    state_overflow,
)
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.clipping import NORM_SIZE_BYTES, Closing, ClosingByNorm
from shardwell_server.shard.parameter.contribution_log import ClosedSet
from shardwell_server.shard.parameter.contributions import Contributions, Contributors
from shardwell_server.shard.parameter.encoded_weights import EncodedWeights
from shardwell_server.shard.parameter.register import Register
from shardwell_server.shard.parameter.reports import Reports
from shardwell_server.shard.parameter.snapshot import Snapshots
from shardwell_server.shard.parameter.state import ParameterState
from shardwell_server.shard.sessions import Attendance
from shardwell_server.shard.slice import ShardSlice
from shardwell_server.shard.step_times import StepTimes
from shardwell_server.shard.step_tracker import Decision, ParameterSeat, StepTracker
from shardwell_server.shard.watch import Timer
from shardwell_server.store import (
    NO_SEAT,
    ChunkRecord,
    ParameterStorage,
    Transition,
    check_not_retired,
)


class _BrokenOffError(Exception):
    """An image is not wanted any more."""


class ParameterSlice(ShardSlice[ParameterSeat, pb.CreateParameterResponse, pb.ParameterStatus]):
    """See the module. All methods may be called from any thread."""

    def __init__(
        self,
        spec: ParameterSpec,
        where: Slice,
        storage: ParameterStorage,
        *,
        chunk_element_count: int,
        is_first_shard: bool,
        limits: Limits,
        sessions: Liveness,
        spans: Spans,
        timer: Timer | None = None,
        log: Callable[[ClosedSet], None] | None = None,
        spool_dir: Path | None = None,
    ) -> None:
        self.spec = spec
        self._spans = spans
        self.where = where
        self.chunk_element_count = chunk_element_count
        self.storage = storage
        self._rules = TensorRules(spec.optimizer, spec.layout)
        self._codec = ChunkCodec.of(spec)
        self._summed = self._codec.codec.summed
        """The codec of contributions as sums have them."""
        self._keeps_versions = spec.keeps_versions
        self._may_stay_encoded = storage.is_in_memory and not spec.closes_by_norm
        self._chunks = [
            Chunk(
                where.chunk(index, chunk_element_count),
                index,
                index * chunk_element_count,
                storage,
                spec,
            )
            for index in range(where.chunk_count(chunk_element_count))
        ]
        self.chunk_count = len(self._chunks)
        self._tracker = StepTracker(
            storage.records(),
            worker_count=spec.worker_count,
            worker_count_max=limits.worker_count_max,
            sessions=sessions,
            closes_by_norm=spec.closes_by_norm,
            elastic=spec.members,
            min_contributors=spec.min_contributors,
            has_grace=spec.grace_s > 0,
        )
        self.has_open_sets = spec.has_open_sets
        """Whether a step may close without a worker, so that each gradient has an outcome."""
        self._log = log
        self._is_restoring = True
        """Whether sets that are noted now may have been noted by an earlier process."""
        self.contributions = Contributions(None if log is None else self._log_set)
        """The contributors to the last steps, where sets are open."""
        self._register = Register(
            spec,
            storage,
            self._tracker,
            learning_rate=self._rules.learning_rate,
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
        """Snapshots of this slice, under way."""
        self._encoded = EncodedWeights(spec, spans, count_max=limits.encoded_chunk_count_max)
        state = ParameterState(
            spec=spec,
            storage=storage,
            tracker=self._tracker,
            register=self._register,
            lock=self._register.lock,
            chunks=self._chunks,
            rules=self._rules,
            encoded=self._encoded,
            snapshots=self.snapshots,
            contributions=self.contributions,
            times=StepTimes(len(self._chunks), time.monotonic),
            spans=spans,
        )
        super().__init__(spec.name, state, limits.abandoned_after_s, timer)
        self.closing = (ClosingByNorm if spec.closes_by_norm else Closing)(state)
        """How its steps close."""
        self._image_lock = threading.Lock()
        self.reports = Reports()
        """What workers report of its steps."""
        self._grace_over = [-1] * self.chunk_count
        """Of each chunk: the last step whose grace was over."""
        self._restore_sets()
        self._replay()
        self._is_restoring = False
        self.times.begin_anew()  # what was replayed was another process's
        self.closing.recovered()
        if storage.is_torn:
            for index in range(self.chunk_count):
                self.verify(index)

    # Opening and initializing.

    def _meet_incarnation(self, incarnation: int) -> int:
        return self._register.meet_incarnation(incarnation)

    def _opened(self, worker_id: str) -> pb.CreateParameterResponse:
        initialized = self._register.is_initialized  # what is only staged may have any version
        return pb.CreateParameterResponse(
            slice_offset=self.where.offset,
            slice_size=self.where.size,
            chunk_element_count=self.chunk_element_count,
            version=self._tracker.version_min() if initialized else 0,
            next_step=self._tracker.next_step(worker_id) if initialized else 0,
            initialized=initialized,
            init_epoch=self._register.committed_epoch,
            begun=self._register.has_begun,
            cuts_blocks=self.spec.cuts_blocks,
        )

    def _say_when(self, response: pb.CreateParameterResponse, worker_id: str) -> None:
        super()._say_when(response, worker_id)
        response.version_max = self._tracker.version_max()

    def _taken_over(self, seat: ParameterSeat) -> None:
        """All that the last owner was counting is counted on return."""
        self._wake_all()  # its last owner may wait there
        seat.forget_checksums()

    def _wake_all(self) -> None:
        for chunk in self._chunks:
            with chunk.changed.lock:
                chunk.changed.notify_all()

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
            OtherIncarnationError: first weights stand, or shard 0 did not grant the epoch.
        """
        if isinstance(self.spec.optimizer, Average):
            raise ArgumentError(f"parameter {self.spec.name!r} averages; it has no first weights")
        if not self.where.offset <= where.offset <= where.stop <= self.where.stop:
            raise ArgumentError(
                f"first weights for elements {where.offset} to {where.stop - 1}; this shard owns "
                f"{self.where.offset} to {self.where.stop - 1}"
            )
        with self._register.lock:
            check_not_retired(self.storage)
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
            epoch: Epoch of the claim.
            version: Updates that they have seen.
            learning_rate: From that version on; None: the spec's.
            load_id: See InitWeightsRequest.
            with_slots: Whether optimizer state came too; else it begins anew.

        Returns:
            The version.

        Raises:
            ArgumentError: the version is none, or is without its optimizer state; or there is a
                rate for an optimizer without one.
            InitSupersededError, OtherIncarnationError: see `set_first_weights`.
        """
        if not 0 <= version <= STEP_MAX or (version and self.storage.slots and not with_slots):
            raise ArgumentError(
                f"first weights of {self.spec.name!r} at version {version}: versions are 0 to "
                f"{STEP_MAX}, and above 0 come with {len(self.storage.slots)} arrays of state"
            )
        if learning_rate is not None and self._rules.learning_rate is None:
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
                self._write_image(lambda: False)  # before any client learns that they are here
                self._encoded.forget()
                self._register.finish_first(epoch, learning_rate, load_id)
            return self._tracker.version_min()

    def _begin_slots(self, chunk: Chunk) -> None:
        """Sets the optimizer's first state, bit for bit, whatever the arrays hold.

        A restore that did not come to its end may have left something, or a disk. The image is
        that of the first weights, which have come.
        """
        if chunk.state.image is not None:
            chunk.state.image.begin_first()
        for slot, value in zip(chunk.state.slots, self._rules.initial_slots, strict=True):
            bits = slot.view(np.uint32)
            first = np.float32(value)
            if (bits != first.view(np.uint32)).any():  # a page that is not written takes no memory
                slot[:] = first

    def confirm_init(self, epoch: int) -> int:
        """Makes first weights stand that shard 0 has accepted; returns the version.

        Raises:
            OtherIncarnationError: this shard has no complete values of that epoch.
        """
        with self._register.lock:
            self._encoded.forget()
            self._register.confirm_first(epoch)
            return self._tracker.version_min()

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[None]:
        with self._image_lock:
            self._come_to_rest()
            yield

    # Keeping.

    def make_image(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        if self.storage.wants_image and self._register.is_initialized:
            with contextlib.suppress(_BrokenOffError):
                self._write_image(is_stopping)

    def _write_image(self, is_stopping: Callable[[], bool]) -> None:
        with self._image_lock, self.storage.imaging() as add:
            for index, chunk in enumerate(self._chunks):
                if is_stopping():
                    raise _BrokenOffError
                with chunk.changed.lock:
                    chunk.verify()
                    add(index)
            self.closing.imaged()

    def verify(self, chunk_index: int) -> None:
        """Checks a chunk that an earlier process left, ahead of its first use.

        Raises:
            StorageError: it was damaged.
        """
        if self._register.is_initialized:
            chunk = self._chunks[chunk_index]
            with chunk.changed.lock:
                chunk.verify()

    # Gradients in.

    def contribute(
        self,
        contributor: Contributor[ParameterSeat],
        gradient: types_pb2.GradientChunk,
        payload: Bytes,
        deadline: RequestDeadline,
    ) -> bool:
        """Counts a gradient chunk, once; blocks while an earlier step is open.

        Everything is checked before anything is changed; the worker's seat is taken only then.

        Returns:
            False if it had been counted before; `contributor.superseded` has those of which another
            gradient was.

        Raises:
            ArgumentError, CorruptChunkError, NonFiniteError: the chunk is refused.
            NotInitializedError, SeatsTakenError, LimitError: see `Crew.seat`.
            WorkerIdInUseError, SessionUnknownError: the seat is another session's, or free.
            StepOrderError: see the tracker.
            WorkersMissingError: the earlier step did not close in time.
        """
        begin_ns = now_ns()
        header = gradient.chunk
        context = checksum.gradient_context(self.spec.name, contributor.worker_id)
        start = checksum.gradient(context, gradient)
        intact = self._codec.check(header, payload, start, thread_scratch())
        index, step = header.chunk_index, gradient.step
        if index >= len(self._chunks):
            raise self._no_chunk(index)
        chunk = self._chunks[index]
        if gradient.sample_count > SAMPLE_COUNT_MAX:
            raise ArgumentError(
                f"sample_count must be at most {SAMPLE_COUNT_MAX}; got {gradient.sample_count}"
            )
        values = self._codec.open(intact, chunk.where)
        peak = self._codec.peak(intact, values)
        bad = self._codec.first_non_finite(values) if peak == math.inf else None
        if bad is not None:
            whose = f"gradient of {contributor.worker_id!r}"
            raise non_finite(self.spec, chunk.where.offset + bad, whose)
        contribution = Contribution(values, gradient.sample_count)
        if contributor.seat is None:
            with self._register.lock:
                contributor.seat = self._seat(contributor)
        seat = contributor.seat
        is_empty = gradient.after_refusal and not gradient.sample_count
        rate = None
        if gradient.HasField("learning_rate") or gradient.rate_factors:
            rate = self._brought_rate(gradient)
        if rate is not None and seat is not None and self._tracker.is_sync:
            self._register.bring_learning_rate(contributor, step, rate)
        with chunk.changed.lock:
            self._crew.may_count(contributor)  # another one may take the seat over at any time
            if seat is None:
                found = self.contributions.of_step(step).get(index)
                decision = self._tracker.decide_past(
                    contributor.worker_id, index, step, header.crc32c, found, is_empty=is_empty
                )
            else:
                decision = self._tracker.decide(
                    seat,
                    index,
                    step,
                    header.crc32c,
                    after_refusal=gradient.after_refusal,
                    is_empty=is_empty,
                )
            if decision is Decision.WAIT:
                look_s = refusals.check_ended(self.spec, self._tracker, index)
                deadline.wait(chunk.changed, look_s=look_s)
                raise workers_missing(self.spec, self._tracker, index, step, deadline)
            if decision in (Decision.LATE, Decision.UNKNOWN):
                contributor.may_have_counted |= decision is Decision.UNKNOWN
                return self._late(contributor, index, step, begin_ns)
            if decision is not Decision.COUNT:
                chunk.duplicate_count += 1
                if decision is Decision.SUPERSEDED:
                    contributor.superseded.append(index)
                return False
            assert seat is not None
            gives_up = gradient.after_refusal and not gradient.sample_count and peak == 0.0
            if gives_up and not self._tracker.is_sync:
                chunk.verify()
                nothing = np.empty(0, np.uint8)
                self.storage.journal(
                    index, seat.index, seat.tenure.first_step + step, 0, 0.0, nothing
                )
                self._pass_over(index, seat, step, header.crc32c)
                return True
            summed = contribution
            if self._codec.codec is not self._summed:
                summed = contribution.summed(self._codec.codec)
            chunk.verify()
            version = self._tracker.records[index].version
            learning_rate = self._register.rates.at(version)
            if rate is not None and not self._tracker.is_sync:
                learning_rate = rate
            decay = self._rules.decay_into_state
            decayed = decay and decay * peak_of(chunk.state.weights)
            if not peak + decayed < SAFE_MAGNITUDE:
                what = "gradient" if peak >= SAFE_MAGNITUDE else "weight decay"
                self._check_state(chunk, index, summed, seat, learning_rate, what)
            is_grace_over = self._grace_over[index] == version
            closes = self._tracker.is_complete(index, seat, is_grace_over=is_grace_over)
            self.storage.journal(
                index,
                seat.index,
                seat.tenure.first_step + step,
                contribution.sample_count,
                learning_rate,
                contribution.payload,
                closes=closes and self.has_open_sets,
            )
            # What overflows is found where weights are encoded.
            begun_s = self._count(
                chunk, index, summed, seat, step, learning_rate, header.crc32c, closes=closes
            )
            chunk.counted_count += 1
            closed = self._tracker.records[index].version != version
            if closes:
                chunk.changed.notify_all()
            elif self.has_open_sets and self._tracker.begins_grace(index):
                self._begin_grace(index, version)
            kind = SPAN_KIND_UPDATE if closed else SPAN_KIND_ADD
            end_ns = self._spans.add(
                kind, self.spec.name, step, index, contributor.worker_id, begin_ns
            )
            seat.contributed(contributor.session, end_ns / 1e9, begun_s)
            return True

    def _late(
        self, contributor: Contributor[ParameterSeat], index: int, step: int, begin_ns: int
    ) -> bool:
        """Notes that a chunk of a worker's does not count, and is to be answered all the same."""
        contributor.late.add(index)
        if contributor.seat is not None:
            contributor.seat.late_count += 1
        self._chunks[index].late_count += 1
        worker_id = contributor.worker_id
        self._spans.add(SPAN_KIND_LATE, self.spec.name, step, index, worker_id, begin_ns)
        return False

    def _brought_rate(self, gradient: types_pb2.GradientChunk) -> float:
        """The learning rate that came with a gradient.

        Raises:
            ArgumentError: it can't be one, or the optimizer has none.
        """
        if not gradient.HasField("learning_rate"):
            raise ArgumentError("a gradient has rate_factors, and no learning_rate")
        return self.spec.check_rate(rate_of(gradient.learning_rate, gradient.rate_factors))

    def _no_chunk(self, index: int) -> ArgumentError:
        return ArgumentError(
            f"chunk {index} of parameter {self.spec.name!r}: this shard's slice of "
            f"{self.where.size} elements has {len(self._chunks)} chunks",
            parameter=self.spec.name,
        )

    def _check_state(
        self,
        chunk: Chunk,
        index: int,
        contribution: Contribution,
        seat: ParameterSeat,
        learning_rate: float,
        too_large: str,
    ) -> None:
        """Refuses a gradient that would take optimizer state beyond float32, for good.

        In a mean with others it does so no more than alone, and with weight decay neither: the
        mean lies between what each would be.
        """
        weighs = contribution.sample_count or not self._tracker.is_sync
        if self.spec.allow_non_finite or not weighs:
            return
        found = state_overflow(
            contribution,
            self._summed,
            chunk.state,
            self._rules,
            update_count=self._tracker.records[index].version + 1,
            learning_rate=learning_rate,
        )
        if found is not None:
            slot_index, place = found
            element = chunk.where.offset + place
            raise refusals.state_overflow(
                f"parameter {self.spec.name!r}",
                self.spec.element(element),
                f"gradient of {seat.worker_id!r}",
                self.spec.optimizer.slot_names[slot_index],
                too_large=too_large,
                ending="send the step again",
                element_index=element,
                parameter=self.spec.name,
            )

    def _count(
        self,
        chunk: Chunk,
        index: int,
        contribution: Contribution,
        seat: ParameterSeat,
        step: int,
        learning_rate: float,
        crc32c: int | None = None,
        *,
        closes: bool,
    ) -> float | None:
        """Adds a contribution, closes the step if it is the last, and records both.

        Args:
            chunk: Where; verified, and its lock is held.
            index: Index of the chunk.
            contribution: The contribution to add.
            seat: ParameterSeat of the worker.
            step: In the seat's tenure.
            learning_rate: Rate of the update, should it close the step.
            crc32c: CRC of the payload as it came; None: not known any more.
            closes: Whether it is the last of the step.

        Returns:
            When the synchronous step began; None: with this contribution.
        """
        tracker, codec = self._tracker, self._summed
        record = tracker.records[index]
        total, shift = Total(record.total_factor, record.is_encoded), record.shift
        needed = shift_for(contribution.sample_count, self.spec.step_size_max)
        if total.factor == 0.0:
            shift = needed
        elif needed > shift:
            total = total._replace(factor=math.ldexp(total.factor, shift - needed))
            shift = needed
        following = tracker.following(index, contribution.sample_count, closes=closes)
        closes = following.version > record.version
        if self.has_open_sets:
            self._keep_set(index, seat)
            learning_rate = self.spec.rate_of_step(learning_rate, record.contribution_count + 1)
        if closes and self.snapshots.pending:
            self.snapshots.before_close(index, learning_rate)
        if closes and self._keeps_versions:
            encoded = self._encoded.leave(chunk, index, record.version)
            if encoded is not None:
                self.storage.keep(index, record.version, encoded)
        transition = Transition.FIRST if total.factor == 0.0 else Transition.ADD
        with self.storage.change(index, Transition.CLOSE if closes else transition) as change:
            if closes:
                sample_total = record.sample_total + contribution.sample_count
                close_step(
                    contribution,
                    codec,
                    chunk.state,
                    self._rules,
                    change,
                    total=total,
                    shift=shift,
                    # An asynchronous gradient is applied as it is: there is nothing to weigh it
                    # against.
                    sample_total=sample_total if tracker.is_sync else 1,
                    update_count=record.version + 1,
                    learning_rate=learning_rate,
                    is_closed_alike=self.has_open_sets,
                )
            else:
                assert chunk.state.gradient_sum is not None
                total = add_to_sum(
                    contribution,
                    codec,
                    chunk.state.gradient_sum,
                    total,
                    change,
                    shift=shift,
                    may_stay_encoded=self._may_stay_encoded,
                )
                following = following._replace(
                    total_factor=total.factor, shift=shift, is_encoded=total.is_encoded
                )
            change.commit(following, seat.index, seat.tenure.first_step + step)
        tracker.record(seat, index, step, following, crc32c)
        if closes and self.has_open_sets:
            self._note_set(index, record.version)
        if not tracker.is_sync:
            return None
        begun_s = self.times.contributed(record.version)
        if closes:
            self.times.closed(record.version)
        return begun_s

    def _pass_over(
        self, index: int, seat: ParameterSeat, step: int, crc32c: int | None = None
    ) -> None:
        """Notes that a worker has given up an asynchronous step, which updates nothing."""
        record = self._tracker.records[index]
        with self.storage.change(index, Transition.CLOSE) as change:
            change.commit(record, seat.index, seat.tenure.first_step + step)
        self._tracker.record(seat, index, step, record, crc32c)

    def _replay(self) -> None:
        """Counts again what the storage lacks, having lost it with the machine's power."""
        seats = self._crew.seats
        for entry in self.storage.replay():
            chunk, index = self._chunks[entry.chunk_index], entry.chunk_index
            if entry.seat_index == NO_SEAT and entry.payload.size == NORM_SIZE_BYTES:
                chunk.verify()
                (norm,) = entry.payload.view(np.float64)
                rate = entry.learning_rate  # the register may have forgotten it
                if self.closing.replay(chunk, index, entry.step, float(norm), rate):
                    continue
            if entry.seat_index == NO_SEAT and entry.closes:
                chunk.verify()
                if self._tracker.records[index].version == entry.step:
                    self._decide(chunk, index, entry.learning_rate)
                    continue
            payload = self._codec.codec.upgraded(entry.payload, entry.exponent, chunk.where.size)
            contribution = Contribution(payload, entry.sample_count)
            seat = seats[entry.seat_index] if 0 <= entry.seat_index < len(seats) else None
            step = entry.step - (0 if seat is None else seat.tenure.first_step)
            gives_up = not payload.size and not self._tracker.is_sync
            size = 0 if gives_up else self._codec.codec.encoded_bytes(chunk.where.size)
            if (
                seat is None
                or payload.size != size
                # Below 0 it is of a tenure that is over: the sequence in the journal has to do.
                or (step >= 0 and not self._counts(seat, index, step))
            ):
                raise StorageError(
                    f"parameter {self.spec.name!r}: its journal has step {entry.step} of seat "
                    f"{entry.seat_index} for chunk {index}, which does not go on from its image; "
                    "restore a checkpoint",
                    parameter=self.spec.name,
                )
            chunk.verify()
            if gives_up:
                self._pass_over(index, seat, step)
                continue
            closes = entry.closes
            if not self.has_open_sets:
                closes = self._tracker.is_complete(index, seat)
            if self._codec.codec is not self._summed:
                contribution = contribution.summed(self._codec.codec)
            self._count(chunk, index, contribution, seat, step, entry.learning_rate, closes=closes)

    def _counts(self, seat: ParameterSeat, index: int, step: int) -> bool:
        """Whether a contribution that a journal has counted goes on from what is here."""
        if self.has_open_sets:  # its tenure may be over by now
            return seat.last_step[index] < step == self._tracker.records[index].version
        return self._tracker.decide(seat, index, step) is Decision.COUNT

    # Steps that may close without a worker.

    def _keep_set(self, index: int, *arriving: ParameterSeat) -> None:
        """Notes a contributor in its place of the set, before it counts."""
        if not self.storage.is_in_memory:
            seats = [each.index for each in (*self._tracker.open_sets[index], *arriving)]
            version = self._tracker.records[index].version
            self.storage.keep(index, version, array("H", seats).tobytes())

    def _restore_sets(self) -> None:
        """Goes on from the open sets that were kept, and tells of closed ones."""
        if not self.has_open_sets:
            return
        seats, tracker = self._crew.seats, self._tracker
        for index, record in enumerate(tracker.records):
            kept = array("H", self.storage.kept(index, record.version) or b"")
            count = record.contribution_count
            if len(kept) < count:  # of files of an earlier version
                kept = array("H", [s.index for s in seats if s.last_step[index] == record.version])
            found = [seats[each] for each in set(kept[:count]) if each < len(seats)]
            for seat in found:
                if seat.doubtful_step is not None:
                    seat.restore_mark(index, seat.doubtful_step[index])
            if [s.last_step[index] for s in found] != [record.version] * count:
                raise StorageError(
                    f"parameter {self.spec.name!r}: what is kept of step {record.version} of chunk "
                    f"{index} was damaged: seats {kept[:count].tolist()} are not the {count} that "
                    "have contributed to it; restore the directory from a copy or a checkpoint",
                    parameter=self.spec.name,
                )
            tracker.open_sets[index] = [seats[each] for each in kept[:count]]
            closed = array("H", self.storage.kept(index, record.version - 1) or b"")
            if closed:  # a kill may have come before it was noted
                for seat in [seats[each] for each in closed if each < len(seats)]:
                    if seat.doubtful_step is not None:
                        seat.restore_mark(index, min(seat.doubtful_step[index], record.version - 1))
                names = [seats[each].worker_id for each in closed if each < len(seats)]
                self.contributions.note(record.version - 1, index, names)

    def _note_set(self, index: int, step: int) -> None:
        """A chunk's step has closed; its lock is held."""
        closed = self._tracker.close(index)
        self.contributions.note(step, index, [seat.worker_id for seat in closed])

    def _log_set(self, step: int, index: int, worker_ids: Contributors) -> None:
        assert self._log is not None
        incarnation, where = self._register.incarnation, self._chunks[index].where
        self._log(
            ClosedSet(
                self.spec.name, incarnation, index, where, step, worker_ids, self._is_restoring
            )
        )

    def _begin_grace(self, index: int, version: int) -> None:
        """Closes a chunk's step once its grace is over, if it is open then."""

        def end() -> None:
            if self._tracker.records[index].version == version:
                self._grace_over[index] = version
                self._settle(index)

        self._after(self.spec.grace_s, end)

    def go_on_after_start(self) -> None:
        super().go_on_after_start()
        for index, record in enumerate(self._tracker.records):
            if self._tracker.has_grace_begun(index):
                self._begin_grace(index, record.version)

    def _settle(self, index: int) -> None:
        """Decides a chunk's open set without another contribution, if it is complete now.

        Raises:
            StorageError: it can't be journaled; the step is open still.
        """
        chunk, tracker = self._chunks[index], self._tracker
        with chunk.changed.lock:
            record = tracker.records[index]
            is_grace_over = self._grace_over[index] == record.version
            if record.is_full or not tracker.is_complete(index, is_grace_over=is_grace_over):
                return
            check_not_retired(self.storage)
            begin_ns = now_ns()
            chunk.verify()
            rate = self._register.rates.at(record.version)
            nothing = np.empty(0, np.uint8)
            self.storage.journal(index, NO_SEAT, record.version, 0, rate, nothing, closes=True)
            self._decide(chunk, index, rate)
            chunk.changed.notify_all()
            self._spans.add(SPAN_KIND_UPDATE, self.spec.name, record.version, index, "", begin_ns)

    def _decide(self, chunk: Chunk, index: int, learning_rate: float) -> None:
        """Closes a chunk's step with the set that it has, or leaves it full; its lock is held."""
        record = self._tracker.records[index]
        self._keep_set(index)
        if self.spec.closes_by_norm:
            following = record._replace(is_full=True)
            with self.storage.change(index, Transition.ADD) as change:
                change.commit(following, NO_SEAT, -1)
            self._tracker.records[index] = following
            return
        self.closing.close_full(chunk, index, learning_rate)

    def _settle_all(self) -> None:
        for index in range(self.chunk_count):
            self._settle(index)

    def _come_to_rest(self) -> None:
        for chunk in self._chunks:
            with chunk.changed.lock:
                pass  # what was changing it has ended

    def _give_on(self, seat: ParameterSeat) -> None:
        """Forgets closed sets that it is in: after a restart they would name who has it then."""
        for index, record in enumerate(list(self._tracker.records)):
            chunk, closed = self._chunks[index], record.version - 1
            with chunk.changed.lock:
                kept = self.storage.kept(index, closed) if closed >= 0 else None
                if kept and seat.index in array("H", kept):
                    self.storage.keep(index, closed, b"")

    @property
    def version_min(self) -> int:
        """The fewest updates that a chunk has seen."""
        return self._tracker.version_min()

    def contributors(self, step: int) -> list[str]:
        """Workers whose gradients a step has in any chunk, sorted, where sets are open."""
        if self._tracker.version_min() > step:
            return self.contributions.workers(step)
        found = set(self.contributions.workers(step))
        for index, record in enumerate(list(self._tracker.records)):
            if record.version == step:
                found.update(seat.worker_id for seat in list(self._tracker.open_sets[index]))
        return sorted(found)

    # Weights out.

    def is_ready(self, chunk_index: int, min_version: int) -> bool:
        """Whether `weights_message` would not wait."""
        return self._tracker.records[chunk_index].version >= min_version

    def weights_message(
        self,
        chunk_index: int,
        min_version: int,
        deadline: RequestDeadline,
        max_version: int | None = None,
        held_version: int | None = None,
    ) -> bytes:
        """A chunk's weights as a sealed message, once it has seen `min_version` updates.

        GetWeightsResponse and ExchangeResponse have the same fields, so it serves both.
        `max_version`: see GetWeightsRequest; `held_version`: see GradientChunk.

        Raises:
            NotInitializedError, WorkersMissingError.
            DivergedError: training diverged; the weights are not finite.
            StorageError: an earlier process left a damaged chunk.
        """
        self._register.check_initialized()
        chunk = self._chunks[chunk_index]
        with chunk.changed.lock:
            version = self._tracker.records[chunk_index].version
            if version < min_version:
                look_s = refusals.check_ended(self.spec, self._tracker, chunk_index)
                deadline.wait(chunk.changed, look_s=look_s)
                raise workers_missing(self.spec, self._tracker, chunk_index, min_version, deadline)
            if max_version is not None and version > max_version >= min_version:
                kept = self.storage.kept(chunk_index, max_version)
                if kept and self._encoded.fits(chunk, chunk_index, max_version, kept):
                    return kept
            return self._encoded.message(chunk, chunk_index, version, held_version)

    # The rest.

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        self._register.change_learning_rate(from_step, learning_rate)

    def describe(
        self, name_count_max: int, attending: Mapping[str, Attendance] | None = None
    ) -> pb.ParameterStatus:
        with self._register.lock:
            initialized = self._register.is_initialized
            oldest = self._tracker.version_min() if initialized else 0
            status = pb.ParameterStatus(
                spec=self.spec.to_proto(),
                slice_offset=self.where.offset,
                slice_size=self.where.size,
                initialized=initialized,
                version_min=oldest,
                version_max=self._tracker.version_max() if initialized else 0,
                counted_chunk_count=sum(chunk.counted_count for chunk in self._chunks),
                duplicate_chunk_count=sum(chunk.duplicate_count for chunk in self._chunks),
                late_chunk_count=sum(chunk.late_count for chunk in self._chunks),
                learning_rate=self._register.rates.at(oldest),
                load_id=self._register.committed_load_id,
            )
            contributed_count, missing_count = self._add_members(
                status, oldest, name_count_max, attending
            )
            status.learners.extend(self.reports.learners(name_count_max))
            for name, value in self.reports.newest().items():
                status.figures.add(name=name, value=value)
            status.contributed_worker_count = contributed_count
            status.missing_worker_count = missing_count
            return status
