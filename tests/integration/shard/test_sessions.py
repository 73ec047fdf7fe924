"""Goal: two processes with one worker id never mix or lose a gradient; the second gets an error by
name.

Method: real clients and wire workers on real shards, parameters and tables, synchronous and
asynchronous; the weights show which gradients counted: every element is minus their sum.
"""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.inside import endpoint_of
from harness.polling import PATIENCE_S, eventually
from harness.programs.session_worker import SIZE, SessionWorker, Subject
from harness.threads import in_background
from harness.wire_client.table import WireTable, table_spec
from harness.wire_client.worker import WireParameter, WireWorker, error_detail, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2
from shardwell.v1 import types_pb2 as types
from shardwell_server import Limits

pytestmark = pytest.mark.timeout(60)

KINDS = pytest.mark.parametrize("kind", ["parameter", "table"])
MODES = pytest.mark.parametrize("mode", ["sync", "async"])
Code = grpc.StatusCode


def refused(call: object, code: grpc.StatusCode, kind: int) -> grpc.RpcError:
    """The error of a call of the wire."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call()) if callable(call) else None
    assert caught.value.code() is code, caught.value
    assert error_detail(caught.value).code == kind
    return caught.value


# Two processes with one worker id.


@pytest.mark.sampled(1)
@KINDS
@MODES
def test_a_second_process_is_refused_by_name(cluster, connect, kind, mode) -> None:
    running = cluster(2)
    first = Subject(connect(running, "w0"), kind, mode)
    assert first.put(1) == 0
    with SessionWorker(running.target, "w0", kind, mode) as second:
        answer = second.ask("put 100")
        assert answer.startswith("WorkerIdInUseError: worker id 'w0' is in use: ")
        host = repr(socket.gethostname())
        assert f"process {os.getpid()} on {host} contributes" in answer
        assert f"so would this process {second.pid} on {host}" in answer
        assert "an id of its own" in answer
        assert first.put(2) == 1
        assert second.ask("put 100").startswith("WorkerIdInUseError")
    assert first.values() == {-3.0}
    statuses = first.statuses()
    assert not any(getattr(status, "duplicate_chunk_count", 0) for status in statuses)


@KINDS
def test_two_workers_under_one_id_both_get_an_error_that_names_them(cluster, connect, kind) -> None:
    """The one that has the seat would wait for the worker that the other one should be."""
    running = cluster(2)
    first = Subject(connect(running, "w0"), kind, "sync", worker_count=2)
    first.put(1)
    waiting = in_background(lambda: first.put(2))
    with SessionWorker(running.target, "w0", kind, "sync", worker_count=2) as second:
        assert second.ask("put 100").startswith("WorkerIdInUseError: worker id 'w0' is in use: ")
        with pytest.raises(shardwell.WorkerIdInUseError) as caught:
            waiting.result(PATIENCE_S)
        host = repr(socket.gethostname())
        for pid in (os.getpid(), second.pid):
            assert f"process {pid} on {host}" in caught.value.message
        assert "waits for 1 more of 2 workers" in caught.value.message
        assert "an id of its own" in caught.value.message


@KINDS
def test_a_stranger_under_an_id_ends_no_wait_for_a_worker_that_is_known(
    cluster, connect, kind
) -> None:
    running = cluster(2)
    first, other = (
        Subject(connect(running, worker_id), kind, "sync", worker_count=2)
        for worker_id in ("w0", "w1")
    )
    first.put(1)
    waiting = in_background(lambda: first.put(2))
    with SessionWorker(running.target, "w0", kind, "sync", worker_count=2) as second:
        for _ in range(2):  # each asks for two seconds
            assert second.ask("put 100").startswith("WorkerIdInUseError")
    assert not waiting.done()
    other.put(3)
    assert waiting.result(PATIENCE_S) == 1


@KINDS
def test_clients_that_share_an_id_are_named_where_a_worker_never_came(
    cluster, connect, kind
) -> None:
    """Neither has asked for the other one's seat: it may read."""
    running = cluster(2)
    first = Subject(connect(running, "w0"), kind, "sync", worker_count=2)
    Subject(connect(running, "w0"), kind, "sync", worker_count=2)
    first.put(1)
    with pytest.raises(shardwell.WorkersMissingError, match="are all worker 'w0'"):
        first.put(2, timeout_s=2.0)


@KINDS
@MODES
def test_a_place_is_free_when_its_client_was_closed(cluster, connect, kind, mode) -> None:
    running = cluster(2)
    first = connect(running, "w0")
    assert Subject(first, kind, mode).put(1) == 0
    waiting = Subject(connect(running, "w0"), kind, mode)  # opened while the first was alive
    first.close()
    assert waiting.put(2) == 1
    assert waiting.values() == {-3.0}


@KINDS
@MODES
def test_a_worker_that_opened_before_others_went_on_gets_an_error(
    cluster, connect, kind, mode
) -> None:
    """What it has is a gradient of step 0, and that is long gone."""
    running = cluster(2)
    late = Subject(connect(running, "w0"), kind, mode)
    first = connect(running, "w0")
    subject = Subject(first, kind, mode)
    assert [subject.put(1) for _ in range(3)] == [0, 1, 2]
    first.close()
    for _ in range(2):
        with pytest.raises(shardwell.StepOrderError, match=r"step 2 after .* at step 0; open it a"):
            late.put(100)
    late.open()
    assert late.put(1) == 3
    assert late.values() == {-4.0}


@KINDS
@MODES
def test_what_was_counted_is_not_taken_with_other_values(cluster, kind, mode) -> None:
    """A step that is sent again is acknowledged; another gradient in its place is not."""
    with WireWorker(cluster(2).target, "w0") as worker:
        wire_mode = types.MODE_SYNC if mode == "sync" else types.MODE_ASYNC
        if kind == "parameter":
            parameter = worker.create(spec(size=SIZE, mode=wire_mode))
            parameter.init(np.zeros(SIZE, np.float32))
            for _ in range(2):
                parameter.next_step = 0
                parameter.push(np.ones(SIZE))
            parameter.next_step = 0
            with pytest.raises(grpc.RpcError) as caught:
                parameter.push(np.full(SIZE, 2.0))
            weights = parameter.pull()
        else:
            table = WireTable(worker, table_spec(row_count=SIZE, dim=1, mode=wire_mode))
            ids = list(range(SIZE))
            for _ in range(2):
                table.put(ids, np.ones((SIZE, 1)), step=0)
            with pytest.raises(grpc.RpcError) as caught:
                table.put(ids, np.full((SIZE, 1), 2.0), step=0)
            weights = table.get(ids)
        assert caught.value.code() is Code.FAILED_PRECONDITION
        assert error_detail(caught.value).code == types.ERROR_CODE_STEP_ORDER
        assert "again" in caught.value.details()
        assert "send the same" in caught.value.details()
        np.testing.assert_array_equal(weights, -1.0)


def test_what_was_counted_is_the_other_process_s_to_repeat(cluster, connect) -> None:
    """A restarted worker computes its step anew: what had been counted of it counts once."""
    running = cluster(2)
    first = connect(running, "w0")
    model = Subject(first, "parameter", "sync")
    assert model.put(1) == 0
    first.close()
    again = Subject(connect(running, "w0"), "parameter", "sync")
    again.handle.next_step = 0
    assert again.put(2) == 0
    assert again.values() == {-1.0}


# Names.


@KINDS
@pytest.mark.parametrize("on_files", [False, True])
def test_those_who_read_take_no_name(cluster, connect, tmp_path, kind, on_files) -> None:
    running = cluster(2, data_dir=tmp_path if on_files else None, limits=Limits(worker_count_max=2))
    writer = Subject(connect(running, "w0"), kind, "async")
    writer.put(1)
    sizes = [path.stat().st_size for path in sorted(tmp_path.rglob("events"))]
    for number in range(5):
        with shardwell.connect(running.target, worker_id=f"reader-{number}") as client:
            assert Subject(client, kind, "async").values() == {-1.0}
    readers = [Subject(connect(running, f"stays-{number}"), kind, "async") for number in range(5)]
    assert all(reader.values() == {-1.0} for reader in readers)
    assert [path.stat().st_size for path in sorted(tmp_path.rglob("events"))] == sizes
    other = Subject(connect(running, "w1"), kind, "async")
    assert other.put(1) == 0
    with pytest.raises(shardwell.LimitError, match="worker_count_max=2"):
        readers[0].put(1)
    assert other.values() == {-2.0}


@KINDS
def test_who_opened_is_missing_by_name_only_while_it_lives(cluster, connect, kind) -> None:
    running = cluster(2)
    here = Subject(connect(running, "here"), kind, "sync", worker_count=2)
    late = connect(running, "late")
    Subject(late, kind, "sync", worker_count=2)
    here.put(1)
    assert all(list(status.missing_worker_ids) == ["late"] for status in here.statuses())
    late.close()

    def is_forgotten() -> bool:
        statuses = here.statuses()
        return all(
            not status.missing_worker_ids and status.unknown_worker_count == 1
            for status in statuses
        )

    eventually("nobody is missing by name", is_forgotten)


@KINDS
def test_workers_that_closed_are_done_unless_a_step_waits_for_them(cluster, connect, kind) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{number}") for number in range(2)]
    subjects = [Subject(client, kind, "sync", worker_count=2) for client in clients]
    for subject in subjects:
        subject.put(1)
    clients[1].close()
    for status in subjects[0].statuses():
        assert list(status.done_worker_ids) == ["w1"]
        assert list(status.missing_worker_ids) == ["w0"]
    subjects[0].put(1)
    for status in subjects[0].statuses():
        assert list(status.done_worker_ids) == list(status.missing_worker_ids) == ["w1"]


def test_default_ids_never_collide(cluster) -> None:
    running = cluster(1)
    with shardwell.connect(running.target) as one, shardwell.connect(running.target) as two:
        assert one.worker_id != two.worker_id
        start = f"{socket.gethostname()}-{os.getpid()}-"
        assert one.worker_id.startswith(start)


# Sessions on the wire.


def wired(worker: WireWorker) -> tuple[WireParameter, WireTable]:
    """A parameter of four elements and a table of four rows, all zeros."""
    model = worker.create(spec(size=4))
    model.init(np.zeros(4))
    return model, WireTable(worker, table_spec(row_count=4, dim=1))


def fed(outgoing: queue.SimpleQueue[Any]) -> Iterator[Any]:
    """Messages as they come, until None does."""
    return iter(outgoing.get, None)


def opens(table: WireTable, message: table_pb2.ExchangeRowsRequest) -> Any:
    """The message, which opens a stream about the table."""
    message.open.CopyFrom(table.opening(0))
    return message


def test_a_gradient_needs_a_session_that_attends(cluster) -> None:
    target = cluster(1).target
    with WireWorker(target, "w0") as maker:
        maker.create(spec(size=4)).init(np.zeros(4))
        WireTable(maker, table_spec(row_count=4, dim=1))
        maker.end_session()
    with WireWorker(target, "w0", attends=False) as worker:
        made = worker.create(spec(size=4))  # a reader needs none
        np.testing.assert_array_equal(made.pull(), 0)
        table = WireTable(worker, table_spec(row_count=4, dim=1))
        np.testing.assert_array_equal(table.get([1, 2]), 0)
        stub = worker.stubs[0]
        for call in (
            lambda: [made.push(np.ones(4))],
            lambda: stub.Exchange(iter(made.gradient_messages(pb.ExchangeRequest, 0, np.ones(4)))),
            lambda: [worker.create(spec(size=4), take_seat=True)],
            lambda: table.stream(0, table.parts([1], [[1.0]])),
            lambda: [table.open(take_seat=True)],
        ):
            error = refused(call, Code.UNAVAILABLE, types.ERROR_CODE_SESSION_UNKNOWN)
            assert "attend" in error.details()
        worker.attendances.append(worker.attend(0))
        made.push(np.ones(4))
        table.put([1], [[1.0]])


def test_a_session_is_that_of_one_worker_id(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as worker:
        made = worker.create(spec(size=4))
        made.init(np.zeros(4))
        worker.worker_id = "w1"
        invalid = (Code.INVALID_ARGUMENT, types.ERROR_CODE_INVALID_ARGUMENT)
        refused(
            lambda: worker.stubs[0].PutGradient(
                iter(made.gradient_messages(pb.PutGradientRequest, 0, np.ones(4)))
            ),
            *invalid,
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(worker.attend(0))
        assert caught.value.code() is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"session": 0}, types.ERROR_CODE_INVALID_ARGUMENT),
        ({"host": ""}, types.ERROR_CODE_INVALID_ARGUMENT),
        ({"host": "a\nb"}, types.ERROR_CODE_INVALID_ARGUMENT),
        ({"host": "h" * 256}, types.ERROR_CODE_INVALID_ARGUMENT),
        ({"worker_id": "no name"}, types.ERROR_CODE_INVALID_ARGUMENT),
        ({"shard": types.ShardIdentity(cluster_id="x")}, types.ERROR_CODE_WRONG_SHARD),
    ],
)
def test_what_attends_is_checked(cluster, fields, code) -> None:
    with WireWorker(cluster(1).target, "w0", attends=False) as worker:
        with pytest.raises(grpc.RpcError) as caught:
            list(worker.attend(0, **fields))
        assert error_detail(caught.value).code == code


def test_attending_takes_no_thread_and_no_stream(cluster) -> None:
    """There are 34 threads, and far more calls that stay open."""
    running = cluster(1, limits=Limits(stream_count_max=2))
    with WireWorker(running.target, "w0") as worker:
        calls = []
        for number in range(200):
            worker.session = number + 1
            calls.append(worker.attend(0))
        assert running.servers[0].shard.sessions.count == 201
        status = worker.stubs[0].GetStatus(pb.GetStatusRequest(), timeout=5)
        assert status.open_stream_count == 0
        for call in calls:
            call.cancel()
        sessions = running.servers[0].shard.sessions
        eventually("they are gone", lambda: sessions.count == 1)


def test_session_count_max(cluster, connect) -> None:
    running = cluster(1, limits=Limits(session_count_max=2))
    first, second, third = (connect(running, f"w{number}", timeout_s=5) for number in range(3))
    subjects = [Subject(client, "parameter", "async") for client in (first, second, third)]
    for subject in subjects[:2]:
        subject.put(1)
    with pytest.raises(shardwell.LimitError, match="session_count_max=2"):
        subjects[2].put(1)
    assert subjects[2].values() == {-2.0}
    second.close()

    def gets_in() -> bool:
        try:
            return subjects[2].put(1) == 0
        except shardwell.LimitError:
            return False

    eventually("the third gets in", gets_in)
    assert subjects[2].values() == {-3.0}


@KINDS
def test_a_session_that_has_ended_contributes_no_more(cluster, kind) -> None:
    """As a worker's loop of retries would have it, which attends where its session is not known."""
    running = cluster(1)
    ended = (Code.FAILED_PRECONDITION, types.ERROR_CODE_SESSION_ENDED)
    with WireWorker(running.target, "w0") as worker:
        model, table = wired(worker)
        worker.end_session()
        calls = {
            "parameter": [
                lambda: [model.push(np.ones(4))],
                lambda: [worker.create(spec(size=4), take_seat=True)],
            ],
            "table": [
                lambda: table.stream(0, table.parts([1], [[1.0]])),
                lambda: [table.open(take_seat=True)],
            ],
        }[kind]
        for call in calls:
            assert "another number" in refused(call, *ended).details()
        with pytest.raises(grpc.RpcError) as caught:
            list(worker.attend(0))
        assert (caught.value.code(), error_detail(caught.value).code) == ended
        worker.end_session()  # as one whose answer was lost
        np.testing.assert_array_equal(model.pull(), 0)
        assert table.get([1]) == 0
        worker.session += 1
        worker.attendances.append(worker.attend(0))
        model.push(np.ones(4))
        table.put([1], [[1.0]])
        np.testing.assert_array_equal(model.pull(), -1)
        assert table.get([1]) == -1


@KINDS
def test_what_a_session_has_open_ends_with_it(cluster, kind) -> None:
    """Its Attend, and streams that contribute by it; not those that only read."""
    running = cluster(1)
    with WireWorker(running.target, "w0") as worker, WireWorker(running.target, "w1") as other:
        model, table = wired(worker)
        outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if kind == "parameter":
            reading = worker.stubs[0].Exchange(fed(fetches := queue.SimpleQueue()))
            fetches.put(model.fetch(0))
            open_one = worker.stubs[0].Exchange(fed(outgoing))
            outgoing.put(model.gradient_messages(pb.ExchangeRequest, 0, np.ones(4))[0])
        else:
            reading = table.stubs[0].ExchangeRows(fed(fetches := queue.SimpleQueue()))
            fetches.put(opens(table, table.fetch([1])))
            open_one = table.stubs[0].ExchangeRows(fed(outgoing))
            outgoing.put(opens(table, table.parts([1], [[1.0]])[0]))
        next(open_one)
        next(reading)
        worker.end_session()
        for call in (open_one, worker.attendances[0]):
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is Code.FAILED_PRECONDITION
            assert error_detail(caught.value).code == types.ERROR_CODE_SESSION_ENDED
        assert other.attendances[0].is_active()
        assert reading.is_active()
        for each in (fetches, outgoing):
            each.put(None)
        assert not list(reading)
        assert not endpoint_of(running.servers[0]).calls.refusal_counts


def test_a_stream_goes_on_while_its_session_attends_no_more(cluster) -> None:
    """Until another session takes its seat: that alone decides, so that nothing counts twice."""
    running = cluster(1)
    sessions = running.servers[0].shard.sessions
    with WireWorker(running.target, "w0") as worker, WireWorker(running.target, "w1") as other:
        model, _ = wired(worker)
        outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stream = worker.stubs[0].Exchange(fed(outgoing))
        outgoing.put(model.gradient_messages(pb.ExchangeRequest, 0, np.ones(4), step=0)[0])
        next(stream)
        worker.attendances[0].cancel()
        eventually("it attends no more", lambda: sessions.count == 1)
        (message,) = model.gradient_messages(pb.ExchangeRequest, 0, np.ones(4), step=1)
        message.ClearField("open")
        outgoing.put(message)
        assert next(stream).version == 2
        refused(
            lambda: [model.push(np.ones(4))], Code.UNAVAILABLE, types.ERROR_CODE_SESSION_UNKNOWN
        )
        other.worker_id, other.session = "w0", other.session + 1
        other.attendances.append(other.attend(0))
        taken = other.create(spec(size=4), take_seat=True)
        taken.next_step = 2
        taken.push(np.ones(4))
        (message,) = model.gradient_messages(pb.ExchangeRequest, 0, np.ones(4), step=3)
        message.ClearField("open")
        outgoing.put(message)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert error_detail(caught.value).code == types.ERROR_CODE_WORKER_ID_IN_USE
        np.testing.assert_array_equal(taken.pull(), -3)


def test_two_calls_of_one_session_are_one_life(cluster) -> None:
    running = cluster(1)
    sessions = running.servers[0].shard.sessions
    with WireWorker(running.target, "w0") as worker:
        worker.attendances.append(worker.attend(0))
        worker.attendances[0].cancel()
        made = worker.create(spec(size=4))
        made.init(np.zeros(4))
        made.push(np.ones(4))
        assert sessions.count == 1
        worker.end_session()
        assert sessions.count == 0
        worker.end_session()
