"""Goal: whatever workers do in whatever order, the promises of ADR 0009 hold.

Method: a hypothesis state machine. Workers are processes that follow group.proto (they join, check,
renew, rebuild, leave, die, are replaced), at random moments, while time passes and the server is
started anew. Their answers, and when the server could last have heard of each, are remembered
beside it; the promises are checked on that alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.group.rendezvous_driver import LEASE_S, Room, group_spec
from harness.machines import cases
from shardwell import errors
from shardwell.v1 import group_pb2 as pb

WORKER_COUNT_MAX = 12
numbers = st.integers(0, WORKER_COUNT_MAX - 1)


@dataclass
class Worker:
    """A process that follows group.proto."""

    member_id: str
    rank: int
    """The one it asks for, or has."""
    state: str = "joining"
    """joining, member, rebuilding, over."""
    generation: int = 0
    """That it is a member of, or rebuilds."""
    member_count: int = 0
    checked: int = 0
    lost_ranks: tuple[int, ...] = ()
    heard_s: float = -1.0
    """When the server could last have heard of it; -1 once no member waits for it any more."""
    last_word_s: float = -1.0
    """When it said something last, whatever became of it since."""
    first_asked_s: float = -1.0
    ranks: set[int] = field(default_factory=set)
    """All that it has had: between its refusal and the answer that says so, the holder's may
    change."""
    called_lost: int = -1
    """The generation in which another said so."""
    silence_s: float = 0.0
    """The longest time without a word of it in its generation."""


class MeetingMachine(RuleBasedStateMachine):
    """`known` has the members that workers know of each generation."""

    min_size = 0
    """Of an elastic group."""

    @initialize(size=st.integers(1, 4))
    def open(self, size: int) -> None:
        self.room = Room(size)
        self.room.spec.min_size = self.min_size
        self.workers: list[Worker] = []
        self.known: dict[int, tuple[str, ...]] = {}
        self.formed: list[int] = []
        """In the order in which workers first heard of them."""
        self.forgotten: set[int] = set()
        """Those formed by lives of the server that are over."""
        self.ready: list[int] = []
        self.incarnations = [7]
        self.strangers = [(math.inf, -1.0)] * 4
        """When each asked first, since it was refused or left, and when last."""
        self.latest = 0
        for rank in range(size):
            self.start(rank)
        self.live(1.0, set())

    # What workers do.

    @rule(rank=st.integers(0, 3))
    def start(self, rank: int) -> None:
        living = [worker for worker in self.workers if worker.state != "over"]
        if len(living) < WORKER_COUNT_MAX and rank < self.room.spec.size:
            self.workers.append(Worker(f"w{len(self.workers)}", rank))
            self.ask(self.workers[-1])

    @rule()
    def replace_all_that_are_gone(self) -> None:
        for rank in range(self.room.spec.size):
            if not any(w.rank == rank and w.state != "over" for w in self.workers):
                self.start(rank)

    @rule()
    def rebuild_all(self) -> None:
        """Each member asks for the next generation."""
        for number in range(len(self.workers)):
            if self.workers[number].state == "member":
                self.rebuild_one(self.workers[number], ())

    @rule(number=numbers)
    def work(self, number: int) -> None:
        """A worker's next word."""
        worker = self.pick(number)
        if worker is not None:
            self.ask(worker)

    @rule(duration_s=st.sampled_from([0.1, 1.0, 1.25, 2.4, 2.6, 6.0]))
    def let_time_pass(self, duration_s: float) -> None:
        self.room.now_s += duration_s

    @rule(duration_s=st.sampled_from([1.0, 6.0]), silent=st.sets(numbers, max_size=3))
    def live(self, duration_s: float, silent: set[int]) -> None:
        """Time passes, in which all but some make themselves heard."""
        for _ in range(round(duration_s / 0.5)):
            self.room.now_s += 0.5
            for number, worker in enumerate(self.workers):
                if number not in silent and worker.state != "over":
                    self.ask(worker)

    @rule(number=numbers, is_known=st.booleans(), rank=st.integers(0, 3))
    def rebuild(self, number: int, is_known: bool, rank: int) -> None:
        worker = self.pick(number)
        if worker is not None and worker.state == "member":
            named = is_known and rank < worker.member_count and rank != worker.rank
            self.rebuild_one(worker, (rank,) if named else ())

    def rebuild_one(self, worker: Worker, lost_ranks: tuple[int, ...]) -> None:
        worker.state, worker.lost_ranks = "rebuilding", lost_ranks
        worker.checked, worker.first_asked_s = 0, -1.0
        self.ask(worker)

    @rule(number=numbers)
    def leave(self, number: int) -> None:
        worker = self.pick(number)
        if worker is not None:
            self.room.leave(worker.member_id)
            worker.state = "over"
            worker.heard_s = -1.0

    @rule(number=numbers)
    def die(self, number: int) -> None:
        worker = self.pick(number)
        if worker is not None:
            worker.state = "over"

    @rule(number=st.integers(0, 3), leaves=st.booleans())
    def ask_for_another_size(self, number: int, leaves: bool) -> None:
        """A worker of another job wants the name; alone, so that it forms nothing."""
        asked_s = min(self.strangers[number][0], self.room.now_s)
        self.strangers[number] = (asked_s, self.room.now_s)
        try:
            answer = self.room.join(f"x{number}", 0, spec=group_spec(self.room.spec.size + 1))
            assert not answer.members
        except errors.GroupMismatchError:
            heard_s = max((worker.last_word_s for worker in self.workers), default=-1.0)
            assert heard_s > asked_s
            self.strangers[number] = (math.inf, self.room.now_s)
        except errors.RankTakenError:  # another of that job has it
            heard = [last_s for other, (_, last_s) in enumerate(self.strangers) if other != number]
            assert max(heard) >= asked_s
            self.strangers[number] = (math.inf, self.room.now_s)
        if leaves:
            self.room.leave(f"x{number}")
            self.strangers[number] = (math.inf, self.room.now_s)

    @rule(incarnation=st.integers(0, 2**32 - 1))
    def start_the_server_anew(self, incarnation: int) -> None:
        """Its numbers may be below those of earlier lives that no worker has named to it."""
        if incarnation in self.incarnations:
            return
        self.incarnations.append(incarnation)
        self.forgotten.update(self.formed)
        self.room.restart(incarnation=incarnation)
        for worker in self.workers:
            if worker.state != "over":
                self.ask(worker)  # those who live make themselves known before others come

    # How they do it.

    def pick(self, number: int) -> Worker | None:
        living = [worker for worker in self.workers if worker.state != "over"]
        return living[number % len(living)] if living else None

    def ask(self, worker: Worker) -> None:
        before_s = worker.heard_s
        worker.silence_s = max(worker.silence_s, self.room.now_s - before_s)
        worker.heard_s = worker.last_word_s = self.room.now_s
        worker.ranks.add(worker.rank)
        if worker.first_asked_s < 0:
            worker.first_asked_s = self.room.now_s
        try:
            if worker.state == "member":
                self.renew(worker)
            else:
                self.join(worker)
        except errors.GroupMismatchError:
            assert worker.state == "joining"
            assert any(heard_s > worker.first_asked_s for _, heard_s in self.strangers)
            worker.state = "over"
        except errors.RankTakenError as error:
            self.check_refused(worker, error)
            worker.state = "over"
        except (errors.WorkerLostError, errors.ArgumentError) as error:
            worker.heard_s = before_s
            self.check_lost(worker, error)
            worker.state = "over"

    def renew(self, worker: Worker) -> None:
        answer = self.room.renew(
            worker.member_id,
            worker.rank,
            worker.generation,
            member_count=worker.member_count,
        )
        members = self.known[worker.generation]
        for lost in answer.lost:
            assert lost.rank != worker.rank
            self.check_gone(members[lost.rank], lost.reason)

    def join(self, worker: Worker) -> None:
        rebuilds = worker.state == "rebuilding"
        members = self.known.get(worker.generation, ())
        called_lost = [members[rank] for rank in worker.lost_ranks if members]
        for other in self.workers:  # a survivor's word ends what a lease would have
            if rebuilds and other.member_id in called_lost:
                other.heard_s, other.called_lost = -1.0, worker.generation
        answer = self.room.join(
            worker.member_id,
            worker.rank,
            checked_generation=worker.checked,
            previous_generation=worker.generation if rebuilds else 0,
            previous_member_count=worker.member_count if rebuilds else 0,
            lost_ranks=worker.lost_ranks if rebuilds else (),
            replacement_wait_ms=1000,
        )
        if not answer.generation:
            assert not answer.members
            assert not answer.ready
            assert answer.missing_ranks or self.min_size
            return
        self.check_formed(worker, answer)
        worker.checked = answer.generation
        if answer.ready:
            if answer.generation not in self.ready:
                self.check_begun(answer)
                self.ready.append(answer.generation)
            if worker.generation != answer.generation:
                worker.silence_s = 0.0
            worker.state, worker.rank = "member", answer.rank
            worker.ranks.add(worker.rank)
            worker.generation, worker.member_count = answer.generation, len(answer.members)

    # What must hold.

    def check_formed(self, worker: Worker, answer: pb.JoinGroupResponse) -> None:
        member_ids = tuple(member.member_id for member in answer.members)
        if "" not in member_ids:  # a server that was started anew may not know all
            assert self.known.setdefault(answer.generation, member_ids) == member_ids
        assert member_ids[answer.rank] == worker.member_id
        assert len(set(member_ids)) == len(member_ids) <= self.room.spec.size
        assert answer.generation > worker.generation
        if worker.state == "joining" and len(member_ids) == self.room.spec.size:
            moved = any(self.is_survivor(member_id) for member_id in member_ids)
            assert answer.rank == worker.rank or moved, "a rank without need of another"
        if answer.generation not in self.formed:
            self.formed.append(answer.generation)
        self.latest = self.formed[-1]
        assert answer.generation == self.latest, "an answer names an older generation"

    def is_survivor(self, member_id: str) -> bool:
        """Whether it was a member before, so that ranks may have closed up around it."""
        return any(w.member_id == member_id and w.generation for w in self.workers)

    def check_gone(self, member_id: str, reason: str) -> None:
        """No worker is called lost that was heard of within its lease."""
        gone = next(worker for worker in self.workers if worker.member_id == member_id)
        if "lease" in reason:
            assert max(self.room.now_s - gone.heard_s, gone.silence_s) >= LEASE_S
        elif "left" in reason:
            assert gone.state == "over"
        elif "asked" in reason:
            assert gone.state != "member"
        else:
            assert "found it lost" in reason

    def check_lost(self, worker: Worker, error: errors.ShardwellError) -> None:
        """It was silent, or said to be lost, or others went on without it for that reason."""
        silent = worker.heard_s < 0 or self.room.now_s - worker.heard_s >= LEASE_S / 2
        members = self.known.get(self.latest, ())
        # A server that was started anew has forgotten that it is in the latest, too.
        is_unknown = worker.member_id not in members or self.latest in self.forgotten
        succeeded = self.latest != worker.generation and is_unknown
        # Of generations of two lives that are over, what more than half follow stays (ADR 0009).
        outnumbered = worker.generation in self.forgotten and any(
            other.state in ("member", "rebuilding")
            and other.generation % 2**32 != worker.generation % 2**32
            for other in self.workers
        )
        called_lost = worker.called_lost in (worker.generation, worker.checked)
        assert silent or succeeded or called_lost or outnumbered, str(error)

    def check_refused(self, worker: Worker, error: errors.RankTakenError) -> None:
        """A worker that has the rank, or left it since, was heard of after it asked first."""
        holders = [
            other
            for other in self.workers
            if other is not worker
            and (error.rank in other.ranks or self.is_moved(other))
            and other.last_word_s >= worker.first_asked_s
        ]
        assert holders, str(error)

    def is_moved(self, worker: Worker) -> bool:
        """Whether it may be given another rank than it asks for, as a survivor has that."""
        return worker.state == "joining" and any(
            other.generation and other.rank == worker.rank for other in self.workers
        )

    def check_begun(self, answer: pb.JoinGroupResponse) -> None:
        """A generation follows those before it only when no worker lives in them."""
        (incarnation,) = {answer.generation % 2**32} & {*self.incarnations}
        own = [number for number in self.ready if number % 2**32 == incarnation]
        assert answer.generation > max(own, default=0), "numbers of a life grow"
        for other in self.workers:
            if other.state == "member" and other.generation != answer.generation:
                silent = self.room.now_s - other.heard_s >= LEASE_S - 1e-6
                assert silent or other.heard_s < 0, f"{other} is replaced"

    @invariant()
    def a_rank_has_one_member(self) -> None:
        if not hasattr(self, "room"):
            return
        places = [
            (worker.generation, worker.rank) for worker in self.workers if worker.state == "member"
        ]
        assert len(places) == len(set(places))


TestMeetings, TestMoreMeetings = cases(MeetingMachine, max_examples=60, step_count=30)


class ElasticMeetingMachine(MeetingMachine):
    """Of groups of one to `size` workers."""

    @initialize(size=st.integers(1, 4))
    def open(self, size: int) -> None:
        self.min_size = 1
        self.known: dict[int, tuple[str, ...]] = {}
        super().open(size)

    def check_formed(self, worker: Worker, answer: pb.JoinGroupResponse) -> None:
        member_ids = tuple(member.member_id for member in answer.members)
        if "" not in member_ids:
            assert self.known.setdefault(answer.generation, member_ids) == member_ids
        assert member_ids[answer.rank] == worker.member_id
        assert len(set(member_ids)) == len(member_ids) <= self.room.spec.size
        assert answer.generation > worker.generation
        if answer.generation not in self.formed:
            self.formed.append(answer.generation)
            self.check_order(answer, member_ids)
        self.latest = self.formed[-1]
        assert answer.generation == self.latest, "an answer names an older generation"

    def check_order(self, answer: pb.JoinGroupResponse, member_ids: tuple[str, ...]) -> None:
        """Who was a member before comes first, in the order of before."""
        by_id = {worker.member_id: worker for worker in self.workers}
        # Some have died since they asked, of which the server has not heard.
        old = [each for each in member_ids if by_id[each].generation]
        assert list(member_ids[: len(old)]) == old, "a newcomer is before a member"
        ranks = [by_id[each].rank for each in old]
        assert ranks == sorted(ranks)

    def check_refused(self, worker: Worker, error: errors.RankTakenError) -> None:
        raise AssertionError(f"no rank belongs to anybody: {error}")


TestElasticMeetings, TestMoreElasticMeetings = cases(
    ElasticMeetingMachine, max_examples=60, step_count=30
)
