"""Goal: every thread of a process at work has a name that docs/concepts/threads.md has.

Method: clients, shards and a group work in this process, and all its threads are looked at.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shardwell
from shardwell_server import LocalCluster

SIZE = 3_000_000
PAGE = Path(__file__).parents[3] / "docs/concepts/threads.md"


def _strangers() -> set[str]:
    """Threads that the page does not have: neither ours nor gRPC's."""
    page = PAGE.read_text()
    names = set(re.findall(r"`(shardwell-[a-z-]+)`", page))
    return {
        thread.name
        for thread in threading.enumerate()
        if re.sub(r"_\d+$", "", thread.name) not in names
        and not (getattr(thread, "_target", None).__class__.__module__ or "").startswith("grpc")
        and not getattr(getattr(thread, "_target", None), "__module__", "").startswith("grpc")
    }


@pytest.mark.parametrize("same_host", ["auto", "off"])
def test_each_thread_at_work_is_on_the_page(tmp_path: Path, same_host: str) -> None:
    before = _strangers()
    optimizer = shardwell.SGD(learning_rate=0.5)
    found: set[str] = set()
    with (
        LocalCluster(
            2,
            tmp_path,
            admin_listen="127.0.0.1:0",
            audit_dir=tmp_path / "audit",
            contribution_dir=tmp_path / "contributions",
            same_host=same_host,
        ) as running,
        shardwell.connect(running.target, worker_id="w0", threads=3) as client,
    ):
        elastic = shardwell.Elastic(min_count=1, max_count=2)
        model = client.parameter("m", size=SIZE, optimizer=optimizer, members=elastic)
        model.init(np.zeros(SIZE, np.float32))
        users = client.table("t", row_count=1000, dim=8, optimizer=optimizer)
        for _ in range(3):
            model.exchange(np.ones(SIZE, np.float32))
            users.put_row_gradients(np.arange(100), np.ones((100, 8), np.float32))
            found |= _strangers()
        client.save_checkpoint(tmp_path / "saved")
        found |= _strangers()

        def reduce(rank: int) -> set[str]:
            with shardwell.join_group(
                "g", rank=rank, size=2, rendezvous=running.addresses[0]
            ) as group:
                group.all_reduce(np.ones(SIZE, np.float32))
                group.barrier()
                return _strangers()

        with ThreadPoolExecutor(2, "shardwell-work") as ranks:
            for strangers in ranks.map(reduce, range(2)):
                found |= strangers
    assert found - before == set()
