"""The four verbs of a parameter against real shards, one worker at a time.

Goal: every size and shard count gives the values of the float64 model, and steps, versions and
buffers are what the docstrings say. Gradients are small integers, so nothing is rounded.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.oracles.parameter import ModelParameter, integer_gradient
from harness.polling import PATIENCE_S, eventually

SGD = shardwell.SGD(learning_rate=0.5)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shard_count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 127, 128, 129, 4001])
def test_every_size_on_every_shard_count(cluster, connect, size, shard_count) -> None:
    client = connect(cluster(shard_count, chunk_size_bytes=64), "w0")
    assert client.shard_count == shard_count
    model = client.parameter("model", size=size, optimizer=SGD)
    first = np.arange(size, dtype=np.float32) % 64
    oracle = ModelParameter(first, SGD)
    assert model.init(first) == 0
    np.testing.assert_array_equal(model.get_weights(), first)
    for step in range(3):
        gradient = integer_gradient(0, step, size)
        oracle.put("w0", gradient)
        if step == 1:
            assert model.put_gradient(gradient) == step
            weights = model.get_weights(min_version=step + 1)
        else:
            weights = model.exchange(gradient)
        assert weights.dtype == np.float32
        np.testing.assert_array_equal(weights, oracle.weights)
        assert (model.next_step, model.version) == (step + 1, step + 1)


@pytest.mark.parametrize(
    ("size", "block", "shard_count"), [(1, 1, 3), (7, 1, 3), (128, 4, 1), (3001, 64, 5)]
)
def test_slices_are_what_each_shard_holds(cluster, connect, size, block, shard_count) -> None:
    client = connect(cluster(shard_count), "w0")
    model = client.parameter("model", size=size, optimizer=SGD)
    dealt = np.array_split(range(-(-size // block)), shard_count)
    assert [list(range(part.offset, part.stop)) for part in model.slices] == [
        [element for element in range(size) if element // block in blocks] for blocks in dealt
    ]
    for part, status in zip(model.slices, client.status(), strict=True):
        held = status.parameters[0]
        assert (held.slice_offset, held.slice_size) == (part.offset, part.size)


def test_thousands_of_elements_in_hundreds_of_chunks(cluster, connect) -> None:
    size = 80_011
    client = connect(cluster(3, chunk_size_bytes=64), "w0")
    model = client.parameter("model", size=size, optimizer=SGD)
    oracle = ModelParameter(np.zeros(size), SGD)
    model.init(np.zeros(size, np.float32))
    for step in range(3):
        oracle.put("w0", integer_gradient(0, step, size))
        weights = model.exchange(integer_gradient(0, step, size))
    np.testing.assert_array_equal(weights, oracle.weights)
    held = sum(status.parameters[0].counted_chunk_count for status in client.status())
    assert held == 3 * 313  # a block of 256 each


def test_a_parameter_larger_than_the_largest_chunk(cluster, connect) -> None:
    size = 700_001
    client = connect(cluster(2, chunk_size_bytes=2**20), "w0")
    model = client.parameter("model", size=size, optimizer=SGD, codec="fp32")
    first = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    model.init(first)
    np.testing.assert_array_equal(model.get_weights(), first)
    np.testing.assert_array_equal(model.exchange(np.zeros(size, np.float32)), first)


def test_out_is_filled_and_returned(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=12, optimizer=SGD)
    model.init(np.arange(12, dtype=np.float32))
    out = np.full((3, 4), np.nan, np.float32)
    assert model.get_weights(out=out) is out
    np.testing.assert_array_equal(out, np.arange(12).reshape(3, 4))
    assert model.exchange(np.ones(12, np.float32), out=out) is out
    np.testing.assert_array_equal(out.reshape(-1), np.arange(12) - 0.5)


def test_windows_into_larger_vectors_are_slices_of_them(cluster, connect) -> None:
    """Two parameters share one vector of weights, and one of gradients; nothing beside changes."""
    client = connect(cluster(), "w0")
    weights = np.arange(30, dtype=np.float32)
    gradients = np.arange(30, dtype=np.float32) * 2
    expected = weights.astype(np.float64)
    for name, window in (("head", slice(3, 10)), ("tail", slice(12, 30))):
        model = client.parameter(name, size=window.stop - window.start, optimizer=SGD)
        model.init(weights[window])
        model.exchange(gradients[window], out=weights[window])
        model.begin_exchange(gradients[window], out=weights[window]).finish()
        expected[window] -= 2 * 0.5 * gradients[window]
        np.testing.assert_array_equal(weights, expected)
        weights[window] = 0
        model.get_weights(out=weights[window])
        np.testing.assert_array_equal(weights, expected)


def test_out_may_not_be_the_gradient(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=12, optimizer=SGD)
    model.init(np.zeros(12, np.float32))
    gradient = np.ones(12, np.float32)
    with pytest.raises(shardwell.ArgumentError, match="overlap"):
        model.exchange(gradient, out=gradient)
    np.testing.assert_array_equal(gradient, 1)
    assert model.next_step == 0


def test_two_calls_give_arrays_of_their_own(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=100, optimizer=SGD)
    model.init(np.zeros(100, np.float32))
    one, two = model.get_weights(), model.exchange(np.ones(100, np.float32))
    assert not np.may_share_memory(one, two)
    one[:] = 7
    np.testing.assert_array_equal(model.get_weights(), -0.5)


def test_a_future_holds_the_weights(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=100, optimizer=SGD)
    model.init(np.ones(100, np.float32))
    np.testing.assert_array_equal(model.get_weights_async().result(PATIENCE_S), 1)
    out = np.empty(100, np.float32)
    assert model.get_weights_async(out=out).result(PATIENCE_S) is out


def test_a_future_waits_for_its_version(cluster, connect) -> None:
    running = cluster()
    writer, reader = (
        connect(running, name).parameter("model", size=100, optimizer=SGD)
        for name in ("writer", "reader")
    )
    writer.init(np.zeros(100, np.float32))
    future = reader.get_weights_async(min_version=2)
    writer.put_gradient(np.ones(100, np.float32))
    assert not future.done()
    writer.put_gradient(np.ones(100, np.float32))
    np.testing.assert_array_equal(future.result(PATIENCE_S), -1)


def test_a_future_carries_the_error(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=10, optimizer=SGD)
    with pytest.raises(shardwell.NotInitializedError):
        model.get_weights_async().result(PATIENCE_S)


def test_many_futures_at_once(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=300, optimizer=SGD)
    model.init(np.full(300, 3, np.float32))
    futures = [model.get_weights_async() for _ in range(20)]
    for future in futures:
        np.testing.assert_array_equal(future.result(PATIENCE_S), 3)


def test_a_put_that_overtakes_a_future_of_the_same_parameter(cluster, connect) -> None:
    """The weights of the next step are asked for first; the gradient that they need comes after."""
    client = connect(cluster(), "w0")
    model = client.parameter("model", size=100, optimizer=SGD)
    model.init(np.zeros(100, np.float32))
    future = model.get_weights_async(min_version=1)
    eventually("it is waiting", lambda: all(s.open_stream_count for s in client.status()))
    model.put_gradient(np.ones(100, np.float32))
    np.testing.assert_array_equal(future.result(PATIENCE_S), -0.5)


def test_closed_things_say_so(cluster) -> None:
    running = cluster()
    client = shardwell.connect(running.target, worker_id="w0", timeout_s=5)
    model = client.parameter("model", size=10, optimizer=SGD)
    model.init(np.zeros(10, np.float32))
    model.exchange(np.zeros(10, np.float32))
    client.close()
    client.close()
    gradient = np.zeros(10, np.float32)
    calls = {
        "exchange": lambda: model.exchange(gradient),
        "put_gradient": lambda: model.put_gradient(gradient),
        "get_weights": lambda: model.get_weights(),
        "get_weights_async": lambda: model.get_weights_async().result(PATIENCE_S),
        "init": lambda: model.init(gradient),
        "set_learning_rate": lambda: model.set_learning_rate(0.1),
        "parameter": lambda: client.parameter("other", size=1, optimizer=SGD),
        "status": lambda: client.status(),
    }
    wrong = {}
    for name, call in calls.items():
        try:
            call()
        except shardwell.ClosedError:
            continue
        except Exception as error:
            wrong[name] = repr(error)
        else:
            wrong[name] = "no error"
    assert not wrong


def test_a_target_from_the_environment(cluster, monkeypatch) -> None:
    running = cluster()
    monkeypatch.setenv("SHARDWELL_SHARDS", running.target)
    monkeypatch.setenv("SHARDWELL_WORKER_ID", "from-environment")
    with shardwell.connect() as client:
        assert client.worker_id == "from-environment"
        assert client.cluster_id == running.cluster_id


def test_traffic_is_counted_on_both_sides(cluster, connect) -> None:
    client = connect(cluster(), "w0")
    model = client.parameter("model", size=1000, optimizer=SGD)
    model.init(np.zeros(1000, np.float32))
    model.exchange(np.ones(1000, np.float32))
    traffic = client.traffic
    assert traffic.sent_value_bytes == 2 * 4000
    assert traffic.received_value_bytes == 4000
    assert traffic.sent_bytes > 4000 + 2000
    assert traffic.received_bytes > 2000
    # Blocks of 16 elements have a byte each besides.
    received = sum(status.received_payload_bytes for status in client.status())
    assert received == 4000 + 2000 + 63
