"""Goal: SIGKILL at any moment, of any process, changes nothing about what is learned.

Method: random kills (harness/faults/random_kills.py) in clusters that keep files, hundreds in all;
after every round the shards hold the weights, or rows, of an undisturbed run, bit for bit. The
kills come from a seed, new in each run; a failure prints it, and SHARDWELL_TEST_SEED=... draws the
same ones. Shards and workers are forked, to be back in milliseconds; one test has them started as
users start them. `make soak MINUTES=10` does it for longer, several clusters at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.data.first_weights_plan import FirstWeightsPlan
from harness.data.table_plan import TablePlan
from harness.data.training_plan import TrainingPlan
from harness.data.visit_plan import VisitPlan
from harness.faults.random_kills import KillCase, Toll
from harness.oracles.parameter import integer_gradient
from harness.polling import Stopwatch
from harness.programs.commands import TRAINING_WORKER, Program
from harness.programs.forkserver import ForkedCalls
from harness.threads import together

KILL_COUNT = 24
"""Of each case: several hundred over the suite."""

CASES = [
    KillCase(name="exchange", plan=TrainingPlan()),
    KillCase(
        name="put and get, three workers",
        plan=TrainingPlan(worker_count=3, verb="put_get", size=2000),
    ),
    KillCase(name="async", plan=TrainingPlan(mode="async")),
    KillCase(name="async put", plan=TrainingPlan(mode="async", verb="put_get", worker_count=3)),
    KillCase(
        name="momentum",
        plan=TrainingPlan(optimizer=shardwell.SGD(learning_rate=0.5, momentum=0.5)),
    ),
    KillCase(name="adam", plan=TrainingPlan(optimizer=shardwell.Adam(learning_rate=0.125))),
    KillCase(name="average", plan=TrainingPlan(optimizer=shardwell.Average(), codec="bf16")),
    KillCase(name="learning rates", plan=TrainingPlan(changes_rate=True)),
    KillCase(
        name="large chunks",
        plan=TrainingPlan(size=600_000, optimizer=shardwell.SGD(learning_rate=0.5, momentum=0.5)),
        chunk_size_bytes=2**20,
        steps=12,
    ),
    KillCase(
        name="large chunks of one shard",
        plan=TrainingPlan(size=1_200_000, optimizer=shardwell.Adam(learning_rate=0.125)),
        chunk_size_bytes=2**20,
        shard_count=1,
        steps=12,
    ),
    KillCase(
        name="many chunks, three shards",
        plan=TrainingPlan(size=30_000, codec="fp32+lz4"),
        chunk_size_bytes=256,
        shard_count=3,
        steps=12,
    ),
    KillCase(name="durable steps", plan=TrainingPlan(), durability="step", steps=20),
    KillCase(
        name="durable seconds",
        plan=TrainingPlan(worker_count=3, verb="put_get"),
        durability="0.05",
        steps=20,
    ),
    KillCase(name="first weights", plan=FirstWeightsPlan()),
    KillCase(name="durable first weights", plan=FirstWeightsPlan(), durability="step"),
]
# A worker that is started again in mid-step must send what its first process would have.
CASES += [
    dataclasses.replace(
        case, name=f"{case.name}, depends", plan=dataclasses.replace(case.plan, depends=True)
    )
    for case in CASES
    if isinstance(case.plan, TrainingPlan) and case.plan.mode == "sync"
]
_PIECES = TrainingPlan(verb="pieces", depends=True, size=12_000)
CASES += [
    KillCase(name="pieces", plan=_PIECES),
    KillCase(name="pieces of one worker", plan=dataclasses.replace(_PIECES, worker_count=1)),
    KillCase(
        name="pieces, adam, three workers, three shards",
        plan=dataclasses.replace(
            _PIECES, worker_count=3, optimizer=shardwell.Adam(learning_rate=0.125), codec="fp32+lz4"
        ),
        shard_count=3,
    ),
    KillCase(name="pieces, durable steps", plan=_PIECES, durability="step", steps=20),
]
# A table's gradients depend on the rows that a worker has read.
_ROWS = KillCase(name="rows", plan=TablePlan(), steps=20)
_OF_ONE = dataclasses.replace(_ROWS, name="rows of one worker", plan=TablePlan(worker_count=1))
TABLE_CASES = [
    _ROWS,
    dataclasses.replace(
        _ROWS,
        name="rows, put and get, three workers",
        plan=TablePlan(
            worker_count=3, verb="put_get", optimizer=shardwell.Adagrad(learning_rate=0.5)
        ),
    ),
    dataclasses.replace(_ROWS, name="rows, durable steps", durability="step"),
    _OF_ONE,
    dataclasses.replace(
        _OF_ONE,
        name="rows of one worker, adam, three shards",
        plan=TablePlan(
            worker_count=1,
            row_count=700,
            batch_row_count=480,
            optimizer=shardwell.Adam(learning_rate=0.125),
        ),
        shard_count=3,
    ),
    dataclasses.replace(_OF_ONE, name="rows of one worker, durable seconds", durability="0.05"),
]

VISIT_CASES = [
    KillCase(name="visits", plan=VisitPlan()),
    KillCase(name="visits, skipped steps", plan=VisitPlan(skip_chance=0.1), shard_count=3),
    KillCase(name="visits, durable steps", plan=VisitPlan(worker_count=2), durability="step"),
]

SOAK_MINUTES = float(os.environ.get("SHARDWELL_SOAK_MINUTES") or 10)
SOAK_THREAD_COUNT = 3


@pytest.fixture
def forked() -> Iterator[ForkedCalls]:
    with ForkedCalls() as started:
        yield started


def _seed() -> int:
    return int(os.environ.get("SHARDWELL_TEST_SEED") or random.SystemRandom().randrange(10**9))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kills_never_change_weights(forked: ForkedCalls, tmp_path: Path, case: KillCase) -> None:
    toll = case.run(forked, tmp_path, seed=_seed(), kill_count=KILL_COUNT)
    print(toll)
    assert toll.kill_count >= KILL_COUNT


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", TABLE_CASES, ids=lambda case: case.name)
def test_kills_never_change_rows(forked: ForkedCalls, tmp_path: Path, case: KillCase) -> None:
    toll = case.run(forked, tmp_path, seed=_seed(), kill_count=KILL_COUNT)
    print(toll)
    assert toll.kill_count >= KILL_COUNT


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", VISIT_CASES, ids=lambda case: case.name)
def test_kills_never_change_visits(forked: ForkedCalls, tmp_path: Path, case: KillCase) -> None:
    toll = case.run(forked, tmp_path, seed=_seed(), kill_count=KILL_COUNT // 2)
    print(toll)
    assert toll.kill_count >= KILL_COUNT // 2


@pytest.mark.parametrize(
    ("kill_count", "last_step"), [(3, 150), pytest.param(10, 500, marks=pytest.mark.exhaustive)]
)
def test_processes_as_users_start_them(
    cluster, tmp_path: Path, kill_count: int, last_step: int
) -> None:
    """`shardwell serve`, and workers that are programs; slow to start, so there are few kills."""
    seed, size = _seed(), 5000
    chance = random.Random(seed)
    running = cluster(2, data_dir=tmp_path, processes=True, chunk_size_bytes=1024)

    def started(index: int) -> Program:
        arguments = (running.target, str(index), "2", str(size), str(last_step))
        return stack.enter_context(Program(str(TRAINING_WORKER), *arguments))

    with contextlib.ExitStack() as stack:
        workers = [started(index) for index in (0, 1)]
        for number in range(kill_count):
            index = chance.randrange(2)
            assert workers[index].read_line().startswith(("from", "step")), f"seed {seed}"
            threading.Event().wait(chance.uniform(0, 0.05))
            if number % 3 == 2:
                workers[index].close()
                workers[index] = started(index)
            else:
                running.children[index].kill()
                running.start_again(index)
        assert [worker.end(60) for worker in workers] == [0, 0], f"seed {seed}"
    weights = -0.5 * sum(
        (integer_gradient(0, step, size) + integer_gradient(1, step, size)) / 2
        for step in range(last_step + 1)
    )
    stored = np.concatenate(
        [np.fromfile(path, "<f4") for path in sorted(tmp_path.glob("shard-*/*/*/weights"))]
    )
    np.testing.assert_array_equal(stored, weights, f"seed {seed}")


@pytest.mark.soak
@pytest.mark.timeout(60 * SOAK_MINUTES + 300)
def test_kills_for_minutes_lose_nothing(forked: ForkedCalls, tmp_path: Path) -> None:
    seed, watch = _seed(), Stopwatch()

    def kill_again(thread_index: int) -> Toll:
        chance = random.Random(seed + thread_index)
        toll = Toll()
        while watch.elapsed_s < 60 * SOAK_MINUTES:
            case, kill_seed = (
                chance.choice(CASES + TABLE_CASES + VISIT_CASES),
                chance.randrange(10**9),
            )
            directory = tmp_path / str(kill_seed)
            found = case.run(forked, directory, seed=kill_seed, kill_count=4 * KILL_COUNT)
            shutil.rmtree(directory)
            toll += found
            print(f"{watch.elapsed_s:5.0f} s  {case.name}, seed {kill_seed}: {found}", flush=True)
        return toll

    tolls = together(
        [partial(kill_again, index) for index in range(SOAK_THREAD_COUNT)],
        timeout_s=60 * SOAK_MINUTES + 240,
    )
    print(sum(tolls, Toll()), f"seed {seed}")
