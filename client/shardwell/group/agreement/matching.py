"""Rank 0's record of who calls what: whether all ranks call the same. Pure.

Events go in (a rank calls, leaves, time passes), verdicts come out, each for one rank.

A call is open from the first rank that calls it until all ranks that are active in it have called;
then it is decided: it goes on, or fails for all. It also fails, for the ranks that have called,
when the first of their deadlines passes; ranks that call later get the same verdict. A rank is
active in a call unless it called JOIN before. When all have called JOIN, all are active again. A
rank whose JOIN met its deadline must call JOIN again before any other call; it gets the verdict
then.

Invariants: every rank gets one verdict for each call it makes, and all verdicts of a call say the
same; no verdict but of a failure is given before all active ranks have called.

In an elastic group a call that goes on has a second verdict, once all its ranks say that they have
made it. A call that lacks a rank that left, and one that admits while newcomers wait, is not made:
its verdict says that all follow the generation with another (docs/adr/0037-elastic-groups.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardwell.errors import ArgumentError
from shardwell.specs.names import RANKS_NAMED_MAX, format_ranks
from shardwell.specs.parameter import GROUP_CODECS, SAMPLE_COUNT_MAX, codec_words
from shardwell.v1 import peer_pb2 as pb
from shardwell.v1 import types_pb2

FAILURE_COUNT_MAX = 1024
"""Failed calls that are remembered for ranks that are late."""
UNDER_WAY_COUNT_MAX = 256
"""Calls that a rank may be ahead of the slowest."""
_PROBLEM_LENGTH_MAX = 500
_THAT_MOVE_NOTHING = (pb.OPERATION_BARRIER, pb.OPERATION_JOIN, pb.OPERATION_STATE)

Verdicts = list[tuple[int, pb.Verdict]]


@dataclass
class _Open:
    calls: dict[int, pb.CollectiveCall] = field(default_factory=dict)
    deadline_s: float = math.inf


class CallMatcher:
    """The matcher of one generation's calls, for one thread at a time."""

    def __init__(self, size: int, *, is_elastic: bool = False) -> None:
        self._size = size
        self._is_elastic = is_elastic
        self.newcomer_count = 0
        self._moving: dict[int, set[int]] = {}
        """The ranks that have not made a call that goes on in an elastic group, by call."""
        self._moving_ranks: dict[int, list[int]] = {}
        self._next_index = [0] * size
        self._inactive_from: list[float] = [math.inf] * size
        self._joined: dict[int, list[float]] = {}
        """Ranks that called JOIN, and the deadlines of those calls that wait."""
        self._owed: dict[int, pb.Verdict] = {}
        """The verdict, by rank, that all have joined, which it did not wait for."""
        self._left: dict[int, str] = {}
        self._open: dict[int, _Open] = {}
        self._failed: dict[int, pb.Verdict] = {}

    @property
    def deadline_s(self) -> float:
        """The time at which `expire` has something to do; infinity if no rank waits."""
        waits = [call.deadline_s for call in self._open.values()]
        waits += [deadline_s for waiting in self._joined.values() for deadline_s in waiting]
        return min(waits, default=math.inf)

    def call(self, rank: int, call: pb.CollectiveCall, now_s: float) -> Verdicts:
        """Notes a rank's call; ArgumentError: it is out of order, or no call."""
        self._check(rank, call)
        deadline_s = now_s + call.wait_timeout_ms / 1000
        if call.operation == pb.OPERATION_JOIN:
            return self._join(rank, deadline_s)
        index = call.call_index
        self._next_index[rank] = index + 1
        if rank in self._joined or rank in self._owed:
            misuse = _failure(
                types_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"rank {rank} calls {_name(call)} after join(), before it knows that all have "
                "joined; call join() again to wait for the others",
                [rank],
            )
            verdict = pb.Verdict(call_index=index, operation=call.operation, failure=misuse)
            return [(rank, verdict)]
        failed = self._failed.get(index)
        if failed is not None:
            self._forget_failures()
            return [(rank, failed)]
        opened = self._open.setdefault(index, _Open())
        opened.calls[rank] = call
        opened.deadline_s = min(opened.deadline_s, deadline_s)
        return self._decide(index)

    def made(self, rank: int, index: int) -> Verdicts:
        """Notes that a rank of an elastic group has all that it will have of a call."""
        awaited = self._moving.get(index, set())
        if rank not in awaited:
            raise ArgumentError(f"rank {rank} has not to make call {index}")
        awaited.remove(rank)
        if awaited:
            return []
        del self._moving[index]
        verdict = pb.Verdict(call_index=index, made=True)
        return [(each, verdict) for each in self._moving_ranks.pop(index)]

    def leave(self, rank: int, reason: str) -> Verdicts:
        """Notes that a rank has left after its calls so far; later calls fail."""
        self._left[rank] = reason
        self._joined.pop(rank, None)
        self._owed.pop(rank, None)
        verdicts: Verdicts = []
        for index in sorted(self._open):
            verdicts += self._decide(index)
        for each in self._joined:
            verdicts += self._fail_joins(each, math.inf, self._lost())
        return verdicts

    def expire(self, now_s: float) -> Verdicts:
        """Fails what has waited too long."""
        verdicts: Verdicts = []
        for index, opened in sorted(self._open.items()):
            if opened.deadline_s <= now_s:
                missing = sorted(self._active(index) - set(opened.calls))
                some = next(iter(opened.calls.values()))
                wait_s = min(each.wait_timeout_ms for each in opened.calls.values()) / 1000
                verdicts += self._fail(
                    index,
                    _failure(
                        types_pb2.ERROR_CODE_WORKERS_MISSING,
                        f"{format_ranks(missing)} did not call {_name(some)} (call {index}) within "
                        f"{wait_s:g} s; see whether they are slow or stuck, or raise timeout_s; no "
                        "array was written, and the group goes on with the next call",
                        missing,
                    ),
                )
        missing = sorted(set(range(self._size)) - set(self._joined))
        for rank in self._joined:
            failure = _failure(
                types_pb2.ERROR_CODE_WORKERS_MISSING,
                f"{format_ranks(missing)} did not call join() within the deadline; call join() "
                "again to go on waiting, or raise timeout_s",
                missing,
            )
            verdicts += self._fail_joins(rank, now_s, failure)
        return verdicts

    def _check(self, rank: int, call: pb.CollectiveCall) -> None:
        is_join = call.operation == pb.OPERATION_JOIN
        if call.operation not in pb.Operation.values() or not call.operation:
            raise ArgumentError(f"operation {call.operation} is unknown")
        moves = call.operation not in _THAT_MOVE_NOTHING
        if moves and not call.HasField("problem"):
            reduces = call.operation not in (pb.OPERATION_BROADCAST, pb.OPERATION_ALL_GATHER)
            if call.codec not in GROUP_CODECS.values() or (
                reduces and (not call.reduction or call.reduction not in pb.Reduction.values())
            ):
                raise ArgumentError(
                    f"rank {rank}: {_name(call)} with codec {call.codec} and reduction "
                    f"{call.reduction}, one of which is unknown"
                )
        if not is_join and call.call_index != self._next_index[rank]:
            raise ArgumentError(
                f"rank {rank} makes call {call.call_index}; expected {self._next_index[rank]}"
            )
        if call.sample_count > SAMPLE_COUNT_MAX:
            raise ArgumentError(
                f"sample_count must be at most {SAMPLE_COUNT_MAX}; got {call.sample_count}"
            )
        slowest = min(
            (
                self._reached(other)
                for other in range(self._size)
                if other not in self._joined and other not in self._left
            ),
            default=call.call_index,
        )
        if not is_join and call.call_index - slowest > UNDER_WAY_COUNT_MAX + FAILURE_COUNT_MAX:
            raise ArgumentError(
                f"rank {rank} is {call.call_index - slowest} calls ahead of the slowest"
            )

    def _reached(self, rank: int) -> int:
        owed = self._owed.get(rank)
        return self._next_index[rank] if owed is None else owed.call_index

    def _join(self, rank: int, deadline_s: float) -> Verdicts:
        owed = self._owed.pop(rank, None)
        if owed is not None:
            self._next_index[rank] = owed.call_index
            return [(rank, owed)]
        self._inactive_from[rank] = min(self._inactive_from[rank], self._next_index[rank])
        self._joined.setdefault(rank, []).append(deadline_s)
        verdicts: Verdicts = []
        for index in sorted(self._open):
            verdicts += self._decide(index)
        if len(self._joined) == self._size:
            verdicts += self._all_joined(rank)
        elif self._left:
            verdicts += self._fail_joins(rank, math.inf, self._lost())
        return verdicts

    def _all_joined(self, last_rank: int) -> Verdicts:
        index = max(self._next_index)
        verdict = pb.Verdict(call_index=index, operation=pb.OPERATION_JOIN, last_rank=last_rank)
        verdicts: Verdicts = []
        for rank in range(self._size):
            waiting = self._joined.pop(rank)
            verdicts += [(rank, verdict)] * len(waiting)
            if waiting:
                self._next_index[rank] = index
            else:
                self._owed[rank] = verdict
        self._inactive_from = [math.inf] * self._size
        self._failed.clear()
        return verdicts

    def _fail_joins(self, rank: int, until_s: float, failure: pb.Failure) -> Verdicts:
        waiting = self._joined[rank]
        self._joined[rank] = [deadline_s for deadline_s in waiting if deadline_s > until_s]
        verdict = pb.Verdict(operation=pb.OPERATION_JOIN, failure=failure)
        return [(rank, verdict)] * (len(waiting) - len(self._joined[rank]))

    def _active(self, index: int) -> set[int]:
        return {rank for rank in range(self._size) if self._inactive_from[rank] > index}

    def _decide(self, index: int) -> Verdicts:
        opened, active = self._open[index], self._active(index)
        missing = active - set(opened.calls)
        gone = sorted(rank for rank in missing if rank in self._left)
        if gone:
            return self._regroup(index) if self._is_elastic else self._fail(index, self._lost())
        if missing:
            return []
        calls = {rank: opened.calls[rank] for rank in sorted(opened.calls)}
        failure = _disagreement(index, calls, self._size)
        if failure is not None:
            return self._fail(index, failure)
        if self.newcomer_count and all(call.admits for call in calls.values()):
            return self._regroup(index)
        del self._open[index]
        if self._is_elastic:
            self._moving[index], self._moving_ranks[index] = set(calls), list(calls)
        verdict = pb.Verdict(
            call_index=index,
            operation=next(iter(calls.values())).operation,
            active_ranks=list(calls),
            sample_counts=[call.sample_count for call in calls.values()],
        )
        return [(rank, verdict) for rank in calls]

    def _fail(self, index: int, failure: pb.Failure) -> Verdicts:
        return self._not_made(index, pb.Verdict(call_index=index, failure=failure))

    def _regroup(self, index: int) -> Verdicts:
        return self._not_made(index, pb.Verdict(call_index=index, regroup=True))

    def _not_made(self, index: int, verdict: pb.Verdict) -> Verdicts:
        calls = self._open.pop(index).calls
        # Of those who do not agree, the first one's.
        verdict.operation = calls[min(calls)].operation
        verdicts = [(rank, verdict) for rank in sorted(calls)]
        self._failed[index] = verdict
        self._forget_failures()
        return verdicts

    def _forget_failures(self) -> None:
        late = [
            self._reached(rank)
            for rank in range(self._size)
            if rank not in self._left and rank not in self._joined
        ]
        passed = min(late, default=0)
        for index in [index for index in self._failed if index < passed]:
            del self._failed[index]

    def _lost(self) -> pb.Failure:
        message = "; ".join(f"rank {rank} {reason}" for rank, reason in sorted(self._left.items()))
        return _failure(types_pb2.ERROR_CODE_WORKER_LOST, message, sorted(self._left))


def _failure(code: types_pb2.ErrorCode, message: str, ranks: list[int]) -> pb.Failure:
    detail = types_pb2.ErrorDetail(code=code, element_index=-1)
    if ranks:
        detail.rank = ranks[0]
    if code == types_pb2.ERROR_CODE_WORKERS_MISSING:
        detail.missing_ranks.extend(ranks)
    return pb.Failure(detail=detail, message=message)


def _disagreement(index: int, calls: dict[int, pb.CollectiveCall], size: int) -> pb.Failure | None:
    problems = {rank: call.problem for rank, call in calls.items() if call.HasField("problem")}
    if problems:
        problem_words = "; ".join(
            f"rank {rank}: {problem.message[:_PROBLEM_LENGTH_MAX]}"
            for rank, problem in list(problems.items())[:RANKS_NAMED_MAX]
        )
        first, problem = next(iter(problems.items()))
        failure = _failure(
            types_pb2.ERROR_CODE_COLLECTIVE_MISMATCH,
            f"call {index} can't go on: {problem_words}; no array was written",
            [first],
        )
        if problem.detail.code:
            failure.detail.code = problem.detail.code
            failure.detail.element_index = problem.detail.element_index
        return failure
    kinds: dict[str, list[int]] = {}
    for rank, call in calls.items():
        kinds.setdefault(_described(call), []).append(rank)
    if len(kinds) > 1:
        call_words = "; ".join(f"{format_ranks(ranks)}: {kind}" for kind, ranks in kinds.items())
        return _failure(
            types_pb2.ERROR_CODE_COLLECTIVE_MISMATCH,
            f"the ranks do not make the same call ({index}): {call_words}; all must call the same "
            "in the same order; no array was written",
            [],
        )
    call = next(iter(calls.values()))
    if call.operation in (pb.OPERATION_REDUCE, pb.OPERATION_BROADCAST) and call.root not in calls:
        return _failure(
            types_pb2.ERROR_CODE_COLLECTIVE_MISMATCH,
            f"call {index}: the root of {_name(call)} is rank {call.root}, which takes no part; "
            f"active are {format_ranks(sorted(calls))}",
            [call.root],
        )
    if call.operation == pb.OPERATION_ALL_GATHER and len(calls) < size:
        out = sorted(set(range(size)) - set(calls))
        return _failure(
            types_pb2.ERROR_CODE_COLLECTIVE_MISMATCH,
            f"call {index}: all_gather needs the segments of all ranks, and {format_ranks(out)} "
            "called join(); gather after join() has returned",
            out,
        )
    return None


def _name(call: pb.CollectiveCall) -> str:
    return pb.Operation.Name(call.operation).removeprefix("OPERATION_").lower()


def _described(call: pb.CollectiveCall) -> str:
    parts = []
    if call.operation not in _THAT_MOVE_NOTHING:
        parts.append(f"{call.element_count} elements")
        if call.reduction in pb.Reduction.values() and call.reduction:
            parts.append(f"op {pb.Reduction.Name(call.reduction)[len('REDUCTION_') :].lower()}")
        if call.codec:
            parts.append(f"codec {codec_words(call.codec)}")
    if call.operation in (pb.OPERATION_REDUCE, pb.OPERATION_BROADCAST):
        parts.append(f"root {call.root}")
    if call.retries:
        parts.append("retry")
    return f"{_name(call)}({', '.join(parts)})"
