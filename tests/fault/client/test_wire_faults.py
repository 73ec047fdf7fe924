"""A wire that is cut, stalls or changes bytes: errors that name the shard, nothing counted twice.

Method: a proxy in front of the second shard, integer gradients, and the model's weights at the end
whatever happened on the way. Deadlines are short; test_reconnection.py has calls that go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Direction, Proxy
from harness.inside import idle_streams
from harness.oracles.parameter import integer_gradient
from harness.polling import PATIENCE_S, Stopwatch, eventually, until_accepted
from harness.threads import in_background

SGD = shardwell.SGD(learning_rate=0.5)
SIZE = 40_000
HASTY_S = 1.0


@pytest.fixture
def running(cluster):
    return cluster(2, chunk_size_bytes=1024)


@pytest.fixture
def proxy(running) -> Iterator[Proxy]:
    with Proxy(running.addresses[1]) as between:
        yield between


@pytest.fixture
def model(running, proxy, connect) -> shardwell.Parameter:
    client = connect(f"{running.addresses[0]},{proxy.address}", "w0", same_host=False)
    parameter = client.parameter("model", size=SIZE, optimizer=SGD, codec="fp32")
    parameter.init(np.zeros(SIZE, np.float32))
    return parameter


def _gradient(step: int) -> np.ndarray:
    return integer_gradient(0, step, SIZE)


def _after(step_count: int) -> np.ndarray:
    return -0.5 * sum(_gradient(step) for step in range(step_count))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("byte_count", [1, 3000, 40_000, 70_000])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("verb", ["exchange", "put_gradient"])
def test_cut_in_the_middle(model, proxy, verb, direction, byte_count) -> None:
    """The first call of a client: an error at its deadline, and the same gradient counts once."""
    if verb == "put_gradient" and direction is Direction.TO_CLIENT:
        byte_count = min(byte_count, 1)  # its answer is short
    proxy.cut_after(direction, byte_count)
    with pytest.raises(shardwell.ShardUnavailableError, match="shard 1") as caught:
        getattr(model, verb)(_gradient(0), timeout_s=HASTY_S)
    assert (caught.value.shard_index, caught.value.retryable) == (1, True)
    assert isinstance(caught.value, ConnectionError)
    assert model.next_step == 0
    assert proxy.cut_count == 1
    proxy.accept()
    getattr(model, verb)(_gradient(0))
    np.testing.assert_array_equal(model.get_weights(min_version=1), _after(1))
    np.testing.assert_array_equal(model.exchange(_gradient(1)), _after(2))


@pytest.mark.parametrize("byte_count", [1, 40_000])
def test_cut_while_weights_come(model, proxy, byte_count) -> None:
    model.put_gradient(_gradient(0))
    proxy.cut_after(Direction.TO_CLIENT, byte_count)
    with pytest.raises(shardwell.ShardUnavailableError, match="shard 1"):
        model.get_weights(timeout_s=HASTY_S)
    proxy.accept()
    np.testing.assert_array_equal(model.get_weights(), _after(1))


def test_cut_while_first_weights_go(running, proxy, connect) -> None:
    client = connect(f"{running.addresses[0]},{proxy.address}", "w0", same_host=False)
    model = client.parameter("model", size=SIZE, optimizer=SGD, codec="fp32")
    proxy.cut_after(Direction.TO_SHARD, 30_000)
    with pytest.raises(shardwell.ShardUnavailableError, match="shard 1"):
        model.init(np.ones(SIZE, np.float32), timeout_s=HASTY_S)
    proxy.accept()
    model.init(np.full(SIZE, 2, np.float32))
    np.testing.assert_array_equal(model.get_weights(), 2)


def test_cut_between_steps_is_not_noticed(model, proxy) -> None:
    """A connection that died of old age is replaced without an error."""
    for step in range(4):
        np.testing.assert_array_equal(model.exchange(_gradient(step)), _after(step + 1))
        proxy.cut()
    assert proxy.connection_count >= 4


def test_streams_dropped_by_the_shard_are_reopened(running, model) -> None:
    """As a shard does that ends idle streams."""
    for step in range(3):
        np.testing.assert_array_equal(model.exchange(_gradient(step)), _after(step + 1))
        # All before any is dropped: the client then ends the others itself.
        eventually("the streams are idle", lambda: all(idle_streams(s) for s in running.servers))
        for server in running.servers:
            for stream in list(idle_streams(server)):
                stream.end(shardwell.ShardUnavailableError("idle"))


@pytest.mark.parametrize("verb", ["exchange", "put_gradient", "get_weights"])
def test_stalled_before_the_call(model, proxy, verb) -> None:
    _stalls(model, proxy, verb, timeout_s=1.0)


def test_stalled_on_a_stream_that_was_used(model, proxy) -> None:
    model.exchange(_gradient(0))
    proxy.stall()
    watch = Stopwatch()
    with pytest.raises(shardwell.DeadlineError, match="shard 1"):
        model.exchange(_gradient(1), timeout_s=1.0)
    assert 0.95 < watch.elapsed_s < PATIENCE_S
    proxy.resume()
    np.testing.assert_array_equal(model.exchange(_gradient(1), timeout_s=PATIENCE_S), _after(2))


def _stalls(model: shardwell.Parameter, proxy: Proxy, verb: str, *, timeout_s: float) -> None:
    def call(within_s: float) -> None:
        if verb == "get_weights":
            model.get_weights(timeout_s=within_s)
        else:
            getattr(model, verb)(_gradient(0), timeout_s=within_s)

    proxy.stall()
    watch = Stopwatch()
    with pytest.raises(shardwell.DeadlineError, match="shard 1") as caught:
        call(timeout_s)
    assert timeout_s - 0.05 < watch.elapsed_s < PATIENCE_S
    assert type(caught.value) is shardwell.DeadlineError
    assert caught.value.shard_index == 1
    proxy.resume()
    call(15.0)
    if verb != "get_weights":
        np.testing.assert_array_equal(model.get_weights(min_version=1), _after(1))


def test_stalled_in_the_middle_and_going_on(model, proxy) -> None:
    """A wire that stalls for a moment costs time alone."""
    model.exchange(_gradient(0))
    proxy.stall()
    exchanging = in_background(lambda: model.exchange(_gradient(1)))
    with pytest.raises(TimeoutError):
        exchanging.result(0.3)
    proxy.resume()
    np.testing.assert_array_equal(exchanging.result(PATIENCE_S), _after(2))


MARK = np.full(4, 1.1754944e-38, np.float32).tobytes()  # in no header, and no chunk but one


def _marked(step: int) -> np.ndarray:
    gradient = _gradient(step)
    gradient[SIZE // 2 + 1000 : SIZE // 2 + 1004] = np.frombuffer(MARK, np.float32)
    return gradient


@pytest.mark.parametrize("verb", ["exchange", "put_gradient"])
def test_a_bit_that_flips_on_the_way_to_the_shard(model, proxy, verb) -> None:
    """Sent again without a word; a wire that keeps on damaging is an error."""
    proxy.corrupt_after(Direction.TO_SHARD, MARK, count=4)
    with pytest.raises(shardwell.CorruptChunkError, match="CRC32C") as caught:
        getattr(model, verb)(_marked(0))
    assert proxy.corrupted_count == 3
    assert (caught.value.shard_index, caught.value.retryable) == (1, True)
    assert model.next_step == 0
    getattr(model, verb)(_marked(0))
    assert proxy.corrupted_count == 4
    expected = -0.5 * _marked(0)
    np.testing.assert_array_equal(model.get_weights(min_version=1), expected)


@pytest.mark.parametrize("verb", ["exchange", "get_weights"])
def test_a_bit_that_flips_on_the_way_back(running, proxy, connect, verb) -> None:
    client = connect(f"{running.addresses[0]},{proxy.address}", "w0", same_host=False)
    optimizer = shardwell.Average()
    model = client.parameter("mean", size=SIZE, optimizer=optimizer, codec="fp32")
    if verb == "get_weights":
        model.put_gradient(_marked(0))
    proxy.corrupt_after(Direction.TO_CLIENT, MARK, count=4)
    call = model.get_weights if verb == "get_weights" else partial(model.exchange, _marked(0))
    with pytest.raises(shardwell.CorruptChunkError, match="CRC32C") as caught:
        call()
    assert (caught.value.shard_index, caught.value.parameter) == (1, "mean")
    assert proxy.corrupted_count == 3
    np.testing.assert_array_equal(call(), _marked(0))
    assert proxy.corrupted_count == 4
    assert (model.version, model.next_step) == (1, 1)


@pytest.mark.sampled(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("verb", ["exchange", "put_gradient", "get_weights"])
def test_damage_below_the_framing_of_grpc(model, proxy, verb) -> None:
    """Bits of the headers of HTTP/2's frames, in what a shard answers: a broken connection.

    Some break nothing but make both ends wait, until gRPC's keepalive finds out.
    """
    faults = [(place, bits) for place in (0, 3, 5, 8) for bits in (0x10, 0x40)]
    for step, (place, bits) in enumerate(faults):
        proxy.corrupt_at(Direction.TO_CLIENT, place, bits)
        if verb == "get_weights":
            call = partial(model.get_weights, timeout_s=HASTY_S)
        else:
            call = partial(getattr(model, verb), _gradient(step), timeout_s=HASTY_S)
        retryable = (shardwell.ShardUnavailableError, shardwell.DeadlineError)
        until_accepted(call, *retryable, timeout_s=60.0)
    assert proxy.corrupted_count == len(faults)
    expected = _after(0 if verb == "get_weights" else len(faults))
    np.testing.assert_array_equal(model.get_weights(), expected)


def test_cuts_at_random_while_two_workers_train(running, proxy, connect) -> None:
    """Neither notices; the result is that of an undisturbed run."""
    step_count = 12
    target = f"{running.addresses[0]},{proxy.address}"

    def train(index: int) -> np.ndarray:
        client = connect(target, f"w{index}")
        model = client.parameter("two", size=SIZE, optimizer=SGD, worker_count=2, codec="fp16")
        model.init(np.zeros(SIZE, np.float32))
        for step in range(step_count):
            weights = model.exchange(integer_gradient(index, step, SIZE))
        return weights

    training = [in_background(lambda i=i: train(i)) for i in (0, 1)]
    generator = np.random.default_rng(3)
    for _ in range(6):
        mark = proxy.passed_bytes[Direction.TO_SHARD] + int(generator.integers(20_000, 200_000))
        eventually(
            "bytes flow",
            lambda m=mark: (
                proxy.passed_bytes[Direction.TO_SHARD] > m or all(each.done() for each in training)
            ),
            timeout_s=PATIENCE_S,
        )
        proxy.cut()
    total = sum(integer_gradient(i, s, SIZE) for i in (0, 1) for s in range(step_count))
    for each in training:
        np.testing.assert_array_equal(each.result(PATIENCE_S), -0.25 * total)
