"""Every limit of a shard that can be reached: the error names it, and the shard goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

import shardwell
from harness.inside import endpoint_of, idle_sets
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually, until_accepted
from harness.tokens import bearing
from harness.wire_client.worker import WireWorker, error_detail, sgd, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server import Limits, LocalCluster

SGD = shardwell.SGD(learning_rate=0.5)


def test_parameter_count_max(cluster, connect) -> None:
    client = connect(cluster(limits=Limits(parameter_count_max=2)), "w0")
    for name in ("one", "two"):
        client.parameter(name, size=10, optimizer=SGD)
    with pytest.raises(
        shardwell.LimitError, match=r"parameter_count_max=2.*'three'.*tensors="
    ) as caught:
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
def test_stored_bytes_have_a_limit(cluster, connect, optimizer, worker_count, arrays) -> None:
    limit = 4 * 100 * arrays
    client = connect(cluster(1, limits=Limits(stored_bytes_max=limit)), "w0")
    fits = {"optimizer": optimizer, "worker_count": worker_count}
    with pytest.raises(shardwell.LimitError, match=f"stored_bytes_max={limit}"):
        client.parameter("large", size=101, **fits)
    client.parameter("fits", size=100, **fits)
    assert client.status()[0].stored_bytes == limit
    with pytest.raises(shardwell.LimitError, match=f"stored_bytes_max={limit}.*{limit} in use"):
        client.parameter("more", size=1, **fits)


@pytest.mark.parametrize("optimizer", [SGD, shardwell.Average()], ids=["sgd", "average"])
def test_stored_bytes_max_counts_images_and_what_changed_them(tmp_path, connect, optimizer) -> None:
    """Also after a restart."""
    size, blocks = 5000, 2
    limit = 4 * size * 3 + 3 * (size + 4 * blocks)  # weights, sums, image; three changes
    fits = {"size": size, "optimizer": optimizer, "worker_count": 2, "codec": "int8"}
    for has_it in (False, True):
        with LocalCluster(1, tmp_path, limits=Limits(stored_bytes_max=limit)) as running:
            client = connect(running, "w0")
            if not has_it:
                with pytest.raises(shardwell.LimitError, match=f"{limit + 15} bytes here"):
                    client.parameter("large", **{**fits, "size": size + 1})
                assert not client.status()[0].parameters
            client.parameter("fits", **fits)
            assert client.status()[0].stored_bytes == limit
            with pytest.raises(shardwell.LimitError, match=f"stored_bytes_max={limit}.*in use"):
                client.parameter("more", **{**fits, "size": 1})
            client.close()
    with LocalCluster(1, tmp_path) as running, shardwell.connect(running.target) as client:
        assert client.delete("fits") == limit
        assert client.status()[0].stored_bytes == 0


def test_workers_have_a_limit(cluster, connect) -> None:
    running = cluster(1, limits=Limits(worker_count_max=2))
    models = {
        name: connect(running, name).parameter("model", size=10, optimizer=SGD, mode="async")
        for name in ("reader", "w0", "w1", "w2")
    }
    models["reader"].init(np.zeros(10, np.float32))
    for name in ("w0", "w1"):
        models[name].put_gradient(np.ones(10, np.float32))
    with pytest.raises(shardwell.LimitError, match=r"worker_count_max=2.*'w2'") as caught:
        models["w2"].put_gradient(np.ones(10, np.float32))
    assert caught.value.worker_id == "w2"
    np.testing.assert_array_equal(models["w0"].exchange(np.ones(10, np.float32)), -1.5)
    for name in ("reader", "w2"):
        np.testing.assert_array_equal(models[name].get_weights(), -1.5)


def test_streams_have_a_limit(cluster, connect) -> None:
    """Streams at work are never ended: one more is refused, and comes in when one is free."""
    client = connect(cluster(1, limits=Limits(stream_count_max=2)), "w0")
    model = client.parameter("model", size=10, optimizer=SGD, worker_count=2)
    model.init(np.zeros(10, np.float32))
    waiting = [model.get_weights_async(min_version=1) for _ in range(2)]
    eventually("both wait", lambda: client.status()[0].open_stream_count == 2)
    gradient = np.ones(10, np.float32)
    for call in (
        lambda: model.exchange(gradient),
        lambda: model.put_gradient(gradient),
        lambda: model.get_weights(),
    ):
        with pytest.raises(shardwell.LimitError, match="stream_count_max=2"):
            call()
    assert not any(future.done() for future in waiting)
    model.close()
    again = client.parameter("model", size=10, optimizer=SGD, worker_count=2)
    np.testing.assert_array_equal(until_accepted(again.get_weights, shardwell.LimitError), 0)


def test_a_model_of_many_parameters_has_one_stream(cluster, connect) -> None:
    running = cluster(2, limits=Limits(stream_count_max=2))
    gradient = np.ones(10, np.float32)
    for name in ("w0", "w1"):
        client = connect(running, name)
        for number in range(40):
            layer = client.parameter(f"layer{number}", size=10, optimizer=SGD, mode="async")
            layer.init(np.zeros(10, np.float32))
            layer.exchange(gradient)
    assert [status.open_stream_count for status in client.status()] == [2, 2]
    np.testing.assert_array_equal(layer.get_weights(), -1)


def test_idle_streams_give_way(cluster, connect) -> None:
    """More workers than streams, each of which keeps one: no worker is refused."""
    running = cluster(1, limits=Limits(stream_count_max=3))
    models = [
        connect(running, f"w{n}").parameter("model", size=10, optimizer=SGD, mode="async")
        for n in range(6)
    ]
    models[0].init(np.zeros(10, np.float32))
    gradient = np.ones(10, np.float32)
    for _ in range(3):
        for model in models:
            model.exchange(gradient)
    np.testing.assert_array_equal(models[0].get_weights(), -9)
    assert endpoint_of(running.servers[0]).streams.count <= 3


def test_silent_streams_keep_no_client_out(cluster, connect) -> None:
    """Of every kind that a client sends messages on, opened and never used."""
    running = cluster(1, limits=Limits(stream_count_max=8))
    ended = threading.Event()

    def silence() -> Iterator[bytes]:
        ended.wait(60)
        yield from ()

    with bearing(grpc.insecure_channel(running.target)) as channel:
        calls = [
            channel.stream_stream(f"/shardwell.v1.{method}")(silence())
            for method in (
                "ParameterServerService/Exchange",
                "ParameterServerService/PutGradient",
                "ParameterServerService/InitWeights",
                "TableService/ExchangeRows",
                "TableService/LoadRows",
            )
            * 4
        ]
        client = connect(running, "w0")
        eventually("all are taken", lambda: client.status()[0].open_stream_count == 8)
        model = client.parameter("model", size=10, optimizer=SGD)
        model.init(np.zeros(10, np.float32))
        np.testing.assert_array_equal(model.exchange(np.ones(10, np.float32)), -0.5)
        ended.set()
        for call in calls:
            call.cancel()


def test_status_answers_when_all_streams_are_taken(cluster, connect) -> None:
    running = cluster(1, limits=Limits(stream_count_max=3))
    client = connect(running, "w0")
    model = client.parameter("model", size=10, optimizer=SGD, worker_count=2)
    model.init(np.zeros(10, np.float32))
    futures = [
        connect(running, f"r{n}")
        .parameter("model", size=10, optimizer=SGD, worker_count=2)
        .get_weights_async(min_version=1, timeout_s=2 * BRIEF_S)
        for n in range(3)
    ]
    eventually("all streams are taken", lambda: client.status()[0].open_stream_count == 3)
    for future in futures:
        with pytest.raises(shardwell.WorkersMissingError):
            future.result(PATIENCE_S)
    eventually("all streams are free", lambda: client.status()[0].open_stream_count == 0)


def test_wait_max_s_bounds_what_is_asked_for(cluster, connect) -> None:
    running = cluster(1, limits=Limits(wait_max_s=0.5))
    model = connect(running, "w0").parameter("model", size=10, optimizer=SGD, worker_count=2)
    model.init(np.zeros(10, np.float32))
    watch = Stopwatch()
    with pytest.raises(shardwell.WorkersMissingError, match=r"0\.5 s"):
        model.exchange(np.zeros(10, np.float32), timeout_s=PATIENCE_S)
    assert watch.elapsed_s < PATIENCE_S


def test_changes_of_a_rate_have_a_limit(cluster) -> None:
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
            worker.stubs[0].SetLearningRate(request, timeout=PATIENCE_S)

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
    """Just over 1 MiB + 5 KiB; the shard goes on."""
    running = cluster(1)
    model = connect(running, "w0").parameter("model", size=10, optimizer=SGD, codec="fp32")
    model.init(np.zeros(10, np.float32))
    path = f"/shardwell.v1.ParameterServerService/{method}"
    message = bytes(2**20 + 5121)
    with bearing(grpc.insecure_channel(running.target)) as channel:
        calls = {
            "Exchange": lambda: list(
                channel.stream_stream(path)(iter([message]), timeout=PATIENCE_S)
            ),
            "CreateParameter": lambda: channel.unary_unary(path)(message, timeout=PATIENCE_S),
        }
        call = calls.get(
            method, lambda: channel.stream_unary(path)(iter([message]), timeout=PATIENCE_S)
        )
        caught = _refusal(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    np.testing.assert_array_equal(model.exchange(np.ones(10, np.float32)), -0.5)


def _refusal(call: Callable[[], object]) -> pytest.ExceptionInfo[grpc.RpcError]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught


def test_a_message_at_the_size_limit_is_read(cluster) -> None:
    """1 MiB of values and their scales are the most that the .proto allows; they have to pass."""
    running = cluster(1, chunk_size_bytes=2**20)
    with WireWorker(running.target, "w0") as worker:
        size = 2**19
        parameter = worker.create(spec("m", size, codec=types_pb2.CODEC_FP16))
        parameter.init(np.zeros(size))
        np.testing.assert_array_equal(parameter.exchange(np.ones(size)), -1)


@pytest.mark.parametrize("name", sorted(Limits.__dataclass_fields__))
@pytest.mark.parametrize("value", [0, -1, True, "1", None])
def test_impossible_limits_are_refused(name, value) -> None:
    with pytest.raises(shardwell.ArgumentError, match=name):
        Limits(**{name: value})


def test_who_only_reads_keeps_no_stream(cluster, connect) -> None:
    """Its place is another's as soon as it has its weights; a worker's own fetches take no more."""
    running = cluster(1)
    trainer, reader = connect(running, "w0"), connect(running, "reader")
    net = trainer.parameter("net", size=10, optimizer=shardwell.SGD(1.0))
    net.init(np.zeros(10, np.float32))
    net.exchange(np.ones(10, np.float32))
    streams = endpoint_of(running.servers[0]).streams
    for _ in range(3):
        assert reader.parameter("net").get_weights()[0] == -1
        assert net.get_weights()[0] == -1
    eventually("the trainer's alone is open", lambda: streams.count == 1)
    assert not idle_sets(reader)
    assert len(idle_sets(trainer)) == 1
