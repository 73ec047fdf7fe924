"""Goal: what is acknowledged is in files that the next start finds, or it is refused.

Method: shards as processes, each with a directory of its own. While a worker trains, the directory,
or something in it, is removed, moved or replaced in each way that people and programs do it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import shardwell
from harness.polling import eventually
from harness.programs.commands import ServingShard
from harness.tokens import bearing

pytestmark = pytest.mark.timeout(60)

SIZE = 1000
SGD = shardwell.SGD(learning_rate=1.0)
ONES = np.ones(SIZE, np.float32)
IDS, ROWS = np.arange(5), np.ones((5, 2), np.float32)
GONE = r"data directory {path}.*nothing is acknowledged any more.*put the directory back"


def opened(client: shardwell.Client) -> tuple[shardwell.Parameter, shardwell.Table]:
    table = client.table(
        "rows", row_count=100, dim=2, optimizer=SGD, initializer=shardwell.Zeros(), mode="async"
    )
    return client.parameter("model", size=SIZE, optimizer=SGD), table


def is_serving(address: str) -> bool:
    """Whether grpc.health.v1 says so of the parameters' or the tables' service, or of both."""
    with bearing(grpc.insecure_channel(address)) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        names = ("", "shardwell.v1.ParameterServerService", "shardwell.v1.TableService")
        found = {check(health_pb2.HealthCheckRequest(service=n), timeout=5).status for n in names}
    return health_pb2.HealthCheckResponse.SERVING in found


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def parent_moved(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def replaced(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    shutil.copytree(path.with_name("elsewhere"), path)


def emptied(path: Path) -> None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def parameter_removed(path: Path) -> None:
    shutil.rmtree(path / "parameters" / "000001")


def weights_removed(path: Path) -> None:
    (path / "parameters" / "000001" / "weights").unlink()


def weights_restored(path: Path) -> None:
    """As rsync does: the copy is written under another name, which then takes the first's place."""
    weights = path / "parameters" / "000001" / "weights"
    shutil.copyfile(weights, weights.with_name("copy"))
    os.replace(weights.with_name("copy"), weights)


def rows_removed(path: Path) -> None:
    (path / "tables" / "000001" / "weights").unlink()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("durability", "remove"),
    [
        *((durability, how) for durability in ("process", "step", "1") for how in (
            shutil.rmtree, moved,
        )),
        *(("process", how) for how in (
            weights_removed, parent_moved, replaced, emptied, parameter_removed, weights_restored,
            rows_removed,
        )),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)  # fmt: skip
def test_a_directory_that_is_gone(
    tmp_path: Path, connect, durability: str, remove: Callable[[Path], None]
) -> None:
    path = tmp_path / "cluster" / "shard"
    with ServingShard(f"--data-dir={path}", f"--durability={durability}") as shard:
        address = shard.address()
        client = connect(address, "w0")
        model, table = opened(client)
        model.init(ONES)
        model.exchange(ONES)
        table.put_row_gradients(IDS, ROWS)
        assert is_serving(address)
        remove(path)
        eventually("the shard says that it serves no more", lambda: not is_serving(address))
        calls: list[Callable[[], object]] = [
            lambda: model.exchange(ONES),
            lambda: model.put_gradient(ONES),
            model.get_weights,
            lambda: table.put_row_gradients(IDS, ROWS),
            lambda: table.get_rows(IDS),
            lambda: opened(connect(address, "w1")),
            lambda: client.parameter("other", size=SIZE, optimizer=SGD),
            lambda: client.save_checkpoint(tmp_path / "saved"),
        ]
        for call in calls:
            with pytest.raises(shardwell.StorageError, match=GONE.format(path=path)) as caught:
                call()
            assert caught.value.shard_index == 0
        assert not (tmp_path / "saved").exists()
        shard.process.terminate()
        assert shard.end() == 1
        assert any("nothing is acknowledged" in line for line in shard.log)


def samples_removed(path: Path) -> None:
    (path / "parameters" / "000001" / "samples").unlink()


def samples_restored(path: Path) -> None:
    samples = path / "parameters" / "000001" / "samples"
    shutil.copyfile(samples, samples.with_name("copy"))
    os.replace(samples.with_name("copy"), samples)


@pytest.mark.parametrize("remove", [samples_removed, samples_restored])
def test_a_log_of_samples_that_is_gone(
    tmp_path: Path, connect, remove: Callable[[Path], None]
) -> None:
    path = tmp_path / "shard"
    with ServingShard(f"--data-dir={path}") as shard:
        address = shard.address()
        model, _ = opened(connect(address, "w0"))
        model.init(ONES)
        batches = model.batches(shardwell.Samples(SIZE, 1))
        model.exchange(ONES, batch=next(batches))
        remove(path)
        eventually("the shard says that it serves no more", lambda: not is_serving(address))
        with pytest.raises(shardwell.StorageError, match=GONE.format(path=path)):
            model.exchange(ONES, batch=next(batches))
        shard.process.terminate()
        assert shard.end() == 1


def test_who_waits_for_other_workers_learns_it_too(tmp_path: Path, connect) -> None:
    path = tmp_path / "shard"
    with ServingShard(f"--data-dir={path}") as shard:
        client = connect(shard.address(), "w0")
        model = client.parameter("model", size=SIZE, optimizer=SGD, worker_count=2)
        model.init(ONES)
        waiting = model.get_weights_async(min_version=1)
        moved(path)
        with pytest.raises(shardwell.StorageError, match=GONE.format(path=path)):
            waiting.result()


@pytest.mark.parametrize("durability", ["process", "step"])
def test_nothing_is_lost_by_moving_it_and_starting_again(
    tmp_path: Path, connect, durability: str
) -> None:
    path = tmp_path / "shard"
    flags = (f"--data-dir={path}", f"--durability={durability}")
    acknowledged = 0
    with ServingShard(*flags) as shard:
        model, _ = opened(connect(shard.address(), "w0"))
        model.init(np.zeros(SIZE, np.float32))
        model.exchange(ONES)
        moved(path)
        refused = False
        while not refused:
            try:
                acknowledged = model.put_gradient(ONES) + 1
            except shardwell.StorageError:
                refused = True
        shard.process.terminate()
        shard.end()
    assert not path.exists()  # nothing was written where it had been
    path.with_name("elsewhere").rename(path)
    with ServingShard(*flags) as shard:
        model, _ = opened(connect(shard.address(), "w0"))
        assert model.next_step >= acknowledged
        np.testing.assert_array_equal(model.get_weights(), -model.next_step * ONES)


def test_a_shard_says_that_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    for is_new in (True, False):
        with ServingShard(f"--data-dir={path}", "--log-format=json") as shard:
            shard.address()
            shard.process.terminate()
            assert shard.end() == 0
            told = [line for line in shard.log if "begins_anew" in line and str(path) in line]
            assert ['"begins_anew": true' in line for line in told] == [is_new]
            assert not any('"level": "warning"' in line for line in shard.log)


def test_training_leaves_no_trace_that_looks_like_a_removal(tmp_path: Path, connect) -> None:
    """Seats, events that are compacted, images, new tables: names come and go in the directory."""
    path = tmp_path / "shard"
    with ServingShard(f"--data-dir={path}", "--durability=0.05") as shard:
        address = shard.address()
        clients = [connect(address, f"w{index}") for index in range(4)]
        for number in range(40):
            client = clients[number % 4]
            model, table = opened(client)
            model.init(ONES)
            table.put_row_gradients(IDS, ROWS)
            model.set_learning_rate(1.0 / (number + 1), now=True)
            client.parameter(f"model-{number}", size=SIZE, optimizer=SGD).init(ONES)
        assert is_serving(address)
