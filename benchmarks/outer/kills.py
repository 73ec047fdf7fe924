"""What learners train while one of them is killed every 20 s, beside the same without."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outer.rows import Row
from shardwell_server import LocalCluster
from storm import Worker, wait_until

LEARNER_COUNT = 8
SIZE = 100_000
STEP_S = 0.031
OUTER: dict[str, Any] = {"sync_every": 100, "fragments": 4, "overlap": 12}
INTERVAL_S = 20.0
"""From one kill to the next; the first comes after half of it."""
ARM_S = 60.0
WARM_UP_S = 2 * STEP_S * OUTER["sync_every"]
START_LIMIT_S = 60.0
GOAL = 0.95


class Arm(NamedTuple):
    """What an arm has trained: inner steps that counted, a second and learner."""

    everyone: float
    survivors: float
    """Those that were not killed in it."""
    kill_count: int
    waited: float
    """Part of their time that survivors waited in takes."""


@contextlib.contextmanager
def learners(count: int, target: str, **outer: Any) -> Iterator[list[Worker]]:
    """So many, who all take part when the block begins."""
    options = {"target": target, "size": SIZE, "step_s": STEP_S, "outer": outer}
    program = (sys.executable, str(Path(__file__).with_name("member.py")))
    made: list[Worker] = []
    try:
        for index in range(count):
            own = {**options, "worker_id": f"w{index}", "same_host": True}
            made.append(Worker(own, program=program))
        wait_until(lambda: all(len(each.steps(0, 1e12)) > 1 for each in made), START_LIMIT_S)
        time.sleep(WARM_UP_S)
        yield made
    finally:
        for each in made:
            each.kill()


def counted(workers: Sequence[Worker], since_s: float, until_s: float) -> float:
    """Inner steps of theirs that came to count in a time, a second and learner."""
    steps = sum(said["counted"] for each in workers for said in each.steps(since_s, until_s))
    return float(steps / (until_s - since_s) / len(workers))


def train(workers: Sequence[Worker], seconds: float, interval_s: float) -> Arm:
    """Lets learners train.

    Args:
        workers: They.
        seconds: How long.
        interval_s: How often one is killed, and started again at once; 0: never.
    """
    since_s, killed = time.monotonic(), 0
    until_s = since_s + seconds
    while interval_s and (kill_s := since_s + interval_s * (killed + 0.5)) < until_s:
        time.sleep(max(kill_s - time.monotonic(), 0.0))
        victim = workers[killed % len(workers)]
        victim.kill()
        victim.start()
        killed += 1
    time.sleep(max(until_s - time.monotonic(), 0.0))
    survivors = workers[killed:] or workers
    waited_s = 0.0
    for each in survivors:
        said = each.steps(since_s, until_s)
        waited_s += said[-1]["waited_s"] - said[0]["waited_s"] if said else seconds
    return Arm(
        counted(workers, since_s, until_s),
        counted(survivors, since_s, until_s),
        killed,
        waited_s / len(survivors) / seconds,
    )


def row_of(what: str, calm: Arm, killed: Arm) -> Row:
    """Of an arm with kills, beside one without."""
    return Row(
        f"goodput with {killed.kill_count} kills in {ARM_S:g} s / without, {what}",
        f"{GOAL:g}",
        f"{killed.everyone / calm.everyone:.3f}: {killed.everyone:.2f} of {calm.everyone:.2f} "
        f"inner steps a second and learner; of those never killed "
        f"{killed.survivors / calm.survivors:.3f}, which waited {killed.waited:.3f} of their "
        f"time (without {calm.waited:.3f})",
    )


QUORUM = {"min_contributors": LEARNER_COUNT - 1, "grace_s": 0.1}


def measure() -> Iterator[Row]:
    """With elastic members alone, and with a quorum."""
    settings = ", ".join(f"{name}={value}" for name, value in OUTER.items())
    what = f"{LEARNER_COUNT} learners of {SIZE:,} elements, {STEP_S * 1e3:g} ms a step, {settings}"
    for more in ({}, QUORUM):
        with (
            LocalCluster(2, processes=True, log_level="error") as cluster,
            learners(LEARNER_COUNT, cluster.target, **OUTER, **more) as workers,
        ):
            calm = train(workers, ARM_S, 0.0)
            killed = train(workers, ARM_S, INTERVAL_S)
        text = ", ".join(f"{name}={value}" for name, value in more.items())
        yield row_of(text or what, calm, killed)
