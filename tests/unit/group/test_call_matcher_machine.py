"""Goal: whatever ranks call, in whatever order, each gets one answer a call, and all the same.

Method: a hypothesis state machine. Beside the matcher a plain record is kept of what every rank
called, and when; the promises of agreement/matching.py and peer.proto are checked on that record
alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.group.calls import Room
from harness.machines import cases
from shardwell.group.agreement.coordinator import error_of
from shardwell.group.agreement.matching import Verdicts
from shardwell.v1 import peer_pb2 as pb
from shardwell.v1 import types_pb2

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
