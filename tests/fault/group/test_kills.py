"""SIGKILL at random moments, again and again, for members of a group that sum.

Goal: after each kill all survivors name the same rank, rebuild, and every sum is exact. Method: a
seeded generator draws whom to kill and when, and whether survivors go on with fewer or wait for
replacements. Every sum of every member is compared with arithmetic, in the member.
"""

from __future__ import annotations

import contextlib
import random
import signal

import pytest

from harness.group.ranks import error_of, joined
from harness.polling import PATIENCE_S, eventually
from harness.programs.group_processes import GroupProcess, answers, ask_all
from harness.threads import in_background

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
