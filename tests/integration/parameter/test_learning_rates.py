"""Goal: a learning rate that comes with a gradient is that of its step, on every shard and chunk.

Method: schedules that bring a rate with each step, beside those that set it by a call of its own;
the weights are the same bits. Small chunks on two shards.
"""

from __future__ import annotations

import grpc
import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together
from harness.wire_client.worker import WireWorker, error_detail, sgd, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server import LocalCluster

SIZE = 157
RATES = [0.5, 0.5, 0.25, 0.0, 1.0, 0.125, 0.125]
ADAM = shardwell.Adam(learning_rate=0.5)
GRADIENTS = np.random.default_rng(3).standard_normal((2, len(RATES), SIZE)).astype(np.float32)


def opened(client: shardwell.Client, name: str = "model", **options) -> shardwell.Parameter:
    given = {"optimizer": ADAM, "codec": "fp32", **options}
    parameter = client.parameter(name, size=SIZE, **given)
    if not isinstance(given["optimizer"], shardwell.Average):
        parameter.init(np.ones(SIZE, np.float32))
    return parameter


def set_by_calls(client: shardwell.Client, gradients: np.ndarray) -> np.ndarray:
    """The weights at the end of the schedule, each rate set beforehand by one worker alone."""
    model = opened(client, "called")
    for rate, gradient in zip(RATES, gradients, strict=True):
        model.set_learning_rate(rate)
        weights = model.exchange(gradient)
    return weights


@pytest.mark.parametrize("late_brings", [0.125, None])
def test_a_worker_that_is_ahead_brings_the_next_rate_before_this_one(
    cluster, connect, late_brings
) -> None:
    """A rate is from a step on: the later step keeps its own all the same."""
    running = cluster(1)
    ahead, late = (opened(connect(running, f"w{rank}"), worker_count=2) for rank in range(2))
    ahead.put_gradient(GRADIENTS[0, 0])
    waits = in_background(lambda: ahead.put_gradient(GRADIENTS[0, 1], learning_rate=0.125))
    register = running.servers[0].shard.parameters.get("model")._register
    eventually("its rate is there", lambda: 1 in register._brought)
    late.put_gradient(GRADIENTS[0, 0], learning_rate=1.0)
    late.put_gradient(GRADIENTS[0, 1], learning_rate=late_brings)
    assert waits.result(PATIENCE_S) == 1
    alone = opened(connect(running, "alone"), "alone")
    for gradient, rate in zip(GRADIENTS[0], (1.0, 0.125), strict=False):
        expected = alone.exchange(gradient, learning_rate=rate)
    np.testing.assert_array_equal(late.get_weights(min_version=2), expected)


@pytest.mark.parametrize("verb", ["exchange", "put_gradient"])
def test_a_schedule_that_comes_with_the_gradients(cluster, connect, verb) -> None:
    running = cluster(2, chunk_size_bytes=64)

    def work(index: int) -> np.ndarray:
        model = opened(connect(running, f"w{index}"), worker_count=2)
        for step, rate in enumerate(RATES):
            brings = None if step == 1 or (index and step == 4) else rate  # some say nothing
            getattr(model, verb)(GRADIENTS[0, step], learning_rate=brings)
        return model.get_weights(min_version=len(RATES))

    results = together([lambda: work(0), lambda: work(1)])
    client = connect(running, "alone")
    expected = set_by_calls(client, GRADIENTS[0])
    for weights in results:
        np.testing.assert_array_equal(weights, expected)
    for shard in client.status():
        rates = {entry.spec.name: entry.learning_rate for entry in shard.parameters}
        assert rates == {"model": RATES[-1], "called": RATES[-1]}


def test_a_rate_that_was_wrong_is_decided_by_a_call(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    one, other = (opened(connect(running, f"w{i}"), worker_count=2) for i in range(2))
    ones = np.ones(SIZE, np.float32)
    one.put_gradient(ones, learning_rate=7.0)
    with pytest.raises(shardwell.StepOrderError, match="or decide with set_learning_rate"):
        other.put_gradient(ones, learning_rate=0.5)
    other.set_learning_rate(0.5)
    other.put_gradient(ones, learning_rate=0.5)
    expected = opened(connect(running, "alone"), "expected")
    found = expected.exchange(ones, learning_rate=0.5)
    np.testing.assert_array_equal(one.get_weights(min_version=1), found)


def test_workers_that_bring_different_rates_get_an_error(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    one, other = (opened(connect(running, f"w{i}"), worker_count=2) for i in range(2))
    ones = np.ones(SIZE, np.float32)
    for step, (rate, another) in enumerate([(0.5, 0.75), (0.25, 0.5)]):
        one.put_gradient(ones, learning_rate=rate)
        words = (
            rf"step {step} of parameter 'model' has learning rate {rate}, which 'w0' has brought; "
            rf"the gradient of 'w1' brings {another}"
        )
        for verb in (other.exchange, other.put_gradient):
            with pytest.raises(shardwell.StepOrderError, match=words):
                verb(ones, learning_rate=another)
        other.put_gradient(ones, learning_rate=rate)
    assert (one.next_step, other.next_step) == (2, 2)
    expected = opened(connect(running, "alone"), "expected")
    expected.exchange(ones)
    expected.set_learning_rate(0.25)
    np.testing.assert_array_equal(one.get_weights(min_version=2), expected.exchange(ones))


def test_a_worker_that_is_ahead_hides_no_disagreement(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    one, other = (opened(connect(running, f"w{i}"), worker_count=2) for i in range(2))
    ones = np.ones(SIZE, np.float32)
    one.put_gradient(ones, learning_rate=0.5)
    with pytest.raises(shardwell.WorkersMissingError):  # its next step has been brought, too
        one.put_gradient(ones, learning_rate=0.25, timeout_s=1.0)
    with pytest.raises(shardwell.StepOrderError, match=r"step 0 .* rate 0.5, .*; .* brings 0.75"):
        other.put_gradient(ones, learning_rate=0.75)
    other.put_gradient(ones, learning_rate=0.5)
    one.put_gradient(ones, learning_rate=0.25)
    other.put_gradient(ones)
    expected = opened(connect(running, "alone"), "expected")
    for rate in (0.5, 0.25):
        weights = expected.exchange(ones, learning_rate=rate)
    np.testing.assert_array_equal(one.get_weights(min_version=2), weights)


def test_what_a_gradient_brings_overrules_a_call(cluster, connect) -> None:
    model = opened(connect(cluster(2), "w0"))
    ones = np.ones(SIZE, np.float32)
    model.exchange(ones)
    model.set_learning_rate(0.125)
    weights = model.exchange(ones, learning_rate=0.0)
    np.testing.assert_array_equal(model.exchange(ones, learning_rate=0.0), weights)


def test_a_schedule_goes_on_from_a_checkpoint(cluster, connect, tmp_path) -> None:
    client, ones = connect(cluster(2), "w0"), np.ones(SIZE, np.float32)
    model = opened(client)
    for rate in (0.5, 0.25):
        model.exchange(ones, learning_rate=rate)
    client.save_checkpoint(tmp_path / "ckpt")
    expected = model.exchange(ones, learning_rate=0.125)
    again = connect(cluster(3), "w0")
    again.restore_checkpoint(tmp_path / "ckpt")
    found = opened(again).exchange(ones, learning_rate=0.125)
    np.testing.assert_array_equal(found, expected)


def test_asynchronous_gradients_have_a_rate_each(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    sgd = shardwell.SGD(learning_rate=4.0)
    models = [
        opened(connect(running, f"w{i}"), optimizer=sgd, mode="async", codec="fp32")
        for i in range(2)
    ]
    ones = np.ones(SIZE, np.float32)
    models[0].exchange(ones, learning_rate=0.5)
    models[1].exchange(ones, learning_rate=0.25)
    assert models[0].exchange(ones).tolist() == [1 - 0.5 - 0.25 - 4.0] * SIZE


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "0.1", True])
def test_rates_that_are_none(cluster, connect, rate) -> None:
    client = connect(cluster(2), "w0")
    model, ones = opened(client), np.ones(SIZE, np.float32)
    average = opened(client, "average", optimizer=shardwell.Average())
    sent_bytes = client.traffic.sent_bytes
    for verb in (model.exchange, model.put_gradient):
        with pytest.raises(shardwell.ArgumentError, match="learning_rate must be a finite number"):
            verb(ones, learning_rate=rate)
    with pytest.raises(shardwell.ArgumentError, match=r"Average\(.*\) has no learning rate"):
        average.exchange(ones, learning_rate=0.5)
    assert client.traffic.sent_bytes == sent_bytes


def test_the_shard_checks_them_too(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as worker:
        for optimizer, words in (
            (sgd(1.0), "must be a finite number"),
            (types_pb2.Optimizer(average=types_pb2.Average()), "has no learning rate"),
        ):
            name = optimizer.WhichOneof("rule")
            parameter = worker.create(spec(name, 4, optimizer=optimizer))
            if name == "sgd":
                parameter.init(np.zeros(4))
            (message,) = parameter.gradient_messages(pb.PutGradientRequest, 0, np.ones(4))
            message.gradient.learning_rate = -1.0
            parameter.seal(message)
            with pytest.raises(grpc.RpcError, match=words) as caught:
                worker.stubs[0].PutGradient(iter([message]), timeout=10)
            assert error_detail(caught.value).code == types_pb2.ERROR_CODE_INVALID_ARGUMENT


@pytest.mark.parametrize("durability", ["process", "step"])
def test_a_shard_that_is_killed_within_the_step_has_its_rate_still(tmp_path, durability) -> None:
    ones = np.ones(SIZE, np.float32)
    with (
        LocalCluster(2, tmp_path, processes=True, durability=durability) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as first,
        shardwell.connect(cluster.target, worker_id="w1") as second,
    ):
        one, other = opened(first, worker_count=2), opened(second, worker_count=2)
        one.put_gradient(ones, learning_rate=0.125)
        cluster.children[1].kill()
        cluster.start_again(1)
        weights = other.exchange(ones)  # which brings none
        alone = opened(first, "alone")
        alone.set_learning_rate(0.125)
        np.testing.assert_array_equal(weights, alone.exchange(ones))
