"""Goal: calls with one answer go over one kept connection on this machine, whatever they are about,
and fail no otherwise than over gRPC.

Method: a client's connections, as its shards count them; refusals, waits that end, shards that
stand still, break off or are of an older version; a socket of its own that calls twice.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.standing_still import stopped
from harness.inside import channels_of, endpoint_of, open_calls, unix_connections
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together
from harness.tokens import common_authorization
from harness.wire_client import crc
from shardwell.process.unix_sockets import socket_path
from shardwell.transport import unix_questions
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import unix_stream_pb2
from shardwell.wire.frames import FrameKind, FrameReader, head
from shardwell_server import LocalCluster
from shardwell_server.services import unix_streams
from shardwell_server.store.memory.store import MemoryStore

pytestmark = [
    pytest.mark.same_host,
    pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="peers can't be asked for here"),
]

SGD = shardwell.SGD(learning_rate=1.0)
SIZE = 10
ONES = np.ones(SIZE, np.float32)
STATUS = "/shardwell.v1.ParameterServerService/GetStatus"


@pytest.fixture(autouse=True)
def _tells_why_none_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """Else no output shows it, as calls go on over gRPC without a word."""
    caplog.set_level(logging.DEBUG, logger="shardwell")
    caplog.set_level(logging.DEBUG, logger="shardwell_server")


def connection_counts(running: LocalCluster) -> list[int]:
    """Connections that each shard has, idle ones among them."""
    return [len(unix_connections(server)) for server in running.servers]


def called_over_grpc(client: shardwell.Client) -> set[str]:
    """Calls with one answer of a parameter or table that went that way."""
    return {name.rpartition("/")[2] for each in channels_of(client) for name in each._stubs}


def opened(client: shardwell.Client, name: str = "net", **options: Any) -> shardwell.Parameter:
    net = client.parameter(name, size=SIZE, optimizer=SGD, **options)
    net.init(np.zeros(SIZE, np.float32))
    return net


def test_many_parameters_and_tables_take_two_connections(cluster, connect) -> None:
    """One for steps of parameters, one for all else; a table's steps have their own."""
    running = cluster(2)
    client = connect(running, "w0")
    for number in range(20):
        assert opened(client, f"p{number}").exchange(ONES)[0] == -1
        client.parameter(f"p{number}").set_learning_rate(0.5)
    assert connection_counts(running) == [2, 2]
    for number in range(3):
        client.table(f"t{number}", row_count=9, dim=2, optimizer=SGD).get_rows([1])
    assert client.status()[0].parameters[0].initialized
    assert max(connection_counts(running)) <= 3
    assert called_over_grpc(client) == {"GetStatus"}  # by which it learned of the socket


def test_a_refusal_is_that_of_grpc(cluster, connect) -> None:
    running, logged = cluster(2), []
    opened(connect(running, "maker"))
    for same_host in (True, False):
        client = connect(running, f"w{same_host}", same_host=same_host)
        with pytest.raises(shardwell.SpecMismatchError) as caught:
            client.parameter("net", size=SIZE + 1, optimizer=SGD)
        logged.append((caught.value.message, caught.value.parameter, caught.value.shard_index))
        assert client.parameter("net").size == SIZE
    assert logged[0] == logged[1]


def test_calls_of_several_threads_do_not_wait_for_each_other(cluster, connect) -> None:
    """One waits for first weights, which another sets meanwhile."""
    running = cluster(1)
    client, other = connect(running, "w0"), connect(running, "w1")
    nets = [each.parameter("net", size=SIZE, optimizer=SGD) for each in (client, other)]
    server = running.servers[0]
    channel = channels_of(client)[0]
    granted = channel.call(
        "ClaimInit",
        pb.ClaimInitRequest(shard=channel.identity, parameter="net", worker_id="w0"),
        pb.ClaimInitResponse,
        timeout_s=PATIENCE_S,
        parameter="net",
    )
    assert granted.granted
    waiting = in_background(lambda: nets[1].init(ONES))
    eventually(
        "it waits",
        lambda: any(
            connection.task is not None and call.rpc.name == "ClaimInit"
            for connection in unix_connections(server)
            for call in open_calls(server)
        ),
    )
    together([lambda i=i: client.parameter(f"p{i}", size=SIZE, optimizer=SGD) for i in range(12)])
    assert nets[0].init(np.zeros(SIZE, np.float32)) == 0
    assert waiting.result(PATIENCE_S) == 0
    np.testing.assert_array_equal(nets[1].get_weights(), 0)


def test_closing_a_client_ends_what_waits(cluster, connect) -> None:
    running = cluster(1)
    client, other = connect(running, "w0"), connect(running, "w1")
    client.parameter("net", size=SIZE, optimizer=SGD)
    net = other.parameter("net", size=SIZE, optimizer=SGD)
    channel = channels_of(client)[0]
    request = pb.ClaimInitRequest(shard=channel.identity, parameter="net", worker_id="w0")
    channel.call("ClaimInit", request, pb.ClaimInitResponse, timeout_s=PATIENCE_S)
    waiting = in_background(lambda: net.init(ONES))
    calls = endpoint_of(running.servers[0]).calls
    eventually("it waits", lambda: any(call.rpc.name == "ClaimInit" for call in calls._open))
    other.close()
    assert isinstance(waiting.exception(PATIENCE_S), shardwell.ClosedError)
    client.close()
    eventually("all have ended", lambda: connection_counts(running) == [0])


def test_a_question_to_a_stopped_shard(cluster, connect) -> None:
    running = cluster(1, processes=True)
    client = connect(running, "w0")
    opened(client)
    with stopped(running.children[0].pid), pytest.raises(shardwell.ShardwellError):
        client.delete("net", timeout_s=0.5)
    short = connect(running, "w1", timeout_s=0.5)
    with stopped(running.children[0].pid), pytest.raises(shardwell.DeadlineError):
        short.parameter("net")
    assert short.parameter("net").size == SIZE


def test_a_connection_that_the_shard_has_ended(cluster, connect, monkeypatch) -> None:
    monkeypatch.setattr(unix_streams, "_OPEN_S", 0.05)
    running = cluster(1)
    client = connect(running, "w0")
    client.parameter("a", size=SIZE, optimizer=SGD)
    eventually("it has ended", lambda: connection_counts(running) == [0])
    client.parameter("b", size=SIZE, optimizer=SGD)
    assert called_over_grpc(client) == {"GetStatus"}


def test_what_is_idle_gives_way(cluster, connect) -> None:
    running = cluster(1)
    endpoint_of(running.servers[0]).unix_streams._count_max = 2
    clients = [connect(running, f"w{rank}") for rank in range(5)]
    for rank, client in enumerate(clients):
        client.parameter(f"p{rank}", size=SIZE, optimizer=SGD)
        assert called_over_grpc(client) == {"GetStatus"}
    assert connection_counts(running) == [2]


def test_a_shard_of_an_older_version(cluster, connect) -> None:
    """Which takes nothing there but streams."""
    running, exchange = cluster(2), "/shardwell.v1.ParameterServerService/Exchange"
    for server in running.servers:
        streams = endpoint_of(server).unix_streams
        streams.methods = {exchange: streams.methods[exchange]}
    client = connect(running, "w0")
    assert opened(client).exchange(ONES)[0] == -1
    assert called_over_grpc(client) >= {"CreateParameter", "ClaimInit", "ConfirmInit"}


def test_an_answer_that_is_too_long(cluster, connect, monkeypatch) -> None:
    monkeypatch.setattr(unix_streams, "MESSAGE_SIZE_MAX_BYTES", 1000)
    client = connect(cluster(1), "w0")
    for number in range(20):
        client.parameter(f"p{number}", size=SIZE, optimizer=SGD)
    assert len(client.status()[0].parameters) == 20


def test_a_request_that_is_too_long(cluster, connect, monkeypatch) -> None:
    monkeypatch.setattr(unix_questions, "MESSAGE_SIZE_MAX_BYTES", 50)
    client = connect(cluster(1), "w0")
    client.parameter("net", size=SIZE, optimizer=SGD)
    assert "CreateParameter" in called_over_grpc(client)


def test_an_answer_that_is_lost_is_asked_for_again(cluster, connect, monkeypatch) -> None:
    """The call was made, and is made once."""
    real, lost = unix_streams._Connection._answered, [3]

    def answered(self: Any, answer: bytes) -> bool:
        if lost[0]:
            lost[0] -= 1
            self._transport.abort()
            return False
        return real(self, answer)

    monkeypatch.setattr(unix_questions, "PAUSE_S", 0.0)
    monkeypatch.setattr(unix_streams._Connection, "_answered", answered)
    running = cluster(1)
    client = connect(running, "w0")
    assert opened(client).exchange(ONES)[0] == -1
    assert lost == [0]
    assert [each.spec.name for each in client.status()[0].parameters] == ["net"]


def test_a_store_that_fails(cluster, connect, monkeypatch) -> None:
    """An error that is none of ours ends as over gRPC."""

    def create(self: MemoryStore, *args: Any) -> Any:
        raise RuntimeError("bits fell out")

    running = cluster(1)
    client = connect(running, "w0")
    with monkeypatch.context() as failing:
        failing.setattr(MemoryStore, "create", create)
        with pytest.raises(shardwell.InternalError, match="bits fell out"):
            client.parameter("net", size=SIZE, optimizer=SGD)
    assert opened(client).exchange(ONES)[0] == -1


def frame(kind: FrameKind, contents: bytes) -> bytes:
    return head(kind, len(contents)) + contents


def test_two_calls_of_one_connection(cluster) -> None:
    """As a worker in another language makes them."""
    running = cluster(1)
    authorization = common_authorization() or ""
    opening = unix_stream_pb2.UnixStreamOpen(
        method=STATUS, authorization=authorization, wire_version=crc.WIRE_VERSION
    )
    request = crc.seal_message(pb.GetStatusRequest(identity_only=True)).SerializeToString()
    reader = FrameReader()
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(socket_path(endpoint_of(running.servers[0]).unix_streams.address))
        for _ in range(2):
            for part in (
                frame(FrameKind.OPEN, opening.SerializeToString()),
                frame(FrameKind.MESSAGE, request),
                frame(FrameKind.END, b""),
            ):
                for piece in (part[:3], part[3:]):
                    connection.sendall(piece)
            found: list[tuple[int, bytes]] = []
            while not found:
                found += reader.feed(connection.recv(2**16))
            ((kind, contents),) = found
            assert kind == FrameKind.MESSAGE
            assert pb.GetStatusResponse.FromString(contents).shard.shard_count == 1
        assert connection_counts(running) == [1]
    eventually("it is gone", lambda: connection_counts(running) == [0])
