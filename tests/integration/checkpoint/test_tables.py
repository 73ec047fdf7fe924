"""Goal: a checkpoint has every row of a table at one version, taken while training goes on, and
training that starts from it is the same training, bit for bit, on any number of shards.

Method: gradients of ones with SGD and momentum, so that a row's values follow from its count; files
are read with the package safetensors alone. Restored training is compared with training that was
never interrupted.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardwell
from harness.oracles.rows import OPTIMIZERS
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.threads import in_background, together
from harness.wire_client.table import WireTable
from harness.wire_client.worker import WireWorker
from shardwell.checkpoint import capture
from shardwell_server import Limits, LocalCluster

DIM = 3
MOMENTUM = shardwell.SGD(learning_rate=1.0, momentum=0.5)


def open_table(client: shardwell.Client, **options: Any) -> shardwell.Table:
    defaults: dict[str, Any] = {
        "row_count": 1000,
        "dim": DIM,
        "optimizer": MOMENTUM,
        "initializer": shardwell.Zeros(),
        "codec": "fp32",
    }
    return client.table("rows", **{**defaults, **options})


def read_rows(path: Path, name: str = "rows") -> tuple[dict[str, np.ndarray], dict]:
    """A table's arrays by ascending id and its entry in the manifest, without Shardwell."""
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 3
    (entry,) = [entry for entry in manifest["tables"] if entry["name"] == name]
    files = [load_file(path / file["path"]) for file in entry["files"]]
    assert [len(file["ids"]) for file in files] == [file["rows"] for file in entry["files"]]
    arrays = {key: np.concatenate([file[key] for file in files]) for key in files[0]}
    order = arrays["ids"].argsort()
    return {key: array[order] for key, array in arrays.items()}, entry


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def batches(step_count: int, row_count: int | None, workers: int = 1) -> list[list[tuple]]:
    """For each worker, ids and gradients of each step; float32 sums of them are exact."""
    generator = np.random.default_rng(5)
    keys = np.arange(40) if row_count else generator.integers(-(2**63), 2**63 - 1, 40)
    return [
        [
            (generator.choice(keys, 25), generator.integers(-8, 9, (25, DIM)) / 8)
            for _ in range(step_count)
        ]
        for _ in range(workers)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("row_count", [1000, None], ids=["row_count", "keys"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_training_is_the_same_bit_for_bit(
    cluster, connect, tmp_path, name, row_count, mode
) -> None:
    options = {"optimizer": OPTIMIZERS[name], "row_count": row_count, "mode": mode}
    (steps,) = batches(8, row_count)
    client = connect(cluster(2), "w0")
    table = open_table(client, **options)
    for ids, gradients in steps[:4]:
        table.put_row_gradients(ids, gradients)
    checkpoint = client.save_checkpoint(tmp_path / "c")
    (entry,) = checkpoint.tables
    assert (entry.version, entry.version_max, entry.name) == (4, 4, "rows")
    assert shardwell.inspect_checkpoint(tmp_path / "c", verify=True) == checkpoint
    before, _ = read_rows(tmp_path / "c")
    np.testing.assert_array_equal(before["ids"], table.row_ids())
    assert entry.row_count == len(before["ids"])
    every = np.unique(np.concatenate([ids for ids, _ in steps]))
    for ids, gradients in steps[4:]:
        expected = table.exchange_rows(ids, gradients, every)
    client.save_checkpoint(tmp_path / "end")
    at_the_end, _ = read_rows(tmp_path / "end")
    for shard_count in (1, 2, 3):
        target = connect(cluster(shard_count), "w0")
        assert target.restore_checkpoint(tmp_path / "c") == checkpoint
        target.save_checkpoint(tmp_path / f"again{shard_count}")
        assert_same(read_rows(tmp_path / f"again{shard_count}")[0], before)
        again = open_table(target, **options)
        assert again.next_step == (4 if mode == "sync" else 0)
        for ids, gradients in steps[4:]:
            found = again.exchange_rows(ids, gradients, every)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(again.row_ids(), at_the_end["ids"])
        target.save_checkpoint(tmp_path / f"end{shard_count}")
        assert_same(read_rows(tmp_path / f"end{shard_count}")[0], at_the_end)


class Training:
    """Workers that take steps on threads until `stop`, all after the same step."""

    def __init__(self, tables: list[shardwell.Table]) -> None:
        self._tables = tables
        self._stop_at = 2**62
        self._steps = [0] * len(tables)
        self.going = threading.Event()
        self._futures = [in_background(lambda i=i: self._run(i)) for i in range(len(tables))]

    def _run(self, index: int) -> None:
        table = self._tables[index]
        while table.next_step < self._stop_at:
            step = self._steps[index] = table.next_step
            # Row k is in every (k + 1)th step; all rows of a step must be there or none.
            ids = np.flatnonzero(step % (np.arange(50) + 1) == 0)
            table.exchange_rows(ids, np.ones((ids.size, DIM)))
            self.going.set()

    def stop(self) -> None:
        self._stop_at = max(self._steps) + 3
        for future in self._futures:
            future.result(PATIENCE_S)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shard_count", "worker_count", "stored"), [(1, 1, False), (3, 2, False), (2, 2, True)]
)
def test_training_goes_on_while_one_version_of_a_table_is_taken(
    cluster, connect, tmp_path, monkeypatch, shard_count, worker_count, stored
) -> None:
    monkeypatch.setattr(capture, "FILE_SIZE_BYTES", 200)
    running = cluster(shard_count, data_dir=tmp_path / "data" if stored else None)
    names = [f"w{index}" for index in range(worker_count)]
    clients = [connect(running, name) for name in names]
    tables = [open_table(client, worker_count=worker_count) for client in clients]
    saver = connect(running, "saver")
    training = Training(tables)
    assert training.going.wait(PATIENCE_S)
    versions = []
    try:
        for number in range(6):
            (entry,) = saver.save_checkpoint(tmp_path / f"c{number}").tables
            versions.append(entry.version)
            eventually("training goes on", lambda v=entry.version: tables[0].next_step > v)
    finally:
        training.stop()
    assert versions == sorted(set(versions)), "training went on in between"
    for number, version in enumerate(versions):
        arrays, entry = read_rows(tmp_path / f"c{number}")
        assert (entry["version"], entry["version_max"]) == (version, version)
        counts = -(-version // (np.arange(50) + 1))
        np.testing.assert_array_equal(arrays["ids"], np.arange(50))
        np.testing.assert_array_equal(arrays["update_counts"], counts)
        last = (version - 1) // (np.arange(50) + 1) * (np.arange(50) + 1)
        np.testing.assert_array_equal(arrays["last_steps"], last)
        weight = momentum = np.float32(0)
        at = {}
        for count in range(1, version + 1):
            momentum = np.float32(0.5) * momentum + np.float32(1)
            weight = weight - momentum
            at[count] = weight
        expected = np.array([at[count] for count in counts])
        np.testing.assert_array_equal(arrays["weights"], np.repeat(expected[:, None], DIM, 1))
    if stored:
        assert not list((tmp_path / "data").rglob("tmp*")), "spools have no names"


@pytest.mark.parametrize("durability", ["process", "step"])
def test_a_restored_table_keeps_what_it_was_given(cluster, connect, tmp_path, durability) -> None:
    """Files of a restored shard are as good as those of one that trained; with its rate."""
    client = connect(cluster(1), "w0")
    table = open_table(client)
    for _ in range(3):
        table.put_row_gradients(np.arange(20), np.ones((20, DIM)))
    table.set_learning_rate(0.5)
    client.save_checkpoint(tmp_path / "c")
    expected = table.exchange_rows(np.arange(25), np.ones((25, DIM)))
    with (
        LocalCluster(2, tmp_path / "data", durability=durability) as running,
        shardwell.connect(running.target, worker_id="restorer") as restorer,
    ):
        restorer.restore_checkpoint(tmp_path / "c")
    again = open_table(connect(cluster(2, data_dir=tmp_path / "data"), "w0"))
    assert again.next_step == 3
    np.testing.assert_array_equal(again.exchange_rows(np.arange(25), np.ones((25, DIM))), expected)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_restore_is_done_again_over_what_it_had_restored(
    cluster, connect, tmp_path, mode
) -> None:
    """One that was cut off between two tables; and one that was done. Not over what has changed."""
    saver = connect(cluster(2), "w0")
    options = {"row_count": 100, "dim": 2, "optimizer": MOMENTUM, "mode": mode, "codec": "fp32"}
    ids, ones = np.arange(40), np.ones((40, 2), np.float32)
    for name in ("a", "b", "c"):
        saver.table(name, **options).put_row_gradients(ids, ones)
    saver.save_checkpoint(tmp_path / "saved")
    running = cluster(3, data_dir=tmp_path / "data")
    client = connect(running, "w0")
    client.restore_checkpoint(tmp_path / "saved", tables=["a"])
    for _ in range(2):
        restored = client.restore_checkpoint(tmp_path / "saved")
        assert [entry.name for entry in restored.tables] == ["a", "b", "c"]
    tables = {name: client.table(name) for name in ("a", "b", "c")}
    rows = saver.table("a").get_rows(ids)
    for table in tables.values():
        np.testing.assert_array_equal(table.get_rows(ids), rows)
    changes = {
        "a": lambda: tables["a"].put_row_gradients([5], ones[:1]),
        "b": lambda: tables["b"].evict(older_than_step=1),
        "c": lambda: tables["c"].set_learning_rate(0.125, now=True),
    }
    for name, change in changes.items():
        client.restore_checkpoint(tmp_path / "saved", tables=[name])
        change()
        with pytest.raises(shardwell.ArgumentError, match=f"'{name}' has rows already"):
            client.restore_checkpoint(tmp_path / "saved", tables=[name])


def test_another_checkpoint_is_not_taken_for_what_was_restored(cluster, connect, tmp_path) -> None:
    """Of the same version, with as many rows."""
    for name, value in (("one", 1.0), ("two", 2.0)):
        saver = connect(cluster(2), "w0")
        table = saver.table("a", row_count=9, dim=2, optimizer=MOMENTUM)
        table.put_row_gradients([1], np.full((1, 2), value))
        saver.save_checkpoint(tmp_path / name)
    client = connect(cluster(2), "w0")
    client.restore_checkpoint(tmp_path / "one")
    with pytest.raises(shardwell.ArgumentError, match="'a' has rows already"):
        client.restore_checkpoint(tmp_path / "two")
    client.restore_checkpoint(tmp_path / "one")


def test_a_choice_of_tables_and_what_exists(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    for name in ("a", "b"):
        options = {"row_count": 10, "dim": 2, "optimizer": MOMENTUM}
        client.table(name, **options).put_row_gradients([1], np.ones((1, 2)))
    client.parameter("net", size=4, optimizer=MOMENTUM).init(np.zeros(4, np.float32))
    made = client.save_checkpoint(tmp_path / "all")
    assert [e.name for e in made.parameters] == ["net"]
    assert [e.name for e in made.tables] == ["a", "b"]
    one = client.save_checkpoint(tmp_path / "one", [], ["b", "b"])
    assert ([e.name for e in one.parameters], [e.name for e in one.tables]) == ([], ["b"])
    with pytest.raises(shardwell.UnknownTableError, match="nobody"):
        client.save_checkpoint(tmp_path / "no", tables=["nobody"])
    with pytest.raises(shardwell.ArgumentError, match="tables must be a list of names"):
        client.save_checkpoint(tmp_path / "no", tables="b")
    with pytest.raises(shardwell.ArgumentError, match="'b' has rows already"):
        client.restore_checkpoint(tmp_path / "one")
    target = connect(cluster(3), "w0")
    with pytest.raises(shardwell.ArgumentError, match="no table 'nobody'"):
        target.restore_checkpoint(tmp_path / "all", tables=["nobody"])
    target.restore_checkpoint(tmp_path / "all", [], ["b"])
    target.restore_checkpoint(tmp_path / "all", ["net"], ["a"])
    other = connect(cluster(1), "w0")
    other.table("b", row_count=11, dim=2, optimizer=MOMENTUM)
    with pytest.raises(shardwell.SpecMismatchError, match="row_count"):
        other.restore_checkpoint(tmp_path / "one")


def test_a_table_without_rows_is_saved_and_restored(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    open_table(client).put_row_gradients([], np.empty((0, DIM)))
    (entry,) = client.save_checkpoint(tmp_path / "c").tables
    assert (entry.version, entry.row_count, entry.files) == (1, 0, ())
    target = connect(cluster(3), "w0")
    target.restore_checkpoint(tmp_path / "c")
    assert open_table(target).next_step == 1


def test_synchronous_workers_go_on_after_a_restore(cluster, connect, tmp_path) -> None:
    workers = batches(6, 1000, workers=2)

    def train(running: Any, suffix: str, steps: range) -> np.ndarray:
        clients = [connect(running, f"{suffix}{i}") for i in range(2)]
        tables = [open_table(client, worker_count=2) for client in clients]
        assert [table.next_step for table in tables] == [steps.start] * 2

        def work(index: int) -> np.ndarray:
            for step in steps:
                tables[index].exchange_rows(*workers[index][step], np.arange(40))
            return tables[index].get_rows(np.arange(40), min_version=steps.stop)

        rows = together([lambda i=i: work(i) for i in range(2)])[0]
        for client in clients:
            client.close()
        return rows

    source = cluster(2)
    train(source, "w", range(3))
    connect(source, "saver").save_checkpoint(tmp_path / "c")
    expected = train(source, "w", range(3, 6))
    target = cluster(3)
    connect(target, "restorer").restore_checkpoint(tmp_path / "c")
    np.testing.assert_array_equal(train(target, "v", range(3, 6)), expected)


def test_a_limit_of_the_target_is_named(cluster, connect, tmp_path) -> None:
    """Where shards can't take it, nothing is restored, and gradients are refused."""
    client = connect(cluster(2), "w0")
    open_table(client).put_row_gradients(np.arange(100), np.ones((100, DIM)))
    client.save_checkpoint(tmp_path / "c")
    target = connect(cluster(2, limits=Limits(table_row_count_max=20)), "w0")
    with pytest.raises(shardwell.LimitError, match="table_row_count_max=20"):
        target.restore_checkpoint(tmp_path / "c")
    table = open_table(target)
    with pytest.raises(shardwell.NotInitializedError, match="restored"):
        table.put_row_gradients([1], np.ones((1, DIM)))
    with pytest.raises(shardwell.NotInitializedError, match="restored"):
        table.get_rows([1])


def test_gradients_of_an_open_step_are_no_part(cluster, connect, tmp_path) -> None:
    """Nor are rows that only they created, nor the part of a step that waits for its end."""
    running = cluster(2)
    tables = [open_table(connect(running, f"w{i}"), worker_count=2) for i in range(2)]
    together([lambda t=t: t.put_row_gradients([1, 2], np.ones((2, DIM))) for t in tables])
    tables[0].put_row_gradients([2, 3], np.ones((2, DIM)))
    (entry,) = connect(running, "saver").save_checkpoint(tmp_path / "c").tables
    assert (entry.version, entry.row_count) == (1, 2)
    np.testing.assert_array_equal(read_rows(tmp_path / "c")[0]["ids"], [1, 2])
    target = cluster(1)
    connect(target, "restorer").restore_checkpoint(tmp_path / "c")
    tables = [open_table(connect(target, f"w{i}"), worker_count=2) for i in range(2)]
    together([lambda t=t: t.put_row_gradients([2, 3], np.ones((2, DIM))) for t in tables])
    rows = tables[0].get_rows([1, 2, 3], min_version=2)
    np.testing.assert_array_equal(rows[:, 0], [-1.0, -2.5, -1.0])


def test_a_table_s_step_that_is_stuck_half_way_names_who_is_missing(
    cluster, connect, tmp_path
) -> None:
    """One shard has closed a step that the other has not: there is no version to take."""
    running = cluster(2)
    table = open_table(connect(running, "w0"), worker_count=2)
    table.put_row_gradients([1], np.ones((1, DIM)))
    saver = connect(running, "saver")
    with WireWorker(running.target, "late") as worker:
        late = WireTable(worker, table.spec.to_proto())
        list(late.stream(0, late.parts([], [])))
        with pytest.raises(shardwell.WorkersMissingError, match="late") as caught:
            saver.save_checkpoint(tmp_path / "c", timeout_s=BRIEF_S)
        assert caught.value.missing_worker_ids == ("late",)
        assert list(tmp_path.iterdir()) == []
        list(late.stream(1, late.parts([], [])))
    (entry,) = saver.save_checkpoint(tmp_path / "c").tables
    assert entry.version == 1


def test_state_of_rows_that_is_not_finite_is_not_saved(cluster, connect, tmp_path) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    table = open_table(client, optimizer=shardwell.Adagrad(learning_rate=0.5))
    table.put_row_gradients([7], np.ones((1, DIM)))
    running.servers[0].shard.tables.get("rows").storage.slots[0][0] = np.inf
    assert np.isfinite(table.get_rows([7])).all()
    words = r"nothing was saved: .*column 0 of the optimizer's 'sum' of row id 7 is not finite"
    with pytest.raises(shardwell.DivergedError, match=words):
        client.save_checkpoint(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_row_gradient_that_state_can_not_take_fails_its_sender(
    cluster, connect, tmp_path, mode
) -> None:
    client = connect(cluster(2), "w0")
    table = open_table(client, optimizer=shardwell.Adagrad(learning_rate=0.5), mode=mode)
    gradients = np.ones((3, DIM), np.float32)
    gradients[1, 2] = 1e20
    with pytest.raises(shardwell.NonFiniteError, match=r"'sum' of row id 8, column 2") as caught:
        table.put_row_gradients([3, 8, 5], gradients)
    assert caught.value.element_index == DIM + 2
    assert table.abandon_step() == 0
    table.put_row_gradients([8], np.ones((1, DIM)))
    assert table.get_rows([8])[0].tolist() == [-0.5] * DIM
    client.save_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("options", [{"mode": "sync"}, {"mode": "async"}, {"worker_count": 2}])
@pytest.mark.parametrize("is_new", [True, False])
def test_weight_decay_that_state_of_rows_can_not_take_raises(
    cluster, connect, tmp_path, options, is_new
) -> None:
    """Rows are so large that the square of what decay adds to a small gradient overflows."""
    running = cluster(2)
    client = connect(running, "w0")
    large = shardwell.Uniform(low=1e30, high=1e30)
    table = open_table(
        client,
        optimizer=shardwell.Adagrad(learning_rate=0.5, weight_decay=1.0),
        initializer=large if is_new else shardwell.Zeros(),
        **options,
    )
    ids, gradients = [3, 8, 5], np.ones((3, DIM), np.float32)
    if not is_new:
        tables = [table]
        if "worker_count" in options:
            other = connect(running, "w1").table("rows")
            tables.append(other)
        for each in tables:
            each.put_row_gradients(ids, gradients)
        for server in running.servers:
            server.shard.tables.get("rows").storage.weights[:] = 1e30
    words = r"weight decay .*because weights are.*'sum' of row id (3|8|5), column 0"
    with pytest.raises(shardwell.NonFiniteError, match=words):
        table.put_row_gradients(ids, gradients)
    table.abandon_step()
    if "worker_count" not in options:
        client.save_checkpoint(tmp_path / "c")


def test_a_row_that_is_not_finite_is_named_and_a_way_out(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    table = open_table(client, optimizer=shardwell.SGD(learning_rate=1.0))
    healthy = client.table("healthy", row_count=9, dim=DIM, optimizer=MOMENTUM)
    healthy.put_row_gradients([1], np.ones((1, DIM)))
    for _ in range(2):  # twice the largest
        table.put_row_gradients([7], np.full((1, DIM), np.finfo(np.float32).max))
    words = r"nothing was saved: .*table 'rows': column 0 of row id 7 .*evict such rows.*tables="
    with pytest.raises(shardwell.DivergedError, match=words) as caught:
        client.save_checkpoint(tmp_path / "c")
    assert (caught.value.table, caught.value.parameter) == ("rows", None)
    assert list(tmp_path.iterdir()) == []
    client.save_checkpoint(tmp_path / "healthy", tables=["healthy"])
    assert table.evict(older_than_step=table.next_step) == 1
    client.save_checkpoint(tmp_path / "all")
