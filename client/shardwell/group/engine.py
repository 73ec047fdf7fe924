"""One rank's collectives, one after another, on a thread of their own.

A call is announced at once, by whichever thread makes it, so that the ranks agree on it while the
data of earlier calls still flow; its data flow when its turn comes.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardwell.errors import (
    DeadlineError,
    InternalError,
    ShardwellError,
    WorkersMissingError,
)
from shardwell.group.agreement.coordinator import Agreement, error_of, failure_of
from shardwell.group.agreement.settlement import Counts
from shardwell.group.mailbox import Mailbox
from shardwell.group.schedule.arithmetic import ChunkArithmetic, Reduction, chunk_element_count
from shardwell.group.schedule.collective import Arrival, Collective, Job, Sending
from shardwell.group.schedule.plan import Operation, Plan
from shardwell.group.schedule.strategies import Strategy
from shardwell.group.transport.peers import Outgoing
from shardwell.numerics.codec import CODECS, Float32
from shardwell.numerics.weighted_mean import MeanFactors
from shardwell.process.spans import Traffic
from shardwell.specs.deadlines import with_answer
from shardwell.threads.spread import CoreThreads
from shardwell.v1 import peer_pb2 as pb

if TYPE_CHECKING:
    from shardwell.group.generation import Generation

_VERDICT_S_MIN = 1.0
"""Calls with a shorter deadline have rank 0's verdict so late at the latest: without one, all would
lose the generation, for a moment of a busy machine."""
_SPREAD_ELEMENT_COUNT = 128 * 1024
"""One thread does chunks of fewer elements sooner than others would be awake."""
_ENDING_S = 2.0
"""The longest time in which rank 0 tells all why the generation is over, within the deadline."""


class Progress(enum.Enum):
    """The progress of a call on this rank."""

    ANNOUNCED = enum.auto()
    """Rank 0 has not said whether all call it: nothing was written."""
    MOVING = enum.auto()
    """It goes on: the array may be written."""
    PREPARED = enum.auto()
    """The result is whole here; in an elastic group, not known to be on all ranks."""
    ENDED = enum.auto()
    """It has ended on all ranks alike."""


class Regrouping(Exception):  # noqa: N818 (no error: the call is made in the next generation)
    """No rank of an elastic group makes the call in this generation."""


class Done(NamedTuple):
    """The ranks that took part in a call that was made."""

    ranks: tuple[int, ...] = ()
    sample_counts: tuple[int, ...] = ()
    """By the place in `ranks`."""
    place: int = 0
    """This rank's place in `ranks`."""
    last_rank: int = 0
    """With a join, the rank that called it last."""
    generation: int = 0
    """With an elastic group, the generation in which it was made."""


@dataclass(kw_only=True)
class Call:
    """One call of this rank."""

    announcement: pb.CollectiveCall
    operation: Operation | None
    """None: a barrier, or a join."""
    array: Float32
    """(n,) float32, read and written in place."""
    reduction: Reduction
    codec_name: str
    timeout_s: float
    """Bound of the wait for the others to call; then again for the data."""
    plan: Plan | None = None
    """None: it moves no chunks, or they can't be made."""
    may_have_nans: bool = False
    result: Future[Done] = field(default_factory=Future)
    """Done when the array is."""
    progress: Progress = Progress.ANNOUNCED
    done: Done = field(default_factory=Done)
    """The outcome, once the ranks that take part are known."""

    @property
    def is_join(self) -> bool:
        """True if it has no place among the other calls."""
        return self.announcement.operation == pb.OPERATION_JOIN


class _Moving(NamedTuple):
    call: Call
    call_index: int
    ranks: tuple[int, ...]
    collective: Collective
    deadline_s: float


class Engine:
    """Makes calls in the order in which they come. Any thread may submit them."""

    def __init__(
        self,
        rank: int,
        strategy: Strategy,
        mailbox: Mailbox,
        agreement: Agreement,
        links: Generation,
        traffic: Traffic,
        *,
        context_of: Callable[[pb.CollectiveCall, Sequence[int], Sequence[int]], int],
        threads: CoreThreads,
    ) -> None:
        self.is_elastic = False
        """True if calls end when all ranks have made them; set before the first call."""
        self.counts = Counts()
        """The progress of an elastic group's calls; final once the engine is closed."""
        self._context_of = context_of
        self._threads = threads
        self._rank = rank
        self._strategy = strategy
        self._mailbox = mailbox
        self._agreement = agreement
        self._links = links
        self._traffic = traffic
        self.next_call_index = 0
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shardwell-group", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """True if the caller is a callback of a call: no call is made until it returns."""
        return threading.current_thread() is self._thread

    def submit(self, call: Call) -> None:
        """Makes a call when its turn comes; does not block."""
        self._calls.put(call)

    def close(self) -> None:
        """Waits until all submitted calls are done or have failed, and ends the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.result.set_running_or_notify_cancel():
                # The others count on this rank: it takes part, and its result is dropped.
                call.result = Future()
            try:
                call.result.set_result(self._made(call))
            except BaseException as error:
                call.result.set_exception(error)

    def _made(self, call: Call) -> Done:
        index = None if call.is_join else call.announcement.call_index
        verdict = self._mailbox.await_verdict(
            index, max(with_answer(call.timeout_s), _VERDICT_S_MIN)
        )
        if verdict is None:
            raise self._given_up(
                DeadlineError(
                    f"rank 0 did not say within {call.timeout_s:.3g} s whether all ranks call "
                    f"{_name(call)}; see whether it is stuck",
                    rank=0,
                ),
                0.0,
            )
        if verdict.HasField("failure"):
            if self.is_elastic:
                self._note(call, Progress.ENDED)
            raise error_of(verdict.failure)
        if call.is_join:
            self.next_call_index = verdict.call_index
            return Done(last_rank=verdict.last_rank)
        if self.is_elastic:
            if verdict.regroup:
                raise Regrouping
            self._note(call, Progress.MOVING)
        ranks = tuple(verdict.active_ranks)
        call.done = Done(ranks, tuple(verdict.sample_counts), ranks.index(self._rank))
        if call.operation is not None and call.array.size:
            deadline_s = time.monotonic() + with_answer(call.timeout_s)
            try:
                with self._mailbox.inbox.taken_over():
                    self._moved(call, call.operation, verdict)
            except ShardwellError as error:
                if self._mailbox.ended is None:
                    raise self._given_up(error, deadline_s) from None
                ended = self._mailbox.await_end(0.0)
                raise error if ended is None else ended() from None
            except Exception as error:
                message = f"rank {self._rank} failed in {_name(call)}: {error!r:.300}"
                failed = InternalError(message, rank=self._rank)
                raise self._given_up(failed, deadline_s) from error
        if self.is_elastic:
            self._await_others(call)
        return call.done

    def _note(self, call: Call, progress: Progress) -> None:
        call.progress = progress
        reached = call.announcement.call_index + 1
        if progress is Progress.MOVING:
            self.counts = Counts(self.counts.made, reached)
        elif progress is Progress.ENDED:
            self.counts = Counts(reached, reached)

    def _await_others(self, call: Call) -> None:
        self._note(call, Progress.PREPARED)
        index = call.announcement.call_index
        self._agreement.made(index)
        timeout_s = max(call.timeout_s, _VERDICT_S_MIN)
        if self._mailbox.await_verdict(index, timeout_s) is None:
            raise self._given_up(
                DeadlineError(
                    f"rank {self._rank} has the result of {_name(call)}, and not all ranks had "
                    f"it within {call.timeout_s:.3g} s; see whether one is stuck"
                ),
                0.0,
            )
        self._note(call, Progress.ENDED)

    def _given_up(self, error: ShardwellError, deadline_s: float) -> ShardwellError:
        self._agreement.give_up(failure_of(error))
        rest_s = max(deadline_s - time.monotonic(), 0.0)
        ended = self._mailbox.await_end(min(rest_s, _ENDING_S))
        if ended is None:  # rank 0 is silent; calls that were agreed on can't go on either
            self._links.end(failure_of(error))
        return error if ended is None else ended()

    def _moved(self, call: Call, operation: Operation, verdict: pb.Verdict) -> None:
        ranks, place = call.done.ranks, call.done.place
        sample_counts = list(call.done.sample_counts)
        # Its own count as this rank knows it: where rank 0 had another, no two ranks' chunks fit.
        sample_counts[place] = call.announcement.sample_count
        plan = call.plan
        if plan is None or plan.size > len(ranks):
            plan = plan_of(call, operation, self._strategy, self._rank, ranks)
        is_mean = call.reduction is Reduction.MEAN
        weights = MeanFactors(sample_counts)
        arithmetic = partial(
            ChunkArithmetic,
            call.array,
            call_index=verdict.call_index,
            context=self._context_of(call.announcement, ranks, sample_counts),
            codec_name=call.codec_name,
            reduction=call.reduction,
            factor=weights.factor(place) if is_mean else 1.0,
            divisor=weights.divisor if is_mean else 1.0,
            may_have_nans=call.may_have_nans,
        )
        deadline_s = time.monotonic() + call.timeout_s
        targets = {place: self._links.outgoing(ranks[place]) for place in plan.targets}
        arithmetics = [arithmetic()]
        collective = Collective(
            plan,
            arithmetics[0],
            room_of=lambda target, size_bytes: targets[target].room(size_bytes),
        )
        moving = _Moving(call, verdict.call_index, ranks, collective, deadline_s)
        if self._threads.count > 1 and plan.chunks[0][0].size >= _SPREAD_ELEMENT_COUNT:
            arithmetics += [
                arithmetic() for _ in range(min(self._threads.count, len(plan.chunks)) - 1)
            ]
        for source in plan.sources:
            self._links.listen_to(ranks[source])
        while not collective.is_done:
            if plan.is_one_way:
                for target, link in targets.items():
                    if not link.await_room(deadline_s - time.monotonic()):
                        raise self._late(call, "room for more chunks to", (ranks[target],))
            if len(arithmetics) > 1:
                _send(targets, self._made_beside(moving, arithmetics))
            elif collective.may_enter:
                _send(targets, collective.enter())
            else:
                arrival = self._arrival(moving)
                sendings = collective.receive(arrival)
                if arrival.release is not None:
                    arrival.release()
                _send(targets, sendings)
        self._mailbox.forget(verdict.call_index)

    def _arrival(self, moving: _Moving) -> Arrival:
        call, index, ranks, collective, deadline_s = moving
        arrival = self._mailbox.take(index, deadline_s - time.monotonic())
        if arrival is None:
            late = tuple(ranks[peer] for peer in collective.awaited_ranks)
            raise self._late(call, "chunks of", late)
        return self._counted(arrival, moving)

    def _counted(self, arrival: Arrival, moving: _Moving) -> Arrival:
        if arrival.rank not in moving.ranks:
            raise InternalError(f"rank {arrival.rank} takes no part in {_name(moving.call)}")
        count = arrival.header.chunk.element_count
        size_bytes = len(arrival.message) + arrival.shared_bytes
        self._traffic.add_received(size_bytes, count, arrival.shared_bytes)
        return arrival._replace(rank=moving.ranks.index(arrival.rank))

    def _made_beside(
        self, moving: _Moving, arithmetics: Sequence[ChunkArithmetic]
    ) -> list[Sending]:
        """Waits for input while there is nothing else, and never while a thread works."""
        collective = moving.collective
        made: list[tuple[Job, list[Sending]]] = []
        by_chunk: dict[int, list[tuple[Job, list[Sending]]]] = {}
        while len(by_chunk) < len(arithmetics):
            if collective.may_enter:
                job = collective.begin()
            elif not made:
                job = collective.admit(self._arrival(moving))
            elif (come := self._mailbox.come(moving.call_index)) is not None:
                job = collective.admit(self._counted(come, moving))
            else:
                break
            made.append((job, []))
            by_chunk.setdefault(job.chunk_index, []).append(made[-1])
        *others, last = zip(arithmetics, by_chunk.values(), strict=False)
        with self._threads.spread() as spread:
            for arithmetic, jobs in others:
                spread.give(_make, collective, arithmetic, jobs)
            _make(collective, *last)
        for job, _ in made:  # in the order in which they came: see `Incoming`
            if job.arrival is not None and job.arrival.release is not None:
                job.arrival.release()
        return [sending for _, sendings in made for sending in sendings]

    def _late(self, call: Call, what: str, late: tuple[int, ...]) -> WorkersMissingError:
        return WorkersMissingError(
            f"rank {self._rank} waited {call.timeout_s:.3g} s for {what} rank "
            f"{', '.join(map(str, late))} in {_name(call)}; see whether they are stuck, or "
            "raise timeout_s; call rebuild() to go on",
            missing_ranks=late,
            rank=late[0] if late else None,
        )


def plan_of(
    call: Call, operation: Operation, strategy: Strategy, rank: int, ranks: Sequence[int]
) -> Plan:
    """The plan of `rank` for a call among `ranks`."""
    byte_count = call.array.size * CODECS[call.codec_name].item_size
    return Plan(
        operation=operation,
        strategy=strategy.suited_to(byte_count, len(ranks)),
        rank=ranks.index(rank),
        size=len(ranks),
        root=ranks.index(call.announcement.root) if operation.has_root else 0,
        element_count=call.array.size,
        chunk_element_count=chunk_element_count(call.codec_name),
    )


def _make(
    collective: Collective, arithmetic: ChunkArithmetic, jobs: Sequence[tuple[Job, list[Sending]]]
) -> None:
    for job, sendings in jobs:
        sendings += collective.made(job, arithmetic)


def _send(targets: dict[int, Outgoing], sendings: list[Sending]) -> None:
    for sending in sendings:
        targets[sending.rank].send(sending.message, sending.element_count, sending.shared_bytes)


def _name(call: Call) -> str:
    kind = pb.Operation.Name(call.announcement.operation).removeprefix("OPERATION_").lower()
    return kind if call.is_join else f"{kind} (call {call.announcement.call_index})"
