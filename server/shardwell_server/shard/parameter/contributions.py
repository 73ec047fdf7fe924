"""Gradients into one slice: each chunk counted once, in its turn, and journaled before it counts.

The tracker decides, averaging.py moves bytes, the storage keeps them; here threads meet, at each
chunk's lock.
"""

from __future__ import annotations

import math

import numpy as np

from shardwell.errors import ArgumentError, StorageError
from shardwell.numerics.codec import Bytes
from shardwell.numerics.scratch import thread_scratch
from shardwell.numerics.update_rules import SAFE_MAGNITUDE, UpdateRule, decay_into_state, peak_of
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, ParameterSpec
from shardwell.v1 import types_pb2
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec, check_chunk
from shardwell_server.shard import errors as refusals
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import non_finite, workers_missing
from shardwell_server.shard.members import Contributor
from shardwell_server.shard.parameter.averaging import (
    Contribution,
    add_to_sum,
    close_step,
    shift_for,
    state_overflow,
)
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.register import Register
from shardwell_server.shard.parameter.snapshot import Snapshots
from shardwell_server.shard.step_tracker import Decision, Seat, StepTracker
from shardwell_server.store import ParameterStorage, Transition


class Contributions:
    """See the module. Any thread may call `take`."""

    def __init__(
        self,
        spec: ParameterSpec,
        chunks: list[Chunk],
        tracker: StepTracker,
        register: Register,
        storage: ParameterStorage,
        rule: UpdateRule,
        snapshots: Snapshots,
    ) -> None:
        self._spec = spec
        self._codec = ChunkCodec.of(spec)
        self._chunks = chunks
        self._tracker = tracker
        self._register = register
        self._storage = storage
        self._rule = rule
        self._snapshots = snapshots
        self._decay = decay_into_state(spec.optimizer)

    def seat(self, contributor: Contributor[Seat]) -> Seat:
        """The worker's seat, which is the session's from now on; the register's lock is held.

        When it was taken over, all that its last owner was counting is counted on return.

        Raises:
            ShardwellError: see `Register.seat`.
        """
        seat = self._register.seat(contributor)
        if seat.was_taken_over:
            for chunk in self._chunks:
                with chunk.changed:
                    chunk.changed.notify_all()  # its last owner may wait there
            seat.forget_checksums()
        return seat

    def take(
        self,
        contributor: Contributor[Seat],
        gradient: types_pb2.GradientChunk,
        payload: Bytes,
        deadline: RequestDeadline,
    ) -> bool:
        header = gradient.chunk
        context = checksum.gradient_context(self._spec.name, contributor.worker_id)
        intact = check_chunk(header, payload, checksum.gradient(context, gradient))
        index, step = header.chunk_index, gradient.step
        chunk = self._chunk(index)
        if gradient.sample_count > SAMPLE_COUNT_MAX:
            raise ArgumentError(
                f"sample_count must be at most {SAMPLE_COUNT_MAX}; got {gradient.sample_count}"
            )
        values = self._codec.open(intact, chunk.where)
        peak = self._codec.peak(header, values)
        bad = self._codec.first_non_finite(header, values) if peak == math.inf else None
        if bad is not None:
            whose = f"gradient of {contributor.worker_id!r}"
            raise non_finite(self._spec, chunk.where.offset + bad, whose)
        contribution = Contribution(values, header.scale_exponent, gradient.sample_count)
        if contributor.seat is None:
            with self._register.lock:
                contributor.seat = self.seat(contributor)
        seat = contributor.seat
        with chunk.changed:
            seat.check(contributor)  # another one may take it over at any time
            decision = self._tracker.decide(seat, index, step, header.crc32c)
            if decision is Decision.WAIT:
                deadline.wait(chunk.changed)
                raise workers_missing(self._spec, self._tracker, index, step, deadline)
            if decision is Decision.DUPLICATE:
                chunk.duplicate_count += 1
                return False
            chunk.verify()
            version = self._tracker.records[index].version
            learning_rate = self._register.learning_rate(version)
            decayed = self._decay and self._decay * peak_of(chunk.state.weights)
            if not peak + decayed < SAFE_MAGNITUDE:
                what = "gradient" if peak >= SAFE_MAGNITUDE else "weight decay"
                self._check_state(chunk, index, contribution, seat, learning_rate, what)
            self._storage.journal(
                index,
                seat.index,
                seat.stored(step),
                contribution.sample_count,
                contribution.exponent,
                learning_rate,
                contribution.payload,
            )
            with np.errstate(all="ignore"):  # overflows are found where weights are encoded
                self._count(chunk, index, contribution, seat, step, learning_rate, header.crc32c)
            seat.contributed(contributor.session)
            chunk.counted_count += 1
            if self._tracker.records[index].version != version:
                chunk.changed.notify_all()
            return True

    def _check_state(
        self,
        chunk: Chunk,
        index: int,
        contribution: Contribution,
        seat: Seat,
        learning_rate: float,
        too_large: str,
    ) -> None:
        """Refuses a gradient that would take optimizer state beyond float32, for good.

        In a mean with others it does so no more than alone, and with weight decay neither: the
        mean lies between what each would be.
        """
        weighs = contribution.sample_count or not self._tracker.is_sync
        if self._spec.allow_non_finite or not weighs:
            return
        with np.errstate(all="ignore"):
            found = state_overflow(
                contribution,
                self._codec.codec,
                chunk.state,
                self._rule,
                thread_scratch(),
                update_count=self._tracker.records[index].version + 1,
                learning_rate=learning_rate,
            )
        if found is not None:
            slot_index, place = found
            element = chunk.where.offset + place
            raise refusals.state_overflow(
                f"parameter {self._spec.name!r}",
                f"element {element}",
                f"gradient of {seat.worker_id!r}",
                self._spec.optimizer.slot_names[slot_index],
                too_large=too_large,
                element_index=element,
                parameter=self._spec.name,
            )

    def replay(self) -> None:
        """Counts again what the storage lacks, having lost it with the machine's power."""
        seats = self._tracker.seats
        for entry in self._storage.replay():
            chunk, index = self._chunks[entry.chunk_index], entry.chunk_index
            contribution = Contribution(entry.payload, entry.exponent, entry.sample_count)
            seat = seats[entry.seat_index] if entry.seat_index < len(seats) else None
            step = entry.step - (0 if seat is None else seat.tenure.first_step)
            if (
                seat is None
                or entry.payload.size != chunk.where.size * self._codec.codec.item_size
                # Below 0 it is of a tenure that is over: the sequence in the journal has to do.
                or (step >= 0 and self._tracker.decide(seat, index, step) is not Decision.COUNT)
            ):
                raise StorageError(
                    f"parameter {self._spec.name!r}: its journal has step {entry.step} of seat "
                    f"{entry.seat_index} for chunk {index}, which does not go on from its image; "
                    "restore a checkpoint",
                    parameter=self._spec.name,
                )
            chunk.verify()
            with np.errstate(all="ignore"):
                self._count(
                    chunk,
                    index,
                    contribution,
                    seat,
                    step,
                    entry.learning_rate,  # the register may have forgotten it
                )

    def _chunk(self, index: int) -> Chunk:
        if index >= len(self._chunks):
            raise ArgumentError(
                f"chunk {index} of parameter {self._spec.name!r}: this shard's slice of "
                f"{sum(chunk.where.size for chunk in self._chunks)} elements has "
                f"{len(self._chunks)} chunks",
                parameter=self._spec.name,
            )
        return self._chunks[index]

    def _count(
        self,
        chunk: Chunk,
        index: int,
        contribution: Contribution,
        seat: Seat,
        step: int,
        learning_rate: float,
        crc32c: int | None = None,
    ) -> None:
        """Adds a contribution, closes the step if it is the last, and records both."""
        tracker, codec, scratch = self._tracker, self._codec.codec, thread_scratch()
        record = tracker.records[index]
        total_factor, shift = record.total_factor, record.shift
        needed = shift_for(contribution.sample_count, self._spec.worker_count)
        if total_factor == 0.0:
            shift = needed
        elif needed > shift:
            total_factor, shift = math.ldexp(total_factor, shift - needed), needed
        closes = tracker.completes(index)
        if closes and self._snapshots.pending:
            self._snapshots.before_close(index, learning_rate)
        transition = Transition.FIRST if total_factor == 0.0 else Transition.ADD
        with self._storage.change(index, Transition.CLOSE if closes else transition) as change:
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
                    sample_total=sample_total if tracker.is_sync else 1,
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
            following = tracker.following(
                index, contribution.sample_count, total_factor=total_factor, shift=shift
            )
            change.commit(following, seat.index, seat.stored(step))
        tracker.record(seat, index, step, following, crc32c)
