"""Goal: calls that wait or are idle on a shard take no thread of it, and keep no client out.

Method: a shard in a process of its own, whose threads are counted from outside, with far more calls
that wait than it has threads; raw gRPC where the SDK would not do it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Proxy
from harness.inside import endpoint_of
from harness.polling import PATIENCE_S, eventually
from harness.tokens import bearing
from harness.wire_client import crc as wire_crc
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.server import ShardServer
from shardwell_server.services import calls

SGD = shardwell.SGD(learning_rate=1.0)
SIZE = 10
ONES = np.ones(SIZE, np.float32)
THREAD_COUNT_MAX = 80
"""Of a whole shard: its 32 for work, and gRPC's own, which are as many as it has cores and some."""
CLIENT_COUNT, WAIT_COUNT = 6, 60


def thread_count(running) -> int:
    (child,) = running.children
    return len(list(Path(f"/proc/{child.pid}/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_calls_that_wait_take_no_thread(cluster, connect) -> None:
    running = cluster(1, processes=True)
    clients = [connect(running, f"w{n}") for n in range(CLIENT_COUNT)]
    models = [client.parameter("m", size=SIZE, optimizer=SGD) for client in clients]
    table = clients[0].table("t", row_count=9, dim=2, optimizer=SGD)
    models[0].init(np.zeros(SIZE, np.float32))
    waiting = [
        model.get_weights_async(min_version=1) for _ in range(WAIT_COUNT) for model in models
    ]
    status = clients[0].status
    eventually(
        "all wait", lambda: status()[0].open_stream_count >= len(waiting), timeout_s=PATIENCE_S
    )
    assert thread_count(running) < THREAD_COUNT_MAX
    assert not any(future.done() for future in waiting)
    np.testing.assert_array_equal(connect(running, "reader").parameter("m").get_weights(), 0)
    table.put_row_gradients([1, 2], np.ones((2, 2), np.float32))
    np.testing.assert_array_equal(models[0].exchange(ONES), -ONES)
    for future in waiting:
        np.testing.assert_array_equal(future.result(PATIENCE_S), -ONES)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_idle_streams_take_no_thread(cluster, connect) -> None:
    running = cluster(1, processes=True)
    client = connect(running, "w0")
    ended = threading.Event()

    def silence() -> Iterator[bytes]:
        ended.wait(PATIENCE_S)
        yield from ()

    with bearing(grpc.insecure_channel(running.target)) as channel:
        exchange = channel.stream_stream("/shardwell.v1.ParameterServerService/Exchange")
        streams = [exchange(silence()) for _ in range(200)]
        eventually("all are open", lambda: client.status()[0].open_stream_count >= 200)
        assert thread_count(running) < THREAD_COUNT_MAX
        ended.set()
        for stream in streams:
            stream.cancel()
    eventually("all have ended", lambda: not client.status()[0].open_stream_count)


def test_a_call_that_is_dropped_while_it_waits_is_forgotten(cluster, connect) -> None:
    """By the shard's chunks, too, which would wake it."""
    running = cluster(1)
    client = connect(running, "w0")
    model = client.parameter("m", size=SIZE, optimizer=SGD)
    model.init(np.zeros(SIZE, np.float32))
    shard = running.servers[0].shard
    chunk = shard.parameters.get("m")._chunks[0]
    for _ in range(3):
        impatient = connect(running, "impatient")
        futures = [impatient.parameter("m").get_weights_async(min_version=1) for _ in range(20)]
        eventually("they wait", lambda: len(chunk.changed._waiting) == 20)
        impatient.close()
        eventually("they are forgotten", lambda: not chunk.changed._waiting)
        assert all(isinstance(f.exception(PATIENCE_S), shardwell.ClosedError) for f in futures)
    np.testing.assert_array_equal(model.exchange(ONES), -ONES)


def test_answers_that_are_not_read_count_in_a_limit(cluster, connect, monkeypatch) -> None:
    monkeypatch.setattr(calls, "_ROOM_WAIT_S", 0.5)
    running = cluster(1, chunk_size_bytes=1 << 20, limits=Limits(answer_bytes_max=8 << 20))
    client = connect(running, "w0")
    large = client.parameter("large", size=1 << 22, optimizer=SGD)
    large.init(np.zeros(1 << 22, np.float32))
    room = endpoint_of(running.servers[0]).calls._room
    (status,) = client.status()
    shard = types_pb2.ShardIdentity(cluster_id=status.cluster_id, shard_index=0, shard_count=1)
    request = wire_crc.seal_message(pb.GetWeightsRequest(parameter="large", shard=shard))
    with Proxy(running.target) as line, bearing(grpc.insecure_channel(line.address)) as channel:
        line.slow_down(bytes_per_s=200_000)
        get = channel.unary_stream("/shardwell.v1.ParameterServerService/GetWeights")
        slow = [get(request.SerializeToString()) for _ in range(30)]
        eventually("there is no room", lambda: room.is_full)
        assert room._bytes < 8 << 20 | 32 << 20, "the limit, and one message a thread"
        with pytest.raises(shardwell.LimitError, match=f"answer_bytes_max={8 << 20}"):
            large.get_weights()
        assert client.status()[0].shard_index == 0
        for call in slow:
            call.cancel()
    eventually("there is room again", lambda: not room._bytes)
    np.testing.assert_array_equal(large.get_weights(), 0)


def test_grpc_s_context_is_asked_on_its_loop_alone(tmp_path, monkeypatch) -> None:
    """Elsewhere it crashes the process, if the call ends meanwhile; with an audit log, too."""
    asked: set[tuple[str, str]] = set()

    class Watched:
        def __init__(self, context: object) -> None:
            self._context = context

        def __getattr__(self, name: str) -> object:
            asked.add((name, threading.current_thread().name))
            return getattr(self._context, name)

    made = calls.Call.__init__

    def watched(call: calls.Call, context: object, *arguments: object) -> None:
        made(call, Watched(context), *arguments)

    monkeypatch.setattr(calls.Call, "__init__", watched)
    config = ShardConfig(shard_index=0, shard_count=1, audit_log=tmp_path / "audit.jsonl")
    with (
        ShardServer(config) as server,
        shardwell.connect(server.address, worker_id="w0", same_host=False) as client,
    ):
        model = client.parameter("m", size=1 << 20, optimizer=SGD)
        model.init(np.zeros(1 << 20, np.float32))
        model.exchange(np.ones(1 << 20, np.float32))
        table = client.table("t", row_count=9, dim=2, optimizer=SGD)
        table.put_row_gradients([1], np.ones((1, 2), np.float32))
    assert {thread for _, thread in asked} == {"shardwell-loop"}, asked
    assert {"peer", "auth_context"} <= {name for name, _ in asked}
