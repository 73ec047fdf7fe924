"""All-reduce among the threads of one process, which share their arrays' memory.

One round is one all-reduce. Its states, guarded by one lock:

    gathering     each rank brings its call. Ends when all have, which are then compared; or at the
                  first deadline, or when a thread is interrupted: the object is then broken.
    reducing and  all threads at once: each reduces its own part of all arrays, block by block, and
    handing out   writes each block into all of them while it is in cache. A part is read and
                  written by one thread alone, so no thread waits between the two.
    over          all parts are done, or the round has failed. Threads return.

Calls come to the next round, which gathers as soon as this one reduces. Invariants:
(1) Nothing is written unless all ranks have come, with calls that agree.
(2) A rank has at most one call under way. A round reduces only when all its ranks have called,
    so all calls of the one before have returned: no thread sees a later round's values.
(3) A call returns, or raises, only when no thread writes to its array any more.
(4) What a round ends with, all its threads get: the same bits, or the same error.
(5) Sums are taken in order of rank: the same arrays give the same bits, whichever thread comes
first.

Each array is read twice (values that are not finite are looked for first) and written once. It
keeps no memory between calls but each thread's block.

A call that can't be used is brought all the same, so that every thread learns of it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardwell.errors import (
    ArgumentError,
    CollectiveMismatchError,
    DeadlineError,
    NonFiniteError,
    ShardwellError,
    WorkerLostError,
    WorkersMissingError,
)
from shardwell.numerics.arguments import as_output, check_integer
from shardwell.numerics.codec import Float32, first_non_finite
from shardwell.numerics.elementwise import blocks
from shardwell.numerics.reduction import REDUCTIONS, ReductionName, part_of, reduce_block
from shardwell.numerics.scratch import thread_scratch
from shardwell.numerics.weighted_mean import MeanFactors
from shardwell.specs.deadlines import check_timeout
from shardwell.specs.names import format_ranks
from shardwell.specs.parameter import SAMPLE_COUNT_MAX
from shardwell.threads.calls import SIGNAL_INTERVAL_S
from shardwell.training.gradient_sync import GradientSync

THREAD_COUNT_MAX = 1024
Failure = Callable[[], ShardwellError]
"""Makes the error of a round, a new one for each thread."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    form: str
    """The parts in which all calls must agree, in words; or why this one can't be used."""
    is_usable: bool = True
    op: str = ""
    values: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    sample_count: int = 0
    non_finite_index: int | None = None
    """The first element that is not finite and may not be so."""


def _call_of(array: Any, op: Any, sample_count: Any, *, allow_non_finite: bool) -> _Call:
    try:
        if op not in REDUCTIONS:
            raise ArgumentError(f"op must be one of {REDUCTIONS}; got {op!r:.80}")
        values = as_output(array, None, "array")
        count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
    except ArgumentError as error:
        return _Call(form=error.message, is_usable=False)
    shape = f" of shape {array.shape}" if len(array.shape) != 1 else ""
    return _Call(
        form=f"{op} of {values.size} elements{shape}",
        op=op,
        values=values,
        sample_count=count,
        non_finite_index=None if allow_non_finite else first_non_finite(values),
    )


def _failure_of(calls: Sequence[_Call]) -> Failure | None:
    unusable = [rank for rank, call in enumerate(calls) if not call.is_usable]
    if len(unusable) == len(calls):
        return partial(ArgumentError, f"rank 0: {calls[0].form}", rank=0)
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call.form, []).append(rank)
    if len(ranks) > 1:
        forms = ", ".join(f"{form} ({format_ranks(found)})" for form, found in ranks.items())
        return partial(
            CollectiveMismatchError,
            f"the threads called different things: {forms}; no array was written; all must call "
            "the same, with arrays of one shape",
            rank=unusable[0] if unusable else None,
        )
    shared = _sharing(calls)
    if shared is not None:
        message = f"the arrays of ranks {shared[0]} and {shared[1]} overlap; give each its own"
        return partial(ArgumentError, message, rank=shared[1])
    for rank, call in enumerate(calls):
        index = call.non_finite_index
        if index is not None:
            message = (
                f"array of rank {rank}: element {index} is {call.values[index]}; no array was "
                "written; skip or mend the step, or use ThreadedSync(..., allow_non_finite=True)"
            )
            return partial(NonFiniteError, message, element_index=index, rank=rank)
    return None


def _sharing(calls: Sequence[_Call]) -> tuple[int, int] | None:
    starts = sorted(
        (int(call.values.__array_interface__["data"][0]), rank)
        for rank, call in enumerate(calls)
        if call.values.size
    )
    for (start, rank), (next_start, next_rank) in itertools.pairwise(starts):
        if start + calls[rank].values.nbytes > next_start:
            return min(rank, next_rank), max(rank, next_rank)
    return None


class _Round:
    def __init__(self) -> None:
        self.calls: dict[int, _Call] = {}
        self.buffers: list[Float32] = []
        self.weights = MeanFactors(())
        self.writing: set[int] | None = None
        """Ranks whose parts are not done; None: calls are gathered."""
        self.failure: Failure | None = None

    @property
    def gathers(self) -> bool:
        return self.writing is None and self.failure is None


class ThreadedSync(GradientSync):
    """Synchronises the gradients of `worker_count` threads; reusable, for any lengths in turn.

    Every thread calls the same methods in the same order, each with its own array. A thread's rank
    is its seat, taken with `take_seat`, or else the lowest free one at its first call (then bits
    may depend on which thread came first); or the `rank=` of the call. A seat whose thread has
    ended is free.

    Args:
        worker_count: How many threads, 1 to 1024.
        timeout_s: How long a call waits for the other threads.
        allow_non_finite: Let NaN and infinity through; the default refuses them, for all threads.

    Examples:
        >>> import threading
        >>> sync = shardwell.ThreadedSync(2)
        >>> gradients = [np.zeros(2, np.float32), np.ones(2, np.float32)]
        >>> threads = [
        ...     threading.Thread(target=sync.sync_gradients, args=[each]) for each in gradients
        ... ]
        >>> for thread in threads:
        ...     thread.start()
        >>> for thread in threads:
        ...     thread.join()
        >>> gradients[0]
        array([0.5, 0.5], dtype=float32)
    """

    def __init__(
        self, worker_count: int, *, timeout_s: float = 60.0, allow_non_finite: bool = False
    ) -> None:
        self._worker_count = check_integer("worker_count", worker_count, 1, THREAD_COUNT_MAX)
        self._timeout_s = check_timeout(timeout_s)
        self._allow_non_finite = allow_non_finite
        self._condition = threading.Condition()
        self._seats: dict[int, threading.Thread] = {}
        self._under_way: dict[int, threading.Thread] = {}
        """Ranks whose call has not returned."""
        self._next = _Round()
        """The round that gathers calls."""
        self._broken: Failure | None = None

    def __repr__(self) -> str:
        return f"ThreadedSync({self._worker_count})"

    @property
    def worker_count(self) -> int:
        """The threads that take part."""
        return self._worker_count

    @property
    def rank(self) -> int:
        """The calling thread's seat; takes the lowest free one if it has none.

        Raises:
            ArgumentError: all seats are taken.
        """
        with self._condition:
            return self._seat(threading.current_thread())

    def take_seat(self, rank: int) -> None:
        """Makes `rank` the calling thread's, in place of the one that it may have. Repeatable.

        Raises:
            ArgumentError: another living thread has that seat, or there is none such.
        """
        rank = self._check_rank(rank)
        thread = threading.current_thread()
        with self._condition:
            holder = self._seats.get(rank)
            if holder is not None and holder is not thread and holder.is_alive():
                raise ArgumentError(
                    f"rank {rank} is the seat of thread {holder.name!r}; take another, or have "
                    "that thread call leave_seat()",
                    rank=rank,
                )
            self._leave(thread)
            self._seats[rank] = thread

    def leave_seat(self) -> None:
        """Frees the calling thread's seat. Safe to repeat."""
        with self._condition:
            self._leave(threading.current_thread())

    def sync_gradients(
        self, array: Float32, *, sample_count: int = 1, rank: int | None = None
    ) -> None:
        """Replaces the array by the mean of all threads', weighted; see GradientSync.

        Args:
            array: float32 of any shape, writable and C-contiguous; other threads read and write
                it until the call returns.
            sample_count: Weight of this array, 0 to 2^24.
            rank: Rank of the caller; None: the calling thread's.

        Raises:
            ArgumentError: all threads' arrays are of no use; or this rank has a call under way.
            CollectiveMismatchError: the threads called with different arrays or operations; all get
                it, and no array was written.
            NonFiniteError: an array has NaN or infinity; likewise for all.
            WorkersMissingError: threads did not come in time. The object is then broken until
                `reset`; no array was written.
            WorkerLostError: it is broken, or a thread was interrupted while it took part.
        """
        self.all_reduce(array, "mean", sample_count=sample_count, rank=rank)

    def all_reduce(
        self,
        array: Float32,
        op: ReductionName = "sum",
        *,
        sample_count: int = 1,
        rank: int | None = None,
    ) -> None:
        """Replaces the array by the reduction of all threads': "sum", "mean", "max" or "min".

        Raises:
            ShardwellError: see `sync_gradients`. A sum that float32 can't hold is infinite.
        """
        thread = threading.current_thread()
        call = _call_of(array, op, sample_count, allow_non_finite=self._allow_non_finite)
        with self._condition:
            self._check_usable()
            own_rank = self._seat(thread) if rank is None else self._check_rank(rank)
            other = self._under_way.get(own_rank)
            if other is not None:
                raise ArgumentError(
                    f"rank {own_rank} is used by two threads at once, {other.name!r} and "
                    f"{thread.name!r}; give each thread a rank of its own",
                    rank=own_rank,
                )
            self._under_way[own_rank] = thread
            round_ = self._next
        try:
            self._take_part(round_, own_rank, call)
        finally:
            with self._condition:
                del self._under_way[own_rank]
                self._condition.notify_all()

    def reset(self) -> None:
        """Makes a broken object usable again; calls that still wait fail first.

        Seats stay with the threads that live. Not for a thread that is within a call.

        Raises:
            DeadlineError: calls have not returned within `timeout_s`.
        """
        with self._condition:
            reason = "ThreadedSync.reset() was called meanwhile; call again"
            self._break(self._next, partial(WorkerLostError, reason))
            if not self._waited_for(lambda: not self._under_way):
                raise DeadlineError(
                    f"ranks {sorted(self._under_way)} have not returned from their calls within "
                    f"{self._timeout_s:g} s; reset again when they have"
                )
            self._broken = None
            self._next = _Round()

    # One call, on its own thread.

    def _take_part(self, round_: _Round, rank: int, call: _Call) -> None:
        try:
            self._gather(round_, rank, call)
            self._reduce(round_, rank)
        except BaseException:
            with self._condition:
                if round_.failure is None:  # interrupted, or a defect: the others must know
                    reason = f"rank {rank} was interrupted in the middle of a call"
                    self._break(round_, partial(WorkerLostError, reason, rank=rank))
            raise
        finally:
            with self._condition:
                if round_.writing is not None:
                    round_.writing.discard(rank)
                self._condition.notify_all()
                self._until_nobody_writes(round_)
        with self._condition:
            if round_.failure is not None:
                raise round_.failure()

    def _gather(self, round_: _Round, rank: int, call: _Call) -> None:
        with self._condition:
            if not round_.gathers:  # broken since
                self._check_usable()
            round_.calls[rank] = call
            if len(round_.calls) == self._worker_count:
                self._compare(round_)
                self._condition.notify_all()
            elif not self._waited_for(lambda: not round_.gathers):
                missing = tuple(sorted(set(range(self._worker_count)) - set(round_.calls)))
                message = (
                    f"{format_ranks(missing)} of {self._worker_count} did not call within "
                    f"{self._timeout_s:g} s; no array was written; call reset() when all threads "
                    "can go on"
                )
                lost = partial(WorkersMissingError, message, missing_ranks=missing, rank=missing[0])
                self._break(round_, lost)

    def _compare(self, round_: _Round) -> None:
        self._next = _Round()
        calls = [round_.calls[rank] for rank in range(self._worker_count)]
        round_.failure = _failure_of(calls)
        if round_.failure is None:
            round_.buffers = [call.values for call in calls]
            round_.weights = MeanFactors([call.sample_count for call in calls])
            round_.writing = set(range(self._worker_count))

    def _reduce(self, round_: _Round, rank: int) -> None:
        if round_.failure is not None:
            return
        buffers, reduction = round_.buffers, round_.calls[rank].op
        total = thread_scratch().values
        first, stop = part_of(buffers[0].size, len(buffers), rank)
        for start, end in blocks(stop, first):
            if round_.failure is not None:
                return
            block = [buffer[start:end] for buffer in buffers]
            reduce_block(block, reduction, round_.weights, total[: end - start])

    # Under the lock.

    def _until_nobody_writes(self, round_: _Round) -> None:
        if not self._waited_for(lambda: not round_.writing):
            late = tuple(sorted(round_.writing or ()))
            words = f"{format_ranks(late)} did not reduce their parts within {self._timeout_s:g} s"
            self._break(round_, partial(WorkersMissingError, words, missing_ranks=late))

    def _waited_for(self, has_come: Callable[[], bool]) -> bool:
        """Waits with the lock held; False if it did not come in time. Signals are handled."""
        until_s = time.monotonic() + self._timeout_s
        while not has_come():
            rest_s = until_s - time.monotonic()
            if rest_s <= 0:
                return False
            self._condition.wait(min(rest_s, SIGNAL_INTERVAL_S))
        return True

    def _break(self, round_: _Round, failure: Failure) -> None:
        if round_.failure is None and round_.writing != set():  # else it is over
            round_.failure = failure
        if self._broken is None:
            self._broken = failure
        self._condition.notify_all()

    def _check_usable(self) -> None:
        if self._broken is not None:
            cause = self._broken()
            raise WorkerLostError(
                f"this ThreadedSync is broken: {cause}; call reset()",
                rank=getattr(cause, "rank", None),
            )

    def _seat(self, thread: threading.Thread) -> int:
        for rank, holder in self._seats.items():
            if holder is thread:
                return rank
        for rank in range(self._worker_count):
            if rank not in self._seats or not self._seats[rank].is_alive():
                self._seats[rank] = thread
                return rank
        raise ArgumentError(
            f"all {self._worker_count} seats are taken by other threads; thread {thread.name!r} "
            "is one too many; make ThreadedSync with a larger worker_count"
        )

    def _leave(self, thread: threading.Thread) -> None:
        self._seats = {k: holder for k, holder in self._seats.items() if holder is not thread}

    def _check_rank(self, rank: Any) -> int:
        return check_integer("rank", rank, 0, self._worker_count - 1)
