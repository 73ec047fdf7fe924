"""A storm from a seed: members come, leave, are killed and stand still, and shards are killed.

Nothing hangs, and the weights are those that a replay of the recorded sets leads to, bit for bit.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest

import shardwell
from harness.faults.elastic_storm import Storm
from harness.oracles.contribution_sets import replayed, sets_of
from harness.polling import eventually
from harness.programs.elastic_worker import IDS, NAME, ElasticWorker
from shardwell_server import LocalCluster

SIZE, CREW = 1000, 4
SHORT_S = 12.0
SOAK_MINUTES = float(os.environ.get("SHARDWELL_SOAK_MINUTES") or 10)
OPTIONS = {
    "min_count": 2,
    "max_count": 6,
    "member_return_s": 0.2,
    "member_lease_s": 0.6,
}


def storm_of(
    running: LocalCluster, stack: ExitStack, seed: int, **options: object
) -> Storm[ElasticWorker]:
    """A crew of that many, and its storm."""

    def start(worker_id: str) -> ElasticWorker:
        return stack.enter_context(ElasticWorker(running.target, worker_id, **options))

    def start_again(shard: int) -> None:
        running.children[shard].kill()
        running.start_again(shard)

    count = len(running.children)
    storm: Storm[ElasticWorker] = Storm(start, start_again, shard_count=count, seed=seed)
    storm.resize(CREW)
    return storm


def steps_of(worker: ElasticWorker) -> int:
    """How many of its gradients have had an outcome so far."""
    while not worker._unread.empty():
        worker.read_line()
    return len(worker.lines)


def weather(storm: Storm[ElasticWorker], seconds: float) -> None:
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
        storm = storm_of(running, stack, seed, **{**inexact, **options})
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
        storm = storm_of(running, stack, seed, **{"kind": "table", **OPTIONS})
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
