"""Goal: ranks that call the same go on, and every disagreement fails all, with who and what.

Method: events in, verdicts out, with a clock that the test turns.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.group.calls import TIMEOUT_S, Room, a_call
from harness.machines import cases
from shardwell import errors
from shardwell.group.agreement.coordinator import error_of, failure_of
from shardwell.group.agreement.matching import (
    FAILURE_COUNT_MAX,
    SAMPLE_COUNT_MAX,
    UNDER_WAY_COUNT_MAX,
    Verdicts,
)
from shardwell.v1 import peer_pb2 as pb
from shardwell.v1 import types_pb2

JOIN = pb.OPERATION_JOIN
OPERATIONS = [each for each in pb.Operation.values() if each not in (0, JOIN)]


def ranks(answers: Verdicts) -> list[int]:
    return sorted(rank for rank, _ in answers)


def the_verdict(answers: Verdicts, *expected_ranks: int) -> pb.Verdict:
    """The one verdict that exactly these ranks get."""
    assert ranks(answers) == list(expected_ranks)
    verdicts = {verdict.SerializeToString(deterministic=True) for _, verdict in answers}
    assert len(verdicts) == 1
    return answers[0][1]


def the_error(answers: Verdicts, *expected_ranks: int) -> errors.ShardwellError:
    verdict = the_verdict(answers, *expected_ranks)
    assert verdict.operation  # whose verdict it is: join() has no place among the others
    return error_of(verdict.failure)


@pytest.mark.parametrize("operation", OPERATIONS, ids=pb.Operation.Name)
def test_all_call_the_same(operation: pb.Operation) -> None:
    room = Room(3)
    for index in range(3):
        assert room.call(1, operation, sample_count=5) == []
        assert room.call(0, operation, sample_count=0) == []
        verdict = the_verdict(room.call(2, operation, sample_count=7), 0, 1, 2)
        assert not verdict.HasField("failure")
        assert (verdict.call_index, verdict.operation) == (index, operation)
        assert list(verdict.active_ranks) == [0, 1, 2]
        assert list(verdict.sample_counts) == [0, 5, 7]
    assert room.matcher.deadline_s == math.inf


def test_a_rank_alone_agrees_with_itself() -> None:
    room = Room(1)
    assert list(the_verdict(room.call(0), 0).active_ranks) == [0]
    assert the_verdict(room.join(0), 0).last_rank == 0


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "operation": ({"operation": pb.OPERATION_BARRIER}, "barrier"),
    "element_count": ({"element_count": 9}, "9 elements"),
    "reduction": ({"reduction": pb.REDUCTION_MAX}, "op max"),
    "codec": ({"codec": types_pb2.CODEC_FP16}, "codec fp16"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_fails_all(kind: str) -> None:
    fields, what = MISMATCHES[kind]
    for odd in range(3):
        room = Room(3)
        answers: Verdicts = []
        for rank in range(3):
            answers = room.call(rank, **(fields if rank == odd else {}))
        error = the_error(answers, 0, 1, 2)
        assert isinstance(error, errors.CollectiveMismatchError)
        others = ", ".join(str(rank) for rank in range(3) if rank != odd)
        assert f"rank {odd}: " in error.message
        assert f"ranks {others}: all_reduce(8 elements, op sum, codec fp32)" in error.message
        assert what in error.message
        # The group goes on.
        for rank in range(3):
            answers = room.call(rank)
        assert not the_verdict(answers, 0, 1, 2).HasField("failure")


@pytest.mark.parametrize("operation", [pb.OPERATION_REDUCE, pb.OPERATION_BROADCAST])
def test_roots_must_be_the_same(operation: pb.Operation) -> None:
    room = Room(2)
    room.call(0, operation, root=0)
    error = the_error(room.call(1, operation, root=1), 0, 1)
    assert isinstance(error, errors.CollectiveMismatchError)
    assert "root 0" in error.message
    assert "root 1" in error.message


def test_what_does_not_matter_may_differ() -> None:
    room = Room(2)
    room.call(0, sample_count=1, wait_timeout_ms=1, root=0)
    answers = room.call(1, sample_count=9, wait_timeout_ms=2, root=1)
    assert not the_verdict(answers, 0, 1).HasField("failure")
    room.call(0, pb.OPERATION_BARRIER, element_count=0)
    answers = room.call(1, pb.OPERATION_BARRIER, element_count=3)
    assert not the_verdict(answers, 0, 1).HasField("failure")


def test_a_root_that_has_joined_takes_no_part() -> None:
    room = Room(3)
    room.join(2)
    room.call(0, pb.OPERATION_BROADCAST, root=2)
    error = the_error(room.call(1, pb.OPERATION_BROADCAST, root=2), 0, 1)
    assert isinstance(error, errors.CollectiveMismatchError)
    assert error.rank == 2
    assert "takes no part; active are ranks 0, 1" in error.message


def test_a_problem_of_one_is_the_error_of_all() -> None:
    room = Room(3)
    room.call(0)
    problem = failure_of(errors.NonFiniteError("element 3 is nan", element_index=3))
    room.call(2, problem=problem)
    error = the_error(room.call(1), 0, 1, 2)
    assert isinstance(error, errors.NonFiniteError)
    assert (error.rank, error.element_index) == (2, 3)
    assert "rank 2: element 3 is nan" in error.message


def test_problems_of_many_are_all_named_within_a_bound() -> None:
    room = Room(40)
    answers: Verdicts = []
    for rank in range(40):
        mismatch = errors.CollectiveMismatchError(f"no float32 on {rank} " + "x" * 10_000)
        answers = room.call(rank, problem=failure_of(mismatch))
    error = the_error(answers, *range(40))
    assert isinstance(error, errors.CollectiveMismatchError)
    assert error.rank == 0
    assert all(f"no float32 on {rank} " in error.message for rank in range(16))
    assert len(error.message) < 16 * 600


def test_a_mismatch_of_many_names_no_more_than_fit() -> None:
    room = Room(100)
    answers: Verdicts = []
    for rank in range(100):
        answers = room.call(rank, element_count=8 if rank % 2 else 9)
    message = the_error(answers, *range(100)).message
    assert "and 34 more" in message
    assert len(message) < 1000


def test_a_late_rank_is_named_and_gets_the_same_verdict() -> None:
    room = Room(4)
    room.call(1)
    room.now_s += 4
    room.call(3, wait_timeout_ms=50_000)
    assert room.matcher.deadline_s == pytest.approx(room.now_s - 4 + TIMEOUT_S)
    assert room.pass_time(TIMEOUT_S - 4.1) == []
    answers = room.pass_time(0.2)
    error = the_error(answers, 1, 3)
    assert isinstance(error, errors.WorkersMissingError)
    assert error.missing_ranks == (0, 2)
    words = f"ranks 0, 2 did not call all_reduce (call 0) within {TIMEOUT_S:g} s"
    assert words in error.message
    assert room.matcher.deadline_s == math.inf
    late = [room.call(0, element_count=1), room.call(2, pb.OPERATION_BARRIER)]
    for rank, each in zip((0, 2), late, strict=True):
        assert the_verdict(each, rank) == answers[0][1]
    # The group goes on with the next call.
    answers = [verdict for rank in range(4) for verdict in room.call(rank)]
    assert not the_verdict(answers, 0, 1, 2, 3).HasField("failure")


def test_each_call_has_its_own_deadline() -> None:
    room = Room(2)
    room.call(0)
    room.now_s += 5
    room.call(0)
    assert the_verdict(room.pass_time(5), 0).call_index == 0
    assert the_verdict(room.pass_time(5), 0).call_index == 1
    assert the_verdict(room.call(1), 1).call_index == 0
    assert the_verdict(room.call(1), 1).call_index == 1


def test_failures_are_forgotten_when_all_know() -> None:
    room = Room(2)
    for _ in range(3 * FAILURE_COUNT_MAX):
        room.call(0)
        assert ranks(room.pass_time(TIMEOUT_S)) == [0]
        assert ranks(room.call(1)) == [1]
    assert len(room.matcher._failed) <= 1


def test_a_rank_can_only_be_so_far_ahead() -> None:
    room = Room(2)
    for _ in range(FAILURE_COUNT_MAX + UNDER_WAY_COUNT_MAX + 1):
        room.call(0)
    with pytest.raises(errors.ArgumentError, match="ahead of the slowest"):
        room.call(0)
    room.call(1)
    room.call(0)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (a_call(1), "makes call 1; expected 0"),
        (a_call(2**63), "expected 0"),
        (a_call(0, pb.OPERATION_UNSPECIFIED), "operation 0 is unknown"),
        (a_call(0, 99), "operation 99 is unknown"),  # type: ignore[arg-type]
        (a_call(0, sample_count=SAMPLE_COUNT_MAX + 1), "sample_count must be at most"),
    ],
)
def test_what_is_no_call_is_refused(call: pb.CollectiveCall, why: str) -> None:
    room = Room(2)
    with pytest.raises(errors.ArgumentError, match=why):
        room.matcher.call(0, call, room.now_s)
    assert room.matcher.deadline_s == math.inf
    room.call(0)
    assert ranks(room.call(1)) == [0, 1]


def test_calls_after_a_rank_left_fail() -> None:
    room = Room(3)
    room.call(0)
    room.call(1)
    room.call(0)
    answers = room.leave(2)
    assert ranks(answers) == [0, 0, 1]
    room.call(1)
    room.call(0)
    for rank in (0, 1):
        assert len(room.verdicts[rank]) == room.next_index[rank]
        for verdict in room.verdicts[rank]:
            error = error_of(verdict.failure)
            assert isinstance(error, errors.WorkerLostError)
            assert error.rank == 2
            assert "rank 2 has left the group" in error.message
    assert room.matcher.deadline_s == math.inf


def test_calls_that_a_rank_made_before_it_left_go_on() -> None:
    room = Room(2)
    room.call(1)
    assert room.leave(1) == []
    assert not the_verdict(room.call(0), 0, 1).HasField("failure")
    assert isinstance(the_error(room.call(0), 0), errors.WorkerLostError)


# join()


def test_calls_go_on_without_those_who_joined() -> None:
    room = Room(3)
    room.call(0)
    room.call(1)
    assert list(the_verdict(room.call(2), 0, 1, 2).active_ranks) == [0, 1, 2]
    room.call(0)
    assert room.join(1) == []
    verdict = the_verdict(room.call(2), 0, 2)
    assert list(verdict.active_ranks) == [0, 2]
    assert list(verdict.sample_counts) == [1, 1]
    assert room.join(0) == []
    assert list(the_verdict(room.call(2), 2).active_ranks) == [2]
    verdict = the_verdict(room.join(2), 0, 1, 2)
    assert (verdict.operation, verdict.call_index, verdict.last_rank) == (JOIN, 3, 2)
    answers = [each for rank in range(3) for each in room.call(rank)]
    assert list(the_verdict(answers, 0, 1, 2).active_ranks) == [0, 1, 2]
    assert answers[0][1].call_index == 3


def test_a_call_that_waited_for_who_joins_goes_on() -> None:
    room = Room(3)
    room.call(0)
    room.call(2)
    verdict = the_verdict(room.join(1), 0, 2)
    assert list(verdict.active_ranks) == [0, 2]


def test_who_joins_takes_part_in_the_calls_it_made_before() -> None:
    room = Room(2)
    room.call(0)
    room.join(0)
    assert list(the_verdict(room.call(1), 0, 1).active_ranks) == [0, 1]
    assert list(the_verdict(room.call(1), 1).active_ranks) == [1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("batches", list(itertools.product(range(3), repeat=3)), ids=str)
def test_join_in_every_interleaving(batches: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Ranks have 0 to 2 batches; one after another does all it can, or all take turns."""
    for takes_turns in (False, True):
        room = Room(3)
        todo = {rank: [*["call"] * batches[rank], "join"] for rank in order}
        last = -1
        while any(todo.values()):
            for rank in order:
                steps, todo[rank] = (
                    (todo[rank][:1], todo[rank][1:]) if takes_turns else (todo[rank], [])
                )
                for step in steps:
                    last = rank if step == "join" else last
                    room.join(rank) if step == "join" else room.call(rank)
        for rank in range(3):
            answers = sorted(room.verdicts[rank], key=lambda verdict: verdict.operation == JOIN)
            assert len(answers) == batches[rank] + 1
            for index, verdict in enumerate(answers[:-1]):
                active = [other for other in range(3) if batches[other] > index]
                assert not verdict.HasField("failure")
                assert list(verdict.active_ranks) == active
            assert answers[-1].operation == JOIN
            assert answers[-1].call_index == max(batches)
            assert answers[-1].last_rank == last


def test_a_join_that_meets_its_deadline_can_be_called_again() -> None:
    room = Room(3)
    room.join(1, timeout_s=5)
    room.join(0, timeout_s=20)
    assert room.matcher.deadline_s == room.now_s + 5
    error = the_error(room.pass_time(5), 1)
    assert isinstance(error, errors.WorkersMissingError)
    assert error.missing_ranks == (2,)
    assert room.join(1) == []
    assert the_verdict(room.join(2), 0, 1, 2).last_rank == 2


def test_who_gave_up_joining_hears_of_it_at_its_next_join() -> None:
    """Not before: an answer without a waiting call would be taken for the next one's."""
    room = Room(3)
    room.call(0)
    room.call(1)
    room.call(2)
    room.join(1, timeout_s=5)
    room.pass_time(5)
    room.call(0)
    room.call(2)
    room.join(0)
    assert the_verdict(room.join(2), 0, 2).call_index == 2
    # The others wait for rank 1 from now on.
    assert room.call(0) == []
    assert room.call(2) == []
    assert isinstance(the_error(room.call(1), 1), errors.ArgumentError)
    verdict = the_verdict(room.join(1), 1)
    assert (verdict.operation, verdict.call_index, verdict.last_rank) == (JOIN, 2, 2)
    assert list(the_verdict(room.call(1), 0, 1, 2).active_ranks) == [0, 1, 2]
    assert the_verdict([*room.join(1), *room.join(0), *room.join(2)], 0, 1, 2).last_rank == 2


def test_join_from_two_threads_is_answered_twice() -> None:
    room = Room(2)
    room.join(0, timeout_s=5)
    room.join(0, timeout_s=50)
    room.join(0, timeout_s=70)
    assert isinstance(the_error(room.pass_time(5), 0), errors.WorkersMissingError)
    assert not the_verdict(room.join(1), 0, 0, 1).HasField("failure")
    assert room.matcher.deadline_s == math.inf


def test_a_call_after_join_fails_alone() -> None:
    room = Room(2)
    room.call(0)
    room.join(1)
    error = the_error(room.call(1), 1)
    assert isinstance(error, errors.ArgumentError)
    assert error.rank == 1
    assert "join() again" in error.message
    assert the_verdict(room.join(0), 0, 1).call_index == 1


def test_a_call_after_join_is_not_mixed_up_with_one_that_failed() -> None:
    """Call 0 fails for the other; rank 1's error must say what it did wrong."""
    room = Room(3)
    room.join(1)
    room.call(0)
    room.pass_time(TIMEOUT_S - 1)
    room.leave(2)
    assert isinstance(error_of(room.verdicts[0][0].failure), errors.WorkerLostError)
    assert isinstance(the_error(room.call(1), 1), errors.ArgumentError)


def test_joins_fail_when_a_rank_leaves() -> None:
    """At once: no rank can complete them."""
    room = Room(4)
    room.join(0)
    room.join(2)
    error = the_error(room.leave(1), 0, 2)
    assert isinstance(error, errors.WorkerLostError)
    assert error.rank == 1
    assert isinstance(the_error(room.join(3), 3), errors.WorkerLostError)
    assert isinstance(the_error(room.join(0), 0), errors.WorkerLostError)
    assert room.matcher.deadline_s == math.inf


# Whatever ranks call, in whatever order, each gets one answer a call, and all the same. Method: a
# hypothesis state machine. Beside the matcher a plain record is kept of what every rank called,
# and when; the promises of agreement/matching.py and peer.proto are checked on that record alone.


MISSING = types_pb2.ERROR_CODE_WORKERS_MISSING
LOST = types_pb2.ERROR_CODE_WORKER_LOST
MISUSE = types_pb2.ERROR_CODE_INVALID_ARGUMENT
MISMATCH = types_pb2.ERROR_CODE_COLLECTIVE_MISMATCH
numbers = st.integers(0, 3)


@dataclass
class Member:
    """A rank's calls, and its verdicts."""

    state: str = "active"
    """active; out: its join() waits; idle: its join() met the deadline; left."""
    waiting_since: dict[int, float] = field(default_factory=dict)
    """Deadlines of its calls that were not answered, by index."""
    join_deadlines_s: list[float] = field(default_factory=list)
    join_epochs: list[int] = field(default_factory=list)
    """What its epoch was when it called them."""
    out_from: float = math.inf
    """First call that it takes no part in."""
    epoch: int = 0
    """How many verdicts have said that all joined."""


class RollCallMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 4))
    def open(self, size: int) -> None:
        self.room = Room(size)
        self.members = [Member() for _ in range(size)]
        self.lengths: dict[tuple[int, int], dict[int, int]] = {}
        """By (epoch, index): what each rank called."""
        self.answers: dict[tuple[int, int], pb.Verdict] = {}
        self.epoch = 0
        self.pending_joins: set[int] = set()
        """Ranks that have called JOIN in this epoch."""

    @rule(number=numbers, length=st.sampled_from([8, 8, 8, 9]), timeout_s=st.integers(1, 9))
    def call(self, number: int, length: int, timeout_s: int) -> None:
        rank, member = self.pick(number)
        if member.state == "left" or member.join_deadlines_s:
            return
        index = self.room.next_index[rank]
        if member.state == "idle":
            answers = self.room.call(rank, element_count=length, wait_timeout_ms=timeout_s * 1000)
            assert [rank_of_answer for rank_of_answer, _ in answers] == [rank]
            assert answers[0][1].call_index == index
            assert answers[0][1].failure.detail.code == MISUSE
            return
        member.waiting_since[index] = self.room.now_s + timeout_s
        self.lengths.setdefault((member.epoch, index), {})[rank] = length
        self.check(self.room.call(rank, element_count=length, wait_timeout_ms=timeout_s * 1000))

    @rule(number=numbers, timeout_s=st.integers(1, 9))
    def join(self, number: int, timeout_s: int) -> None:
        rank, member = self.pick(number)
        if member.state == "left":
            return
        if member.state != "idle":
            member.out_from = min(member.out_from, self.room.next_index[rank])
        member.state = "out"
        member.join_deadlines_s.append(self.room.now_s + timeout_s)
        member.join_epochs.append(member.epoch)
        if member.epoch == self.epoch:
            self.pending_joins.add(rank)
            if len(self.pending_joins) == len(self.members):
                self.epoch += 1
                self.pending_joins = set()
                self.last_rank = rank
        self.check(self.room.join(rank, timeout_s))

    @rule(duration_s=st.sampled_from([0.5, 1.0, 3.0, 10.0]))
    def let_time_pass(self, duration_s: float) -> None:
        self.check(self.room.pass_time(duration_s))

    @precondition(lambda self: hasattr(self, "room") and self.room.now_s > 110)
    @rule(number=numbers)
    def leave(self, number: int) -> None:
        """As groups do: when all its calls have been answered."""
        rank, member = self.pick(number)
        if member.state == "left" or member.waiting_since or member.join_deadlines_s:
            return
        member.state = "left"
        self.pending_joins.discard(rank)
        self.check(self.room.leave(rank))

    def pick(self, number: int) -> tuple[int, Member]:
        rank = number % len(self.members)
        return rank, self.members[rank]

    # What must hold.

    def check(self, answers: Verdicts) -> None:
        for rank, verdict in answers:
            if verdict.operation == pb.OPERATION_JOIN:
                self.check_join(rank, verdict)
            else:
                self.check_call(rank, verdict)

    def check_call(self, rank: int, verdict: pb.Verdict) -> None:
        member, index = self.members[rank], verdict.call_index
        member.waiting_since.pop(index)  # it has called, and was not answered before
        key = (member.epoch, index)
        assert self.answers.setdefault(key, verdict) == verdict, "ranks get different verdicts"
        calls = self.lengths[key]
        if not verdict.HasField("failure"):
            assert list(verdict.active_ranks) == sorted(calls)
            assert len(set(calls.values())) == 1
            for other, each in enumerate(self.members):
                if each.epoch == member.epoch and other not in calls:
                    assert each.out_from <= index, f"rank {other} was not waited for"
            return
        error = error_of(verdict.failure)
        code = verdict.failure.detail.code
        if code == MISMATCH:
            assert len(set(calls.values())) > 1
        elif code == LOST:
            assert self.members[verdict.failure.detail.rank].state == "left"
        else:
            assert code == MISSING, error
            assert verdict.failure.detail.missing_ranks

    def check_join(self, rank: int, verdict: pb.Verdict) -> None:
        member = self.members[rank]
        assert member.join_deadlines_s, "an answer that nobody waits for"
        if not verdict.HasField("failure"):
            assert not member.waiting_since
            assert member.join_epochs.pop(0) < self.epoch, "not all had joined"
            assert verdict.last_rank == self.last_rank
            member.join_deadlines_s.pop(0)
            member.epoch = self.epoch
            member.out_from = math.inf
            if not member.join_deadlines_s:
                member.state = "active"
            return
        if verdict.failure.detail.code == LOST:
            assert any(other.state == "left" for other in self.members)
            member.join_deadlines_s.pop(0)
            member.join_epochs.pop(0)
        else:
            assert verdict.failure.detail.code == MISSING
            deadline_s = min(member.join_deadlines_s)
            assert deadline_s <= self.room.now_s
            member.join_deadlines_s.remove(deadline_s)
            member.join_epochs.pop(0)
            missing = set(verdict.failure.detail.missing_ranks)
            assert missing == set(range(len(self.members))) - self.pending_joins
        if not member.join_deadlines_s:
            member.state = "idle"

    @invariant()
    def the_deadline_is_that_of_the_first_who_waits(self) -> None:
        """So that no rank waits for longer: a call's first deadline counts for all."""
        if not hasattr(self, "room"):
            return
        deadlines_s = [each for member in self.members for each in member.join_deadlines_s]
        for member in self.members:
            deadlines_s += member.waiting_since.values()
        assert self.room.matcher.deadline_s == min(deadlines_s, default=math.inf)

    @invariant()
    def nobody_waits_without_need(self) -> None:
        """What waits, waits for a rank that can still come."""
        if not hasattr(self, "room"):
            return
        for member in self.members:
            for index in member.waiting_since:
                calls = self.lengths[member.epoch, index]
                assert any(
                    other not in calls
                    and each.state != "left"
                    and (each.epoch < member.epoch or each.out_from > index)
                    for other, each in enumerate(self.members)
                )
            if member.join_deadlines_s:
                assert all(other.state != "left" for other in self.members)


TestRollCalls, TestMoreRollCalls = cases(RollCallMachine, max_examples=100, step_count=40)
