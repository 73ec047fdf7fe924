"""Goal: streams over a Unix socket change how soon answers come, and nothing else; who connects
there with anything but a call of this user does no harm.

Method: the same steps with them and over gRPC, bit for bit; shards and clients that end, refuse or
are cut off in the middle; a socket of its own that sends what is no call.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.standing_still import stopped
from harness.inside import channels_of, endpoint_of, open_calls, unix_connections
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.threads import in_background, together
from harness.tokens import common_authorization
from harness.transports import stream_counts, unix_calls
from harness.wire_client import crc
from harness.wire_client.crc import WIRE_VERSION
from shardwell.process import unix_sockets
from shardwell.process.unix_sockets import socket_path
from shardwell.rpc.shard_channel import EXCHANGE, EXCHANGE_ROWS
from shardwell.transport import neighbour, unix_call, unix_questions
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import unix_stream_pb2
from shardwell.wire.frames import FrameKind, FrameReader, head
from shardwell.wire.messages import MESSAGE_SIZE_MAX_BYTES
from shardwell_server import LocalCluster
from shardwell_server.config import Limits
from shardwell_server.services import unix_streams
from shardwell_server.shard.sessions import Sessions
from shardwell_server.store.memory import MemoryStore

pytestmark = [
    pytest.mark.same_host,
    pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="peers can't be asked for here"),
]

SGD = shardwell.SGD(learning_rate=1.0)
SERVICE = "/shardwell.v1.ParameterServerService"


@pytest.fixture(autouse=True)
def _tells_why_none_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """Else no output shows it, as calls go on over gRPC without a word."""
    caplog.set_level(logging.DEBUG, logger="shardwell")
    caplog.set_level(logging.DEBUG, logger="shardwell_server")


def opened(client: shardwell.Client, name: str = "net", size: int = 10, **options: Any) -> Any:
    net = client.parameter(name, size=size, optimizer=SGD, **options)
    net.init(np.zeros(size, np.float32))
    return net


def test_much_that_is_inline_both_ways_at_once(cluster, connect) -> None:
    """More than sockets hold, while neither side has read what the other says."""
    client = connect(cluster(2, chunk_size_bytes=2**18), "w0")
    net = opened(client, size=4_000_000, codec="fp32+lz4")
    values = np.random.default_rng(1).standard_normal(net.size, np.float32)
    np.testing.assert_array_equal(net.exchange(values), -values)
    assert unix_calls(client)
    assert not client.traffic.shared_bytes


def test_unread_answers_do_not_pile_up(cluster, connect, monkeypatch) -> None:
    """A shard's stream stops while another's is read."""
    most: list[int] = []
    real = unix_call.UnixCall.receive

    def receive(self: Any, **options: Any) -> bool:
        is_open = real(self, **options)
        most.append(len(self._answers))
        return is_open

    monkeypatch.setattr(unix_call.UnixCall, "receive", receive)
    running = cluster(2, chunk_size_bytes=2**16)
    client, other = connect(running, "w0"), connect(running, "w1")
    sizes = {"codec": "fp32+lz4", "size": 3_000_000, "worker_count": 2}
    nets = [opened(each, **sizes) for each in (client, other)]
    values = np.random.default_rng(1).standard_normal(3_000_000, np.float32)
    together([lambda net=net: net.exchange(values) for net in nets])
    assert max(most) < 16


# Going to gRPC, and coming back.


def test_one_shard_that_is_elsewhere_keeps_all_on_grpc(cluster, connect) -> None:
    client = connect(cluster(3), "w0")
    channels_of(client)[1].unix.address = ""
    net = opened(client, size=600)
    for step in range(3):
        assert (net.exchange(np.ones(600, np.float32)) == -step - 1).all()
    assert not unix_calls(client)


@pytest.mark.parametrize("size", [600, 900_000])
def test_a_shard_on_another_machine_is_not_looked_for_again(
    cluster, connect, monkeypatch, caplog, size
) -> None:
    """It said where it listens: looking again costs all open streams and their memory."""
    monkeypatch.setattr(neighbour, "_RESTART_S", 0.0)
    client = connect(cluster(2, chunk_size_bytes=2**20), "w0")
    channels_of(client)[1].unix.address = "@shardwell-nobody"
    net = opened(client, size=size)
    for step in range(4):
        assert (net.exchange(np.ones(size, np.float32)) == -step - 1).all()
    assert caplog.text.count("shard 1 takes no streams here") == 1
    assert [calls for calls in unix_calls(client) if calls.is_active()] == []


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_shard_that_takes_no_stream_any_more(cluster, connect, index) -> None:
    """In the middle of training: no step is lost, or waits for it."""
    client = connect(cluster(3), "w0")
    net = opened(client, size=600)

    def is_there() -> bool:  # on a machine that is busy enough a first try may fail
        for channel in channels_of(client):
            channel.unix.pause(0.0)
        net.exchange(np.ones(600, np.float32))
        return len(unix_calls(client)) == 3

    eventually("all are over Unix sockets", is_there)
    before = unix_calls(client)
    address = channels_of(client)[index].unix.address
    channels_of(client)[index].unix.address = "@shardwell-nobody"
    before[0].cancel()
    net.exchange(np.ones(600, np.float32))
    assert not any(call.is_active() for call in unix_calls(client))
    channels_of(client)[index].unix.address = address

    def is_back() -> bool:
        net.exchange(np.ones(600, np.float32))
        return sum(call.is_active() for call in unix_calls(client)) == 3

    eventually("it is tried again", is_back)


@pytest.mark.parametrize("kind", ["parameter", "table"])
def test_a_socket_that_only_breaks_calls(cluster, connect, monkeypatch, kind) -> None:
    """A stream's twice in a row, another once; then it is left alone for a while."""
    tried: list[str] = []

    def serve_of(self: Any, method: str) -> tuple[unix_streams.Serve, None]:
        async def serve(messages: Any, connection: Any) -> None:
            tried.append(method)
            connection.abandon()

        return serve, None

    monkeypatch.setattr(unix_streams.UnixStreams, "_serve_of", serve_of)
    client = connect(cluster(1), "w0")
    if kind == "parameter":
        assert opened(client).exchange(np.ones(10, np.float32))[0] == -1
    else:
        table = client.table("t", row_count=9, dim=1, optimizer=SGD)
        before = table.get_rows([1])
        np.testing.assert_allclose(table.exchange_rows([1], np.ones((1, 1))), before - 1, 1e-2)
    streams = [method for method in tried if method in (EXCHANGE, EXCHANGE_ROWS)]
    assert (len(streams), len(tried)) == (2, 3)
    assert not any(call.is_active() for call in unix_calls(client))


def test_a_socket_that_breaks_every_second_stream(cluster, connect, monkeypatch) -> None:
    """A step that succeeds between two failures makes counting them begin anew."""
    real, opened_count = unix_streams.UnixStreams._serve_of, 0

    def serve_of(self: Any, method: str) -> Any:
        nonlocal opened_count
        serve, pack = real(self, method)
        if method != EXCHANGE:
            return serve, pack
        opened_count += 1
        is_broken = opened_count % 2 > 0

        async def served(messages: Any, connection: Any) -> None:
            if is_broken:
                connection.abandon()
            else:
                await serve(messages, connection)

        return served, pack

    monkeypatch.setattr(unix_streams.UnixStreams, "_serve_of", serve_of)
    client = connect(cluster(1), "w0")
    net = opened(client)
    for step in range(3):
        assert net.exchange(np.ones(10, np.float32))[0] == -1.0 - step
        assert opened_count == 2 * (step + 1)
        for call in unix_calls(client):
            call.cancel()


def test_a_shard_that_does_not_know_the_session_yet(cluster, connect, monkeypatch) -> None:
    """It has answered, so that it is up; however often that is the answer."""
    client = connect(cluster(1), "w0")
    net = opened(client)
    net.exchange(np.ones(10, np.float32))
    real, refused = Sessions.check, [3]

    def check(self: Sessions, *args: Any, **options: Any) -> Any:
        if refused[0]:
            refused[0] -= 1
            raise shardwell.SessionUnknownError("this shard does not know the session")
        return real(self, *args, **options)

    monkeypatch.setattr(Sessions, "check", check)
    unix_calls(client)[0].cancel()
    assert net.exchange(np.ones(10, np.float32))[0] == -2
    assert refused == [0]
    assert sum(call.is_active() for call in unix_calls(client)) == 1


def test_a_peer_of_another_user(cluster, connect, monkeypatch) -> None:
    client = connect(cluster(1), "w0")
    net = opened(client)
    real = unix_sockets.check_same_user
    refused: list[str] = []

    def check(connection: Any) -> None:
        name = threading.current_thread().name
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            try:
                real(connection)
            except PermissionError:
                refused.append(name)
                raise

    for module in (unix_sockets, unix_streams):
        monkeypatch.setattr(module, "check_same_user", check)
        del refused[:]
        channels_of(client)[0].unix.pause(0.0)
        assert net.exchange(np.ones(10, np.float32)).size == 10
        assert refused
        assert not any(call.is_active() for call in unix_calls(client))
        monkeypatch.setattr(module, "check_same_user", real)


# Ends.


def test_closing_a_client_closes_its_streams(cluster, connect) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    opened(client, size=600).exchange(np.ones(600, np.float32))
    assert stream_counts(running) == [1, 1]
    client.close()
    eventually("they are gone", lambda: stream_counts(running) == [0, 0])


def test_a_client_that_is_dropped_closes_its_streams(cluster) -> None:
    running = cluster(1)
    client = shardwell.connect(running.target, worker_id="w0")
    net = opened(client, size=100_000, codec="fp32+lz4")
    net.exchange(np.ones(100_000, np.float32))
    assert stream_counts(running) == [1]
    del client, net

    def are_gone() -> bool:
        gc.collect()
        return stream_counts(running) == [0]

    eventually("they are gone", are_gone)


@pytest.mark.parametrize("size", [10, 500_000])
def test_a_shard_that_ends_ends_the_wait_for_another(cluster, connect, size) -> None:
    """Though it is the other's answer that is read first."""
    running = cluster(2, processes=True, chunk_size_bytes=2**16)
    client = connect(running, "w0", timeout_s=BRIEF_S)
    net = opened(client, size=size, worker_count=2)
    waiting = in_background(lambda: net.exchange(np.ones(size, np.float32)))
    eventually("it waits", lambda: sum(call.is_active() for call in unix_calls(client)) == 2)
    first = unix_calls(client)
    running.children[1].kill()
    eventually("both have ended", lambda: not any(call.is_active() for call in first))
    assert isinstance(waiting.exception(PATIENCE_S), shardwell.ShardwellError)


def test_a_stream_to_a_stopped_shard(cluster, connect) -> None:
    running = cluster(1, processes=True)
    client = connect(running, "w0")
    net = opened(client)
    net.exchange(np.ones(10, np.float32))
    with stopped(running.children[0].pid), pytest.raises(shardwell.ShardwellError):
        net.exchange(np.ones(10, np.float32), timeout_s=1.0)
    assert net.exchange(np.ones(10, np.float32))[0] in (-2, -3)


def test_a_stream_that_gave_way_is_opened_again(cluster, connect) -> None:
    running = cluster(1, limits=Limits(stream_count_max=2))
    nets = [opened(connect(running, f"w{rank}"), f"net{rank}") for rank in range(4)]
    for step in range(3):
        for net in nets:
            assert net.exchange(np.ones(10, np.float32))[0] == -step - 1
    eventually("no more are open", lambda: stream_counts(running)[0] <= 2)


def test_more_connections_than_there_may_be(cluster, connect, monkeypatch) -> None:
    """A client that is not let in calls over gRPC."""
    running = cluster(1)
    endpoint_of(running.servers[0]).unix_streams._count_max = 1
    nets = [opened(connect(running, f"w{rank}"), f"net{rank}") for rank in range(3)]
    for step in range(2):
        for net in nets:
            assert net.exchange(np.ones(10, np.float32))[0] == -step - 1
    assert stream_counts(running) == [1]


def test_a_child_that_ends_leaves_its_parent_s_streams(cluster, connect) -> None:
    client = connect(cluster(1, processes=True), "w0")
    net = opened(client)
    net.exchange(np.ones(10, np.float32))
    (call,) = unix_calls(client)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            call.cancel()
            client.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert net.exchange(np.ones(10, np.float32))[0] == -2
    assert unix_calls(client) == [call]


# Junk that is no call.


@pytest.fixture
def dialled(cluster) -> Iterator[Any]:
    """Connections to a shard's socket."""
    running = cluster(1)
    with contextlib.ExitStack() as stack:

        def dial(*parts: bytes) -> socket.socket:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.settimeout(PATIENCE_S)
            connection.connect(socket_path(endpoint_of(running.servers[0]).unix_streams.address))
            connection.sendall(b"".join(parts))
            return connection

        dial.running = running  # type: ignore[attr-defined]
        yield dial


def frame(kind: int, contents: bytes) -> bytes:
    return struct.pack("<II", len(contents), kind) + contents


def opening(method: str = EXCHANGE) -> bytes:
    authorization = common_authorization() or ""
    opens = unix_stream_pb2.UnixStreamOpen(
        method=method, authorization=authorization, wire_version=WIRE_VERSION
    )
    return frame(FrameKind.OPEN, opens.SerializeToString())


def said(connection: socket.socket) -> list[tuple[int, bytes]]:
    """Frames, until the shard has closed the connection."""
    reader, frames = FrameReader(), []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(2**16):
            frames += reader.feed(piece)
    return frames


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(FrameKind.MESSAGE, b"before any call"),
        frame(FrameKind.END, b""),
        frame(FrameKind.OPEN, b"\xff\xff\xff"),
        opening() + opening(),
        opening() + frame(FrameKind.END, b"none"),
        opening() + frame(FrameKind.END, b"") + frame(FrameKind.END, b""),
        opening() + frame(FrameKind.END, b"") + frame(FrameKind.MESSAGE, b""),
        opening() + head(FrameKind.MESSAGE, MESSAGE_SIZE_MAX_BYTES + 1),
        opening() + frame(9, b""),
    ],
)
def test_what_is_no_call_is_cut_off(dialled, connect, bad) -> None:
    assert said(dialled(bad)) == []
    assert opened(connect(dialled.running, "w0")).exchange(np.ones(10, np.float32))[0] == -1
    eventually("it is gone", lambda: stream_counts(dialled.running) == [1])


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (opening(f"{SERVICE}/GetWeights"), 12),
        (opening(f"{SERVICE}/GetStatus") + frame(FrameKind.END, b""), 3),
        (opening(f"{SERVICE}/GetStatus") + frame(FrameKind.MESSAGE, b"\xff\xff"), 3),
        (opening("/nothing"), 12),
        (opening() + frame(FrameKind.MESSAGE, b"\xff\xff"), 15),
        (opening() + frame(FrameKind.MESSAGE, b""), 3),
    ],
)
def test_calls_that_are_refused(dialled, sent, code) -> None:
    ((kind, contents),) = said(dialled(sent))
    assert kind == FrameKind.END
    assert unix_stream_pb2.UnixStreamEnd.FromString(contents).code == code


def test_who_says_nothing_is_cut_off(dialled, monkeypatch) -> None:
    monkeypatch.setattr(unix_streams, "_OPEN_S", 0.2)
    assert said(dialled()) == []
    assert said(dialled(opening()[:9])) == []
    eventually("they are gone", lambda: stream_counts(dialled.running) == [0])


def test_random_bytes_do_no_harm(dialled, connect) -> None:
    drawn = np.random.default_rng(7)
    net = opened(connect(dialled.running, "w0"))
    for number in range(60):
        start = opening() if number % 2 else b""
        middle = frame(0, drawn.bytes(int(drawn.integers(0, 200)))) if number % 4 > 1 else b""
        dialled(start, middle, drawn.bytes(int(drawn.integers(0, 5000)))).close()
    assert net.exchange(np.ones(10, np.float32))[0] == -1
    eventually("they are gone", lambda: stream_counts(dialled.running) == [1])


def test_a_client_that_reads_nothing_is_no_burden(dialled, connect) -> None:
    """Its messages are not read on and on either."""
    connection = dialled(opening())
    connection.setblocking(False)
    message, sent_bytes = frame(FrameKind.MESSAGE, bytes(100_000)), 0
    with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
        while sent_bytes < 2**26:
            sent_bytes += connection.send(message)
    assert sent_bytes < 2**26
    assert opened(connect(dialled.running, "w0")).exchange(np.ones(10, np.float32))[0] == -1


# Calls with one answer go over one kept connection on this machine, whatever they are about, and
# fail no otherwise than over gRPC. Method: a client's connections, as its shards count them;
# refusals, waits that end, shards that stand still, break off or are of an older version; a socket
# of its own that calls twice.


SIZE = 10
ONES = np.ones(SIZE, np.float32)
STATUS = "/shardwell.v1.ParameterServerService/GetStatus"


def connection_counts(running: LocalCluster) -> list[int]:
    """Connections that each shard has, idle ones among them."""
    return [len(unix_connections(server)) for server in running.servers]


def called_over_grpc(client: shardwell.Client) -> set[str]:
    """Calls with one answer of a parameter or table that went that way."""
    return {name for each in channels_of(client) for name in each._stubs} - {"AwaitRecording"}


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
    running = cluster(2)
    for server in running.servers:
        streams = endpoint_of(server).unix_streams
        streams.methods = {EXCHANGE: streams.methods[EXCHANGE]}
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
    client = connect(cluster(1), "w0")
    assert opened(client).exchange(ONES)[0] == -1
    assert lost == [0]
    assert [each.spec.name for each in client.status()[0].parameters] == ["net"]


def test_a_store_that_fails(cluster, connect, monkeypatch) -> None:
    """An error that is none of ours ends as over gRPC."""

    def create(self: MemoryStore, *args: Any) -> Any:
        raise RuntimeError("bits fell out")

    client = connect(cluster(1), "w0")
    with monkeypatch.context() as failing:
        failing.setattr(MemoryStore, "create", create)
        with pytest.raises(shardwell.InternalError, match="bits fell out"):
            client.parameter("net", size=SIZE, optimizer=SGD)
    assert opened(client).exchange(ONES)[0] == -1


def test_two_calls_of_one_connection(cluster) -> None:
    """As a worker in another language makes them."""
    running = cluster(1)
    authorization = common_authorization() or ""
    opening = unix_stream_pb2.UnixStreamOpen(
        method=STATUS, authorization=authorization, wire_version=WIRE_VERSION
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
