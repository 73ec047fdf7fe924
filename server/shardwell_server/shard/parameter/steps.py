"""The steps of a slice: contributions are counted, and the last one, time or a norm closes a step.

Each chunk of most parameters closes a step with its last contribution. Where the mean gradient is
clipped by its norm over all shards, a step closes in two phases.

States of a chunk's step, where n is its contributions:

    open, n < worker_count     as of any parameter
    full, n = worker_count     the sum is kept; no worker contributes to it, nor to the next step
    closed                     version + 1: updated with the mean, scaled down by the norm

Where sets are open, a step is full once its set is decided, whatever n is. The norm goes from the
clients, who have asked all shards for theirs, to the register, which logs the first that it gets
for a step, and then to the chunks, one by one. Invariants:

  - All chunks of all shards close a step with the same norm: that of the first shard, to which
    clients tell it first.
  - A shard knows the norm of a step before any of its chunks closes it; after kill -9 it goes on
    with the same one.
  - The norm of step s + 1 is only taken where all chunks have left step s. So a client that finds
    a step closed without its norm knows that it is closed everywhere: all workers have gone on.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from shardwell.errors import ArgumentError, StepOrderError, StorageError
from shardwell.numerics.update_rules import clip_factor, exact_sum
from shardwell.numerics.weighted_mean import shift_for
from shardwell.process.spans import now_ns
from shardwell.specs.parameter import block_size_of
from shardwell.v1.trace_pb2 import SPAN_KIND_UPDATE
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.shard import errors as refusals
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import await_version
from shardwell_server.shard.parameter.averaging import (
    Contribution,
    Total,
    add_to_sum,
    close_full_step,
    close_step,
    squares_of_mean,
    state_overflow,
)
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.state import ParameterState
from shardwell_server.shard.step_tracker import Decision, ParameterSeat
from shardwell_server.store.contract import (
    NO_SEAT,
    ChunkRecord,
    JournalEntry,
    Transition,
    check_not_retired,
)

NORM_SIZE_BYTES = 8
"""Bytes of a step's end in a journal: a float64."""
Measured: TypeAlias = tuple[list[float] | None, float | None]
"""The squares of a shard's part of a step's mean, and the norm of all."""


class Steps:
    """Steps whose chunks close with the last contribution. Any thread may call it."""

    def __init__(self, state: ParameterState) -> None:
        self._spec = state.spec
        self._register = state.register
        self._tracker = state.tracker
        self._storage = state.storage
        self._rules = state.rules
        self._sent = ChunkCodec.of(state.spec).codec
        """Codec of contributions as they come."""
        self._codec = self._sent.summed
        """Codec of contributions as sums have them."""
        self._may_stay_encoded = state.storage.is_in_memory and not state.spec.closes_by_norm
        self._keeps_versions = state.spec.keeps_versions
        self._encoded = state.encoded
        self._snapshots = state.snapshots
        self._sets = state.sets
        self._chunks = state.chunks
        self._spans = state.spans
        self._times = state.times

    def check_state(
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
        if self._spec.allow_non_finite or not weighs:
            return
        found = state_overflow(
            contribution,
            self._codec,
            chunk.state,
            self._rules,
            update_count=self._tracker.records[index].version + 1,
            learning_rate=learning_rate,
        )
        if found is not None:
            slot_index, place = found
            element = chunk.where.offset + place
            raise refusals.state_overflow(
                f"parameter {self._spec.name!r}",
                self._spec.element(element),
                f"gradient of {seat.worker_id!r}",
                self._spec.optimizer.slot_names[slot_index],
                too_large=too_large,
                ending="send the step again",
                element_index=element,
                parameter=self._spec.name,
            )

    def count(
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

        The chunk is verified, and its lock is held; `step` is in the seat's tenure, `crc32c` that
        of the payload as it came. Returns when the synchronous step began; None: with this.
        """
        tracker, codec = self._tracker, self._codec
        record = tracker.records[index]
        total, shift = Total(record.total_factor, record.is_encoded), record.shift
        needed = shift_for(contribution.sample_count, self._spec.step_size_max)
        if total.factor == 0.0:
            shift = needed
        elif needed > shift:
            total = total._replace(factor=math.ldexp(total.factor, shift - needed))
            shift = needed
        following = tracker.following(index, contribution.sample_count, closes=closes)
        closes = following.version > record.version
        if self._tracker.has_open_sets:
            self._sets.keep(index, seat)
            learning_rate = self._spec.rate_of_step(learning_rate, record.contribution_count + 1)
        if closes and self._snapshots.pending:
            self._snapshots.before_close(index, learning_rate)
        if closes and self._keeps_versions:
            self._encoded.leave(chunk, index, record.version)
        transition = Transition.FIRST if total.factor == 0.0 else Transition.ADD
        with self._storage.change(index, Transition.CLOSE if closes else transition) as change:
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
                    is_closed_alike=self._tracker.has_open_sets,
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
        if closes and self._tracker.has_open_sets:
            self._sets.closed(index, record.version)
        if not tracker.is_sync:
            return None
        begun_s = self._times.contributed(record.version)
        if closes:
            self._times.closed(record.version)
        return begun_s

    def pass_over(
        self, index: int, seat: ParameterSeat, step: int, crc32c: int | None = None
    ) -> None:
        """Notes that a worker has given up an asynchronous step, which updates nothing."""
        record = self._tracker.records[index]
        with self._storage.change(index, Transition.CLOSE) as change:
            change.commit(record, seat.index, seat.tenure.first_step + step)
        self._tracker.record(seat, index, step, record, crc32c)

    def replay(self) -> None:
        """Counts again what the storage lacks, having lost it with the machine's power."""
        seats = self._tracker.crew.seats
        for entry in self._storage.replay():
            chunk, index = self._chunks[entry.chunk_index], entry.chunk_index
            if entry.seat_index == NO_SEAT and self._ends_again(chunk, index, entry):
                continue
            payload = self._sent.upgraded(entry.payload, entry.exponent, chunk.where.size)
            contribution = Contribution(payload, entry.sample_count)
            seat = seats[entry.seat_index] if 0 <= entry.seat_index < len(seats) else None
            step = entry.step - (0 if seat is None else seat.tenure.first_step)
            gives_up = not payload.size and not self._tracker.is_sync
            size = 0 if gives_up else self._sent.encoded_bytes(chunk.where.size)
            if (
                seat is None
                or payload.size != size
                # Below 0 it is of a tenure that is over: the sequence in the journal has to do.
                or (step >= 0 and not self._counts(seat, index, step))
            ):
                raise StorageError(
                    f"parameter {self._spec.name!r}: its journal has step {entry.step} of seat "
                    f"{entry.seat_index} for chunk {index}, which does not go on from its image; "
                    "restore a checkpoint",
                    parameter=self._spec.name,
                )
            chunk.verify()
            if gives_up:
                self.pass_over(index, seat, step)
                continue
            closes = entry.closes
            if not self._tracker.has_open_sets:
                closes = self._tracker.is_complete(index, seat)
            if self._sent is not self._codec:
                contribution = contribution.summed(self._sent)
            self.count(chunk, index, contribution, seat, step, entry.learning_rate, closes=closes)

    def _counts(self, seat: ParameterSeat, index: int, step: int) -> bool:
        if self._tracker.has_open_sets:  # its tenure may be over by now
            return seat.last_step[index] < step == self._tracker.records[index].version
        return self._tracker.decide(seat, index, step) is Decision.COUNT

    def settle(self, index: int) -> None:
        """Decides a chunk's open set without another contribution, if it is complete now."""
        chunk, tracker = self._chunks[index], self._tracker
        with chunk.changed.lock:
            record = tracker.records[index]
            is_grace_over = self._sets.grace_over[index] == record.version
            if record.is_full or not tracker.is_complete(index, is_grace_over=is_grace_over):
                return
            check_not_retired(self._storage)
            begin_ns = now_ns()
            chunk.verify()
            rate = self._register.rates.at(record.version)
            nothing = np.empty(0, np.uint8)
            self._storage.journal(
                JournalEntry(index, NO_SEAT, record.version, 0, rate, nothing, closes=True)
            )
            self.decide(chunk, index, rate)
            chunk.changed.notify_all()
            self._spans.add(SPAN_KIND_UPDATE, self._spec.name, record.version, index, "", begin_ns)

    def decide(self, chunk: Chunk, index: int, learning_rate: float) -> None:
        """Decides a chunk's open set, and closes the step if it can be; its lock is held."""
        self._sets.keep(index)
        self.close_full(chunk, index, learning_rate)

    def close_full(
        self, chunk: Chunk, index: int, learning_rate: float, clip_factor: float = 1.0
    ) -> None:
        """Closes a chunk's step with the sum that it has, times a factor; its lock is held.

        The journal has the step's end, and the chunk is verified.
        """
        record = self._tracker.records[index]
        if self._snapshots.pending:
            self._snapshots.before_close(index, learning_rate)
        if self._keeps_versions:
            self._encoded.leave(chunk, index, record.version)
        following = ChunkRecord(record.version + 1)
        with self._storage.change(index, Transition.CLOSE) as change:
            with np.errstate(all="ignore"):  # overflows are found where weights are encoded
                close_full_step(
                    chunk.state,
                    self._codec,
                    self._rules,
                    change,
                    record,
                    clip_factor=clip_factor,
                    learning_rate=self._spec.rate_of_step(learning_rate, record.contribution_count),
                )
            change.commit(following, NO_SEAT, -1)
        self._tracker.records[index] = following
        if self._tracker.has_open_sets:
            self._sets.closed(index, record.version)
        self._times.closed(record.version)

    def measure(self, step: int, deadline: RequestDeadline) -> Measured:
        """Returns `exact_sum` of the squares of this shard's part of a step's mean, and the norm.

        The first is None once a chunk has closed the step; the second as long as the shard knows
        none, and again when the step is long over.
        """
        raise self._refusal()

    def close(self, step: int, norm: float) -> float | None:
        """Closes a step with the norm known before, else this one; returns it. None: long over."""
        raise self._refusal()

    def _ends_again(self, chunk: Chunk, index: int, entry: JournalEntry) -> bool:
        """Ends a chunk's step as the journal has it; returns whether it can be ended."""
        if not entry.closes or self._tracker.records[index].version != entry.step:
            return False
        chunk.verify()
        self.decide(chunk, index, entry.learning_rate)
        return True

    def recovered(self) -> None:
        """Forgets norms of steps that are not full any more, after all was replayed.

        A norm is on disk at once; what it is of, as often as `--durability` says.
        """
        self._register.forget_norms(
            lambda step: not all(self._may_close(each, step) for each in self._tracker.records)
        )

    def _may_close(self, record: ChunkRecord, step: int) -> bool:
        """Returns True if a chunk has closed a step, or is full, as one record of it says."""
        is_full = self._tracker.is_decided(record)
        return record.version > step or (record.version == step and is_full)

    def _refusal(self) -> ArgumentError:
        self._register.check_initialized()
        return ArgumentError(
            f"parameter {self._spec.name!r} closes steps by itself: it has no clip_norm, or "
            "one worker, who clips",
            parameter=self._spec.name,
        )


class StepsByNorm(Steps):
    """The steps in two phases: full with the last contribution, closed with the norm."""

    def __init__(self, state: ParameterState) -> None:
        super().__init__(state)
        self._squares: list[tuple[int, list[float]]] = [(-1, [])] * len(state.chunks)
        """By chunk: the step, and the squares of its mean."""

    def measure(self, step: int, deadline: RequestDeadline) -> Measured:
        self._register.check_initialized()
        for index, chunk in enumerate(self._chunks):
            with chunk.changed.lock:
                version = self._tracker.records[index].version
                if version > step:
                    return None, self._register.norm_of(step)
                if version < step or not self._tracker.is_full(index):
                    await_version(self._tracker, step + 1, chunk.changed, deadline, index)
                if self._squares[index][0] != step:
                    chunk.verify()
                    record, size = self._tracker.records[index], block_size_of(self._spec.size)
                    with np.errstate(all="ignore"):
                        squares = squares_of_mean(chunk.state, self._rules, record, size)
                    self._squares[index] = (step, squares)
        squares = exact_sum([each for _, squares in self._squares for each in squares])
        return squares, self._register.norm_of(step)

    def close(self, step: int, norm: float) -> float | None:
        self._register.check_initialized()
        if norm < 0 or not (math.isfinite(norm) or self._spec.allow_non_finite):
            raise ArgumentError(f"norm must be a finite number of at least 0; got {norm}")
        for index, record in enumerate(list(self._tracker.records)):
            if not self._may_close(record, step):
                raise StepOrderError(
                    f"step {step} of parameter {self._spec.name!r} can't be closed: chunk {index} "
                    f"is at step {record.version}, with {record.contribution_count} of "
                    f"{self._spec.worker_count} contributions; ask for its norm first",
                    parameter=self._spec.name,
                )
        counted = self._register.agree_on_norm(step, norm)
        if counted is None:
            return None
        for index, chunk in enumerate(self._chunks):
            with chunk.changed.lock:
                if self._tracker.records[index].version == step:
                    begin_ns = now_ns()
                    chunk.verify()
                    rate = self._register.rates.at(step)
                    payload = np.array([counted]).view(np.uint8)
                    self._storage.journal(JournalEntry(index, NO_SEAT, step, 0, rate, payload))
                    self._close(chunk, index, counted, rate)
                    chunk.changed.notify_all()
                    self._spans.add(SPAN_KIND_UPDATE, self._spec.name, step, index, "", begin_ns)
        return counted

    def decide(self, chunk: Chunk, index: int, learning_rate: float) -> None:
        self._sets.keep(index)
        following = self._tracker.records[index]._replace(is_full=True)
        with self._storage.change(index, Transition.ADD) as change:
            change.commit(following, NO_SEAT, -1)
        self._tracker.records[index] = following

    def _ends_again(self, chunk: Chunk, index: int, entry: JournalEntry) -> bool:
        if entry.payload.size != NORM_SIZE_BYTES:
            return super()._ends_again(chunk, index, entry)
        if not self._tracker.is_full(index) or self._tracker.records[index].version != entry.step:
            return False
        chunk.verify()
        (norm,) = entry.payload.view(np.float64)
        self._register.restore_norm(entry.step, float(norm))
        self._close(chunk, index, float(norm), entry.learning_rate)  # the register may lack it
        return True

    def _close(self, chunk: Chunk, index: int, norm: float, learning_rate: float) -> None:
        """Updates a full chunk, verified; its lock is held."""
        factor = clip_factor(norm, self._spec.optimizer.clip_norm)
        self.close_full(chunk, index, learning_rate, factor)
