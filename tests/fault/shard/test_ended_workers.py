"""Goal: a worker that has ended in order, and that a step still needs, is an error at once for all
who wait, which names it; one that the step does not need is none.

Method: each verb that waits is given ten minutes, and is to end within the patience of a test. How
long a worker that ended is expected back is set to nothing or to very long, so that no test depends
on how fast its machine is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background
from harness.wire_client.worker import WireWorker
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server import LocalCluster
from shardwell_server.shard import crews

SIZE = 200
SGD = shardwell.SGD(learning_rate=0.5)
LONG_S = 600.0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls do not wait for a worker that has ended."""
    monkeypatch.setattr(crews, "RETURN_AFTER_END_S", 0.0)


def ones(value: float = 1.0) -> np.ndarray:
    return np.full(SIZE, value, np.float32)


def opened(client: shardwell.Client, worker_count: int = 2, **options: Any) -> shardwell.Parameter:
    options = {"optimizer": SGD, **options}
    net = client.parameter("net", size=SIZE, worker_count=worker_count, **options)
    net.init(ones(0))
    return net


def rows_of(client: shardwell.Client, worker_count: int = 2) -> shardwell.Table:
    zeros = shardwell.Zeros()
    return client.table(
        "rows", row_count=100, dim=4, optimizer=SGD, initializer=zeros, worker_count=worker_count
    )


def attends(running: LocalCluster, worker_id: str = "last") -> None:
    """Returns when all shards know the worker's session, which its client does not wait for."""
    sessions = [server.shard.sessions for server in running.servers]
    eventually("it attends", lambda: all(worker_id in each.by_worker() for each in sessions))


def exchange(net: shardwell.Parameter) -> object:
    return net.exchange(ones(), timeout_s=LONG_S)


def begun_exchange(net: shardwell.Parameter) -> object:
    begun = net.begin_exchange(ones())
    begun.ready(0, SIZE)
    return begun.finish(timeout_s=LONG_S)


def put_two(net: shardwell.Parameter) -> object:
    """The second waits for the step of the first."""
    if net.next_step == 1:
        net.put_gradient(ones())
    return net.put_gradient(ones(), timeout_s=LONG_S)


def get_weights(net: shardwell.Parameter) -> object:
    return net.get_weights(min_version=2, timeout_s=LONG_S)


def get_weights_async(net: shardwell.Parameter) -> object:
    return net.get_weights_async(min_version=2, timeout_s=LONG_S).result(LONG_S)


VERBS = [exchange, begun_exchange, put_two, get_weights, get_weights_async]


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("verb", VERBS)
def test_all_who_wait_are_given_the_name_at_once(cluster, connect, verb, clip_norm) -> None:
    """The same call goes on when a worker of that name is back."""
    running = cluster(2, chunk_size_bytes=64)
    rule = shardwell.SGD(learning_rate=0.5, clip_norm=clip_norm)
    last = connect(running, "last")
    net, other = opened(connect(running, "w0"), optimizer=rule), opened(last, optimizer=rule)
    net.put_gradient(ones())
    other.exchange(ones(), timeout_s=LONG_S)
    waiting = in_background(lambda: verb(net))
    reader = connect(running, "reader").parameter("net")
    read = in_background(lambda: get_weights(reader))
    eventually("they wait", lambda: all(each.open_stream_count for each in last.status()))
    last.close()
    for future in (waiting, read):
        error = future.exception(PATIENCE_S)
        assert isinstance(error, shardwell.WorkersMissingError), error
        assert error.missing_worker_ids == ("last",)
        assert error.parameter == "net"
        assert error.retryable
        assert "waits for 'last', which ended in order" in error.message
        assert re.search(r"step 1 of chunk \d+ waits", error.message)
    again = in_background(lambda: verb(net)).exception(PATIENCE_S)  # now it does not wait at all
    assert isinstance(again, shardwell.WorkersMissingError)
    back = opened(connect(running, "last"), optimizer=rule)
    assert back.next_step == 1
    attends(running)
    going_on = in_background(lambda: verb(net))
    if verb in (get_weights, get_weights_async):
        net.put_gradient(ones())
    back.put_gradient(ones())
    going_on.result(PATIENCE_S)
    if not clip_norm:
        np.testing.assert_array_equal(net.get_weights(min_version=2), ones(-1))


@pytest.mark.parametrize("verb", ["exchange", "put", "get"])
def test_those_who_wait_for_rows(cluster, connect, verb) -> None:
    running = cluster(2)
    last = connect(running, "last")
    rows, other = (rows_of(client) for client in (connect(running, "w0"), last))
    ids, gradients = np.arange(20), np.ones((20, 4), np.float32)
    rows.put_row_gradients(ids, gradients)
    other.put_row_gradients(ids, gradients)

    def call() -> object:
        if verb == "exchange":
            return rows.exchange_rows(ids, gradients, ids, timeout_s=LONG_S)
        if verb == "get":
            return rows.get_rows(ids, min_version=2, timeout_s=LONG_S)
        if rows.next_step == 1:
            rows.put_row_gradients(ids, gradients)
        return rows.put_row_gradients(ids, gradients, timeout_s=LONG_S)

    waiting = in_background(call)
    eventually("it waits", lambda: all(each.open_stream_count for each in last.status()))
    last.close()
    error = waiting.exception(PATIENCE_S)
    assert isinstance(error, shardwell.WorkersMissingError), error
    assert (error.missing_worker_ids, error.table) == (("last",), "rows")
    assert "table 'rows': step 1 waits for 'last', which ended in order" in error.message
    back = rows_of(connect(running, "last"))
    attends(running)
    going_on = in_background(call)
    if verb == "get":
        rows.put_row_gradients(ids, gradients)
    back.put_row_gradients(ids, gradients)
    going_on.result(PATIENCE_S)
    assert rows.get_rows(ids, min_version=2)[0, 0] == -1


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("is_table", [False, True], ids=["parameter", "table"])
def test_who_has_contributed_to_the_step_may_end(cluster, connect, is_table) -> None:
    """As at every training's end: one is done first, and closes; the slowest comes last."""
    running = cluster(2, chunk_size_bytes=64)
    names = ["w0", "first", "slow"]
    ids, gradients = np.arange(20), np.ones((20, 4), np.float32)
    calls: dict[str, Callable[[], Any]] = {}
    clients = {name: connect(running, name) for name in names}
    for name, client in clients.items():
        if is_table:
            table = rows_of(client, worker_count=3)
            calls[name] = lambda table=table: table.exchange_rows(ids, gradients, ids)
        else:
            net = opened(client, worker_count=3)
            calls[name] = lambda net=net: net.exchange(ones())
    for _ in range(2):
        step = [in_background(calls[name]) for name in names]
        assert {float(each.result(PATIENCE_S).max()) for each in step} in ({-0.5}, {-1.0})
    waiting = in_background(calls["w0"])
    if is_table:
        table = clients["first"].table("rows")
        table.put_row_gradients(ids, gradients)
    else:
        clients["first"].parameter("net").put_gradient(ones())
    clients["first"].close()

    def members_that_are_done() -> bool:
        shown = clients["slow"].status()
        return all(
            list(each.done_worker_ids) == ["first"]
            for status in shown
            for each in (status.tables if is_table else status.parameters)
        )

    eventually("it has ended", members_that_are_done)
    assert not waiting.done()
    assert float(calls["slow"]().max()) == -1.5
    assert float(waiting.result(PATIENCE_S).max()) == -1.5
    clients["slow"].close()
    clients["w0"].close()


@pytest.mark.usefixtures("at_once")
def test_a_step_waits_for_a_process_that_has_connected_under_the_name(cluster, connect) -> None:
    """Started again before the old one closes, it may take as long as it likes."""
    running = cluster(2, chunk_size_bytes=64)
    last = connect(running, "last")
    net, other = opened(connect(running, "w0")), opened(last)
    net.put_gradient(ones())
    other.exchange(ones())
    successor = connect(running, "last")
    sessions = [server.shard.sessions for server in running.servers]
    eventually("all three attend", lambda: all(each.count == 3 for each in sessions))
    last.close()
    waiting = in_background(lambda: net.exchange(ones(), timeout_s=LONG_S))
    watcher = connect(running, "watcher")
    eventually("it waits", lambda: all(each.open_stream_count for each in watcher.status()))
    opened(successor).put_gradient(ones())
    np.testing.assert_array_equal(waiting.result(PATIENCE_S), ones(-1))
    waiting = in_background(lambda: net.exchange(ones(), timeout_s=LONG_S))
    successor.close()
    error = waiting.exception(PATIENCE_S)
    assert isinstance(error, shardwell.WorkersMissingError), error
    assert error.missing_worker_ids == ("last",)


def test_who_comes_back_soon_is_waited_for(cluster, connect, monkeypatch) -> None:
    monkeypatch.setattr(crews, "RETURN_AFTER_END_S", LONG_S)
    running = cluster(2, chunk_size_bytes=64)
    last = connect(running, "last")
    net, other = opened(connect(running, "w0")), opened(last)
    net.put_gradient(ones())
    other.exchange(ones())
    waiting = in_background(lambda: net.exchange(ones(), timeout_s=LONG_S))
    last.close()
    opened(connect(running, "last")).put_gradient(ones())
    np.testing.assert_array_equal(waiting.result(PATIENCE_S), ones(-1))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("is_table", [False, True])
def test_a_training_that_all_have_left_begins_again(cluster, connect, is_table) -> None:
    """The first to come back waits for the other, however much later that one is started."""
    running = cluster(2, chunk_size_bytes=64)

    def step(worker: shardwell.Client) -> Callable[[], Any]:
        if not is_table:
            net = opened(worker)
            return lambda: net.exchange(ones(), timeout_s=LONG_S)
        table = rows_of(worker)
        return lambda: table.exchange_rows([1], np.ones((1, 4), np.float32), timeout_s=LONG_S)

    crew = [connect(running, f"w{rank}") for rank in range(2)]
    made = [in_background(step(worker)) for worker in crew]
    for each in made:
        each.result(PATIENCE_S)
    for worker in crew:
        worker.close()
    first = in_background(step(connect(running, "w1")))
    with pytest.raises(TimeoutError):
        first.result(0.5)  # it waits, and does not fail
    step(connect(running, "w0"))()
    first.result(PATIENCE_S)


def test_a_version_that_no_step_will_bring(cluster, connect) -> None:
    """All have ended: who waits for more than they made is given all their names."""
    running = cluster(2, chunk_size_bytes=64)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    for net in [opened(client) for client in clients]:
        net.put_gradient(ones())
    for client in clients:
        client.close()
    reader = connect(running, "reader").parameter("net")
    np.testing.assert_array_equal(reader.get_weights(min_version=1), ones(-0.5))
    late = in_background(lambda: reader.get_weights(min_version=2, timeout_s=LONG_S))
    error = late.exception(PATIENCE_S)
    assert isinstance(error, shardwell.WorkersMissingError), error
    assert error.missing_worker_ids == ("w0", "w1")
    assert "'w0', 'w1', which ended in order (their clients were closed)" in error.message


def test_a_shard_that_was_started_again_knows_who_has_ended(connect, tmp_path) -> None:
    with LocalCluster(2, tmp_path, processes=True, chunk_size_bytes=64) as running:
        last = connect(running, "last")
        net, other = opened(connect(running, "w0")), opened(last)
        net.put_gradient(ones())
        other.exchange(ones())
        last.close()
        running.children[1].kill()
        running.start_again(1)
        waiting = in_background(lambda: net.exchange(ones(), timeout_s=LONG_S))
        error = waiting.exception(PATIENCE_S)
        assert isinstance(error, shardwell.WorkersMissingError), error
        assert error.missing_worker_ids == ("last",)
        opened(connect(running, "last")).put_gradient(ones())
        np.testing.assert_array_equal(net.exchange(ones()), ones(-1))


def test_a_snapshot_of_a_step_that_is_stuck_half_way(cluster, connect, tmp_path) -> None:
    """One shard has closed a step, and another never will: there is no version to take."""
    running = cluster(2)
    net = opened(connect(running, "w0"))
    net.put_gradient(ones())
    saver = connect(running, "saver")
    with WireWorker(running.target, "late") as worker:
        late = worker.create(net.spec.to_proto())
        late.push(ones())
        net.put_gradient(ones())
        first = late.gradient_messages(pb.PutGradientRequest, 0, ones(), step=1)
        worker.stubs[0].PutGradient(iter(first), timeout=PATIENCE_S)
        save = in_background(lambda: saver.save_checkpoint(tmp_path / "c", timeout_s=LONG_S))
        worker.end_session()
        error = save.exception(PATIENCE_S)
    assert isinstance(error, shardwell.WorkersMissingError), error
    assert error.missing_worker_ids == ("late",)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_worker_that_fails_is_waited_for_and_one_that_exits_is_not(
    cluster, connect, error
) -> None:
    """A worker that starts again after an error goes on where it was, as after a kill."""
    running = cluster(2, chunk_size_bytes=64)
    net = opened(connect(running, "w0"))
    net.put_gradient(ones())
    last = connect(running, "last")
    opened(last).exchange(ones())
    with pytest.raises(error), last:
        raise error
    waiting = in_background(lambda: net.exchange(ones(), timeout_s=LONG_S))
    if error is SystemExit:
        assert isinstance(waiting.exception(PATIENCE_S), shardwell.WorkersMissingError)
        return
    watcher = connect(running, "watcher")
    eventually("it waits", lambda: all(each.open_stream_count for each in watcher.status()))
    for each in watcher.status():
        assert not each.parameters[0].done_worker_ids
    opened(connect(running, "last")).put_gradient(ones())
    np.testing.assert_array_equal(waiting.result(PATIENCE_S), ones(-1))


@pytest.mark.usefixtures("at_once")
def test_a_step_that_closes_with_fewer_does_without_who_has_ended(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    clients = [connect(running, name) for name in ("w0", "w1", "last")]
    nets = [opened(client, 3, min_contributors=2, grace_s=0.0) for client in clients]
    nets[2].put_gradient(ones())
    clients[2].close()
    for _ in range(2):
        waiting = in_background(lambda: nets[0].exchange(ones(), timeout_s=LONG_S))
        nets[1].exchange(ones(), timeout_s=LONG_S)
        waiting.result(PATIENCE_S)
    clients[1].close()
    error = in_background(lambda: nets[0].exchange(ones(), timeout_s=LONG_S)).exception(PATIENCE_S)
    assert isinstance(error, shardwell.WorkersMissingError), error
    assert set(error.missing_worker_ids) == {"w1", "last"}


# A worker that does not come: a deadline error that names it, and no harm once it does.  Each verb
# that waits is tried, for a worker that opened the parameter (it is named) and for one that never
# did (it is counted). Afterwards the same objects go on to the weights of the model.


WAIT_S = 1.0
MISSING_VERBS = ["exchange", "get_weights", "get_weights_async", "put_gradient"]


def _open(client: shardwell.Client, worker_count: int = 2) -> shardwell.Parameter:
    return client.parameter("model", size=SIZE, optimizer=SGD, worker_count=worker_count)


def _ones(value: float = 1.0) -> np.ndarray:
    return np.full(SIZE, value, np.float32)


def _wait_by(verb: str, model: shardwell.Parameter, timeout_s: float) -> None:
    """Calls a verb that needs the other worker's gradient of step 0."""
    if verb == "exchange":
        model.exchange(_ones(), timeout_s=timeout_s)
        return
    if model.next_step == 0:
        model.put_gradient(_ones())
    if verb == "put_gradient":
        if model.next_step == 1:
            model.put_gradient(_ones(3))  # waits for step 0 to close
    elif verb == "get_weights":
        model.get_weights(min_version=1, timeout_s=timeout_s)
    else:
        model.get_weights_async(min_version=1, timeout_s=timeout_s).result(timeout_s + PATIENCE_S)


@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize("verb", ["exchange", "get_weights", "get_weights_async"])
@pytest.mark.parametrize("is_known", [True, False], ids=["opened it", "never came"])
def test_the_missing_worker_is_named_or_counted(
    cluster, connect, verb, is_known, shard_count
) -> None:
    running = cluster(shard_count, chunk_size_bytes=64)
    model = _open(connect(running, "here"))
    late = _open(connect(running, "late")) if is_known else None
    model.init(_ones(0))
    watch = Stopwatch()
    with pytest.raises(shardwell.WorkersMissingError) as caught:
        _wait_by(verb, model, WAIT_S)
    assert WAIT_S <= watch.elapsed_s < PATIENCE_S
    error = caught.value
    assert f"waited {WAIT_S:g} s for version 1" in error.message
    assert isinstance(error, TimeoutError)
    assert error.retryable
    assert error.parameter == "model"
    assert error.missing_worker_ids == (("late",) if is_known else ())
    assert ("'late'" if is_known else "1 that never opened the parameter") in error.message
    assert "'here'" not in error.message

    # The worker comes after all; the same call of the same object succeeds.
    late = late or _open(connect(running, "late"))
    late.put_gradient(_ones(3))
    _wait_by(verb, model, 20.0)
    np.testing.assert_array_equal(model.get_weights(), -1)
    assert model.next_step == 1


def test_a_gradient_two_steps_ahead_names_who_holds_it_up(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    model, late = (_open(connect(running, name)) for name in ("here", "late"))
    model.init(_ones(0))
    assert model.put_gradient(_ones()) == 0
    watch = Stopwatch()
    with pytest.raises(shardwell.WorkersMissingError, match="'late'") as caught:
        model.put_gradient(_ones(3), timeout_s=WAIT_S)
    assert WAIT_S / 2 <= watch.elapsed_s < PATIENCE_S
    assert caught.value.missing_worker_ids == ("late",)
    assert model.next_step == 1
    late.put_gradient(_ones(3))
    assert model.put_gradient(_ones(3)) == 1
    late.put_gradient(_ones(5))
    np.testing.assert_array_equal(model.get_weights(min_version=2), -1 - 2)


def test_a_waiting_gradient_goes_on_by_itself(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    model, late = (_open(connect(running, name)) for name in ("here", "late"))
    model.init(_ones(0))
    model.put_gradient(_ones())
    ahead = in_background(lambda: model.put_gradient(_ones(3)))
    assert late.put_gradient(_ones(3)) == 0
    assert ahead.result(PATIENCE_S) == 1


def test_several_are_missing(cluster, connect) -> None:
    running = cluster(2)
    model = _open(connect(running, "here"), worker_count=5)
    for name in ("late-1", "late-2"):
        _open(connect(running, name), worker_count=5)
    model.init(_ones(0))
    with pytest.raises(shardwell.WorkersMissingError) as caught:
        model.exchange(_ones(), timeout_s=BRIEF_S)
    assert caught.value.missing_worker_ids == ("late-1", "late-2")
    assert "'late-1', 'late-2' and 2 that never opened" in caught.value.message


def test_many_missing_workers_are_not_all_listed(cluster, connect) -> None:
    running = cluster(1)
    model = _open(connect(running, "here"), worker_count=30)
    for index in range(20):
        _open(connect(running, f"late-{index}"), worker_count=30)
    model.init(_ones(0))
    with pytest.raises(shardwell.WorkersMissingError, match="and 12 more and 9 that") as caught:
        model.exchange(_ones(), timeout_s=3 * BRIEF_S)
    assert len(caught.value.missing_worker_ids) == 20


def test_an_asynchronous_version_that_never_comes(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("m", size=SIZE, optimizer=SGD, mode="async")
    model.init(_ones(0))
    with pytest.raises(shardwell.WorkersMissingError, match="asynchronous"):
        model.get_weights(min_version=3, timeout_s=BRIEF_S)
    for _ in range(3):
        model.put_gradient(_ones())
    np.testing.assert_array_equal(model.get_weights(min_version=3), -1.5)


def test_status_shows_who_is_missing(cluster, connect) -> None:
    running = cluster(2)
    client = connect(running, "here")
    model = _open(client, worker_count=3)
    _open(connect(running, "late"), worker_count=3)
    model.init(_ones(0))
    model.put_gradient(_ones())
    for status in client.status():
        (parameter,) = status.parameters
        assert list(parameter.contributed_worker_ids) == ["here"]
        assert list(parameter.missing_worker_ids) == ["late"]
        assert parameter.unknown_worker_count == 1


def test_a_short_call_is_not_held_up_by_a_long_one(cluster, connect) -> None:
    """Two threads, one parameter: the deadline of one is not the other's."""
    client = connect(cluster(2), "here")
    model = _open(client)
    model.init(_ones(0))
    long = model.get_weights_async(min_version=1, timeout_s=6.0)
    eventually("it is waiting", lambda: all(s.open_stream_count for s in client.status()))
    watch = Stopwatch()
    with contextlib.suppress(shardwell.DeadlineError):
        np.testing.assert_array_equal(model.get_weights(timeout_s=0.5), 0)
    elapsed_s = watch.elapsed_s
    with pytest.raises(shardwell.WorkersMissingError):
        long.result(PATIENCE_S)
    assert elapsed_s < PATIENCE_S


def test_calls_that_are_given_up_leave_no_error_in_the_log(cluster, connect, caplog) -> None:
    """A client that goes away in the middle of a wait is everyday life, not a defect."""
    running = cluster(2)
    client = shardwell.connect(running.target, worker_id="here", timeout_s=PATIENCE_S)
    model = _open(client)
    observer = connect(running, "observer")
    model.init(_ones(0))
    model.put_gradient(_ones())
    ahead = in_background(lambda: model.put_gradient(_ones()))
    eventually("it waits", lambda: all(s.open_stream_count for s in observer.status()))
    client.close()
    assert isinstance(ahead.exception(10), shardwell.ShardwellError)
    eventually("it ended", lambda: not any(s.open_stream_count for s in observer.status()))
    running.close()
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not errors, [record.getMessage() for record in errors]
