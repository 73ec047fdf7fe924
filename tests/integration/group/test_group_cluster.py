"""Goal: a GroupCluster is one cluster to all ranks, with a shard of each, for as long as any needs
it; and an error on one rank is raised on all.

Method: ranks as threads of this process, each with a shard in a real process of its own; workers
that die are processes. Other addresses of the loopback interface stand for other machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.group.ranks import WAIT_S, begun_on_ranks, error_of, on_ranks
from harness.leaks import child_pids, is_running
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import Program
from harness.programs.ports import free_port
from harness.threads import in_background
from shardwell_server import GroupCluster

SIZE = 7


def _trained(group: shardwell.Group, cluster: GroupCluster) -> list[float]:
    """Two steps of plain SGD."""
    with shardwell.connect(cluster.target, worker_id=f"w{group.rank}", timeout_s=60) as client:
        net = client.parameter(
            "net",
            size=SIZE,
            optimizer=shardwell.SGD(learning_rate=0.5),
            worker_count=group.size,
            codec="fp32",
        )
        net.init(np.ones(SIZE, np.float32))
        for _ in range(2):
            weights = net.exchange(np.full(SIZE, group.rank, np.float32))
        assert [status.shard_index for status in client.status()] == list(range(group.size))
        return weights.tolist()


@pytest.fixture
def meeting(cluster) -> str:
    """Where ranks meet: a shard that has nothing to do with theirs."""
    return cluster(1).target


@pytest.mark.parametrize("size", [1, 3])
def test_one_cluster_with_a_shard_of_each_rank(meeting, size) -> None:
    def work(group: shardwell.Group):
        with GroupCluster(group) as running:
            return running.addresses, running.target, running.cluster_id, _trained(group, running)

    results = on_ranks(size, meeting, work)
    addresses, target, cluster_id, weights = results[0]
    assert results == [results[0]] * size
    assert target == ",".join(addresses)
    assert len(set(addresses)) == size
    assert cluster_id.startswith("group-")
    assert weights == [1.0 - (size - 1) / 2] * SIZE  # 2 steps * 0.5 * mean of the ranks


def test_two_clusters_of_a_group_have_names_of_their_own(meeting) -> None:
    def work(group: shardwell.Group):
        with GroupCluster(group) as first, GroupCluster(group) as second:
            assert _trained(group, first) == _trained(group, second)
            return first.cluster_id, second.cluster_id

    (names, others) = on_ranks(2, meeting, work)
    assert names == others
    assert names[0] != names[1]


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine's on Linux")
def test_shards_listen_where_the_ranks_are_reached(meeting) -> None:
    def work(group: shardwell.Group):
        listen = {"listen": "0.0.0.0:0"} if group.rank == 1 else {}
        with GroupCluster(group, **listen) as running:
            _trained(group, running)
            return [address.partition(":")[0] for address in running.addresses]

    def joined(rank: int) -> list[str]:
        host = f"127.0.0.{rank + 2}"
        with shardwell.join_group("hosts", rank, 2, None, meeting, listen=f"{host}:0") as group:
            assert group.addresses[rank].startswith(f"{host}:")
            return work(group)

    ranks = [in_background(lambda rank=rank: joined(rank)) for rank in range(2)]
    for rank in ranks:
        assert rank.result(WAIT_S) == ["127.0.0.2", "127.0.0.3"]


def test_shards_serve_until_all_ranks_have_left(meeting) -> None:
    """Rank 0 is done at once; rank 1 trains on, on the shards of both, and is then waited for."""
    leaving = threading.Event()

    def work(group: shardwell.Group) -> float:
        with GroupCluster(group) as running:
            if group.rank == 0:
                leaving.set()
                return 0.0
            assert leaving.wait(PATIENCE_S)
            with shardwell.connect(running.target, worker_id="w1", timeout_s=60) as client:
                net = client.parameter("own", size=SIZE, optimizer=shardwell.SGD(learning_rate=1.0))
                net.init(np.zeros(SIZE, np.float32))
                for _ in range(5):
                    weights = net.exchange(np.ones(SIZE, np.float32))
            return float(weights[0])

    assert on_ranks(2, meeting, work) == [0.0, -5.0]


@pytest.mark.parametrize("what", ["taken port", "argument"])
def test_a_shard_that_does_not_start_fails_all_ranks(meeting, what, capfd) -> None:
    port = meeting.rpartition(":")[2]
    options = {"listen": f"127.0.0.1:{port}"} if what == "taken port" else {"grace_s": -1.0}

    def work(group: shardwell.Group) -> shardwell.ShardwellError:
        return error_of(lambda: GroupCluster(group, **(options if group.rank == 1 else {})))

    errors = on_ranks(3, meeting, work)
    own = shardwell.ShardUnavailableError if what == "taken port" else shardwell.ArgumentError
    assert type(errors[1]) is own
    for rank in (0, 2):
        assert type(errors[rank]) is shardwell.ShardUnavailableError
        assert "no shard of rank 1 started" in errors[rank].message
        assert errors[rank].shard_index == 1
    if what == "taken port":
        assert "can't listen on" in capfd.readouterr().err


def test_a_rank_that_fails_does_not_wait_for_the_others(meeting) -> None:
    def work(group: shardwell.Group) -> None:
        with GroupCluster(group):
            if group.rank == 1:
                raise ValueError("my mistake")

    first, second = begun_on_ranks(2, meeting, work)
    assert isinstance(second.exception(PATIENCE_S), ValueError)
    lost = first.exception(PATIENCE_S)
    assert isinstance(lost, shardwell.WorkerLostError)
    assert lost.rank == 1
    assert "my mistake" in lost.message


def test_close_may_be_repeated(meeting) -> None:
    def work(group: shardwell.Group) -> None:
        running = GroupCluster(group)
        running.close()
        running.close()

    on_ranks(2, meeting, work)


WORKER = """
import os, sys, time
import numpy as np, shardwell
from shardwell_server import GroupCluster

with (
    shardwell.join_group() as group,
    GroupCluster(group) as cluster,
    shardwell.connect(cluster.target, worker_id=f"w{group.rank}", timeout_s=300) as client,
):
    net = client.parameter(
        "net", size=5, optimizer=shardwell.Adam(learning_rate=0.1), worker_count=group.size
    )
    net.init(np.zeros(5, np.float32))
    net.exchange(np.ones(5, np.float32))
    print("trained", cluster.target, flush=True)
    if "waits" in sys.argv:
        time.sleep(300)
"""


def _started(path: Path, *arguments: str, host: str = "127.0.0.1") -> Callable[[int], Program]:
    path.write_text(WORKER)
    shared = {
        "WORLD_SIZE": "2",
        "SHARDWELL_GROUP": "job",
        "MASTER_ADDR": host,
        # By its name this machine is reached from others, too; no token goes there in the clear.
        **({} if host == "127.0.0.1" else {"SHARDWELL_INSECURE": "1", "SHARDWELL_TOKEN_FILE": ""}),
        "SHARDWELL_RENDEZVOUS_PORT": str(free_port()),
    }
    return lambda rank: Program(str(path), *arguments, environment={**shared, "RANK": str(rank)})


@pytest.mark.parametrize("host", ["127.0.0.1", "this machine's name"])
def test_programs_that_any_launcher_has_started(tmp_path, host) -> None:
    """As torchrun starts them: rank 0 serves the place where they meet, and is known by it."""
    if host == "this machine's name":
        host = socket.gethostname()
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            pytest.skip("it has no address")
    start = _started(tmp_path / "worker.py", host=host)
    with start(0) as first, start(1) as second:
        assert (first.end(), second.end()) == (0, 0), (first.log, second.log)
        assert first.lines == second.lines
        assert first.lines[0].startswith(f"trained {host}:")
        assert first.log == second.log == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_shard_ends_with_its_worker(tmp_path, number) -> None:
    start = _started(tmp_path / "worker.py", "waits")
    shards: set[int] = set()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [os.kill(pid, signal.SIGKILL) for pid in filter(is_running, shards)])
        workers = [stack.enter_context(start(rank)) for rank in range(2)]
        for worker in workers:
            assert worker.read_line().startswith("trained ")
        own = child_pids(workers[1].pid)
        shards |= own | child_pids(workers[0].pid)
        assert len(shards) == 2
        workers[1].send(number)
        eventually("its shard is gone", lambda: not any(map(is_running, own)))
        assert all(map(is_running, shards - own))
        workers[0].send(number)
        eventually("all are gone", lambda: not any(map(is_running, shards)))
