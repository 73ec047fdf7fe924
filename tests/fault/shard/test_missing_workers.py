"""A worker that does not come: a deadline error that names it, and no harm once it does.

Each verb that waits is tried, for a worker that opened the parameter (it is named) and for one that
never did (it is counted). Afterwards the same objects go on to the weights of the model.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import shardwell
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background

SGD = shardwell.SGD(learning_rate=0.5)
SIZE = 200
WAIT_S = 1.0
VERBS = ["exchange", "get_weights", "get_weights_async", "put_gradient"]


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
