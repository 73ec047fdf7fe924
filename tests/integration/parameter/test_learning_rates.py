"""Goal: a learning rate that comes with a gradient is that of its step, on every shard and chunk.

Method: schedules that bring a rate with each step, beside those that set it by a call of its own;
the weights are the same bits. Small chunks on two shards.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together
from harness.wire_client.worker import WireWorker, error_detail, sgd, spec
from shardwell import GroupedRate, TensorGroup
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.v1 import types_pb2 as types
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


# Groups of tensors whose rates change apart, step by step, exactly once. Method: SGD and momentum
# by hand, in powers of two, against two workers on two shards with small chunks; a worker that
# writes the wire by itself, with a CRC of its own; a shard that is killed between two workers'
# gradients. One that loses power is in tests/fault/store/test_power_loss.py.


TENSORS = {"a": (50,), "b": (70,), "c": (30,)}
GROUPS = [TensorGroup("a", rate_group=1, learning_rate_factor=0.5), TensorGroup("b", rate_group=2)]
GROUPED_RATES = [
    GroupedRate(0.5, [1.0, 0.25]),
    GroupedRate(0.5, [1.0, 0.25]),
    GroupedRate(0.25, [0.0, 8.0]),
    0.125,
    GroupedRate(0.125, [2.0, 0.5]),
]
SGD = shardwell.SGD(learning_rate=1.0)
MOMENTUM = shardwell.SGD(learning_rate=1.0, momentum=0.5)
CLIPPED = shardwell.SGD(learning_rate=1.0, clip_norm=1e30)


def grouped_opened(client: shardwell.Client, **options: Any) -> Any:
    given = {"optimizer": SGD, "codec": "fp32", "worker_count": 2, **options}
    net = client.parameter("net", tensors=TENSORS, groups=GROUPS, **given)
    net.init({name: np.zeros(shape, np.float32) for name, shape in TENSORS.items()})
    return net


def gradient(step: int, rank: int = 0) -> dict[str, Any]:
    return {
        name: (np.arange(*shape) % 5 + step + rank).astype(np.float32)
        for name, shape in TENSORS.items()
    }


def expected(steps: int, momentum: float = 0.0, worker_count: int = 2) -> dict[str, Any]:
    weights = {name: np.zeros(shape) for name, shape in TENSORS.items()}
    moments = {name: np.zeros(shape) for name, shape in TENSORS.items()}
    for step, rate in zip(range(steps), GROUPED_RATES, strict=False):
        factors = getattr(rate, "factors", (1.0, 1.0))
        by_name = {"a": 0.5 * factors[0], "b": factors[1], "c": 1.0}
        for name in TENSORS:
            mean = sum(gradient(step, rank)[name] for rank in range(worker_count)) / worker_count
            moments[name] = momentum * moments[name] + mean
            weights[name] -= float(rate) * by_name[name] * moments[name]
    return weights


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values.astype(np.float32), err_msg=name)


def train(nets: list[Any], steps: range) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for step in steps:
        calls = [
            partial(net.exchange, gradient(step, rank), learning_rate=GROUPED_RATES[step])
            for rank, net in enumerate(nets)
        ]
        weights = together(calls)[0]
    return weights


@pytest.mark.parametrize(
    ("rule", "momentum"), [(SGD, 0.0), (MOMENTUM, 0.5), (CLIPPED, 0.0)], ids=str
)
def test_factors_are_those_of_each_step(cluster, connect, rule: Any, momentum: float) -> None:
    running = cluster(2, chunk_size_bytes=64)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    nets = [grouped_opened(client, optimizer=rule) for client in clients]
    assert_equal(train(nets, range(5)), expected(5, momentum))
    assert clients[0].status()[0].parameters[0].learning_rate == 0.125


def test_asynchronous_gradients_have_their_own(cluster, connect) -> None:
    net = grouped_opened(
        connect(cluster(2, chunk_size_bytes=64), "w0"), mode="async", worker_count=0
    )
    for step in range(5):
        weights = net.exchange(gradient(step), learning_rate=GROUPED_RATES[step])
    assert_equal(weights, expected(5, worker_count=1))


def test_a_rate_without_factors_ends_them(cluster, connect) -> None:
    net = grouped_opened(connect(cluster(1), "w0"), worker_count=1)
    ones = {name: np.ones(shape, np.float32) for name, shape in TENSORS.items()}
    first = net.exchange(ones, learning_rate=GROUPED_RATES[0])
    second = net.exchange(ones)  # as it is
    net.set_learning_rate(0.5)
    third = net.exchange(ones)
    for name, one, two, three in (("a", 0.25, 0.5, 0.75), ("b", 0.125, 0.25, 0.75)):
        assert [each[name][0] for each in (first, second, third)] == [-one, -two, -three]


@pytest.mark.parametrize(
    ("rate", "groups"),
    [(GroupedRate(0.1, [1.0]), GROUPS), (GroupedRate(0.1, [1.0, 1.0]), [])],
    ids=["one group", "no groups"],
)
def test_factors_for_other_groups_are_refused(cluster, connect, rate: Any, groups: Any) -> None:
    client = connect(cluster(1), "w0")
    net = client.parameter("net", tensors=TENSORS, groups=groups, optimizer=SGD)
    net.init(gradient(0))
    with pytest.raises(shardwell.ArgumentError, match=r"factors for \d groups, and .* has \d"):
        net.put_gradient(gradient(0), learning_rate=rate)
    assert net.next_step == 0


def test_workers_that_bring_other_factors(cluster, connect) -> None:
    running = cluster(1)
    first, second = (grouped_opened(connect(running, f"w{rank}")) for rank in range(2))
    first.put_gradient(gradient(0), learning_rate=GROUPED_RATES[0])
    for other in (GroupedRate(0.5, [1.0, 0.5]), 0.5):
        with pytest.raises(shardwell.StepOrderError, match=r"GroupedRate\(0.5, \[1.0, 0.25\]"):
            second.put_gradient(gradient(0, 1), learning_rate=other)
    second.put_gradient(gradient(0, 1), learning_rate=GROUPED_RATES[0])
    assert_equal(first.get_weights(min_version=1), expected(1))


def test_a_worker_of_the_wire(cluster) -> None:
    layout = types.TensorLayout(
        tensors=[
            types.Tensor(name="a", shape=[6], options=_options(rate_group=1)),
            types.Tensor(name="b", shape=[4], options=_options(rate_group=2)),
        ]
    )
    with WireWorker(cluster(1).target, "w0") as worker:
        net = worker.create(spec(size=10, layout=layout))
        net.init(np.zeros(10))
        messages = net.gradient_messages(pb.PutGradientRequest, 0, np.ones(10))
        for factors, rate, code in (
            ([1.0], 0.5, grpc.StatusCode.INVALID_ARGUMENT),
            ([1.0, float("nan")], 0.5, grpc.StatusCode.INVALID_ARGUMENT),
            ([1.0, 2.0], None, grpc.StatusCode.INVALID_ARGUMENT),
            ([1.0, 2.0], 0.5, None),
        ):
            for message in messages:
                message.gradient.rate_factors[:] = factors
                message.gradient.ClearField("learning_rate")
                if rate is not None:
                    message.gradient.learning_rate = rate
                net.seal(message)
            if code is None:
                assert worker.stubs[0].PutGradient(iter(messages)).counted_chunk_count
                continue
            with pytest.raises(grpc.RpcError) as refused:
                worker.stubs[0].PutGradient(iter(messages))
            assert refused.value.code() is code
            assert error_detail(refused.value).code == types.ERROR_CODE_INVALID_ARGUMENT
        messages[0].gradient.rate_factors[1] = 4.0  # under the CRC of what was there
        with pytest.raises(grpc.RpcError) as damaged:
            worker.stubs[0].PutGradient(iter(messages))
        assert damaged.value.code() is grpc.StatusCode.DATA_LOSS
        np.testing.assert_array_equal(net.pull(min_version=1), [-0.5] * 6 + [-1.0] * 4)


def _options(**fields: Any) -> types.TensorOptions:
    return types.TensorOptions(learning_rate_factor=1.0, **fields)


@pytest.mark.parametrize("rule", [MOMENTUM, CLIPPED], ids=str)
def test_a_shard_killed_between_two_gradients_goes_on_with_their_factors(
    cluster, connect, tmp_path: Path, rule: Any
) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True, chunk_size_bytes=64)
    nets = [grouped_opened(connect(running, f"w{rank}"), optimizer=rule) for rank in range(2)]
    train(nets, range(2))
    nets[0].put_gradient(gradient(2), learning_rate=GROUPED_RATES[2])
    for index in range(2):
        running.children[index].kill()
        running.start_again(index)
    nets[1].put_gradient(gradient(2, 1))  # it brings no rate: the step has one
    weights = nets[0].get_weights(min_version=3)
    assert_equal(weights, expected(3, rule.momentum))
    assert_equal(train(nets, range(3, 5)), expected(5, rule.momentum))
