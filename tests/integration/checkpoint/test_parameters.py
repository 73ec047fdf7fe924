"""Goal: a checkpoint is one version of every parameter, taken while training goes on.

Method: gradients of ones and SGD, so that every element at version V is known; two workers train on
threads while checkpoints are taken, which are read with the package safetensors alone. What goes on
from one is in test_any_shard_count.py.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardwell
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.threads import in_background
from harness.wire_client.worker import WireWorker
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

    def __init__(self, models: list[shardwell.Parameter]) -> None:
        self._models = models
        self._stop_at = 2**62
        self._steps = [0] * len(models)
        self.going = threading.Event()
        self._futures = [in_background(lambda i=i: self._run(i)) for i in range(len(models))]

    def _run(self, index: int) -> None:
        model = self._models[index]
        out, ones = np.empty(model.size, np.float32), np.ones(model.size, np.float32)
        while model.next_step < self._stop_at:
            self._steps[index] = model.next_step
            model.exchange(ones, out=out)
            self.going.set()

    def stop(self) -> None:
        self._stop_at = max(self._steps) + 3
        for future in self._futures:
            future.result(PATIENCE_S)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("shard_count", "stored"), [(1, False), (3, False), (2, True)])
def test_training_goes_on_while_one_version_is_taken(
    cluster, connect, tmp_path, shard_count, stored
) -> None:
    running = cluster(shard_count, data_dir=tmp_path / "data" if stored else None)
    models = [open_model(connect(running, name), worker_count=2) for name in ("w0", "w1")]
    models[0].init(np.zeros(SIZE, np.float32))
    saver = connect(running, "saver")
    training = Training(models)
    assert training.going.wait(PATIENCE_S)
    made: list[shardwell.Checkpoint] = []
    try:
        for number in range(6):
            made.append(saver.save_checkpoint(tmp_path / f"c{number}"))
            version = made[-1].parameters[0].version
            eventually("training goes on", lambda last=version: models[0].next_step > last)
    finally:
        training.stop()
    versions = [checkpoint.parameters[0].version for checkpoint in made]
    assert versions == sorted(set(versions)), "training went on in between"
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
