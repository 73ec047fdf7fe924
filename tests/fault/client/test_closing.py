"""client.close() while another thread is in a call: the call ends, with an error, and soon."""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Proxy
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together

SGD = shardwell.SGD(learning_rate=0.5)
SIZE = 300
VERBS = ["first exchange", "exchange", "get_weights", "get_weights_async", "put_gradient", "init"]


@pytest.mark.parametrize("shard_count", [1, 2])
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_that_waits_for_another_worker(cluster, connect, verb, shard_count) -> None:
    running = cluster(shard_count, chunk_size_bytes=64)
    observer = connect(running, "observer")
    other = connect(running, "other").parameter("m", size=SIZE, optimizer=SGD, worker_count=2)
    client = shardwell.connect(running.target, worker_id="w0", timeout_s=60)
    model = client.parameter("m", size=SIZE, optimizer=SGD, worker_count=2)
    gradient = np.ones(SIZE, np.float32)
    if verb == "init":
        from harness.wire_client.worker import WireWorker
        from shardwell.v1 import parameter_server_pb2 as pb

        with WireWorker(running.target, "claims") as worker:
            request = pb.ClaimInitRequest(
                shard=worker.identities[0], parameter="m", worker_id="claims"
            )
            assert worker.stubs[0].ClaimInit(request, timeout=PATIENCE_S).granted
        waiting = in_background(lambda: model.init(gradient))
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
    else:
        model.init(np.zeros(SIZE, np.float32))
        if verb == "exchange":
            together([lambda: model.exchange(gradient), lambda: other.exchange(gradient)])
        if verb == "put_gradient":
            model.put_gradient(gradient)
        calls = {
            "first exchange": lambda: model.exchange(gradient),
            "exchange": lambda: model.exchange(gradient),
            "get_weights": lambda: model.get_weights(min_version=5),
            "get_weights_async": lambda: model.get_weights_async(min_version=5).result(PATIENCE_S),
            "put_gradient": lambda: model.put_gradient(gradient),
        }
        busy = 2 if verb == "exchange" else 1  # `other` keeps its stream
        waiting = in_background(calls[verb])
        eventually(
            "it waits at every shard",
            lambda: all(s.open_stream_count >= busy for s in observer.status()),
        )
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
    client.close()
    error = waiting.exception(10)
    assert isinstance(error, shardwell.ClosedError), repr(error)
    idle = 1 if verb == "exchange" else 0
    eventually(
        "the shards let go",
        lambda: all(s.open_stream_count <= idle for s in observer.status()),
    )


@pytest.mark.parametrize("verb", ["exchange", "get_weights", "put_gradient"])
def test_a_call_on_a_stalled_wire(cluster, verb) -> None:
    running = cluster(1)
    with Proxy(running.target) as proxy:
        client = shardwell.connect(proxy.address, worker_id="w0", timeout_s=60, same_host=False)
        model = client.parameter("m", size=SIZE, optimizer=SGD)
        model.init(np.zeros(SIZE, np.float32))
        proxy.stall()
        gradient = np.ones(SIZE, np.float32)
        calls = {
            "exchange": lambda: model.exchange(gradient),
            "get_weights": model.get_weights,
            "put_gradient": lambda: model.put_gradient(gradient),
        }
        waiting = in_background(calls[verb])
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        client.close()
        assert isinstance(waiting.exception(10), shardwell.ShardwellError)


def test_close_races_with_steps(cluster) -> None:
    """At no particular instant: every outcome is a result or an error of ours."""
    running = cluster(2, chunk_size_bytes=64)
    for round_ in range(12):
        client = shardwell.connect(running.target, worker_id=f"w{round_}", timeout_s=PATIENCE_S)
        model = client.parameter(f"m{round_}", size=SIZE, optimizer=SGD)
        model.init(np.zeros(SIZE, np.float32))

        def train(model: shardwell.Parameter = model) -> None:
            while True:
                model.exchange(np.ones(SIZE, np.float32))
                model.put_gradient(np.ones(SIZE, np.float32))

        training = in_background(train)
        eventually("it trains", lambda m=model, n=round_: m.next_step > n)
        client.close()
        assert isinstance(training.exception(10), shardwell.ShardwellError), training
