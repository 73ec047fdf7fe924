"""Goal: whatever is lost, and whenever, all members that live agree on every call of their program.

Method: a hypothesis state machine of an elastic group without sockets: the matcher and the
settlement are the real ones, messages are queues that are cut when a rank dies. Each worker makes
calls 0, 1, 2, ... of one program; what each call came to on each worker is compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.group.calls import a_call
from harness.machines import cases
from shardwell.group.agreement.matching import CallMatcher, Verdicts
from shardwell.group.agreement.settlement import (
    Counts,
    Fate,
    fate_of,
    from_message,
    merged,
    to_message,
)
from shardwell.v1 import peer_pb2 as pb

WORKER_COUNT_MAX = 8
AHEAD_COUNT = 2
"""Calls that a worker may have under way."""
numbers = st.integers(0, WORKER_COUNT_MAX - 1)
few = st.sets(st.integers(0, 3), max_size=2)


def retries(call: int) -> bool:
    """Whether a call of the program is made again when data have moved."""
    return call % 3 != 0


@dataclass
class Pending:
    """A call of the program that has not ended."""

    call: int
    generation: int = 0
    index: int = 0
    progress: str = "announced"
    """announced, moving, prepared."""


@dataclass(eq=False)
class Worker:
    """A process of the program."""

    next_call: int = 0
    """Of the program, to be announced."""
    pending: list[Pending] = field(default_factory=list)
    outcomes: dict[int, str] = field(default_factory=dict)
    """By call of the program: returned, or failed."""
    counts: Counts = field(default_factory=Counts)
    standings: dict[int, Counts] = field(default_factory=dict)
    lives: bool = True
    is_new: bool = True
    """It has not begun a generation: it waits in join_group."""
    next_index: int = 0

    @property
    def first_open(self) -> int:
        """The first call of the program that has not ended here."""
        return self.pending[0].call if self.pending else self.next_call


class ElasticMachine(RuleBasedStateMachine):
    """One generation at a time; a death ends it, and `follow` begins the next."""

    @initialize(size=st.integers(2, 4))
    def open(self, size: int) -> None:
        self.workers = [Worker() for _ in range(size)]
        self.members = list(self.workers)
        for worker in self.workers:
            worker.is_new = False
        self.number = 1
        self.is_over = False
        self.begin()

    def begin(self) -> None:
        """A generation of `members`, by rank."""
        self.matcher = CallMatcher(len(self.members), is_elastic=True)
        self.to_zero: list[deque] = [deque() for _ in self.members]
        self.from_zero: list[deque] = [deque() for _ in self.members]
        self.moving_on: dict[int, set[Worker]] = {}
        """By index: who has the first verdict."""
        for worker in self.members:
            worker.next_index, worker.counts = 0, Counts()

    # What ranks do.

    @rule(calls=few, tells=few, hears=few, moves=few, confirms=few)
    def work(
        self, calls: set[int], tells: set[int], hears: set[int], moves: set[int], confirms: set[int]
    ) -> None:
        self.go_on(calls, tells, hears, moves, confirms)

    def go_on(
        self, calls: set[int], tells: set[int], hears: set[int], moves: set[int], confirms: set[int]
    ) -> None:
        """All members do all that they can, in order, except those of each set."""
        if self.is_over:
            return
        parts = (
            (calls, lambda number: self.call_now(number)),
            (tells, lambda number: self.deliver_now(number, True, 9)),
            (hears, lambda number: self.deliver_now(number, False, 9)),
            (moves, lambda number: self.receive_all_data_now(number)),
            (tells, lambda number: self.deliver_now(number, True, 9)),
            (confirms, lambda number: self.deliver_now(number, False, 9)),
        )
        for excepted, do in parts:
            for number, worker in enumerate(self.members):
                if number not in excepted and worker.lives:
                    self.do_as(worker, do)

    def do_as(self, worker: Worker, do: Callable[[int], None]) -> None:
        if not self.is_over:
            do(self.living().index(worker))

    @rule(number=numbers)
    def call(self, number: int) -> None:
        self.call_now(number)

    def call_now(self, number: int) -> None:
        """A worker makes the next call of its program."""
        worker = self.pick(number)
        if worker is not None and len(worker.pending) < AHEAD_COUNT:
            worker.pending.append(Pending(worker.next_call))
            worker.next_call += 1
            self.announce(worker, worker.pending[-1])

    def announce(self, worker: Worker, pending: Pending) -> None:
        pending.generation, pending.index = self.number, worker.next_index
        pending.progress = "announced"
        worker.next_index += 1
        made = a_call(pending.index, element_count=pending.call + 1, retries=retries(pending.call))
        self.send(worker, pb.AgreeRequest(call=made))

    @rule(number=numbers)
    def receive_all_data(self, number: int) -> None:
        self.receive_all_data_now(number)

    def receive_all_data_now(self, number: int) -> None:
        """A call's data are here, once all ranks send theirs."""
        worker = self.pick(number)
        if worker is None:
            return
        for pending in worker.pending:
            if pending.progress == "moving":
                if self.moving_on[pending.index] == set(self.members):
                    pending.progress = "prepared"
                    made = pb.MadeCall(call_index=pending.index)
                    self.send(worker, pb.AgreeRequest(made=made))
                return

    @rule(number=numbers, upwards=st.booleans(), count=st.integers(1, 4))
    def deliver(self, number: int, upwards: bool, count: int) -> None:
        self.deliver_now(number, upwards, count)

    def deliver_now(self, number: int, upwards: bool, count: int) -> None:
        """Messages arrive, in order."""
        worker = self.pick(number)
        if worker is None:
            return
        rank = self.members.index(worker)
        for _ in range(count):
            if upwards and self.to_zero[rank] and self.members[0].lives:
                self.take(rank, self.to_zero[rank].popleft())
            elif not upwards and self.from_zero[rank]:
                self.hear(worker, self.from_zero[rank].popleft())

    @precondition(lambda self: hasattr(self, "workers") and not self.is_over)
    @rule(number=numbers)
    def leave(self, number: int) -> None:
        """In order: when all its calls have ended, and rank 0 later than its verdicts."""
        worker = self.pick(number)
        if worker is None or worker.pending or len(self.living()) == 1:
            return
        worker.lives = False
        if worker is not self.members[0]:
            self.hand_out(self.matcher.leave(self.members.index(worker), "has left"))
        else:
            self.end(cuts=False)

    @rule(number=numbers)
    def die(self, number: int) -> None:
        worker = self.pick(number)
        if worker is not None and len(self.living()) > 1:
            worker.lives = False
            self.end(cuts=worker is self.members[0])

    def end(self, *, cuts: bool) -> None:
        """The generation is over; what a dead rank 0 had not delivered is lost."""
        self.is_over = True
        for queue in self.from_zero if cuts else ():
            queue.clear()

    @rule(newcomer_count=st.integers(0, 2), settled=st.sets(numbers), dies=st.none() | numbers)
    def begin_the_next(self, newcomer_count: int, settled: set[int], dies: int | None) -> None:
        self.follow(newcomer_count, settled, dies)

    def follow(self, newcomer_count: int, settled: set[int], dies: int | None) -> None:
        """The next generation: all that live, and newcomers; some may learn, and another die."""
        if not self.is_over:
            return
        for worker in self.living():
            known = merged([worker.standings, {self.number: worker.counts}])
            worker.standings = known if worker.counts.moved == 0 else {self.number: worker.counts}
        self.number += 1
        room = WORKER_COUNT_MAX - len(self.living())
        newcomers = [Worker() for _ in range(min(newcomer_count, room))]
        self.workers += newcomers
        self.members = [*(w for w in self.workers if w.lives and w not in newcomers), *newcomers]
        known = merged(from_message(to_message(worker.standings)) for worker in self.members)
        self.begin()
        self.is_over = False
        if dies is not None and len(self.members) > 1:
            # Rank 0 has answered some, and then one dies: they are settled, others not.
            for place in settled:
                if place < len(self.members) and not self.members[place].is_new:
                    self.settle(self.members[place], known)
            self.members[dies % len(self.members)].lives = False
            self.is_over = True
            return
        for worker in self.members:
            self.settle(worker, known)
        old = [worker for worker in self.members if not worker.is_new]
        for worker in self.members:
            if worker.is_new:
                worker.next_call = old[0].first_open if old else 0
                worker.is_new = False
        starts = {worker.first_open for worker in self.members}
        assert len(starts) == 1, "members would go on with different calls"

    @rule(unheard=few, settled=few, dies=numbers)
    def lose_two(self, unheard: set[int], settled: set[int], dies: int) -> None:
        """Rank 0 dies when some know that a call is made, and then one that knew it."""
        self.go_on(set(), set(), set(), set(), unheard)
        if not self.is_over and self.members[0].lives and len(self.living()) > 1:
            self.members[0].lives = False
            self.end(cuts=True)
        self.follow(0, settled, dies)
        self.follow(0, set(), None)

    def settle(self, worker: Worker, known: dict[int, Counts]) -> None:
        """What becomes of its calls; those that are made again are announced."""
        worker.standings = known
        pending, worker.pending = worker.pending, []
        for each in pending:
            fate = fate_of(
                each.index,
                known.get(each.generation, Counts()),
                is_prepared=each.progress == "prepared",
                retries=retries(each.call),
            )
            if fate is Fate.AGAIN:
                written = each.progress != "announced"
                assert retries(each.call) or not written, "made again on its own result"
                worker.pending.append(each)
                self.announce(worker, each)
            else:
                worker.outcomes[each.call] = "returned" if fate is Fate.MADE else "failed"

    # How messages travel.

    def send(self, worker: Worker, request: pb.AgreeRequest) -> None:
        rank = self.members.index(worker)
        if rank == 0:
            self.take(0, request)
        else:
            self.to_zero[rank].append(request)

    def take(self, rank: int, request: pb.AgreeRequest) -> None:
        if self.is_over:
            return
        if request.HasField("call"):
            self.hand_out(self.matcher.call(rank, request.call, 0.0))
        else:
            self.hand_out(self.matcher.made(rank, request.made.call_index))

    def hand_out(self, verdicts: Verdicts) -> None:
        for rank, verdict in verdicts:
            if rank == 0:
                self.hear(self.members[0], verdict)
            else:
                self.from_zero[rank].append(verdict)

    def hear(self, worker: Worker, verdict: pb.Verdict) -> None:
        index = verdict.call_index
        assert not verdict.HasField("failure"), verdict.failure.message
        pending = next(each for each in worker.pending if each.index == index)
        if verdict.regroup:
            self.end(cuts=False)
        elif verdict.made:
            assert pending.progress == "prepared"
            worker.pending.remove(pending)
            worker.outcomes[pending.call] = "returned"
            worker.counts = Counts(index + 1, max(index + 1, worker.counts.moved))
        else:
            pending.progress = "moving"
            self.moving_on.setdefault(index, set()).add(worker)
            worker.counts = Counts(worker.counts.made, index + 1)

    def living(self) -> list[Worker]:
        return [worker for worker in self.members if worker.lives]

    def pick(self, number: int) -> Worker | None:
        """A member that lives, while the generation does."""
        living = self.living()
        return None if self.is_over or not living else living[number % len(living)]

    # What must hold.

    @invariant()
    def all_that_live_agree(self) -> None:
        if not hasattr(self, "workers"):
            return
        known: dict[int, str] = {}
        for worker in self.living():
            for call, outcome in worker.outcomes.items():
                assert known.setdefault(call, outcome) == outcome, f"call {call}: {outcome}"

    @invariant()
    def a_call_with_retry_never_fails(self) -> None:
        for worker in getattr(self, "workers", ()):
            for call, outcome in worker.outcomes.items():
                assert outcome == "returned" or not retries(call)


TestElastic, TestMoreElastic = cases(ElasticMachine, max_examples=600, step_count=30)


def test_a_settlement_is_given_on_when_the_one_that_knew_dies() -> None:
    """Rank 1 knows that a call is made, says so, and dies when rank 2 has learned it alone."""
    room = ElasticMachine()
    room.open(size=4)
    room.go_on(set(), set(), set(), set(), {2, 3})
    room.members[0].lives = False
    room.end(cuts=True)
    room.follow(0, settled={1}, dies=0)
    room.follow(0, settled=set(), dies=None)
    room.all_that_live_agree()
    assert [worker.outcomes for worker in room.members] == [{0: "returned"}] * 2
