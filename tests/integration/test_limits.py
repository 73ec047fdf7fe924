"""Every limit of a shard that can be reached: the error names it, and the shard goes on."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import numpy as np
import pytest

import shardwell
from harness.polling import Stopwatch, eventually, until_accepted
from harness.wire_worker import WireWorker, error_detail, sgd, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server import Limits

pytestmark = pytest.mark.timeout(30)

SGD = shardwell.SGD(learning_rate=0.5)


def test_parameter_count_max(cluster, connect) -> None:
    client = connect(cluster(limits=Limits(parameter_count_max=2)), "w0")
    for name in ("one", "two"):
        client.parameter(name, size=10, optimizer=SGD)
    with pytest.raises(shardwell.LimitError, match=r"parameter_count_max=2.*'three'") as caught:
        client.parameter("three", size=10, optimizer=SGD)
    assert caught.value.parameter == "three"
    client.parameter("one", size=10, optimizer=SGD)


@pytest.mark.parametrize(
    ("optimizer", "worker_count", "arrays"),
    [
        (SGD, 1, 1),
        (SGD, 2, 2),
        (shardwell.SGD(learning_rate=1, momentum=0.5), 2, 3),
        (shardwell.Adam(), 1, 3),
    ],
)
def test_stored_bytes_max(cluster, connect, optimizer, worker_count, arrays) -> None:
    limit = 4 * 100 * arrays
    running = cluster(1, limits=Limits(stored_bytes_max=limit))
    client = connect(running, "w0")
    fits = {"optimizer": optimizer, "worker_count": worker_count}
    with pytest.raises(shardwell.LimitError, match=f"stored_bytes_max={limit}"):
        client.parameter("large", size=101, **fits)
    client.parameter("fits", size=100, **fits)
    assert client.status()[0].stored_bytes == limit
    with pytest.raises(shardwell.LimitError, match=f"stored_bytes_max={limit}.*{limit} in use"):
        client.parameter("more", size=1, **fits)


def test_worker_count_max(cluster, connect) -> None:
    running = cluster(1, limits=Limits(worker_count_max=2))
    for name in ("w0", "w1", "w0"):
        model = connect(running, name).parameter("model", size=10, optimizer=SGD, mode="async")
    with pytest.raises(shardwell.LimitError, match=r"worker_count_max=2.*'w2'") as caught:
        connect(running, "w2").parameter("model", size=10, optimizer=SGD, mode="async")
    assert caught.value.worker_id == "w2"
    model.init(np.zeros(10, np.float32))
    np.testing.assert_array_equal(model.exchange(np.ones(10, np.float32)), -0.5)


def test_stream_count_max(cluster, connect) -> None:
    running = cluster(1, limits=Limits(stream_count_max=2))
    client = connect(running, "w0")
    models = [client.parameter(f"m{n}", size=10, optimizer=SGD) for n in range(3)]
    gradient = np.ones(10, np.float32)
    for model in models:
        model.init(np.zeros(10, np.float32))
    for model in models[:2]:
        model.exchange(gradient)  # each keeps its stream
    for call in (
        lambda: models[2].exchange(gradient),
        lambda: models[2].put_gradient(gradient),
        lambda: models[2].get_weights(),
    ):
        with pytest.raises(shardwell.LimitError, match="stream_count_max=2"):
            call()
    assert client.status()[0].open_stream_count == 2
    models[0].close()
    until_accepted(lambda: models[2].exchange(gradient), shardwell.LimitError)
    np.testing.assert_array_equal(models[1].exchange(gradient), -1)


def test_status_answers_when_all_streams_are_taken(cluster, connect) -> None:
    running = cluster(1, limits=Limits(stream_count_max=3))
    client = connect(running, "w0")
    model = client.parameter("model", size=10, optimizer=SGD, worker_count=2)
    model.init(np.zeros(10, np.float32))
    futures = [
        connect(running, f"r{n}")
        .parameter("model", size=10, optimizer=SGD, worker_count=2)
        .get_weights_async(min_version=1, timeout_s=1.0)
        for n in range(3)
    ]
    eventually("all streams are taken", lambda: client.status()[0].open_stream_count == 3)
    for future in futures:
        with pytest.raises(shardwell.WorkersMissingError):
            future.result(10)
    eventually("all streams are free", lambda: client.status()[0].open_stream_count == 0)


def test_wait_max_s_bounds_what_is_asked_for(cluster, connect) -> None:
    running = cluster(1, limits=Limits(wait_max_s=0.5))
    model = connect(running, "w0").parameter("model", size=10, optimizer=SGD, worker_count=2)
    model.init(np.zeros(10, np.float32))
    watch = Stopwatch()
    with pytest.raises(shardwell.WorkersMissingError, match=r"0\.5 s"):
        model.exchange(np.zeros(10, np.float32), timeout_s=20)
    assert watch.elapsed_s < 6


def test_learning_rate_change_count_max(cluster) -> None:
    running = cluster(1, limits=Limits(learning_rate_change_count_max=3))
    with WireWorker(running.target, "w0") as worker:
        parameter = worker.create(spec("model", 10, optimizer=sgd(1.0)))
        parameter.init(np.zeros(10))

        def change(from_step: int) -> None:
            request = pb.SetLearningRateRequest(
                shard=worker.identities[0],
                parameter="model",
                learning_rate=0.5,
                from_step=from_step,
            )
            worker.stubs[0].SetLearningRate(request, timeout=5)

        def change_often() -> None:
            for from_step in range(10, 20):
                change(from_step)

        with pytest.raises(grpc.RpcError, match="learning_rate_change_count_max=3") as caught:
            change_often()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_detail(caught.value).code == types_pb2.ERROR_CODE_LIMIT_EXCEEDED
        np.testing.assert_array_equal(parameter.exchange(np.ones(10)), -1)


def test_encoded_chunk_count_max_of_one(cluster, connect) -> None:
    """The smallest cache: workers that lag behind each other get the same weights."""
    running = cluster(2, limits=Limits(encoded_chunk_count_max=1), chunk_size_bytes=64)
    one = connect(running, "one").parameter("model", size=500, optimizer=SGD)
    two = connect(running, "two").parameter("model", size=500, optimizer=SGD)
    one.init(np.arange(500, dtype=np.float32))
    np.testing.assert_array_equal(one.get_weights(), two.get_weights())
    np.testing.assert_array_equal(one.exchange(np.ones(500, np.float32)), two.get_weights())


@pytest.mark.parametrize("method", ["PutGradient", "Exchange", "InitWeights", "CreateParameter"])
def test_a_message_over_the_size_limit_is_an_error(cluster, connect, method) -> None:
    """Just over 1 MiB + 1 KiB; the shard goes on."""
    running = cluster(1)
    model = connect(running, "w0").parameter("model", size=10, optimizer=SGD, codec="fp32")
    model.init(np.zeros(10, np.float32))
    path = f"/shardwell.v1.ParameterServerService/{method}"
    message = bytes(2**20 + 1025)
    with grpc.insecure_channel(running.target) as channel:
        calls = {
            "Exchange": lambda: list(channel.stream_stream(path)(iter([message]), timeout=10)),
            "CreateParameter": lambda: channel.unary_unary(path)(message, timeout=10),
        }
        call = calls.get(method, lambda: channel.stream_unary(path)(iter([message]), timeout=10))
        caught = _refusal(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    np.testing.assert_array_equal(model.exchange(np.ones(10, np.float32)), -0.5)


def _refusal(call: Callable[[], object]) -> pytest.ExceptionInfo[grpc.RpcError]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught


def test_a_message_at_the_size_limit_is_read(cluster) -> None:
    """1 MiB of payload is the most that the .proto allows; it has to pass."""
    running = cluster(1, chunk_size_bytes=2**20)
    with WireWorker(running.target, "w0") as worker:
        size = 2**18
        parameter = worker.create(spec("m", size))
        parameter.init(np.zeros(size))
        np.testing.assert_array_equal(parameter.exchange(np.ones(size)), -1)


@pytest.mark.parametrize("name", sorted(Limits.__dataclass_fields__))
@pytest.mark.parametrize("value", [0, -1, True, "1", None])
def test_limits_that_are_none(name, value) -> None:
    with pytest.raises(shardwell.ArgumentError, match=name):
        Limits(**{name: value})
