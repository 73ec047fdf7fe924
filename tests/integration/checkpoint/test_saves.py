"""Goal: a checkpoint is one version of every parameter and of every row, taken while training goes
on; training that starts from it is the same training, bit for bit, on any number of shards.

Method: gradients of ones and SGD with momentum, so that every element at version V is known, and a
row's values follow from its count; workers train on threads while checkpoints are taken, which are
read with the package safetensors alone. More of what goes on from one is in
test_any_shard_count.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
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
from shardwell.checkpoint.directory import MARK_NAME
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server import Limits, LocalCluster

MOMENTUM = shardwell.SGD(learning_rate=1.0, momentum=0.5)
SIZE = 3001


def read_whole(path: Path, name: str) -> tuple[dict[str, np.ndarray], dict]:
    """A parameter's arrays and its entry in the manifest, without Shardwell."""
    manifest = json.loads((path / "manifest.json").read_text())
    (entry,) = [entry for entry in manifest["parameters"] if entry["name"] == name]
    files = [load_file(path / file["path"]) for file in entry["files"]]
    return {key: np.concatenate([file[key] for file in files]) for key in files[0]}, entry


def momentum_at(version: int) -> tuple[np.float32, np.float32]:
    """Weight and momentum of an element after gradients of ones."""
    weight = momentum = np.float32(0)
    for _ in range(version):
        momentum = np.float32(0.5) * momentum + np.float32(1)
        weight = weight - momentum
    return weight, momentum


def open_model(client, optimizer=MOMENTUM, *, size=SIZE, **options):
    return client.parameter("model", size=size, optimizer=optimizer, **options)


class Training:
    """Workers that take steps on threads until `stop`, all after the same step."""

    def __init__(self, handles: list[Any], step: Callable[[Any], object]) -> None:
        self._handles = handles
        self._step = step
        self._stop_at = 2**62
        self._steps = [0] * len(handles)
        self.going = threading.Event()
        self._futures = [in_background(lambda i=i: self._run(i)) for i in range(len(handles))]

    def _run(self, index: int) -> None:
        handle = self._handles[index]
        while handle.next_step < self._stop_at:
            self._steps[index] = handle.next_step
            self._step(handle)
            self.going.set()

    def stop(self) -> None:
        self._stop_at = max(self._steps) + 3
        for future in self._futures:
            future.result(PATIENCE_S)

    def versions(self, save: Callable[[int], int]) -> list[int]:
        """The versions of six checkpoints, between which it goes on; then it stops."""
        assert self.going.wait(PATIENCE_S)
        found: list[int] = []
        try:
            for number in range(6):
                found.append(save(number))
                eventually("it goes on", lambda: self._handles[0].next_step > found[-1])
        finally:
            self.stop()
        assert found == sorted(set(found)), "training went on in between"
        return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("shard_count", "stored"), [(1, False), (3, False), (2, True)])
def test_training_goes_on_while_one_version_is_taken(
    cluster, connect, tmp_path, shard_count, stored
) -> None:
    running = cluster(shard_count, data_dir=tmp_path / "data" if stored else None)
    models = [open_model(connect(running, name), worker_count=2) for name in ("w0", "w1")]
    models[0].init(np.zeros(SIZE, np.float32))
    saver = connect(running, "saver")
    made: list[shardwell.Checkpoint] = []

    def save(number: int) -> int:
        made.append(saver.save_checkpoint(tmp_path / f"c{number}"))
        return made[-1].parameters[0].version

    training = Training(models, lambda model: model.exchange(np.ones(SIZE, np.float32)))
    versions = training.versions(save)
    for checkpoint, version in zip(made, versions, strict=True):
        arrays, entry = read_whole(checkpoint.path, "model")
        assert (entry["version"], entry["version_max"]) == (version, version)
        assert set(arrays) == {"weights", "momentum_buffer"}
        assert arrays["weights"].shape == (SIZE,)
        weight, momentum = momentum_at(version)
        np.testing.assert_array_equal(arrays["weights"], weight)
        np.testing.assert_array_equal(arrays["momentum_buffer"], momentum)
        assert shardwell.inspect_checkpoint(checkpoint.path, verify=True) == checkpoint
    assert sorted(path.name for path in tmp_path.glob("c*")) == [f"c{n}" for n in range(6)]
    if stored:
        assert not list((tmp_path / "data").rglob("tmp*")), "spools have no names"


def test_a_restored_shard_keeps_what_it_was_given(cluster, connect, tmp_path) -> None:
    """Files of a restored shard are as good as those of one that trained."""
    one = cluster(1)
    model = open_model(connect(one, "w0"))
    model.init(np.zeros(SIZE, np.float32))
    for _ in range(3):
        model.exchange(np.ones(SIZE, np.float32))
    model.set_learning_rate(0.5)
    connect(one, "saver").save_checkpoint(tmp_path / "c")
    data_dir = tmp_path / "data"
    with (
        LocalCluster(2, data_dir, chunk_size_bytes=256) as running,
        shardwell.connect(running.target, worker_id="restorer") as client,
    ):
        client.restore_checkpoint(tmp_path / "c")
    model = open_model(connect(cluster(2, data_dir=data_dir), "w0"))
    assert model.next_step == 3
    np.testing.assert_array_equal(model.get_weights(), momentum_at(3)[0])
    weights = model.exchange(np.ones(SIZE, np.float32))
    np.testing.assert_array_equal(weights, momentum_at(3)[0] - np.float32(0.5) * momentum_at(4)[1])


def test_a_snapshot_that_is_read_late_holds_what_was(cluster, connect) -> None:
    """The stream has begun; three steps later its chunks are still those of the version."""
    running = cluster(1)
    model = open_model(connect(running, "w0"))
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(np.ones(SIZE, np.float32))
    with WireWorker(running.target, "reader") as reader:
        request = pb.SnapshotRequest(shard=reader.identities[0], parameter="model", version=1)
        call = reader.stubs[0].Snapshot(request, timeout=PATIENCE_S)
        first = next(call)
        assert (first.version, first.array_count, first.HasField("chunk")) == (1, 2, False)
        for _ in range(3):
            model.exchange(np.ones(SIZE, np.float32))
        messages = list(call)
    for array_index, expected in enumerate(momentum_at(1)):
        parts = [m.payload for m in messages if m.array_index == array_index]
        values = np.frombuffer(b"".join(parts), np.float32)
        np.testing.assert_array_equal(values, np.full(SIZE, expected))
    assert {message.version for message in messages} == {1}


def test_asynchronous_parameters_say_which_versions_they_mix(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    model = open_model(client, mode="async")
    model.init(np.zeros(SIZE, np.float32))
    for _ in range(3):
        model.put_gradient(np.ones(SIZE, np.float32))
    (entry,) = client.save_checkpoint(tmp_path / "c").parameters
    assert (entry.version, entry.version_max) == (3, 3)
    restored = connect(cluster(3), "w0")
    restored.restore_checkpoint(tmp_path / "c")
    model = open_model(restored, mode="async")
    assert model.next_step == 0
    weights = model.exchange(np.ones(SIZE, np.float32))
    np.testing.assert_array_equal(weights, momentum_at(4)[0])
    assert restored.status()[0].parameters[0].version_min == 4


def test_more_shards_than_elements(cluster, connect, tmp_path) -> None:
    client = connect(cluster(5), "w0")
    model = open_model(client, size=3)
    model.init(np.arange(3, dtype=np.float32))
    model.exchange(np.ones(3, np.float32))
    (entry,) = client.save_checkpoint(tmp_path / "c").parameters
    assert (entry.size, len(entry.files)) == (3, 3)
    target = connect(cluster(4), "w0")
    target.restore_checkpoint(tmp_path / "c")
    np.testing.assert_array_equal(open_model(target, size=3).get_weights(), [-1, 0, 1])


def test_several_parameters_and_a_choice_of_them(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    for number, name in enumerate(("a", "B", "b")):
        model = client.parameter(name, size=10, optimizer=shardwell.SGD(learning_rate=1.0))
        model.init(np.full(10, number, np.float32))
    mean = client.parameter("mean", size=10, optimizer=shardwell.Average())
    mean.exchange(np.full(10, 7, np.float32))
    client.parameter("fresh", size=10, optimizer=shardwell.SGD(learning_rate=1.0))
    checkpoint = client.save_checkpoint(tmp_path / "all")
    assert [entry.name for entry in checkpoint.parameters] == ["B", "a", "b", "mean"]
    assert read_whole(tmp_path / "all", "mean")[0]["weights"].tolist() == [7.0] * 10
    one = client.save_checkpoint(tmp_path / "one", ["b", "b"])
    assert [entry.name for entry in one.parameters] == ["b"]
    with pytest.raises(shardwell.NotInitializedError, match="fresh"):
        client.save_checkpoint(tmp_path / "no", ["fresh"])
    with pytest.raises(shardwell.UnknownParameterError, match="nobody"):
        client.save_checkpoint(tmp_path / "no", ["nobody"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "one"]
    target = connect(cluster(3), "w0")
    with pytest.raises(shardwell.ArgumentError, match="nobody"):
        target.restore_checkpoint(tmp_path / "all", ["nobody"])
    target.restore_checkpoint(tmp_path / "all", ["a", "mean"])
    names = [entry.spec.name for entry in target.status()[0].parameters]
    assert names == ["a", "mean"]
    mean = target.parameter("mean", size=10, optimizer=shardwell.Average())
    assert mean.next_step == 0, "an average has nothing that a next step could use"
    target.restore_checkpoint(tmp_path / "all", ["b"])


def test_what_exists_is_refused(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    model = open_model(client)
    model.init(np.zeros(SIZE, np.float32))
    client.save_checkpoint(tmp_path / "c")
    with pytest.raises(shardwell.ArgumentError, match="exists already"):
        client.save_checkpoint(tmp_path / "c")
    with pytest.raises(shardwell.ArgumentError, match="has first weights already"):
        client.restore_checkpoint(tmp_path / "c")
    other = connect(cluster(2), "w0")
    other.parameter("model", size=SIZE, optimizer=shardwell.SGD(learning_rate=2.0))
    with pytest.raises(shardwell.SpecMismatchError, match="optimizer"):
        other.restore_checkpoint(tmp_path / "c")


def test_a_worker_that_opened_before_the_restore_goes_on_there(cluster, connect, tmp_path) -> None:
    source = connect(cluster(1), "w0")
    model = open_model(source)
    model.init(np.zeros(SIZE, np.float32))
    for _ in range(3):
        model.exchange(np.ones(SIZE, np.float32))
    source.save_checkpoint(tmp_path / "c")
    target = cluster(2)
    early = open_model(connect(target, "w0"))
    assert early.next_step == 0
    connect(target, "restorer").restore_checkpoint(tmp_path / "c")
    assert early.init(np.full(SIZE, 9, np.float32)) == 3
    np.testing.assert_array_equal(early.exchange(np.ones(SIZE, np.float32)), momentum_at(4)[0])


def test_a_restoring_client_is_not_missed_as_a_worker(cluster, connect, tmp_path) -> None:
    source = connect(cluster(1), "w0")
    open_model(source, worker_count=2).init(np.zeros(SIZE, np.float32))
    source.save_checkpoint(tmp_path / "c")
    target = connect(cluster(1), "restorer")
    target.restore_checkpoint(tmp_path / "c")
    (entry,) = target.status()[0].parameters
    assert (list(entry.missing_worker_ids), entry.unknown_worker_count) == ([], 2)


def test_a_step_that_is_stuck_half_way_names_who_is_missing(cluster, connect, tmp_path) -> None:
    """One shard has closed a step that the other has not: there is no version to take."""
    running = cluster(2)
    model = open_model(connect(running, "w0"), worker_count=2)
    model.init(np.zeros(SIZE, np.float32))
    model.put_gradient(np.ones(SIZE, np.float32))
    saver = connect(running, "saver")
    with WireWorker(running.target, "late") as worker:
        late = worker.create(model.spec.to_proto())
        first = late.gradient_messages(pb.PutGradientRequest, 0, np.ones(SIZE))
        worker.stubs[0].PutGradient(iter(first), timeout=PATIENCE_S)
        words = f"waited {BRIEF_S:g} s for .*'late'"
        with pytest.raises(shardwell.WorkersMissingError, match=words) as caught:
            saver.save_checkpoint(tmp_path / "c", timeout_s=BRIEF_S)
        assert caught.value.missing_worker_ids == ("late",)
        assert list(tmp_path.iterdir()) == []
        late.push(np.ones(SIZE))
    (entry,) = saver.save_checkpoint(tmp_path / "c").parameters
    assert entry.version == 1
    np.testing.assert_array_equal(read_whole(tmp_path / "c", "model")[0]["weights"], -1)


def test_a_save_that_dies_leaves_nothing_in_the_way(cluster, connect, tmp_path) -> None:
    client = connect(cluster(1), "w0")
    open_model(client).init(np.zeros(SIZE, np.float32))
    left = tmp_path / "c.partial" / "000001-model"
    left.mkdir(parents=True)
    (left.parent / MARK_NAME).touch()
    (left / "slice-00000.safetensors").write_bytes(b"half")
    client.save_checkpoint(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    shardwell.inspect_checkpoint(tmp_path / "c", verify=True)


def test_a_client_that_was_closed(cluster, tmp_path) -> None:
    """Before a save, and while one waits for a step that never closes."""
    running = cluster(1)
    with shardwell.connect(running.target, worker_id="w0") as client:
        model = open_model(client, worker_count=2)
        model.init(np.zeros(SIZE, np.float32))
        with WireWorker(running.target, "w1") as worker:  # one chunk of step 0 closes
            model.put_gradient(np.ones(SIZE, np.float32))
            wire = worker.create(model.spec.to_proto())
            first = wire.gradient_messages(pb.PutGradientRequest, 0, np.ones(SIZE))[:1]
            worker.stubs[0].PutGradient(iter(first), timeout=PATIENCE_S)
        snapshots = running.servers[0].shard.parameters.get("model").snapshots
        saving = in_background(lambda: client.save_checkpoint(tmp_path / "c"))
        eventually("it waits", lambda: snapshots.pending)
        client.close()
        assert isinstance(saving.exception(10), shardwell.ClosedError)
        for call in (client.save_checkpoint, client.restore_checkpoint):
            with pytest.raises(shardwell.ClosedError):
                call(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", ["model", ["model", "nobody"]])
def test_unknown_names_are_refused_before_anything_is_saved(
    cluster, connect, tmp_path, names
) -> None:
    client = connect(cluster(1), "w0")
    open_model(client).init(np.zeros(SIZE, np.float32))
    with pytest.raises((shardwell.ArgumentError, shardwell.UnknownParameterError)):
        client.save_checkpoint(tmp_path / "c", names)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_not_saved(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    model = open_model(client, shardwell.SGD(learning_rate=3e38), codec="fp32")
    model.init(np.zeros(SIZE, np.float32))
    gradient = np.zeros(SIZE, np.float32)
    gradient[SIZE - 1] = 1e3
    model.put_gradient(gradient)
    with pytest.raises(shardwell.DivergedError) as caught:
        client.save_checkpoint(tmp_path / "c")
    assert caught.value.element_index == SIZE - 1
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_not_finite_is_not_saved(cluster, connect, tmp_path) -> None:
    """The sum of squares overflows by the weight, which decays; no gradient is too large."""
    running = cluster(2)
    client = connect(running, "w0")
    model = open_model(client, shardwell.Adagrad(learning_rate=0.5), codec="fp32")
    model.init(np.zeros(SIZE, np.float32))
    model.put_gradient(np.ones(SIZE, np.float32))
    running.servers[1].shard.parameters.get(model.name).storage.slots[0][-2] = np.inf
    assert np.isfinite(model.get_weights()).all()
    words = f"nothing was saved: optimizer's 'sum' at version 1.*element {SIZE - 2} is not finite"
    with pytest.raises(shardwell.DivergedError, match=words) as caught:
        client.save_checkpoint(tmp_path / "c")
    assert caught.value.element_index == SIZE - 2
    assert list(tmp_path.iterdir()) == []


def test_a_gradient_that_state_can_not_take_fails_its_sender(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    model = open_model(client, shardwell.Adagrad(learning_rate=0.5))
    model.init(np.zeros(SIZE, np.float32))
    gradient = np.ones(SIZE, np.float32)
    gradient[SIZE - 3] = 1e20
    with pytest.raises(shardwell.NonFiniteError, match=rf"'sum' of element {SIZE - 3}") as caught:
        model.exchange(gradient)
    assert (caught.value.element_index, model.next_step) == (SIZE - 3, 0)
    gradient[SIZE - 3] = 1.0
    np.testing.assert_allclose(model.exchange(gradient), np.full(SIZE, -0.5))


@pytest.mark.parametrize(
    ("optimizer", "large"),
    [
        (shardwell.Adagrad(learning_rate=0.5, weight_decay=1.0), 1e30),
        (shardwell.RMSProp(learning_rate=0.5, weight_decay=0.5), 1e30),
        (shardwell.Adam(learning_rate=0.5, weight_decay=0.01), -1e30),
        (shardwell.SGD(learning_rate=0.5, momentum=0.5, weight_decay=2.0), 3e38),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("worker_count", [1, 2])
def test_weight_decay_that_state_can_not_take_raises(
    cluster, connect, optimizer, large, worker_count
) -> None:
    """Weights are so large that what decay adds to a small gradient overflows, alone or squared."""
    running = cluster(2)
    client = connect(running, "w0")
    weights = np.zeros(SIZE, np.float32)
    weights[SIZE - 2] = large
    model = open_model(client, optimizer, codec="fp32", worker_count=worker_count)
    model.init(weights)
    words = (
        rf"weight decay .*because weights are.*{optimizer.slot_names[-1]}' of element {SIZE - 2}"
    )
    if isinstance(optimizer, shardwell.SGD):
        words = rf"weight decay .*of element {SIZE - 2} would be infinite"
    with pytest.raises(shardwell.NonFiniteError, match=words) as caught:
        model.put_gradient(np.ones(SIZE, np.float32))
    assert (caught.value.element_index, model.next_step) == (SIZE - 2, 0)
    for server in running.servers:
        for slot in server.shard.parameters.get(model.name).storage.slots:
            assert np.isfinite(slot).all()


def test_weight_decay_of_large_weights_that_state_can_take(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    large, gradient = np.full(SIZE, 2.0**60, np.float32), np.ones(SIZE, np.float32)
    for number, optimizer in enumerate(
        (
            shardwell.Adagrad(learning_rate=0.5, weight_decay=1.0),
            shardwell.AdamW(learning_rate=0.5, weight_decay=0.5),
            shardwell.SGD(learning_rate=0.5, weight_decay=0.5),
        )
    ):
        model = client.parameter(f"p{number}", size=SIZE, optimizer=optimizer, codec="fp32")
        model.init(large)
        assert np.isfinite(model.exchange(gradient)).all()


def test_limits_hold_for_what_is_restored(cluster, connect, tmp_path) -> None:
    client = connect(cluster(1), "w0")
    open_model(client).init(np.zeros(SIZE, np.float32))
    client.save_checkpoint(tmp_path / "c")
    small = connect(cluster(1, limits=Limits(stored_bytes_max=1000)), "w0")
    with pytest.raises(shardwell.LimitError, match="stored_bytes_max"):
        small.restore_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("count", [1, 30])
def test_many_parameters_of_different_sizes(cluster, connect, tmp_path, count) -> None:
    """Small ones travel several at once, and those beside them that are large in their turn."""
    source = connect(cluster(3, chunk_size_bytes=2**20), "w0")
    sizes = {f"p{number}": 1 + 37 * number for number in range(count)}
    sizes["p-large"] = 3_000_000
    adam = shardwell.Adam(learning_rate=0.5)
    expected = {}
    for number, (name, size) in enumerate(sizes.items()):
        model = source.parameter(name, size=size, optimizer=adam, codec="fp32")
        model.init(np.full(size, number, np.float32))
        expected[name] = model.exchange(np.ones(size, np.float32))
    saved = source.save_checkpoint(tmp_path / "saved")
    assert [entry.name for entry in saved.parameters] == sorted(sizes)
    target = connect(cluster(2, chunk_size_bytes=2**20), "w0")
    target.restore_checkpoint(tmp_path / "saved")
    for name, size in sizes.items():
        model = target.parameter(name, size=size, optimizer=adam, codec="fp32")
        assert model.next_step == 1
        np.testing.assert_array_equal(model.get_weights(), expected[name])


# Tables.

DIM = 3


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


def exchange_some(table: shardwell.Table) -> None:
    """Row k is in every (k + 1)th step; all rows of a step must be there or none."""
    ids = np.flatnonzero(table.next_step % (np.arange(50) + 1) == 0)
    table.exchange_rows(ids, np.ones((ids.size, DIM)))


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
    versions = Training(tables, exchange_some).versions(
        lambda number: saver.save_checkpoint(tmp_path / f"c{number}").tables[0].version
    )
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
    client = connect(cluster(3, data_dir=tmp_path / "data"), "w0")
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
