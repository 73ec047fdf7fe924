"""Members that die, stop, or are interrupted, at any moment of a group's life.

Goal: no member hangs, all survivors name the same rank within the lease, and rebuild() goes on with
exact results. Method: members are processes that sum integers; they are killed for real.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from harness.faults.standing_still import stop
from harness.group.ranks import error_of, joined
from harness.polling import PATIENCE_S, Stopwatch, eventually
from harness.programs.commands import ServingShard
from harness.programs.group_processes import Answer, GroupProcess, answers, ask_all
from harness.programs.ports import free_port
from harness.threads import in_background

LEASE_S = 2.0
LONG = 400_000
LONG_FOR_THREADS = 4_000_000
"""Of many chunks, each large enough for a thread of its own."""
STRATEGIES = ("ring", "tree", "centralized")

Start = Callable[..., list[GroupProcess]]


@pytest.fixture
def target(cluster) -> str:
    """Where members meet."""
    return str(cluster(1).target)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts members; they are killed at the end."""
    with contextlib.ExitStack() as stack:

        def started(target: str, ranks: range | list[int], size: int, **options) -> list:
            members = [
                stack.enter_context(GroupProcess(target, rank, size, **options)) for rank in ranks
            ]
            for rank, answer in zip(ranks, answers(members), strict=True):
                assert answer.get("rank") == rank, answer
            return members

        yield started


def kill(member: GroupProcess) -> None:
    member.send(signal.SIGKILL)
    assert member.end() == -signal.SIGKILL


def lost(survivors: list[GroupProcess], rank: int) -> None:
    """Each survivor's error names the same rank."""
    for answer in answers(survivors, PATIENCE_S):
        assert (answer.get("error"), answer["rank"]) == ("WorkerLostError", rank), answer


def rebuilt(members: list[GroupProcess], **arguments) -> list[Answer]:
    """All go on, as ranks 0, 1, 2, ... of one new generation, and sum exactly."""
    found = ask_all(members, "rebuild", **arguments)
    assert [answer.get("size") for answer in found] == [len(members)] * len(members), found
    assert len({answer["generation"] for answer in found}) == 1, found
    assert sorted(answer["rank"] for answer in found) == list(range(len(members))), found
    exact(members)
    return found


def exact(members: list[GroupProcess]) -> None:
    """A wrong sum ends a member's process."""
    for answer in ask_all(members, "sum", size=3001, count=2):
        assert answer.get("size") == len(members), answer


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("threads", [1, 4])
def test_killed_in_the_middle_of_an_all_reduce(target, start, strategy, victim, threads) -> None:
    members = start(target, range(3), 3, strategy=strategy, threads=threads)
    for member in members:
        member.begin("sum", size=LONG if threads == 1 else LONG_FOR_THREADS)
    members[victim].await_step()
    kill(members.pop(victim))
    lost(members, victim)
    found = rebuilt(members)
    assert [answer["rank"] for answer in found] == [0, 1]


def test_a_replacement_takes_the_rank(target, start) -> None:
    """The survivors wait for it; it has the dead one's rank, and all go on as three."""
    members = start(target, range(3), 3)
    first = members[0].ask("standing")["generation"]
    kill(members[1])
    survivors = [members[0], members[2]]
    for member in survivors:
        member.begin("barrier")
    lost(survivors, 1)
    for member in survivors:
        member.begin("rebuild", wait_s=20.0)
    members[1:2] = start(target, [1], 3)
    for rank, answer in zip((0, 2), answers(survivors), strict=True):
        assert (answer["rank"], answer["size"]) == (rank, 3)
        assert answer["generation"] > first
    exact(members)


def test_two_deaths_at_once(target, start) -> None:
    """One is named; the other is not waited for beyond its lease."""
    members = start(target, range(4), 4)
    for member in members:
        member.begin("sum", size=LONG)
    members[0].await_step()
    for victim in (0, 2):
        members[victim].send(signal.SIGKILL)
    survivors = [members[1], members[3]]
    answered = answers(survivors, PATIENCE_S)
    assert all(answer.get("error") == "WorkerLostError" for answer in answered), answered
    assert {answer["rank"] for answer in answered} <= {0, 2}, answered
    watch = Stopwatch()
    rebuilt(survivors)
    assert watch.elapsed_s < PATIENCE_S


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_member_that_is_stopped(target, start, victim) -> None:
    """As dead, when its lease ends; once awake, its call says to join again, and it does."""
    members = start(target, range(3), 3)
    for member in members:
        member.begin("sum", size=LONG)
    members[victim].await_step()
    stop(members[victim].pid)
    survivors = [member for index, member in enumerate(members) if index != victim]
    lost(survivors, victim)
    for member in survivors:
        member.begin("rebuild")
    found = answers(survivors, PATIENCE_S)  # the stopped one is not waited for
    assert [(answer.get("rank"), answer.get("size")) for answer in found] == [(0, 2), (1, 2)]
    exact(survivors)
    members[victim].send(signal.SIGCONT)
    to_join_again(members[victim], victim)
    again = GroupProcess(target, 2, 3)
    with again:
        for member in survivors:
            member.begin("rebuild", wait_s=20.0)
        assert answers([*survivors, again])[2]["rank"] == 2
        exact([*survivors, again])


def to_join_again(woken: GroupProcess, rank: int) -> None:
    """The errors of a member whose lease ended: of its call, and of rebuild."""
    for answer in (woken.answer(PATIENCE_S), woken.ask("rebuild")):
        assert (answer.get("error"), answer["rank"]) == ("WorkerLostError", rank), answer
        assert "close the group, and join it again" in answer["message"]
        assert "rebuild" not in answer["message"]


def test_a_stopped_member_wakes_while_the_others_wait_for_a_replacement(target, start) -> None:
    members = start(target, range(2), 2)
    stop(members[1].pid)
    members[0].begin("barrier")
    lost(members[:1], 1)
    members[0].begin("rebuild", wait_s=30.0)
    members[1].begin("barrier")
    members[1].send(signal.SIGCONT)
    to_join_again(members[1], 1)
    members[1:] = start(target, [1], 2)
    assert answers(members[:1])[0].get("size") == 2
    exact(members)


def test_a_stopped_member_wakes_when_the_others_have_finished(target, start) -> None:
    """It is not to be alone in a group of one."""
    members = start(target, range(3), 3)
    members[1].begin("sum", size=LONG)
    stop(members[1].pid)
    survivors = [members[0], members[2]]
    for member in survivors:
        member.begin("barrier")
    lost(survivors, 1)
    rebuilt(survivors)
    for member in survivors:
        assert member.leave() == 0
    members[1].send(signal.SIGCONT)
    to_join_again(members[1], 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "strategy"), [(3, "ring"), (1, "ring"), (2, "tree")])
def test_a_job_that_was_killed_comes_back_with_other_settings(
    target, start, size, strategy
) -> None:
    """At once: it waits until the leases of the dead have ended."""
    for member in start(target, range(2), 2):
        kill(member)
    members = start(target, range(size), size, strategy=strategy)
    exact(members)


def test_killed_while_others_join(target, start) -> None:
    """Its rank is contended for, and the new worker has it when the dead one's lease has ended."""
    with GroupProcess(target, 1, 3) as victim:

        def is_known() -> bool:
            error = error_of(lambda: joined(target, 0, 3, join_timeout_s=0.5))
            return getattr(error, "missing_ranks", None) == (2,)

        eventually("the meeting place knows rank 1", is_known)
        kill(victim)
    second = in_background(lambda: joined(target, 1, 3, lease_s=LEASE_S))
    with GroupProcess(target, 0, 3) as zero, GroupProcess(target, 2, 3) as two:
        answered = answers([zero, two], PATIENCE_S)
        assert [answer.get("rank") for answer in answered] == [0, 2], answered
        with second.result(PATIENCE_S) as group:
            for member in (zero, two):
                member.begin("barrier")
            group.barrier()
            answers([zero, two])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_killed_during_rebuild(target, start, victim) -> None:
    members = start(target, range(4), 4)
    kill(members.pop(2))
    for member in members:
        member.begin("barrier")
    lost(members, 2)
    place = {0: 0, 1: 1, 3: 2}[victim]
    dying = members.pop(place)
    dying.begin("rebuild", wait_s=0.5)
    for member in members:
        member.begin("rebuild", wait_s=0.5)
    dying.send(signal.SIGKILL)
    found = answers(members)
    if found[0].get("size") == 3:  # it died as a member of the new generation
        found = answers_after_loss(members)
    assert [answer.get("size") for answer in found] == [2, 2], found
    exact(members)


def answers_after_loss(members: list[GroupProcess]) -> list[Answer]:
    for member in members:
        member.begin("barrier")
    answered = answers(members, PATIENCE_S)
    assert {answer.get("error") for answer in answered} == {"WorkerLostError"}, answered
    return ask_all(members, "rebuild")


def test_killed_while_others_wait_in_join(target, start) -> None:
    members = start(target, range(3), 3)
    for member in members[:2]:
        member.begin("join")
    kill(members.pop(2))
    lost(members, 2)
    rebuilt(members)


def test_killed_in_join(target, start) -> None:
    members = start(target, range(3), 3)
    members[2].begin("join")
    for answer in ask_all(members[:2], "barrier"):  # which goes on without it
        assert answer.get("size") == 3, answer
    kill(members.pop(2))
    untold = list(members)

    def answered() -> bool:
        """A barrier without rank 2 may be over before its death is noticed: then another."""
        found = ask_all(untold, "barrier")
        errors = [(answer["error"], answer["rank"]) for answer in found if "error" in answer]
        assert set(errors) <= {("WorkerLostError", 2)}
        untold[:] = [m for m, answer in zip(untold, found, strict=True) if "error" not in answer]
        return not untold

    eventually("all have failed", answered, timeout_s=PATIENCE_S)
    rebuilt(members)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("threads", [1, 4])
def test_ctrl_c_in_the_middle_of_a_call(target, start, victim, threads) -> None:
    members = start(target, range(3), 3, threads=threads)
    for member in members:
        member.begin("sum", size=LONG if threads == 1 else LONG_FOR_THREADS)
    members[victim].await_step()
    members[victim].send(signal.SIGINT)
    interrupted = members.pop(victim)
    lost(members, victim)
    assert "interrupted" in interrupted.answer()
    assert interrupted.end() == 130
    assert not interrupted.log, interrupted.log
    rebuilt(members)


def test_an_exception_of_the_training_code(target, start) -> None:
    members = start(target, range(3), 3)
    for member in members[:2]:
        member.begin("barrier")
    members[2].begin("raise")
    for answer in answers(members[:2], PATIENCE_S):
        assert (answer["error"], answer["rank"]) == ("WorkerLostError", 2)
        assert "the training code fails" in answer["message"]
    assert members[2].end() == 1


def test_members_that_leave_in_order(target, start) -> None:
    """One after another, with long pauses: no exit code, log or rest tells of a failure."""
    members = start(target, range(3), 3)
    exact(members)
    for member in (members[1], members[0], members[2]):
        assert member.leave() == 0
        assert not member.log, member.log


def test_the_meeting_place_is_killed(start) -> None:
    """The group goes on without it; and with it, when it is back, knows of who dies."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        shard = stack.enter_context(ServingShard(port=port))
        address = shard.address()
        members = start(address, range(3), 3)
        exact(members)
        shard.send(signal.SIGKILL)
        assert shard.end() == -signal.SIGKILL
        exact(members)
        for member in members:
            member.begin("sum", size=LONG)
        members[0].await_step()
        stack.enter_context(ServingShard(port=port)).address()
        for _ in range(20):
            members[0].await_step()
        kill(members.pop(1))
        lost(members, 1)
        rebuilt(members)


def test_a_member_is_killed_while_the_meeting_place_is_away(start) -> None:
    with contextlib.ExitStack() as stack:
        port = free_port()
        shard = stack.enter_context(ServingShard(port=port))
        address = shard.address()
        members = start(address, range(3), 3)
        shard.send(signal.SIGKILL)
        shard.end()
        kill(members.pop(0))
        for member in members:
            member.begin("barrier")
        lost(members, 0)
        for member in members:
            member.begin("rebuild")
        stack.enter_context(ServingShard(port=port)).address()
        assert [answer.get("size") for answer in answers(members)] == [2, 2]
        exact(members)


@pytest.mark.exhaustive
def test_memory_does_not_grow(target, start) -> None:
    """200 calls of 4 MiB: what the first ones took suffices."""
    members = start(target, range(2), 2)
    for answer in ask_all(members, "peak", size=2**20, count=200):
        early_kib, late_kib = answer["kib"]
        assert late_kib - early_kib < 12 * 1024, answer


# Members whose program ends without `close`: they end, and leave. Method: programs of their own,
# because what Python waits for at a process's end can't be seen from within one.


PROGRAM = """
import sys
import numpy as np
import shardwell

target, rank, ending = sys.argv[1], int(sys.argv[2]), sys.argv[3]
group = shardwell.join_group("job", rank, 2, rendezvous=target, timeout_s=50)
array = np.full(3_000_000, rank + 1.0, np.float32)
group.all_reduce(array)
assert (array == 3).all()
if ending == "exits":
    with group:
        group.broadcast(np.ones(30_000_000, np.float32))
        sys.exit()
if ending == "raises":
    raise RuntimeError("training failed")
if ending == "calls":
    try:
        group.barrier()
    except shardwell.WorkerLostError as error:
        print(error.rank)
"""


def endings(target: str, *ways: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank's program."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, target, str(rank), way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, way in enumerate(ways)
    ]
    watch, found = Stopwatch(), []
    try:
        for program in programs:
            out, log = program.communicate(timeout=max(PATIENCE_S - watch.elapsed_s, 0.1))
            found.append((program.returncode, out, log))
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    return found


@pytest.mark.parametrize("ending", ["returns", "exits"])
def test_programs_that_do_not_close_end(cluster, ending) -> None:
    """With what they have sent received: the last call succeeds everywhere."""
    for code, _, log in endings(cluster(1).target, ending, ending):
        assert code == 0, log


@pytest.mark.parametrize("failing", [0, 1])
def test_a_program_that_fails_ends_and_the_others_hear_of_it(cluster, failing) -> None:
    ways = ["calls", "calls"]
    ways[failing] = "raises"
    found = endings(cluster(1).target, *ways)
    code, _, log = found[failing]
    assert (code, "training failed" in log) == (1, True), log
    code, out, log = found[1 - failing]
    assert (code, out.strip()) == (0, str(failing)), log


# SIGKILL at random moments, again and again, for members of a group that sum.  Goal: after each
# kill all survivors name the same rank, rebuild, and every sum is exact. Method: a seeded
# generator draws whom to kill and when, and whether survivors go on with fewer or wait for
# replacements. Every sum of every member is compared with arithmetic, in the member.


SIZE = 4
KILL_COUNT = 10
"""A seed's."""
LENGTHS = (10, 3000, 400_000)


class RandomKills:
    """A group under blows."""

    def __init__(self, target: str, strategy: str, stack: contextlib.ExitStack) -> None:
        self._given = {"size": SIZE, "strategy": strategy}
        self._target = target
        self._stack = stack
        self.members: list[GroupProcess] = []
        """By rank."""

    def start(self, ranks: list[int]) -> list[GroupProcess]:
        """New members; they are there when they have answered."""
        return [
            self._stack.enter_context(GroupProcess(self._target, rank, **self._given))
            for rank in ranks
        ]

    def blow(self, chance: random.Random) -> int:
        """Kills one in the middle of sums; the rank that all survivors name."""
        victim, length = chance.randrange(len(self.members)), chance.choice(LENGTHS)
        step_count, pause_s = chance.randrange(4), chance.random() * 0.03
        for member in self.members:
            member.begin("sum", size=length)
        for _ in range(step_count):
            self.members[victim].await_step()
        with contextlib.suppress(AssertionError):
            self.members[victim].answer(pause_s)
        dead = self.members.pop(victim)
        dead.send(signal.SIGKILL)
        assert dead.end() == -signal.SIGKILL
        for answer in answers(self.members, PATIENCE_S):
            assert (answer.get("error"), answer["rank"]) == ("WorkerLostError", victim), answer
        return victim

    def go_on_with_fewer(self) -> None:
        """The survivors close up."""
        self._check(ask_all(self.members, "rebuild"))

    def fill_up(self, victim: int) -> None:
        """The survivors wait until all ranks are there again."""
        free = [victim, *range(len(self.members) + 1, SIZE)]
        kept = [rank for rank in range(SIZE) if rank not in free]
        for member in self.members:
            member.begin("rebuild", wait_s=20.0)
        by_rank = dict(zip([*kept, *free], [*self.members, *self.start(free)], strict=True))
        self.members = [by_rank[rank] for rank in range(SIZE)]
        self._check(answers(self.members))

    def _check(self, found: list[dict]) -> None:
        count = len(self.members)
        assert [answer.get("rank") for answer in found] == list(range(count)), found
        assert {answer["size"] for answer in found} == {count}, found
        assert len({answer["generation"] for answer in found}) == 1, found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("seed", "strategy"), [(1, "ring"), (2, "tree")])
def test_kills_at_random_moments(cluster, seed, strategy) -> None:
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        kills = RandomKills(cluster(1).target, strategy, stack)
        kills.members = kills.start(list(range(SIZE)))
        kills._check(answers(kills.members))
        for _ in range(KILL_COUNT):
            victim = kills.blow(chance)
            if len(kills.members) > 1 and chance.random() < 0.6:
                kills.go_on_with_fewer()
            else:
                kills.fill_up(victim)
            for answer in ask_all(kills.members, "sum", size=3001, count=2):
                assert answer.get("size") == len(kills.members), answer


def test_one_killed_while_others_join_is_waited_for(cluster) -> None:
    """It has asked for its place, so that the others find no process at its address."""
    target = cluster(1).target

    def is_known() -> bool:
        error = error_of(lambda: joined(target, 0, 3, join_timeout_s=0.3))
        return getattr(error, "missing_ranks", None) == (1,)

    with GroupProcess(target, 2, 3, lease_s=5.0) as killed:
        eventually("rank 2 has come", is_known)
        killed.send(signal.SIGKILL)
        assert killed.end() == -signal.SIGKILL
    others = [in_background(lambda rank=rank: joined(target, rank, 3)) for rank in (0, 1)]
    with GroupProcess(target, 2, 3) as replacement:
        with contextlib.ExitStack() as stack:
            groups = [stack.enter_context(each.result(PATIENCE_S)) for each in others]
            assert replacement.answer()["rank"] == 2
            replacement.begin("barrier")
            for call in [in_background(group.barrier) for group in groups]:
                call.result(PATIENCE_S)
            assert replacement.answer()["size"] == 3
        assert replacement.leave() == 0
