"""A shard that is asked to stop finishes what it has begun; calls that wait for others fail."""

from __future__ import annotations

import asyncio
import queue
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
import shardwell_server.server
from harness.inside import endpoint_of
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.programs.commands import ServingShard
from harness.threads import in_background
from harness.wire_client.refusing import wait_until_refusing
from harness.wire_client.worker import WireWorker, error_detail, spec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2 as types
from shardwell_server.config import ShardConfig
from shardwell_server.server import ShardServer

SGD = shardwell.SGD(learning_rate=1.0)
SIZE = 100


def _fed(messages: queue.SimpleQueue[Any]) -> Iterator[Any]:
    while (message := messages.get()) is not None:
        yield message


def test_an_idle_shard_stops_at_once(cluster, connect) -> None:
    """Streams that are kept between steps do not hold it up."""
    running = cluster(2, grace_s=20.0)
    model = connect(running, "w0").parameter("m", size=SIZE, optimizer=SGD)
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(np.ones(SIZE, np.float32))
    watch = Stopwatch()
    running.close()
    assert watch.elapsed_s < PATIENCE_S
    with pytest.raises(shardwell.ShardUnavailableError):
        model.exchange(np.ones(SIZE, np.float32), timeout_s=0.3)


def test_grpc_that_does_not_end_is_left_to_itself(monkeypatch) -> None:
    """As where the system had no thread for it: what was counted is kept, and the stop ends."""
    server = ShardServer(ShardConfig(shard_index=0, shard_count=1, grace_s=0.1))
    server.start()
    end = endpoint_of(server).server.stop
    monkeypatch.setattr(endpoint_of(server).server, "stop", lambda grace_s: asyncio.Event().wait())
    monkeypatch.setattr(shardwell_server.server, "_ABANDON_S", 0.2)
    watch = Stopwatch()
    server.stop()
    server.stop()
    assert watch.elapsed_s < PATIENCE_S
    assert server.shard.is_stopping()
    server._loop.run(end(None))
    server._loop.close()


@pytest.mark.parametrize("method", ["Exchange", "PutGradient"])
def test_a_stream_in_flight_finishes_within_the_grace(cluster, method) -> None:
    """A gradient that is half sent when the shard is asked to stop is taken to its end."""
    running = cluster(1, chunk_size_bytes=64, grace_s=4 * BRIEF_S)
    with WireWorker(running.target, "w0") as worker:
        parameter = worker.create(spec("m", SIZE))
        parameter.init(np.zeros(SIZE))
        kind = getattr(pb, f"{method}Request")
        messages = parameter.gradient_messages(kind, 0, np.ones(SIZE))
        outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            outgoing.put(messages[0])
            call = getattr(worker.stubs[0], method)
            if method == "Exchange":
                answers = call(_fed(outgoing), timeout=PATIENCE_S)
                assert next(answers).version == 1
            else:
                future = call.future(_fed(outgoing), timeout=PATIENCE_S)
                status = worker.stubs[0].GetStatus
                eventually(
                    "the first chunk is counted",
                    lambda: status(pb.GetStatusRequest()).parameters[0].counted_chunk_count,
                )
            stopping = in_background(running.close)
            wait_until_refusing(running.target)
            for message in messages[1:]:
                outgoing.put(message)
            if method == "Exchange":
                rest = [next(answers).version for _ in messages[1:]]
                assert rest == [1] * (len(messages) - 1)
            outgoing.put(None)
            if method == "PutGradient":
                assert future.result(PATIENCE_S).counted_chunk_count == len(messages)
            watch = Stopwatch()
            stopping.result(PATIENCE_S)
            assert watch.elapsed_s < PATIENCE_S
        finally:
            outgoing.put(None)


def test_waits_for_others_end_with_unavailable(cluster, connect) -> None:
    running = cluster(2, grace_s=1.0)
    observer = connect(running, "observer")
    waiting = {}
    for verb in ("exchange", "get_weights", "put_gradient"):
        model = connect(running, verb).parameter(verb, size=SIZE, optimizer=SGD, worker_count=2)
        model.init(np.zeros(SIZE, np.float32))
        if verb == "exchange":
            call = partial(model.exchange, np.ones(SIZE, np.float32))
        elif verb == "get_weights":
            call = partial(model.get_weights, min_version=1)
        else:
            model.put_gradient(np.ones(SIZE, np.float32))
            call = partial(model.put_gradient, np.ones(SIZE, np.float32))
        waiting[verb] = in_background(partial(call, timeout_s=5.0))
    eventually("all wait", lambda: all(s.open_stream_count == 3 for s in observer.status()))
    watch = Stopwatch()
    running.close()
    assert watch.elapsed_s < PATIENCE_S
    for verb, future in waiting.items():
        error = future.exception(10)
        assert isinstance(error, shardwell.ShardUnavailableError), (verb, error)
        assert "stopping" in error.message, (verb, error.message)


def test_a_wait_for_first_weights_ends_with_unavailable(cluster) -> None:
    running = cluster(1, grace_s=1.0)
    with WireWorker(running.target, "claims") as one, WireWorker(running.target, "waits") as two:
        one.create(spec("m", SIZE)).claim_init()
        parameter = two.create(spec("m", SIZE))
        waiting = in_background(lambda: parameter.claim_init(wait_timeout_s=PATIENCE_S))
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        running.close()
        error = waiting.exception(10)
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error_detail(error).code == types.ERROR_CODE_STOPPING


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_serving_process_ends_with_code_0(connect, number) -> None:
    with ServingShard("--grace-s=2") as shard:
        model = connect(shard.address(), "w0").parameter(
            "m", size=SIZE, optimizer=SGD, worker_count=2
        )
        model.init(np.zeros(SIZE, np.float32))
        waiting = in_background(lambda: model.exchange(np.ones(SIZE, np.float32), timeout_s=5.0))
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        shard.send(number)
        assert shard.end() == 0
        assert isinstance(waiting.exception(10), shardwell.ShardUnavailableError)
        assert not any("Traceback" in line for line in shard.log), shard.log
        assert any("shard has stopped" in line for line in shard.log)
