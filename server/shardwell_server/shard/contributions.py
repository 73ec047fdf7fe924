"""Gradients into one slice: each chunk counted once, in its turn, and journaled before it counts.

The ledger decides, averaging.py moves bytes, the storage keeps them; here threads meet, at each
chunk's condition.
"""

from __future__ import annotations

import math

import numpy as np

from shardwell.chunk_codec import ChunkCodec
from shardwell.codec import Bytes
from shardwell.errors import ArgumentError, StorageError
from shardwell.scratch import thread_scratch
from shardwell.specs import SAMPLE_COUNT_MAX, ParameterSpec
from shardwell.update_rules import UpdateRule
from shardwell.v1 import types_pb2
from shardwell_server.shard.averaging import Contribution, add_to_sum, close_step, shift_for
from shardwell_server.shard.chunk import Chunk
from shardwell_server.shard.ledger import Decision, Seat, StepLedger
from shardwell_server.shard.patience import Patience
from shardwell_server.shard.refusals import non_finite, workers_missing
from shardwell_server.shard.register import Register
from shardwell_server.shard.snapshot import Snapshots
from shardwell_server.store import ParameterStorage, Transition


class Contributions:
    """See the module. Any thread may call `take`."""

    def __init__(
        self,
        spec: ParameterSpec,
        chunks: list[Chunk],
        ledger: StepLedger,
        register: Register,
        storage: ParameterStorage,
        rule: UpdateRule,
        snapshots: Snapshots,
    ) -> None:
        self._spec = spec
        self._codec = ChunkCodec.of(spec)
        self._chunks = chunks
        self._ledger = ledger
        self._register = register
        self._storage = storage
        self._rule = rule
        self._snapshots = snapshots

    def take(
        self, worker_id: str, gradient: types_pb2.GradientChunk, payload: Bytes, patience: Patience
    ) -> bool:
        """See `ParameterSlice.contribute`."""
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
            raise non_finite(self._spec, chunk.where.offset + bad, f"gradient of {worker_id!r}")
        contribution = Contribution(values, header.scale_exponent, gradient.sample_count)
        seat = self._seat(worker_id)
        with chunk.changed:
            while (decision := self._ledger.decide(seat, index, step)) is Decision.WAIT:
                if not patience.wait(chunk.changed):
                    raise workers_missing(self._spec, self._ledger, index, step, patience)
            if decision is Decision.DUPLICATE:
                chunk.duplicate_count += 1
                return False
            chunk.verify()
            learning_rate = self._register.learning_rate(self._ledger.records[index].version)
            self._storage.journal(
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

    def replay(self) -> None:
        """Counts again what the storage lacks, having lost it with the machine's power."""
        seats = self._ledger.seats
        for entry in self._storage.replay():
            chunk, index = self._chunks[entry.chunk_index], entry.chunk_index
            contribution = Contribution(entry.payload, entry.exponent, entry.sample_count)
            if (
                entry.seat_index >= len(seats)
                or entry.payload.size != chunk.where.size * self._codec.codec.item_size
                or self._ledger.decide(seats[entry.seat_index], index, entry.step)
                is not Decision.COUNT
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
                    seats[entry.seat_index],
                    entry.step,
                    entry.learning_rate,  # the register may have forgotten it
                )

    def _seat(self, worker_id: str) -> Seat:
        with self._register.lock:
            return self._register.seat(worker_id)

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
    ) -> None:
        """Adds a contribution, closes the step if it is the last, and records both."""
        ledger, codec, scratch = self._ledger, self._codec.codec, thread_scratch()
        record = ledger.records[index]
        total_factor, shift = record.total_factor, record.shift
        needed = shift_for(contribution.sample_count, self._spec.worker_count)
        if total_factor == 0.0:
            shift = needed
        elif needed > shift:
            total_factor, shift = math.ldexp(total_factor, shift - needed), needed
        closes = ledger.completes(index)
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
