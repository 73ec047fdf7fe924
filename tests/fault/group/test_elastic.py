"""Workers of an elastic group that come, leave, are killed or stand still while all go on.

Goal: no worker calls rebuild(), every step has the same sum on all that made it, weights are those
    of
a replay of who took part, and a newcomer goes on from the state of the others. Method: real
processes, killed for real; a sum says who took part in it.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Direction, Proxy
from harness.faults.standing_still import stop
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import ServingShard
from harness.programs.elastic_group_processes import ElasticWorker, check_steps
from harness.programs.ports import free_port
from harness.threads import in_background

BALLAST_BYTES = 40_000_000
"""Of a state that moves in three pieces."""
LONG = 2_000_000
"""A sum that is under way for most of a step."""
STRATEGIES = ("ring", "tree(arity=2)", "centralized")

Start = Callable[..., list[ElasticWorker]]


@pytest.fixture
def target(cluster) -> str:
    """Where workers meet."""
    return str(cluster(1).target)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers, which are there when each has made a step with all others of the call."""
    with contextlib.ExitStack() as stack:

        def started(target: str, *uids: int, others: tuple[int, ...] = (), **options):
            workers = [stack.enter_context(ElasticWorker(target, uid, **options)) for uid in uids]
            for worker in workers:
                worker.await_step_of([*others, *uids])
            return workers

        yield started


def kill(*workers: ElasticWorker) -> None:
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        assert worker.end() == -signal.SIGKILL


def finish(*workers: ElasticWorker) -> None:
    for worker in workers:
        worker.stop()
    for worker in workers:
        assert worker.end() == 0, worker.log


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("retry", [True, False])
def test_a_rank_that_is_killed(target, start, strategy, victim, retry) -> None:
    """In calls of many chunks, so that some have final values; rank 0 decides, and may be it."""
    workers = start(target, 0, 1, 2, element_count=LONG, retry=retry, strategy=strategy)
    dead = next(each for each in workers if each.steps[-1]["rank"] == victim)
    kill(dead)
    left = [each for each in workers if each is not dead]
    for worker in left:
        worker.await_step_of(each.uid for each in left)
    finish(*left)
    check_steps(workers)
    if retry:
        assert not any('"error"' in line for worker in left for line in worker.lines)


DEATHS = [
    (rank, at)
    for rank in (0, 1, 2)
    for at in ("announcing", "sending", "made", "known", "going", "making")
    if rank == 0 or at not in ("going", "making")
]
DEATH_STEP = 5


@pytest.mark.sampled(12)
@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize(("rank", "at"), DEATHS)
def test_a_rank_dies_at_one_instant_of_a_sum(target, start, rank, at, retry) -> None:
    """What some know of the call when it dies decides for all: it is over, or made again."""
    dies = {"rank": rank, "size": 3, "step": DEATH_STEP, "at": at}
    workers = start(target, 0, 1, 2, element_count=LONG, retry=retry, dies=dies)
    dead = next(each for each in workers if each.steps[-1]["rank"] == rank)
    assert dead.end() == -signal.SIGKILL
    left = [each for each in workers if each is not dead]
    for worker in left:
        worker.await_step_of(each.uid for each in left)
    finish(*left)
    found = check_steps(left)
    counts = at in ("known", "making")
    assert found[DEATH_STEP] == sum(2**each.uid for each in (workers if counts else left))
    fails = not (retry or counts or at == "announcing")
    for worker in left:
        assert sum('"error"' in line for line in worker.lines) == fails, worker.lines


def test_a_newcomer_goes_on_from_the_state_of_the_others(target, start) -> None:
    workers = start(target, 0, 1)
    (new,) = start(target, 5, others=(0, 1))
    for worker in workers:
        worker.await_step_of([0, 1, 5])
    finish(*workers, new)
    check_steps([*workers, new])
    assert new.steps[0]["step"] > 0
    assert new.steps[0]["rank"] == 2, "newcomers come behind"
    for worker in workers:
        assert max(step["size"] for step in worker.steps) == 3, "who leaves first makes others two"


def test_a_worker_that_leaves_fails_no_call_of_the_others(target, start) -> None:
    workers = start(target, 0, 1, 2, retry=False)
    by_rank = sorted(workers, key=lambda each: each.steps[-1]["rank"])
    while len(by_rank) > 1:
        assert by_rank.pop(0).leave() == 0  # rank 0
        for worker in by_rank:
            worker.await_step_of(each.uid for each in by_rank)
    finish(*by_rank)
    check_steps(workers)
    assert not any('"error"' in line for worker in workers for line in worker.lines)


def test_two_killed_at_once(target, start) -> None:
    workers = start(target, 0, 1, 2, 3, element_count=LONG)
    kill(*workers[1:3])
    for worker in (workers[0], workers[3]):
        worker.await_step_of([0, 3])
    finish(workers[0], workers[3])
    check_steps(workers)


def test_a_killed_worker_comes_back_with_nothing(target, start) -> None:
    """All members are replaced one after the other, and the state goes on."""
    workers = start(target, 0, 1, 2)
    living = list(workers)
    for uid in (3, 4, 5):
        kill(living.pop(0))
        for worker in living:
            worker.await_step_of(each.uid for each in living)
        workers += start(target, uid, others=tuple(each.uid for each in living))
        living.append(workers[-1])
    finish(*living)
    found = check_steps(workers)
    assert found[len(found) - 1] & 7 == 0, "none of the first is left"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_stood_still_beyond_its_lease(target, start, victim) -> None:
    """The others go on; its call says that it must join again, and it does, as a newcomer."""
    workers = start(target, 0, 1, 2)
    stopped = next(each for each in workers if each.steps[-1]["rank"] == victim)
    left = [each for each in workers if each is not stopped]
    stop(stopped.pid)
    for worker in left:
        worker.await_step_of(each.uid for each in left)
    stopped.send(signal.SIGCONT)
    error = stopped.await_line(lambda line: "error" in line)["error"]
    assert "join it again" in error
    assert "join it again" in stopped.await_line(lambda line: "over" in line)["over"]
    assert stopped.end() == 0, stopped.log
    (again,) = start(target, 6, others=tuple(each.uid for each in left))
    finish(*left, again)
    check_steps([*left, again])


def test_fewer_than_min_size_wait_for_others(target, start) -> None:
    workers = start(target, 0, 1, 2, min_size=3)
    kill(workers[2])
    with ElasticWorker(target, 3, min_size=3) as new:
        for worker in (*workers[:2], new):
            worker.await_step_of([0, 1, 3])
        kill(*workers[:2], new)  # the last would wait for others
        found = check_steps([*workers, new])
    assert all(mask.bit_count() == 3 for mask in found.values())


def test_a_newcomer_that_is_killed_while_it_comes_in(target, start) -> None:
    """It has asked for a place; the members go on without it, before its lease has ended."""
    workers = start(target, 0, 1)
    for uid in (2, 3):
        with ElasticWorker(target, uid, lease_s=600.0) as new:
            new.send(signal.SIGKILL) if uid == 2 else new.await_line(lambda line: "joined" in line)
            kill(new) if uid == 3 else new.end()
        for worker in workers:
            worker.await_line(lambda line: line.get("size") == 2)
            worker.await_step_of([0, 1])
    finish(*workers)
    check_steps(workers)


@pytest.mark.parametrize("at", ["giving", "taking"])
def test_a_worker_dies_in_the_middle_of_a_state(target, start, at) -> None:
    """A state of several pieces: another member gives all of it, and no worker keeps a part."""
    dies = {"rank": 0, "size": 0, "step": 0, "at": at}
    given = {"ballast_bytes": BALLAST_BYTES}
    workers = start(target, 0, 1, 2, **given, **({"dies": dies} if at == "giving" else {}))
    first = next(each.uid for each in workers if each.steps[-1]["rank"] == 0)
    with ElasticWorker(target, 3, **given, **({"dies": dies} if at == "taking" else {})) as new:
        dead = new if at == "taking" else workers[first]
        assert dead.end() == -signal.SIGKILL
        left = [each for each in (*workers, new) if each is not dead]
        for worker in left:
            worker.await_step_of(each.uid for each in left)
        if at == "giving":
            ballast = [line["ballast"] for line in map(json.loads, new.lines) if "given" in line]
            assert ballast == [[first]]
        kill(*left)
        check_steps(left)


def test_the_meeting_place_is_started_again(start) -> None:
    """Members make themselves known to it, and a newcomer comes in after it."""
    port = free_port()
    with ServingShard(port=port) as shard:
        target = shard.address()
        workers = start(target, 0, 1)
        shard.send(signal.SIGKILL)
        shard.end()
        with ElasticWorker(target, 2) as new:
            with ServingShard(port=port) as again:
                again.address()
                for worker in (*workers, new):
                    worker.await_step_of([0, 1, 2])
                kill(workers[0])
                for worker in (workers[1], new):
                    worker.await_step_of([1, 2])
                finish(workers[1], new)
            check_steps([*workers, new])
    assert new.steps[0]["step"] > 0


class Member:
    """A member that is a thread, which joins again when others went on without it."""

    def __init__(self, target: str, uid: int, stopped: threading.Event, **options: Any) -> None:
        self.masks: dict[int, int] = {}
        """By step: who took part."""
        self._join = lambda: shardwell.join_group(
            "wires",
            size=3,
            rendezvous=target,
            elastic=True,
            same_host=False,
            **{"lease_s": 2.0, "timeout_s": 20.0, "join_timeout_s": 60.0, **options},
        )
        self._uid, self._stopped = uid, stopped
        self.ended = in_background(self._train)

    def _train(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._join() as group:
                    self._make_steps(group)
            except shardwell.ClosedError:  # left behind: others may have made its last step again
                self.masks.pop(max(self.masks, default=0), None)

    def _make_steps(self, group: shardwell.Group) -> None:
        step = np.zeros(1, np.int64)
        while not self._stopped.is_set():
            try:
                group.broadcast_state({"step": step})
                array = np.full(LONG, 2.0**self._uid, np.float32)
                group.all_reduce(array, codec="fp32", retry=True)
            except shardwell.WorkerLostError:
                continue
            assert (array == array[0]).all()
            self.masks[int(step[0])] = int(array[0])
            step += 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_wire_between_members_is_cut(target, victim) -> None:
    """All live: those that the others left behind join again, and no step has two sums."""
    stopped, port = threading.Event(), free_port()
    with Proxy(f"127.0.0.1:{port}") as proxy:
        own = {"listen": f"127.0.0.1:{port}", "advertise": proxy.address, "rank": victim}
        members = [Member(target, 0, stopped, **own)]
        members += [Member(target, uid, stopped) for uid in (1, 2)]

        def come_together(first: int) -> None:
            eventually(
                "all make a step together",
                lambda: all(
                    any(mask == 7 and step > first for step, mask in list(each.masks.items()))
                    for each in members
                ),
            )

        try:
            come_together(0)
            proxy.cut_after(Direction.TO_CLIENT, 3_000_000, refuse=False)
            eventually("it is cut", lambda: proxy.cut_count)
            come_together(max(max(list(each.masks)) for each in members))
        finally:
            stopped.set()
        for each in members:
            each.ended.result(PATIENCE_S)
    found: dict[int, int] = {}
    for each in members:
        for step, mask in each.masks.items():
            assert found.setdefault(step, mask) == mask, step


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_of_kills_and_newcomers_loses_no_step(target, start, seed) -> None:
    """Workers are killed, leave and come at random, several at once."""
    chance = random.Random(seed)
    living = start(target, 0, 1, 2, element_count=200_000)
    workers, uid = list(living), 3
    for _ in range(12):
        blow = chance.choice(["kill", "leave", "come", "come"])
        if blow == "come" and len(living) < 5 and uid < 18:
            new = start(
                target, uid, others=tuple(each.uid for each in living), element_count=200_000
            )
            workers += new
            living += new
            uid += 1
        elif blow == "kill" and len(living) > 1:
            kill(living.pop(chance.randrange(len(living))))
        elif blow == "leave" and len(living) > 1:
            assert living.pop(chance.randrange(len(living))).leave() == 0
        for worker in living:
            worker.await_step_of([each.uid for each in living])
    finish(*living)
    check_steps(workers)
