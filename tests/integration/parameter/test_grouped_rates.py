"""Goal: groups of tensors whose rates change apart, step by step, exactly once.

Method: SGD and momentum by hand, in powers of two, against two workers on two shards with small
chunks; a worker that writes the wire by itself, with a CRC of its own; a shard that is killed
between two workers' gradients. One that loses power is in tests/fault/store/test_power_loss.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.threads import together
from harness.wire_client.worker import WireWorker, error_detail, spec
from shardwell import GroupedRate, TensorGroup
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2 as types

TENSORS = {"a": (50,), "b": (70,), "c": (30,)}
GROUPS = [TensorGroup("a", rate_group=1, learning_rate_factor=0.5), TensorGroup("b", rate_group=2)]
RATES = [
    GroupedRate(0.5, [1.0, 0.25]),
    GroupedRate(0.5, [1.0, 0.25]),
    GroupedRate(0.25, [0.0, 8.0]),
    0.125,
    GroupedRate(0.125, [2.0, 0.5]),
]
SGD = shardwell.SGD(learning_rate=1.0)
MOMENTUM = shardwell.SGD(learning_rate=1.0, momentum=0.5)
CLIPPED = shardwell.SGD(learning_rate=1.0, clip_norm=1e30)


def opened(client: shardwell.Client, **options: Any) -> Any:
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
    for step, rate in zip(range(steps), RATES, strict=False):
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
            partial(net.exchange, gradient(step, rank), learning_rate=RATES[step])
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
    nets = [opened(client, optimizer=rule) for client in clients]
    assert_equal(train(nets, range(5)), expected(5, momentum))
    assert clients[0].status()[0].parameters[0].learning_rate == 0.125


def test_asynchronous_gradients_have_their_own(cluster, connect) -> None:
    net = opened(connect(cluster(2, chunk_size_bytes=64), "w0"), mode="async", worker_count=0)
    for step in range(5):
        weights = net.exchange(gradient(step), learning_rate=RATES[step])
    assert_equal(weights, expected(5, worker_count=1))


def test_a_rate_without_factors_ends_them(cluster, connect) -> None:
    net = opened(connect(cluster(1), "w0"), worker_count=1)
    ones = {name: np.ones(shape, np.float32) for name, shape in TENSORS.items()}
    first = net.exchange(ones, learning_rate=RATES[0])
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
    first, second = (opened(connect(running, f"w{rank}")) for rank in range(2))
    first.put_gradient(gradient(0), learning_rate=RATES[0])
    for other in (GroupedRate(0.5, [1.0, 0.5]), 0.5):
        with pytest.raises(shardwell.StepOrderError, match=r"GroupedRate\(0.5, \[1.0, 0.25\]"):
            second.put_gradient(gradient(0, 1), learning_rate=other)
    second.put_gradient(gradient(0, 1), learning_rate=RATES[0])
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
    nets = [opened(connect(running, f"w{rank}"), optimizer=rule) for rank in range(2)]
    train(nets, range(2))
    nets[0].put_gradient(gradient(2), learning_rate=RATES[2])
    for index in range(2):
        running.children[index].kill()
        running.start_again(index)
    nets[1].put_gradient(gradient(2, 1))  # it brings no rate: the step has one
    weights = nets[0].get_weights(min_version=3)
    assert_equal(weights, expected(3, rule.momentum))
    assert_equal(train(nets, range(3, 5)), expected(5, rule.momentum))
