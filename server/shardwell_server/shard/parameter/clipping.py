"""How the steps of a slice close: chunk by chunk, or by the norm of their mean over all shards.

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

from shardwell.errors import ArgumentError, StepOrderError
from shardwell.numerics.update_rules import clip_factor, exact_sum
from shardwell.process.spans import now_ns
from shardwell.specs.parameter import block_size_of
from shardwell.v1.trace_pb2 import SPAN_KIND_UPDATE
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import check_ended, workers_missing
from shardwell_server.shard.parameter.averaging import close_full_step, squares_of_mean
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.state import ParameterState
from shardwell_server.store import NO_SEAT, ChunkRecord, Transition

NORM_SIZE_BYTES = 8
"""Bytes of a step's end in a journal: a float64."""
Measured: TypeAlias = tuple[list[float] | None, float | None]
"""The squares of a shard's part of a step's mean, and the norm of all."""


class Closing:
    """Each chunk closes its step with the last contribution. Any thread may call it.

    Args:
        state: The slice.
    """

    def __init__(self, state: ParameterState) -> None:
        self._spec = state.spec
        self._register = state.register
        self._tracker = state.tracker
        self._storage = state.storage
        self._rules = state.rules
        self._codec = ChunkCodec.of(state.spec).codec.summed
        self._encoded = state.encoded
        self._snapshots = state.snapshots
        self._contributions = state.contributions
        self._times = state.times

    def close_full(
        self, chunk: Chunk, index: int, learning_rate: float, clip_factor: float = 1.0
    ) -> None:
        """Closes a chunk's step with the sum that it has, times a factor; its lock is held.

        What it does is in the journal, and the chunk is verified.
        """
        record = self._tracker.records[index]
        if self._snapshots.pending:
            self._snapshots.before_close(index, learning_rate)
        if self._spec.keeps_versions:
            encoded = self._encoded.leave(chunk, index, record.version)
            if encoded is not None:
                self._storage.keep(index, record.version, encoded)
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
            closed = self._tracker.close(index)
            self._contributions.note(record.version, index, [each.worker_id for each in closed])
        self._times.closed(record.version)

    def measure(self, step: int, deadline: RequestDeadline) -> Measured:
        """A step's norm: the squares of this shard's part, as `exact_sum` has them, and all of it.

        The first is None once a chunk has closed the step; the second as long as the shard knows
        none, and again when the step is long over.

        Raises:
            NotInitializedError, WorkersMissingError: not all have contributed.
            ArgumentError: the parameter is not clipped so.
        """
        raise self._refusal()

    def close(self, step: int, norm: float) -> float | None:
        """Closes a step with a norm, or with the one that the shard knew before; returns which.

        None if it has been closed for long.

        Raises:
            ArgumentError: the norm can't be one, or the parameter is not clipped so.
            NotInitializedError, StepOrderError: not all have contributed.
            StorageError: it can't be noted.
        """
        raise self._refusal()

    def replay(
        self, chunk: Chunk, index: int, step: int, norm: float, learning_rate: float
    ) -> bool:
        """Closes a chunk's step as the journal has it; returns whether it can be closed."""
        return False

    def recovered(self) -> None:
        """To be called when all was replayed."""

    def imaged(self) -> None:
        """To be called when an image has all chunks, before the image is in force."""

    def _refusal(self) -> ArgumentError:
        self._register.check_initialized()
        return ArgumentError(
            f"parameter {self._spec.name!r} closes steps by itself: it has no clip_norm, or "
            "one worker, who clips",
            parameter=self._spec.name,
        )


class ClosingByNorm(Closing):
    """A step is full with its last contribution, and closes when its norm is known."""

    def __init__(self, state: ParameterState) -> None:
        super().__init__(state)
        self._chunks = state.chunks
        self._spans = state.spans
        self._squares: list[tuple[int, list[float]]] = [(-1, [])] * len(state.chunks)
        """By chunk: the step, and its mean's."""

    def measure(self, step: int, deadline: RequestDeadline) -> Measured:
        self._register.check_initialized()
        for index, chunk in enumerate(self._chunks):
            with chunk.changed.lock:
                version = self._tracker.records[index].version
                if version > step:
                    return None, self._register.norm_of(step)
                if version < step or not self._tracker.is_full(index):
                    look_s = check_ended(self._spec, self._tracker, index)
                    deadline.wait(chunk.changed, look_s=look_s)
                    raise workers_missing(self._spec, self._tracker, index, step + 1, deadline)
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
                    self._storage.journal(index, NO_SEAT, step, 0, rate, payload)
                    self._close(chunk, index, counted, rate)
                    chunk.changed.notify_all()
                    self._spans.add(SPAN_KIND_UPDATE, self._spec.name, step, index, "", begin_ns)
        return counted

    def replay(
        self, chunk: Chunk, index: int, step: int, norm: float, learning_rate: float
    ) -> bool:
        is_full = self._tracker.is_full(index)
        if not is_full or self._tracker.records[index].version != step:
            return False
        self._register.restore_norm(step, norm)
        self._close(chunk, index, norm, learning_rate)
        return True

    def recovered(self) -> None:
        """Forgets norms of steps that are not full any more, after all was replayed.

        A norm is on disk at once; what it is of, as often as `--durability` says.
        """
        self._register.forget_norms(
            lambda step: not all(self._may_close(each, step) for each in self._tracker.records)
        )

    def _may_close(self, record: ChunkRecord, step: int) -> bool:
        """Whether a chunk has closed a step, or is full. From one record: others may close it."""
        is_full = self._tracker.is_decided(record)
        return record.version > step or (record.version == step and is_full)

    def imaged(self) -> None:
        self._register.keep_norm()

    def _close(self, chunk: Chunk, index: int, norm: float, learning_rate: float) -> None:
        """Updates a full chunk, verified; its lock is held."""
        factor = clip_factor(norm, self._spec.optimizer.clip_norm)
        self.close_full(chunk, index, learning_rate, factor)
