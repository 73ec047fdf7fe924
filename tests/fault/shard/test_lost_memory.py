"""A shard that comes back with nothing: noticed, never mixed with what the others still have.

Method: a real server is stopped, and a new one started on its port, with nothing in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass

import shardwell
from harness.polling import eventually
from harness.threads import together
from harness.wire_client.table import WireTable, table_spec
from harness.wire_client.worker import WireWorker, error_detail, spec
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2
from shardwell.v1 import types_pb2 as types
from shardwell_server import LocalCluster, ShardServer
from shardwell_server.shard.table.register import TableRegister

SIZE = 40
ONES = np.ones(SIZE, np.float32)


@contextmanager
def restarted(running: LocalCluster, shard_index: int) -> Iterator[None]:
    """The shard begins anew, on the same address."""
    old = running.servers[shard_index]
    old.stop(0.0)
    with ShardServer(dataclasses.replace(old.config, listen=old.address)):
        yield


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize(
    "optimizer", [shardwell.SGD(learning_rate=1.0), shardwell.Average()], ids=["SGD", "Average"]
)
def test_the_same_name_is_refused_and_another_one_works(
    cluster, connect, optimizer, shard_index
) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    model = client.parameter("model", size=SIZE, optimizer=optimizer)
    if not isinstance(optimizer, shardwell.Average):
        model.init(ONES)
    for _ in range(5):
        model.exchange(ONES)
    with restarted(running, shard_index):
        with pytest.raises(shardwell.UnknownParameterError):
            model.exchange(ONES)
        for again in (client, connect(running, "w0")):
            with pytest.raises(shardwell.OtherIncarnationError, match="lost its memory"):
                again.parameter("model", size=SIZE, optimizer=optimizer)
        fresh = client.parameter("model-2", size=SIZE, optimizer=optimizer)
        if not isinstance(optimizer, shardwell.Average):
            fresh.init(np.zeros(SIZE, np.float32))
        assert np.isfinite(fresh.exchange(ONES)).all()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_that_goes_on_while_a_table_is_opened(cluster, connect, monkeypatch, mode) -> None:
    """Between two shards' answers: they are steps apart then, and nothing is lost."""
    running = cluster(3)
    options = {"row_count": 100, "dim": 1, "optimizer": shardwell.SGD(learning_rate=1.0)}
    options |= {"mode": mode, "initializer": shardwell.Zeros()}
    writer = connect(running, "w0").table("rows", **options)
    ids, ones = np.arange(10), np.ones((10, 1))
    call = ShardChannel.call

    def interrupted(channel: ShardChannel, method: str, *given: Any, **options: Any) -> Any:
        answer = call(channel, method, *given, **options)
        if method == "OpenTable":
            for _ in range(3):
                writer.put_row_gradients(ids, ones)
        return answer

    writer.put_row_gradients(ids, ones)  # which takes its seat
    monkeypatch.setattr(ShardChannel, "call", interrupted)
    reader = connect(running, "reader").table("rows", **options)
    assert writer.next_step == 10
    np.testing.assert_array_equal(reader.get_rows(ids), -10 * ones)


def test_before_the_first_step_old_first_weights_are_not_taken_for_new(cluster, connect) -> None:
    running = cluster(2)
    sgd = shardwell.SGD(learning_rate=1.0)
    model = connect(running, "w0").parameter("model", size=SIZE, optimizer=sgd)
    model.init(ONES)
    with (
        restarted(running, 0),
        pytest.raises(shardwell.OtherIncarnationError, match="shard 0 lost its memory"),
    ):
        connect(running, "w1").parameter("model", size=SIZE, optimizer=sgd)


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        (shardwell.SGD(learning_rate=1.0), "sync"),
        (shardwell.SGD(learning_rate=1.0), "async"),
        (shardwell.Average(), "sync"),
    ],
    ids=["SGD-sync", "SGD-async", "Average"],
)
def test_one_step_is_enough_to_tell(cluster, connect, optimizer, mode, shard_index) -> None:
    """The shards' steps are no further apart than those of any training."""
    running = cluster(3)
    options = {"size": SIZE, "optimizer": optimizer, "mode": mode}
    model = connect(running, "w0").parameter("model", **options)
    if not isinstance(optimizer, shardwell.Average):
        model.init(ONES)
    model.exchange(ONES)
    with restarted(running, shard_index):
        for worker_id in ("w0", "w1"):
            for _ in range(2):
                with pytest.raises(
                    shardwell.OtherIncarnationError, match=f"shard {shard_index}.* lost its memory"
                ):
                    connect(running, worker_id).parameter("model", **options)


def test_what_shard_0_has_lost_is_not_left_out_of_a_checkpoint(cluster, connect, tmp_path) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    client.parameter("model", size=SIZE, optimizer=shardwell.SGD(learning_rate=1.0)).init(ONES)
    with restarted(running, 0):
        observer = connect(running, "observer")
        for names in (None, ["model"]):
            with pytest.raises(shardwell.OtherIncarnationError, match="shard 0 lost its memory"):
                observer.save_checkpoint(tmp_path / "saved", names)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shard_index", [0, 1])
def test_before_anything_has_begun_nothing_is_lost(cluster, connect, shard_index) -> None:
    """First weights that are half there are no reason to refuse those that come whole."""
    running = cluster(2)
    sgd = shardwell.SGD(learning_rate=1.0)
    with WireWorker(running.target, "w0") as dead:
        half = dead.create(spec("model", SIZE))
        half.init_shard(1, 5 * ONES, half.claim_init().epoch)
    with restarted(running, shard_index):
        model = connect(running, "w0").parameter("model", size=SIZE, optimizer=sgd, codec="fp32")
        model.init(ONES)
        np.testing.assert_array_equal(model.exchange(ONES), 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("durability", ["process", "step"])
@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize("kind", ["parameter", "table"])
def test_a_start_on_an_empty_directory(
    tmp_path, cluster, connect, kind, shard_index, durability
) -> None:
    """The error of a client that opens what the others have trained names the shard, and why."""
    running = cluster(2, data_dir=tmp_path, processes=True, durability=durability)
    sgd = shardwell.SGD(learning_rate=1.0)

    def opened(worker_id: str) -> Any:
        client = connect(running, worker_id)
        if kind == "parameter":
            return client.parameter("model", size=SIZE, optimizer=sgd)
        return client.table("model", row_count=SIZE, dim=1, optimizer=sgd)

    model = opened("w0")
    if kind == "parameter":
        model.init(ONES)
        model.exchange(ONES)
    else:
        model.put_row_gradients(np.arange(SIZE), np.ones((SIZE, 1), np.float32))
    model.close()
    running.children[shard_index].kill()
    path = tmp_path / f"shard-{shard_index}"
    path.rename(tmp_path / "elsewhere")
    running.start_again(shard_index)
    expected = f"{path} was empty when it started" if shard_index else "was made anew"
    for worker_id in ("w0", "w1"):
        with pytest.raises(shardwell.OtherIncarnationError, match="lost its memory") as caught:
            opened(worker_id)
        assert expected in caught.value.message
    running.children[shard_index].kill()
    path.rename(tmp_path / "nothing")
    (tmp_path / "elsewhere").rename(path)
    running.start_again(shard_index)
    assert opened("w0").next_step == 1


def refused_for(call: Callable[[], object]) -> tuple[str, str]:
    """Status and code of the error that a call by hand ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, types.ErrorCode.Name(error_detail(caught.value).code)


SERVICE = "ParameterServerService"
OTHER = ("FAILED_PRECONDITION", "ERROR_CODE_OTHER_INCARNATION")


def test_a_worker_of_the_contract_never_goes_on_with_other_weights(cluster) -> None:
    """Whatever call it makes, the answer is not that of a step that has closed without it."""
    running = cluster(2)
    with WireWorker(running.target, "w0") as worker:
        model = worker.create(spec("model", SIZE))
        model.init(np.zeros(SIZE))
        model.exchange(ONES)
        with restarted(running, 0), WireWorker(running.target, "w1") as other:
            assert refused_for(lambda: other.create(model.spec)) == OTHER  # by shard 1
            worker.attendances[0] = worker.attend(0)
            for call in (
                lambda: model.exchange(ONES),
                lambda: model.push(ONES),
                lambda: model.pull(),
                lambda: model.claim_init(),
                lambda: model.init_shard(0, ONES, 1 << 32),
                lambda: worker.open_parameter(model.spec, incarnation=model.incarnation),
                lambda: model.take_seat(),
                lambda: model.confirm_init(1 << 32),
            ):
                assert refused_for(call) == OTHER
            named = {"shard": worker.identities[0], "incarnation": model.incarnation}
            named |= {"parameter": "model", "worker_id": "w0", "learning_rate": 0.5}
            calls = by_name(worker.stubs[0], named)
            assert len(calls) >= 7
            assert {name: refused_for(call) for name, call in calls.items()} == (
                dict.fromkeys(calls, OTHER)
            )


def test_nor_with_other_rows(cluster) -> None:
    running = cluster(2)
    with WireWorker(running.target, "w0") as worker:
        table = WireTable(worker, table_spec(dim=1), take_seat=True)
        for _ in range(2):
            table.put([1, 2, 3], [[1], [1], [1]])
        with restarted(running, 0), WireWorker(running.target, "w1") as other:
            assert refused_for(lambda: WireTable(other, table.spec)) == OTHER  # by shard 1
            worker.attendances[0] = worker.attend(0)
            for call in (
                lambda: table.put([1, 2, 3], [[1], [1], [1]]),
                lambda: table.get([1, 2, 3]),
                lambda: table.open(),
                lambda: table.take_seat(),
            ):
                assert refused_for(call) == OTHER
            named = {"shard": worker.identities[0], "incarnation": table.incarnation}
            named |= {"table": table.spec.name, "learning_rate": 0.5, "count_max": 1}
            calls = by_name(table.stubs[0], named, table_pb2.DESCRIPTOR, "TableService")
            assert len(calls) >= 3
            assert {name: refused_for(call) for name, call in calls.items()} == (
                dict.fromkeys(calls, OTHER)
            )


def by_name(
    stub: Any, given: dict[str, Any], file: Any = pb.DESCRIPTOR, service: str = SERVICE
) -> dict[str, Callable[[], object]]:
    """The calls with one request that name an incarnation, each with what it takes of `given`."""
    found: dict[str, Callable[[], object]] = {}
    for method in file.services_by_name[service].methods:
        fields = method.input_type.fields_by_name
        if "incarnation" in fields and "spec" not in fields and not method.client_streaming:
            request = GetMessageClass(method.input_type)(
                **{key: value for key, value in given.items() if key in fields}
            )
            if "figures" in fields:
                request.figures.add(name="loss", value=1.0)
            call = getattr(stub, method.name)
            is_stream = method.server_streaming
            found[method.name] = partial(_answers, call, request, is_stream=is_stream)
    return found


def _answers(call: Any, request: Any, *, is_stream: bool) -> object:
    return list(call(request)) if is_stream else call(request)


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_that_are_gone_are_not_taken_for_new_ones(cluster, connect, mode, shard_index) -> None:
    """A client that opens the table again, under whatever name, gets an error."""
    running = cluster(2)
    options = {"row_count": 100, "dim": 1, "optimizer": shardwell.SGD(learning_rate=1.0)}
    options |= {"mode": mode, "initializer": shardwell.Zeros()}
    client = connect(running, "w0")
    table = client.table("rows", **options)
    ids, ones = np.arange(10), np.ones((10, 1))
    for _ in range(5):
        table.put_row_gradients(ids, ones)
    with restarted(running, shard_index):
        with pytest.raises(shardwell.UnknownTableError):
            table.get_rows(ids)
        for again in (client, connect(running, "w0"), connect(running, "reader")):
            for _ in range(2):
                with pytest.raises(
                    shardwell.OtherIncarnationError, match="lost its memory"
                ) as caught:
                    again.table("rows", **options)
                assert caught.value.table == "rows"
        # Shard 0 has made it anew when it was asked to open it, and can't know that it had it.
        expected = shardwell.UnknownTableError if shard_index else shardwell.OtherIncarnationError
        with pytest.raises(expected, match="lost its"):
            table.get_rows(ids)
        fresh = client.table("rows-2", **options)
        np.testing.assert_array_equal(fresh.exchange_rows(ids, ones), -ones)


# When a shard without files loses its memory, no client ever gets, sends or saves half a table.
# Method: shards are processes in memory; one is killed and started again, empty; workers that had
# the table open and new ones try everything, again and again.


IDS = np.arange(40)
TABLE_ONES = np.ones((IDS.size, 2), np.float32)
REFUSED = (shardwell.OtherIncarnationError, shardwell.UnknownTableError)


def open_table(client: shardwell.Client, mode: str) -> shardwell.Table:
    return client.table(
        "rows",
        row_count=100,
        dim=2,
        optimizer=shardwell.SGD(learning_rate=1.0),
        initializer=shardwell.Zeros(),
        mode=mode,
    )


def lose(running: LocalCluster, shard_index: int) -> None:
    running.children[shard_index].kill()
    eventually("it has ended", lambda: running.children[shard_index].poll() is not None)
    running.start_again(shard_index)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_table_of_which_a_shard_is_lost(cluster, connect, tmp_path, mode, lost) -> None:
    running = cluster(2, processes=True)
    client = connect(running, "w0")
    table = open_table(client, mode)
    for _ in range(3):
        table.put_row_gradients(IDS, TABLE_ONES)
    lose(running, lost)
    observer = connect(running, "observer")
    tries: list[Callable[[], object]] = [
        lambda: table.get_rows(IDS),
        lambda: table.put_row_gradients(IDS, TABLE_ONES),
        lambda: open_table(connect(running, "new"), mode),
        lambda: open_table(connect(running, "w0"), mode),
        table.reopen,
        lambda: client.save_checkpoint(tmp_path / "saved"),
        lambda: observer.export_table("rows", tmp_path / "rows.safetensors"),
    ]
    for _ in range(2):
        for attempt in tries:
            with pytest.raises(REFUSED, match=r"lost its memory|lost their memory|no table"):
                attempt()
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_table_of_which_nothing_had_begun(cluster, connect, lost) -> None:
    running = cluster(2, processes=True)
    open_table(connect(running, "early"), "async").close()
    lose(running, lost)
    table = open_table(connect(running, "w0"), "async")
    table.put_row_gradients(IDS, TABLE_ONES)
    np.testing.assert_array_equal(table.get_rows(IDS), -1)
    lose(running, lost)
    late = connect(running, "w1")
    with pytest.raises(shardwell.OtherIncarnationError, match="lost its memory"):
        open_table(late, "async")


def test_a_cluster_that_lost_all_begins_anew(cluster, connect) -> None:
    """A worker that had the table open must open it again: its step may be counted or not."""
    running = cluster(2, processes=True)
    table = open_table(connect(running, "w0"), "async")
    table.put_row_gradients(IDS, TABLE_ONES)
    for shard_index in range(2):
        lose(running, shard_index)
    other = open_table(connect(running, "w1"), "async")
    other.put_row_gradients(IDS, TABLE_ONES)
    with pytest.raises(shardwell.OtherIncarnationError, match="lost its memory"):
        table.put_row_gradients(IDS, TABLE_ONES)
    table.reopen()
    table.put_row_gradients(IDS, TABLE_ONES)
    np.testing.assert_array_equal(table.get_rows(IDS), -2)


def test_many_workers_make_one_table(cluster, connect) -> None:
    running = cluster(3)
    clients = [connect(running, f"w{number}") for number in range(8)]
    tables = together([lambda c=client: open_table(c, "async") for client in clients])
    together([lambda t=table: t.put_row_gradients(IDS, TABLE_ONES) for table in tables])
    np.testing.assert_array_equal(tables[0].get_rows(IDS), -8)


def test_a_kept_table_is_the_same_after_a_kill(cluster, connect, tmp_path) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True)
    table = open_table(connect(running, "w0"), "async")
    table.put_row_gradients(IDS, TABLE_ONES)
    for shard_index in range(2):
        lose(running, shard_index)
    table.put_row_gradients(IDS, TABLE_ONES)
    again = open_table(connect(running, "w1"), "async")
    np.testing.assert_array_equal(again.get_rows(IDS), -2)


def test_a_table_without_an_incarnation_yet(cluster, connect, monkeypatch) -> None:
    """Shard 0 ended between making it and drawing its incarnation; the next client gets one."""

    def failing(*_: object) -> None:
        raise shardwell.StorageError("the disk is gone")

    client = connect(cluster(2), "w0")
    with monkeypatch.context() as patch:
        patch.setattr(TableRegister, "note_incarnation", failing)
        with pytest.raises(shardwell.StorageError, match="the disk is gone"):
            open_table(client, "async")
    table = open_table(client, "async")
    (one,) = {status.incarnation for status in table.status()}
    assert one
