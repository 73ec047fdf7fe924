"""Goal: a save or restore that is cut off, or a stream that breaks the .proto, changes nothing.

Method: raw stubs, clients that fail in the middle, shards that are killed; then the same is done
properly, and must give the right numbers.
"""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.inside import register_of
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.wire_client.alterations import Alteration, altered, with_altered
from harness.wire_client.worker import WireParameter, WireWorker, error_detail, spec
from shardwell.checkpoint.restore import _CheckpointValues
from shardwell.checkpoint.tensor_files import TensorsWriter
from shardwell.parameter import first_weights
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2 as types
from shardwell_server import LocalCluster
from shardwell_server.config import ShardConfig
from shardwell_server.server import ShardServer
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.store.files.data_dir import DataDir

SIZE = 60  # 30 elements on each of two shards
MOMENTUM = types.Optimizer(sgd=types.Sgd(learning_rate=1.0, momentum=0.5))
PLAIN = types.Optimizer(sgd=types.Sgd(learning_rate=1.0))
SGD = shardwell.SGD(learning_rate=1.0, momentum=0.5)


def restoring(
    parameter: WireParameter, shard_index: int, epoch: int, *, array_count: int = 2
) -> list[pb.InitWeightsRequest]:
    """A good stream: weights 5 and momentum 2 at version 3, in ranges of 10 elements."""
    messages: list[pb.InitWeightsRequest] = []
    for array_index in range(array_count):
        values = np.full(SIZE, (5, 2)[array_index])
        ranges = parameter.init_messages(shard_index, values, epoch, range_element_count=10)
        for message in ranges[1:]:
            message.array_index = array_index
        messages += ranges if array_index == 0 else ranges[1:]
    messages[0].version, messages[0].learning_rate = 3, 0.5
    messages[0].array_count = array_count
    return parameter.seal_first_weights(messages)


def of_array(messages: list[pb.InitWeightsRequest], array_index: int) -> list[Any]:
    """The second array's ranges, as those of another array."""
    return [altered(message, array_index=array_index) for message in messages[4:]]


ATTACKS: dict[str, Alteration] = {
    "only_weights": lambda m: m[:4],
    # With which an optimizer could begin anew, had it not been said that more was to come.
    "only_weights_of_version_0": lambda m: with_altered(m[:4], 0, version=0),
    "too_few_arrays": lambda m: with_altered(m, 0, array_count=1),
    "too_many_arrays": lambda m: with_altered(m, 0, array_count=3),
    "end_early": lambda m: m[:-1],
    "arrays_in_another_order": lambda m: [m[0], *m[4:], *m[1:4]],
    "an_array_too_many": lambda m: [*m[:4], *of_array(m, 2)],
    "one_array_more": lambda m: [*m, *of_array(m, 2)],
    "far_array": lambda m: with_altered(m, 4, array_index=2**32 - 1),
    "mixed": lambda m: [*m[:2], m[5], *m[3:5], m[2], *m[6:]],
    "far_version": lambda m: with_altered(m, 0, version=2**64 - 1),
    "bad_rate": lambda m: with_altered(m, 0, learning_rate=float("nan")),
    "negative_rate": lambda m: with_altered(m, 0, learning_rate=-1.0),
}


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize("attack", ATTACKS)
def test_streams_that_restore_nonsense(cluster, attack, shard_index) -> None:
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE, optimizer=MOMENTUM))
        epoch = parameter.claim_init().epoch
        messages = ATTACKS[attack](restoring(parameter, shard_index, epoch))
        parameter.seal_first_weights(messages)
        with pytest.raises(grpc.RpcError) as caught:
            worker.stubs[shard_index].InitWeights(iter(messages), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
        assert error_detail(caught.value).code == types.ERROR_CODE_INVALID_ARGUMENT
        assert worker.create(parameter.spec).next_step == 0
        for index in (1, 0):
            worker.stubs[index].InitWeights(
                iter(restoring(parameter, index, epoch)), timeout=PATIENCE_S
            )
        parameter.confirm_init(epoch)
        again = worker.create(parameter.spec)
        assert again.next_step == 3
        np.testing.assert_array_equal(again.pull(), 5)
        np.testing.assert_array_equal(again.exchange(np.ones(SIZE)), 5 - 0.5 * (0.5 * 2 + 1))


def test_state_that_an_optimizer_does_not_have(cluster) -> None:
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE, optimizer=PLAIN))
        epoch = parameter.claim_init().epoch
        with pytest.raises(grpc.RpcError, match=r"expected 1 array, the weights, or all 1; got 2"):
            worker.stubs[0].InitWeights(iter(restoring(parameter, 0, epoch)), timeout=PATIENCE_S)
        for index in (1, 0):
            messages = restoring(parameter, index, epoch, array_count=1)
            worker.stubs[index].InitWeights(iter(messages), timeout=PATIENCE_S)
        parameter.confirm_init(epoch)
        assert worker.create(parameter.spec).next_step == 3


def test_snapshots_that_are_refused(cluster) -> None:
    with WireWorker(cluster(2).target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE, optimizer=MOMENTUM))

        def ask(**fields: Any) -> types.ErrorDetail:
            request = pb.SnapshotRequest(
                **{"shard": worker.identities[1], "parameter": "m", "version": 1, **fields}
            )
            with pytest.raises(grpc.RpcError) as caught:
                list(worker.stubs[1].Snapshot(request, timeout=PATIENCE_S))
            return error_detail(caught.value)

        assert ask().code == types.ERROR_CODE_NOT_INITIALIZED
        parameter.init(np.zeros(SIZE))
        for _ in range(2):
            parameter.exchange(np.ones(SIZE))
        assert ask(parameter="n").code == types.ERROR_CODE_UNKNOWN_PARAMETER
        assert ask(shard=worker.identities[0]).code == types.ERROR_CODE_WRONG_SHARD
        assert ask(version=1).code == types.ERROR_CODE_STEP_ORDER
        missing = ask(version=2**64 - 1, wait_timeout_ms=10)
        assert missing.code == types.ERROR_CODE_WORKERS_MISSING
        assert list(missing.missing_worker_ids) == ["w0"]
        np.testing.assert_array_equal(parameter.exchange(np.ones(SIZE)), -1 - 1.5 - 1.75)


@pytest.mark.parametrize("version", [0, 7], ids=["half read", "waiting"])
def test_a_reader_that_goes_away_is_forgotten(cluster, connect, version) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    model = client.parameter("m", size=100_000, optimizer=SGD)
    model.init(np.zeros(100_000, np.float32))
    snapshots = running.servers[0].shard.parameters.get("m").snapshots
    with WireWorker(running.target, "reader") as reader:
        request = pb.SnapshotRequest(shard=reader.identities[0], parameter="m", version=version)
        call = reader.stubs[0].Snapshot(request, timeout=PATIENCE_S)
        assert next(call).array_count == 2
        assert len(snapshots.pending) == 1
        model.exchange(np.ones(100_000, np.float32))
        call.cancel()
        eventually("the snapshot is forgotten", lambda: snapshots.pending == ())
    np.testing.assert_array_equal(model.exchange(np.ones(100_000, np.float32)), -1 - 1.5)


def _trained(client: shardwell.Client, size: int = SIZE) -> shardwell.Parameter:
    model = client.parameter("m", size=size, optimizer=SGD)
    model.init(np.zeros(size, np.float32))
    for _ in range(2):
        model.exchange(np.ones(size, np.float32))
    return model


def test_a_restore_that_ends_half_way_changes_nothing(
    cluster, connect, tmp_path, monkeypatch
) -> None:
    """At every piece that it may end at; then another client sets plain first weights."""
    source = connect(cluster(1), "w0")
    _trained(source)
    source.save_checkpoint(tmp_path / "c")
    read = _CheckpointValues.read
    for piece_count in range(4):
        client = connect(cluster(2), "w0")
        left = [piece_count]

        def failing(self: Any, *place: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise shardwell.StorageError("the disk is gone")
            return read(self, *place)

        monkeypatch.setattr(_CheckpointValues, "read", failing)
        with pytest.raises(shardwell.StorageError, match="the disk is gone"):
            client.restore_checkpoint(tmp_path / "c")
        monkeypatch.setattr(_CheckpointValues, "read", read)
        for shard in client.status():
            entry = shard.parameters[0]
            assert (entry.initialized, entry.version_max) == (False, 0)
        model = client.parameter("m", size=SIZE, optimizer=SGD)
        if piece_count % 2:
            model.init(np.zeros(SIZE, np.float32))
            for _ in range(2):
                model.exchange(np.ones(SIZE, np.float32))
        else:
            client.restore_checkpoint(tmp_path / "c")
            model = client.parameter("m", size=SIZE, optimizer=SGD)
        assert model.next_step == 2
        np.testing.assert_array_equal(
            model.exchange(np.ones(SIZE, np.float32)), np.float32(-1 - 1.5 - 1.75)
        )


def kill_and_start_again(running: LocalCluster, shard_index: int) -> None:
    running.children[shard_index].kill()
    eventually("it has ended", lambda: running.children[shard_index].poll() is not None)
    running.start_again(shard_index)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_shard_that_is_killed_during_a_restore(
    cluster, connect, tmp_path, monkeypatch, killed
) -> None:
    """It comes back with half of it on its disk, and is given all of it."""
    source = connect(cluster(1), "w0")
    _trained(source)
    source.save_checkpoint(tmp_path / "c")
    running = cluster(2, data_dir=tmp_path / "data", processes=True)
    client = connect(running, "w0")
    read = _CheckpointValues.read

    kills = []

    def killing(self: Any, array_index: int, where: Any) -> Any:
        if array_index == 1 and where.offset == 30 * killed and not kills:
            kills.append(killed)
            kill_and_start_again(running, killed)
        return read(self, array_index, where)

    monkeypatch.setattr(_CheckpointValues, "read", killing)
    client.restore_checkpoint(tmp_path / "c")
    assert kills == [killed]
    model = client.parameter("m", size=SIZE, optimizer=SGD)
    assert model.next_step == 2
    np.testing.assert_array_equal(
        model.exchange(np.ones(SIZE, np.float32)), np.float32(-1 - 1.5 - 1.75)
    )


def test_a_shard_that_is_killed_during_a_save(cluster, connect, tmp_path, monkeypatch) -> None:
    running = cluster(2, data_dir=tmp_path / "data", processes=True, chunk_size_bytes=2**20)
    client = connect(running, "w0")
    _trained(client)
    write = TensorsWriter.put

    size = 2**23  # 32 MB from each shard: more than what may be on its way already
    client.parameter("large", size=size, optimizer=SGD).init(np.zeros(size, np.float32))
    kills = []

    def killing(self: Any, *values: Any) -> None:
        write(self, *values)
        if not kills:
            kills.append(1)
            kill_and_start_again(running, 1)

    monkeypatch.setattr(TensorsWriter, "put", killing)
    made = client.save_checkpoint(tmp_path / "c")
    assert kills == [1]
    assert [entry.version for entry in made.parameters] == [0, 2]
    shardwell.inspect_checkpoint(tmp_path / "c", verify=True)
    running.children[1].kill()
    with pytest.raises(shardwell.ShardUnavailableError, match="shard 1"):
        client.save_checkpoint(tmp_path / "d", timeout_s=BRIEF_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "data"]


@pytest.mark.parametrize("version", [2, 5])
def test_a_restorer_that_dies_before_it_confirms(
    cluster, connect, tmp_path, monkeypatch, version: int
) -> None:
    """Shard 0 has committed, shard 1 has the values alone; the next opening confirms them."""

    class DiedError(BaseException):
        """As SIGKILL: nothing of the client's runs afterwards."""

    def die(*_: object) -> None:
        raise DiedError

    client = connect(cluster(2), "w0")
    model = _trained(client)
    while model.next_step < version:
        model.exchange(np.ones(SIZE, np.float32))
    expected = model.get_weights()
    client.save_checkpoint(tmp_path / "saved")
    target = cluster(2)
    with monkeypatch.context() as patch:
        patch.setattr(first_weights, "confirm", die)
        with pytest.raises(DiedError):
            connect(target, "restorer").restore_checkpoint(tmp_path / "saved")
    again = connect(target, "w0").parameter("m", size=SIZE, optimizer=SGD)
    assert again.next_step == model.next_step
    np.testing.assert_array_equal(again.get_weights(), expected)
    after = model.exchange(np.ones(SIZE, np.float32))
    np.testing.assert_array_equal(again.exchange(np.ones(SIZE, np.float32)), after)


def test_the_rate_of_a_restore_that_failed_is_forgotten(tmp_path) -> None:
    """Rate and weights are one event: of two, a full disk could leave one without the other."""
    config = ShardConfig(shard_index=0, shard_count=1)
    with DataDir(tmp_path, config) as claimed, ShardServer(config, claimed) as server:
        made = server.shard.parameters.open(
            shardwell.ParameterSpec(name="m", size=SIZE, optimizer=SGD, worker_count=1)
        )[0]
        deadline = RequestDeadline(0.0)
        epoch = made.loading.claim("restorer", deadline).epoch
        logged: list[dict[str, Any]] = []
        real = made.storage.log

        def full(event: dict[str, Any]) -> None:
            logged.append(event)
            raise shardwell.StorageError("no space")

        for array_index in (0, 1):
            made.loading.set(epoch, made.where, np.zeros(SIZE), array_index=array_index)
        made.storage.log = full
        with pytest.raises(shardwell.StorageError):
            made.loading.finish(epoch, version=3, learning_rate=0.125, with_slots=True)
        made.storage.log = real
        assert [event["kind"] for event in logged] == ["first_weights"]
        assert (logged[0]["learning_rate"], logged[0]["from_step"]) == (0.125, 3)
        epoch = made.loading.claim("restorer", deadline).epoch
        made.loading.set(epoch, made.where, np.zeros(SIZE))
        made.loading.finish(epoch)
        assert register_of(made).rates.at(5) == 1.0
