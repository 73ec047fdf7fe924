"""Data-parallel training: every worker computes on its share of a batch, all update alike.

    trainer = DataParallelTrainer(gradient_function, weights, shardwell.Adam(), GroupSync(group))
    for batch in batches:                    # the same batches on every worker
        result = trainer.step(batch)
        print(result.step, result.loss)

No server holds the weights: each worker applies the optimizer to its own copy. All begin with the
same weights and apply the same mean gradient (see GradientSync), so they hold the same bits after
every step. The loss travels as one more element of the gradient; a codec that rounds rounds it too,
to the precision that gradients of its magnitude have.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.numerics.arguments import as_flat, check_finite, check_integer
from shardwell.numerics.codec import Float32, first_non_finite
from shardwell.numerics.elementwise import blocks
from shardwell.numerics.update_rules import UpdateRule, clip
from shardwell.process.html_table import html_table
from shardwell.specs.checks import brief
from shardwell.specs.optimizers import OF_PARAMETERS, Average, Optimizer, check_learning_rate
from shardwell.specs.parameter import SAMPLE_COUNT_MAX
from shardwell.training.batches import (
    Update,
    count_samples,
    merge_updates,
    micro_batches,
    share_of,
    split_batch,
)
from shardwell.training.gradient_sync import GradientSync, GroupSync, LocalSync, ServerSync
from shardwell.training.leave_request import LeaveRequest, go_on_without
from shardwell.training.thread_group import ThreadedSync

GradientFunction: TypeAlias = Callable[[Float32, Any], tuple[float, Any]]
"""(weights, batch) -> (mean loss, mean gradient) over the samples of the batch."""

_PROGRESS = struct.Struct("<qd")
"""Step and learning rate, as the workers of a group tell them to each other."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step.

    Examples:
        >>> result = shardwell.StepResult(loss=0.5, sample_count=32, step=7)
        >>> f"step {result.step}: {result.loss}"
        'step 7: 0.5'
    """

    loss: float
    """Mean over the samples of all workers, before the update; rounded to float32 or coarser."""
    sample_count: int
    """Samples that this worker processed."""
    step: int
    """0-based number of the step."""

    def _repr_html_(self) -> str:
        row = (self.step, f"{self.loss:g}", self.sample_count)
        return html_table("what came of a step", ("step", "loss", "samples here"), [row])


class DataParallelTrainer:
    """Trains one copy of the weights on each worker; every worker makes one. For one thread.

    After an error in a step nothing has changed here: the same step may be made again. But when a
    member of a group is lost, some may have made a step that failed for others: after `rebuild`,
    all members (new ones too) call `fit(())`, and go on at `next_step`.

    Args:
        gradient_function: (weights, batch) -> (loss, gradient), both means over the batch's
            samples. Weights come in the shape that they were given in and are not to be written;
            the gradient is float32 (or float64, float16) with as many elements. Never called with
            an empty batch.
        weights: First weights, float32 of any shape, copied. The same on all workers.
        optimizer: The update rule; not Average.
        sync: How gradients are averaged. ServerSync: with a parameter of `weights.size` + 1.
        rank: Number of this worker's share of a batch. None: the sync's, which ServerSync has not.
        micro_batch_size: At most so many samples a call of the gradient function; None: the share
            as a whole.
        leave_on_sigterm: Whether SIGTERM, where the program has no handler of it, lets the step
            under way end, and then the program: see `is_leaving`. Default: with GroupSync, and with
            ServerSync where the others go on without this worker; with a fixed `worker_count` they
            wait until it is started again.

    Raises:
        ArgumentError: an argument can't be used.

    Examples:
        >>> def gradient_of(weights, batch):  # the mean loss and gradient of a batch
        ...     errors = batch @ weights - batch.sum(axis=1)
        ...     return float((errors**2).mean()), 2 * batch.T @ errors / len(batch)
        ...
        >>> sync = shardwell.LocalSync()  # or ServerSync(parameter), GroupSync(group)
        >>> trainer = shardwell.DataParallelTrainer(
        ...     gradient_of, np.zeros(3), shardwell.SGD(lr=0.1), sync
        ... )
        >>> trainer.step(np.eye(3, dtype=np.float32))
        StepResult(loss=1.0, sample_count=3, step=0)
    """

    def __init__(
        self,
        gradient_function: GradientFunction,
        weights: Any,
        optimizer: Optimizer,
        sync: GradientSync | None = None,
        *,
        rank: int | None = None,
        micro_batch_size: int | None = None,
        leave_on_sigterm: bool | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Average):
            kinds = ", ".join(kind.__name__ for kind in OF_PARAMETERS if kind is not Average)
            raise ArgumentError(
                f"optimizer must be one of shardwell.{kinds}; got {brief(optimizer)}"
            )
        self.sync: GradientSync = LocalSync() if sync is None else sync
        """The way in which gradients are averaged."""
        self._gradient_function = gradient_function
        flat = as_flat("weights", weights, None)
        if flat.size == 0:
            raise ArgumentError("weights must have at least 1 element; got 0")
        self._flat: Float32 = flat.astype(np.float32)
        self._weights = self._flat.reshape(np.shape(weights))
        check_finite("weights", self._flat, None, remedy="mend them")
        needed = self._flat.size + 1
        if isinstance(self.sync, ServerSync) and self.sync.parameter.size != needed:
            raise ArgumentError(
                f"parameter {self.sync.parameter.name!r} has {self.sync.parameter.size} elements; "
                f"{needed} are needed for {self._flat.size} weights and the loss; open one of "
                "another name with that size",
                parameter=self.sync.parameter.name,
            )
        if micro_batch_size is not None:
            check_integer("micro_batch_size", micro_batch_size, 1, SAMPLE_COUNT_MAX)
        self._micro_batch_size = micro_batch_size
        self._given_rank = rank
        if rank is not None:
            check_integer("rank", rank, 0, self.sync.worker_count - 1)
        self._rule, self._clip_norm = UpdateRule(optimizer), optimizer.clip_norm
        self._slots = tuple(np.full_like(self._flat, value) for value in self._rule.initial_slots)
        self._learning_rate = float(self._rule.learning_rate or 0.0)
        self._synced = np.empty(self._flat.size + 1, np.float32)
        self._step = 0
        self._leave = LeaveRequest()
        if leave_on_sigterm is None:
            leave_on_sigterm = isinstance(self.sync, GroupSync) or (
                isinstance(self.sync, ServerSync) and go_on_without(self.sync.parameter.spec)
            )
        if leave_on_sigterm:
            self._leave.open()

    split_batch = staticmethod(split_batch)
    merge_updates = staticmethod(merge_updates)

    def __repr__(self) -> str:
        return (
            f"DataParallelTrainer({self._flat.size} weights, next_step={self.next_step}, "
            f"sync={self.sync!r})"
        )

    @property
    def weights(self) -> Float32:
        """The weights, in the shape that they were given in: a view that later steps change."""
        return self._weights

    @property
    def next_step(self) -> int:
        """The number of the next step: how many steps there were."""
        return self._step

    @property
    def is_leaving(self) -> bool:
        """True if SIGTERM has come, or an operator drains this worker (`shardwell members drain`).

        The step under way is made as ever. A loop that looks here ends by itself then; the next
        step of any other raises SystemExit(143) once it is made. A second SIGTERM ends the process
        at once.
        """
        return self._leave.has_come

    @property
    def learning_rate(self) -> float:
        """The rate of the next step. Set it to one value on all workers before one step."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = check_learning_rate("learning_rate", learning_rate)

    @property
    def rank(self) -> int:
        """The number of this worker's share of a batch.

        Raises:
            ArgumentError: the sync has no rank and none was given, or it has another.
        """
        given = self._given_rank
        if isinstance(self.sync, ThreadedSync) and given is not None:
            self.sync.take_seat(given)
            return given
        found: int | None = getattr(self.sync, "rank", None)
        rank = given if found is None else found
        if rank is None:
            raise ArgumentError(
                f"{type(self.sync).__name__} does not know this worker's rank, which step() needs; "
                "pass rank= to DataParallelTrainer, or call step_share()"
            )
        if given not in (None, rank):
            raise ArgumentError(f"rank={given} was given, but the sync's is {rank}; leave it out")
        return int(rank)

    def step(self, batch: Any) -> StepResult:
        """One step on a batch that all workers have, of which each takes its share.

        Args:
            batch: A batch, the same on every worker, with at least 1 sample; see `split_batch`. A
                worker whose share is empty contributes nothing and updates like the others.

        Raises:
            ArgumentError: the batch or what the gradient function returned can't be used.
            NonFiniteError: the loss or gradient of this worker is NaN or infinite.
            ShardwellError: synchronising failed; see `sync_gradients` of the sync.
            SystemExit: see `is_leaving`.
        """
        if count_samples(batch) == 0:
            raise ArgumentError(f"step {self._step}: a batch needs at least 1 sample; got 0")
        return self.step_share(share_of(batch, self.sync.worker_count, self.rank))

    def step_share(self, batch: Any) -> StepResult:
        """One step on a batch that is this worker's own, dealt before; it may be empty.

        Raises:
            ShardwellError: as `step`.
        """
        with self._leave.ending_after_step():
            result = self._make_step(batch)
            if isinstance(self.sync, ServerSync):
                self._leave.has_come |= self.sync.parameter.is_draining
            return result

    def _make_step(self, batch: Any) -> StepResult:
        if self._given_rank is not None:
            _ = self.rank  # takes the seat of a thread
        update = self._update_of(batch)
        self._fill(update)
        self.sync.sync_gradients(self._synced, sample_count=update.sample_count)
        loss = float(self._synced[-1])
        self._apply(self._synced[:-1])
        self._step += 1
        return StepResult(loss=loss, sample_count=update.sample_count, step=self._step - 1)

    def fit(
        self,
        batches: Iterable[Any],
        *,
        on_step: Callable[[StepResult], object] | None = None,
        join_timeout_s: float | None = None,
    ) -> int:
        """Steps over this worker's own shares, until they end.

        With GroupSync, workers may have unequally many: who is done waits in `Group.join` while the
        others go on among themselves; then all take the weights and the optimizer's state of the
        lowest rank that has made the most steps, so that they end with the same bits. With
        ThreadedSync and ServerSync all must have equally many: those that have more get
        WorkersMissingError.

        Args:
            batches: This worker's; see `step_share`.
            on_step: Called after each step that this worker makes.
            join_timeout_s: How long to wait for workers with more batches; None is the group's.

        Returns:
            How many steps this worker made.

        Raises:
            ShardwellError: as `step`; also when a member of the group is lost while others wait for
                it. Then call `fit(())` on all that are left, once the group is rebuilt: it ends
                with the same bits.
        """
        count = 0
        for batch in batches:
            result = self.step_share(batch)
            count += 1
            if on_step is not None:
                on_step(result)
        if isinstance(self.sync, GroupSync):
            self._take_over(self.sync, join_timeout_s)
        return count

    # The parts of a step.

    def _update_of(self, batch: Any) -> Update:
        count = check_integer("samples of a batch", count_samples(batch), 0, SAMPLE_COUNT_MAX)
        if count == 0:
            return Update(gradient=np.zeros_like(self._flat), loss=0.0, sample_count=0)
        if self._micro_batch_size is None or count <= self._micro_batch_size:
            return self._called(batch, count)
        parts = micro_batches(batch, self._micro_batch_size)
        return merge_updates(self._called(part, count_samples(part)) for part in parts)

    def _called(self, batch: Any, sample_count: int) -> Update:
        loss, gradient = self._gradient_function(self._weights, batch)
        flat = as_flat(self._named("gradient"), gradient, self._flat.size)
        return Update(gradient=flat, loss=float(loss), sample_count=sample_count)

    def _fill(self, update: Update) -> None:
        with np.errstate(over="ignore"):
            self._synced[:-1] = update.gradient
            self._synced[-1] = update.loss
        # A group refuses on all its ranks at once; one that refused alone would have the others
        # wait.
        index = None if isinstance(self.sync, GroupSync) else first_non_finite(self._synced)
        if index is None:
            return
        is_loss = index == self._flat.size
        what = "loss" if is_loss else "gradient"
        found = update.loss if is_loss else f"{update.gradient[index]} at element {index}"
        raise NonFiniteError(
            f"{self._named(what)} is {found}, which is not a finite float32; mend the data or "
            "lower the learning rate; the other workers wait until their deadline",
            element_index=-1 if is_loss else index,
            rank=self._known_rank(),
        )

    def _apply(self, gradient: Float32) -> None:
        if self._clip_norm:
            clip(gradient, self._clip_norm)
        for start, stop in blocks(self._flat.size):
            self._rule.apply(
                self._flat[start:stop],
                gradient[start:stop],
                tuple(slot[start:stop] for slot in self._slots),
                update_count=self._step + 1,
                learning_rate=self._learning_rate,
            )

    def _take_over(self, sync: GroupSync, timeout_s: float | None) -> None:
        sync.group.join(timeout_s=timeout_s)
        # A row a rank: bytes, which are exact as float32, and whose sum with zeros is they.
        states = np.zeros((sync.group.size, _PROGRESS.size), np.float32)
        state = _PROGRESS.pack(self._step, self._learning_rate)
        states[sync.group.rank] = np.frombuffer(state, np.uint8)
        sync.group.all_reduce(states, codec="fp32")
        found = [_PROGRESS.unpack(row.tobytes()) for row in states.astype(np.uint8)]
        furthest = max(range(len(found)), key=lambda rank: (found[rank][0], -rank))
        for array in (self._flat, *self._slots):
            sync.group.broadcast(array, root=furthest, codec="fp32")
        self._step, self._learning_rate = found[furthest]

    # Checks, and words for messages.

    def _known_rank(self) -> int | None:
        found: int | None = self._given_rank
        return getattr(self.sync, "rank", None) if found is None else found

    def _named(self, what: str) -> str:
        rank = self._known_rank()
        return f"{what} of {f'rank {rank} ' if rank is not None else ''}at step {self._step}"
