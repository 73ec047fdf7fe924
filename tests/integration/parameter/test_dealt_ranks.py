"""Goal: each rank is dealt the same samples in each run, whichever worker comes first.

Method: two workers ask in either order, with a launcher's variables and without, and after a
restore into other shards.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell

LENGTH, BATCHES = 24, shardwell.Samples(24, 2)
NAMES = ("w0", "w1")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def opened(client: Any) -> Any:
    net = client.parameter(
        "visits", size=LENGTH, optimizer=shardwell.SGD(lr=1.0), codec="fp32", worker_count=2
    )
    net.init(np.zeros(LENGTH))
    return net


def step(nets: dict[str, Any], dealt: dict[str, Any]) -> dict[str, list[int]]:
    """Gives a gradient of the next batch of each worker, in the order of `nets`."""
    found, futures = {}, []
    for name, net in nets.items():
        batch = next(dealt[name])
        found[name] = batch.indices.tolist()
        futures.append(net.exchange_async(np.zeros(LENGTH, np.float32), batch=batch))
    for future in futures:
        future.result()
    return found


def steps(nets: dict[str, Any], count: int) -> list[dict[str, list[int]]]:
    dealt = {name: net.batches(BATCHES) for name, net in nets.items()}
    return [step(nets, dealt) for _ in range(count)]


def test_a_launchers_ranks_are_dealt_the_same_whoever_comes_first(
    cluster: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    runs = []
    for ranks in ((0, 1), (1, 0)):
        running = cluster(1)
        nets = {f"w{rank}": opened(connect(running, f"w{rank}")) for rank in ranks}
        found = {}
        for name, net in nets.items():
            monkeypatch.setenv("RANK", name[1:])
            batches = net.batches(BATCHES)
            found[name] = [next(batches).indices.tolist() for _ in range(4)]
        runs.append(found)
    assert runs[0] == runs[1]
    assert not {*itertools.chain(*runs[0]["w0"])} & {*itertools.chain(*runs[0]["w1"])}


def test_a_rank_is_one_workers(cluster: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that have the same from their launchers are dealt different samples."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    running = cluster(1)
    first, second = (next(opened(connect(running, name)).batches(BATCHES)) for name in NAMES)
    assert not {*first.indices} & {*second.indices}


def test_a_restored_crew_is_dealt_what_it_would_have_been(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    running = cluster(2)
    clients = {name: connect(running, name) for name in NAMES}
    nets = {name: opened(client) for name, client in clients.items()}
    steps(nets, 2)
    clients["w0"].save_checkpoint(tmp_path / "saved")
    expected = steps(nets, 3)

    other = cluster(3)
    connect(other, "ops").restore_checkpoint(tmp_path / "saved")
    nets = {name: opened(connect(other, name)) for name in reversed(NAMES)}
    assert steps(nets, 3) == expected
