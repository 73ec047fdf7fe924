"""Goal: shards that Ray places, and starts again, lose no gradient and count none twice.

Method: real Ray on two nodes of this machine, with addresses of their own. Two workers train while
shards and a node are killed; weights are those that plain NumPy computes, bit for bit. Skipped
where Ray is not installed (`make test-ray`).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.certificates import authority, of_client, of_server
from harness.polling import eventually
from harness.programs.ports import free_port
from harness.threads import in_background
from harness.tokens import Tokens

ray = pytest.importorskip("ray", reason="Ray is not installed; make test-ray installs it")
import shardwell.ray  # noqa: E402
from harness.data.ray_training import reference, train  # noqa: E402

HEAD_HOST, OTHER_HOST = "127.0.0.2", "127.0.0.3"
STEP_COUNT = 400
WAIT_S = 120.0


class Training:
    """Two workers on threads, how far they are, and what stopped them."""

    def __init__(self, cluster: Any, step_count: int = STEP_COUNT, **options: Any) -> None:
        self.steps = [0, 0]
        self._may_end = threading.Event()
        """Set once what is to befall them has: steps take less time than a node to die."""
        self.errors: list[shardwell.ShardwellError] = []
        self._workers: list[Future[Any]] = [
            in_background(
                partial(
                    train,
                    cluster,
                    rank,
                    step_count,
                    say=partial(self._say, rank),
                    fail=self.errors.append,
                    **options,
                )
            )
            for rank in range(2)
        ]

    def _say(self, rank: int, step: int) -> None:
        self.steps[rank] = step
        if step >= STEP_COUNT // 2:
            self._may_end.wait(WAIT_S)

    def until(self, step: int) -> None:
        eventually(
            f"both are beyond step {step}",
            lambda: min(self.steps) >= step or any(each.done() for each in self._workers),
            timeout_s=WAIT_S,
        )

    def weights(self) -> list[Any]:
        self._may_end.set()
        return [worker.result(WAIT_S) for worker in self._workers]


def listens(address: str) -> bool:
    """Returns True if a process listens there."""
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), 5.0):
        return True
    return False


def pid_listening_at(address: str) -> int:
    """The process that listens there."""
    host, _, port = address.rpartition(":")
    wanted = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{int(port):04X}"
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    inode = next(row[9] for row in rows if row[1].endswith(wanted) and row[3] == "0A")
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(entry) == f"socket:[{inode}]":
                return int(entry.parts[2])
    raise AssertionError(f"nobody listens at {address}")


def pid_of_coordinator() -> int:
    """That of this test's Ray, which has the name of its directory for itself."""
    home = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_one = (entry / "cmdline").read_bytes().startswith(b"ray::_Coordinator")
            if is_one and home in (entry / "environ").read_bytes():
                return int(entry.name)
    raise AssertionError("there is no coordinator")


def hosts_of(cluster: Any) -> list[str]:
    return [address.rpartition(":")[0] for address in cluster.addresses]


def test_shards_are_spread_and_workers_of_ray_find_them(nodes: Any) -> None:
    with shardwell.ray.start_shards(2) as cluster:
        assert sorted(hosts_of(cluster)) == [HEAD_HOST, OTHER_HOST]
        worker = ray.remote(train)
        found = ray.get([worker.remote(cluster, rank, 50) for rank in range(2)], timeout=WAIT_S)
        for weights in found:
            np.testing.assert_array_equal(weights, reference(50))
        addresses = cluster.addresses
    cluster.close()  # again does nothing
    for address in addresses:
        with pytest.raises(ConnectionError):
            socket.create_connection(tuple(address.split(":")), 5.0).close()


def test_a_killed_shard_goes_on_from_its_files_at_its_address(nodes: Any, tmp_path: Path) -> None:
    with shardwell.ray.start_shards(2, data_dir=tmp_path) as cluster:
        addresses = cluster.addresses
        training = Training(cluster)
        for number, step in enumerate((50, 120, 200)):
            training.until(step)
            os.kill(pid_listening_at(addresses[number % 2]), signal.SIGKILL)
            eventually("it is there again", lambda: cluster.addresses == addresses)
        os.kill(pid_of_coordinator(), signal.SIGKILL)
        assert cluster.addresses == addresses
        for weights in training.weights():
            np.testing.assert_array_equal(weights, reference(STEP_COUNT))
        assert training.errors == [], "no worker noticed"


def test_a_shard_moves_from_a_lost_node_with_a_shared_directory(nodes: Any, tmp_path: Path) -> None:
    with shardwell.ray.start_shards(2, data_dir=tmp_path) as cluster:
        lost = hosts_of(cluster).index(OTHER_HOST)
        address = cluster.addresses[lost]
        training = Training(cluster)
        training.until(50)
        nodes.kill_other()
        eventually("its shard has ended with it", lambda: not listens(address))
        for weights in training.weights():
            np.testing.assert_array_equal(weights, reference(STEP_COUNT))
        assert hosts_of(cluster) == [HEAD_HOST, HEAD_HOST]
        assert training.errors, "the old address was no use"
        assert {type(error) for error in training.errors} <= {
            shardwell.ShardUnavailableError,
            shardwell.DeadlineError,
            shardwell.WorkersMissingError,
        }
        assert lost in {error.shard_index for error in training.errors}
    # Ray is gone with its shards; their directory is as good for a cluster elsewhere.
    with (
        shardwell.ray.start_shards(2, data_dir=tmp_path) as cluster,
        shardwell.connect(cluster.target) as client,
    ):
        weights = client.parameter("net").get_weights()
    np.testing.assert_array_equal(weights, reference(STEP_COUNT))


@pytest.mark.parametrize("loss", ["process", "node"])
def test_all_shards_go_back_to_the_newest_checkpoint(nodes: Any, tmp_path: Path, loss: str) -> None:
    checkpoint = str(tmp_path / "{step}")
    with shardwell.ray.start_shards(2, checkpoint=checkpoint) as cluster:
        lost = hosts_of(cluster).index(OTHER_HOST)
        training = Training(cluster, checkpoint=checkpoint)
        training.until(50)
        if loss == "process":
            os.kill(pid_listening_at(cluster.addresses[lost]), signal.SIGKILL)
        else:
            address = cluster.addresses[lost]
            nodes.kill_other()
            eventually("its shard has ended with it", lambda: not listens(address))
        for weights in training.weights():
            np.testing.assert_array_equal(weights, reference(STEP_COUNT))
        assert training.errors
        (newest,) = {shardwell.inspect_checkpoint(checkpoint).parameters[0].version}
        assert newest == STEP_COUNT - 19  # saved after step 380
    with (  # others begin with it
        shardwell.ray.start_shards(3, checkpoint=checkpoint) as cluster,
        shardwell.connect(cluster.target) as client,
    ):
        assert client.parameter("net").next_step == newest


def test_lost_memory_of_shards_is_reported(nodes: Any) -> None:
    with shardwell.ray.start_shards(2) as cluster:
        training = Training(cluster)
        training.until(50)
        os.kill(pid_listening_at(cluster.addresses[1]), signal.SIGKILL)
        with pytest.raises(shardwell.StorageError, match=r"shard 1 at .* found nothing") as caught:
            training.weights()
        assert caught.value.shard_index == 1


def test_tls_and_tokens_keep_others_out_on_given_ports(nodes: Any, tmp_path: Path) -> None:
    files = authority("ray", (HEAD_HOST, OTHER_HOST))
    tokens = Tokens(tmp_path)
    token_file = tokens.add("workers", "create")
    with shardwell.ray.start_shards(
        2,
        tls=of_server(files),
        tokens=tokens.path,
        data_dir=tmp_path / "shards",
        port=(port := free_port()),
    ) as cluster:
        ports = [int(address.rpartition(":")[2]) for address in cluster.addresses]
        assert ports == [port, port + 1]
        with pytest.raises(shardwell.AuthenticationError):
            shardwell.connect(cluster.target, connect_timeout_s=5.0)
        with shardwell.connect(
            cluster.target, tls=of_client(files), token_file=token_file
        ) as client:
            net = client.parameter("net", size=10, optimizer=shardwell.SGD(1.0), worker_count=1)
            net.init(np.zeros(10, np.float32))
            np.testing.assert_array_equal(net.exchange(np.ones(10, np.float32)), -1.0)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda p: start(0), shardwell.ArgumentError, "count"),
        (lambda p: start(2, port=65535), shardwell.ArgumentError, "port"),
        (lambda p: start(2, num_cpus=0), shardwell.ArgumentError, "num_cpus, or resources, above"),
        (lambda p: start(2, num_cpus=-1), shardwell.ArgumentError, "above 0"),
        (lambda p: start(2, timeout_s=0), shardwell.ArgumentError, "timeout_s"),
        (lambda p: start(2, durability="step"), shardwell.ArgumentError, "needs a data directory"),
        (
            lambda p: start(2, data_dir=p, checkpoint=p),
            shardwell.ArgumentError,
            "two ways to come back",
        ),
        (
            lambda p: start(2, checkpoint=p / "{step}-{step}"),
            shardwell.ArgumentError,
            "must be once",
        ),
        (lambda p: start(2, checkpoint=p), shardwell.StorageError, "manifest"),
        (lambda p: start(2, data_dir=blocked(p)), shardwell.StorageError, "Not a directory"),
        (lambda p: start(2, data_dir=of_other(p)), shardwell.StorageError, "another shard"),
        (
            lambda p: start(3, num_cpus=64, timeout_s=1.0),
            shardwell.DeadlineError,
            r"no room for 3 shards with \{'CPU': 64\} each .* \d CPU; \d CPU; 12 CPU of these",
        ),
        (
            lambda p: start(2, resources={"fpga": 1}, timeout_s=1.0),
            shardwell.DeadlineError,
            "'fpga': 1",
        ),
    ],
)
def test_impossible_clusters_of_actors_are_refused(
    nodes: Any, tmp_path: Path, call: Callable[[Path], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(tmp_path)


def start(count: int, **options: Any) -> Any:
    return shardwell.ray.start_shards(count, **options)


def blocked(path: Path) -> Path:
    (path / "file").touch()
    return path / "file"


def of_other(path: Path) -> Path:
    with start(1, data_dir=path):
        pass
    return path


def test_on_other_addresses_it_wants_tls_and_tokens(nodes: Any) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; says which address would
        except OSError:
            pytest.skip("this machine has no address but its own")
        host = probe.getsockname()[0]
    nodes.have_two()
    outside = nodes.add(host)
    try:
        with pytest.raises(shardwell.ArgumentError, match=f"shards on {host} can be reached"):
            start(2)
        with start(2, insecure=True, resources={"outside": 1}) as cluster:
            assert hosts_of(cluster) == [host, host]
    finally:
        nodes.remove(outside)
