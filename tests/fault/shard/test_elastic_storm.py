"""A storm from a seed: members come, leave, are killed and stand still, and shards are killed.

Nothing hangs, and the weights are those that a replay of the recorded sets leads to, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack

import pytest

import shardwell
from harness.oracles.contribution_sets import replayed, sets_of
from harness.polling import eventually
from harness.programs.elastic_worker import IDS, NAME, ElasticWorker

SIZE, CREW = 1000, 4
SHORT_S = 12.0
SOAK_MINUTES = float(os.environ.get("SHARDWELL_SOAK_MINUTES") or 10)
OPTIONS = {
    "min_count": 2,
    "max_count": 6,
    "member_return_s": 0.2,
    "member_lease_s": 0.6,
}


class Storm:
    """The crew, and what happens to it."""

    def __init__(self, running, stack: ExitStack, seed: int, options: dict[str, object]) -> None:
        self._running = running
        self._stack = stack
        self._options = options
        self._chance = random.Random(seed)
        self._count = 0
        self.workers: list[ElasticWorker] = []
        self.blows: dict[str, int] = {}

    def start(self, worker_id: str = "") -> None:
        """Starts a worker, under a new name or an old one."""
        self._count += 1
        name = worker_id or f"w{self._count}"
        worker = ElasticWorker(self._running.target, name, **self._options)
        self.workers.append(self._stack.enter_context(worker))

    def blow(self) -> None:
        """Draws what happens now, and has it happen."""
        kinds = ("kill", "replace", "stop", "two", "shard", "nothing")
        kind = self._chance.choice(kinds)
        self.blows[kind] = self.blows.get(kind, 0) + 1
        if kind == "shard":
            shard = self._chance.randrange(len(self._running.children))
            self._running.children[shard].kill()
            self._running.start_again(shard)
        elif kind == "stop":
            victim = self._chance.choice(self.workers)
            victim.send(signal.SIGSTOP)
            time.sleep(self._chance.uniform(0.0, 1.5))
            victim.send(signal.SIGCONT)
        elif kind != "nothing":
            for _ in range(2 if kind == "two" else 1):
                victim = self.workers.pop(self._chance.randrange(len(self.workers)))
                victim.close()
                self.start("" if kind == "replace" else victim.worker_id)
        time.sleep(self._chance.uniform(0.0, 0.3))


def steps_of(worker: ElasticWorker) -> int:
    """How many of its gradients have had an outcome so far."""
    while not worker._unread.empty():
        worker.read_line()
    return len(worker.lines)


def weather(storm: Storm, seconds: float) -> None:
    """Has things happen for so long; all go on after it."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        storm.blow()
    for worker in storm.workers:
        before = steps_of(worker)
        eventually(
            f"{worker.worker_id} goes on after {storm.blows}",
            lambda worker=worker, before=before: steps_of(worker) > before + 1,
        )


def endure(cluster, connect, tmp_path, seed: int, seconds: float, **options: object) -> None:
    running = cluster(
        2,
        data_dir=tmp_path / "data",
        contribution_dir=tmp_path / "log",
        processes=True,
        chunk_size_bytes=256,
    )
    with ExitStack() as stack:
        inexact = {"size": SIZE, "is_inexact": True, **OPTIONS}
        storm = Storm(running, stack, seed, {**inexact, **options})
        for _ in range(CREW):
            storm.start()
        weather(storm, seconds)
    net = connect(running, "reader").parameter(NAME)

    def is_replayed() -> bool:
        """A step may close between the two looks, once the last members are lost."""
        return bool((replayed(sets_of(tmp_path / "log"), SIZE) == net.get_weights()).all())

    eventually(f"a replay has the weights' bits, seed {seed}", is_replayed)
    assert len({tuple(line["contributors"]) for line in sets_of(tmp_path / "log").values()}) > 3


@pytest.mark.parametrize("seed", [1, 2])
def test_a_short_one(cluster, connect, tmp_path, seed) -> None:
    quorum = {"min_contributors": 3, "grace_s": 0.02} if seed % 2 else {}
    endure(cluster, connect, tmp_path, seed, SHORT_S, **quorum)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_short_one_of_a_table(cluster, tmp_path, seed) -> None:
    """Each worker gives all rows one gradient, in one message a shard: they stay alike there."""
    running = cluster(2, data_dir=tmp_path / "data", processes=True)
    with ExitStack() as stack:
        storm = Storm(running, stack, seed, {"kind": "table", **OPTIONS})
        for _ in range(CREW):
            storm.start()
        weather(storm, SHORT_S)
        with shardwell.connect(running.target, worker_id="reader") as client:
            values = set(client.table(NAME).get_rows(IDS).reshape(-1).tolist())
    assert len(values) <= 2
    assert max(values) < 0.0


@pytest.mark.soak
@pytest.mark.timeout(60 * SOAK_MINUTES + 300)
def test_a_long_one(cluster, connect, tmp_path) -> None:
    until_s, seed = time.monotonic() + 60 * SOAK_MINUTES, 100
    while time.monotonic() < until_s:
        directory = tmp_path / f"{seed}"
        directory.mkdir()
        quorum = {"min_contributors": 3, "grace_s": 0.02} if seed % 2 else {}
        endure(cluster, connect, directory, seed, 60.0, **quorum)
        seed += 1
