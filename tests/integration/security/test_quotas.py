"""Goal: what a token may use is bounded, and what it has used up costs no other token anything.

Method: real shards, tokens with small quotas beside one without; counts are compared with what was
made by hand, also after calls that failed and after a restart from files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import shardwell
from harness.inside import channels_of, endpoint_of
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background
from harness.tokens import Tokens
from harness.wire_client import crc as wire_crc
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import session_pb2
from shardwell_server.services import calls

SGD = shardwell.SGD(learning_rate=1.0)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    (tmp_path / "tokens").mkdir()
    return Tokens(tmp_path / "tokens")


def usage_of(running: Any, name: str = "ci", shard_index: int = 0) -> dict[str, int]:
    usage = running.servers[shard_index].shard.usages.of(name)
    return {what: count for what, count in usage._counts.items() if count}


@pytest.mark.parametrize("kind", ["parameters", "tables"])
def test_how_many_it_may_make(cluster, connect, tokens, kind) -> None:
    running = cluster(2, tokens=tokens.path)
    client = connect(running, "w0", token_file=tokens.add("ci", "create", quota={kind: 2}))

    def made(name: str, by: shardwell.Client = client) -> Any:
        if kind == "parameters":
            return by.parameter(name, size=8, optimizer=SGD)
        return by.table(name, row_count=8, dim=2, optimizer=SGD)

    made("a"), made("b"), made("a")
    with pytest.raises(shardwell.LimitError, match=rf"token 'ci' is at its limit {kind}=2: it has"):
        made("c")
    assert usage_of(running)[kind] == 2
    made("c", connect(running, "w1", token_file=tokens.add("other", "create")))
    made("c")  # it is another's, who may be joined
    tokens.add("ci", "create", quota={kind: 3}, secret="another-secret")
    made("d")
    assert usage_of(running)[kind] == 3


def test_states_under_any_number_of_names_are_bounded(cluster, connect, tokens, tmp_path) -> None:
    """Of a token with a quota by that, of one without by the number of workers, and 16 more."""
    running = cluster(1, tokens=tokens.path, data_dir=tmp_path / "data")
    quota = {"stored_bytes": 5_000_000}
    for name, limit in (("ci", quota), ("free", {})):
        client = connect(running, name, token_file=tokens.add(name, "create", quota=limit))
        net = client.parameter(name, size=8, optimizer=SGD)
        net.init(np.zeros(8))
        before = usage_of(running, name)["stored_bytes"]
        channel = channels_of(client)[0]

        def keep(worker_id: str, name: str = name, channel: Any = channel) -> None:
            request = pb.KeepStateRequest(
                shard=channel.identity,
                parameter=name,
                stage=pb.KeepStateRequest.STAGE_PUT,
                worker_id=worker_id,
                state=bytes(10**6),
            )
            channel.call("KeepState", request, pb.KeepStateResponse, timeout_s=PATIENCE_S)

        if limit:
            for index in range(4):
                keep(f"any-{index}")
            with pytest.raises(shardwell.LimitError, match="'ci' is at its limit stored_bytes"):
                keep("any-4")
            keep("any-3")  # safe to repeat
            assert usage_of(running, name)["stored_bytes"] == before + 4 * 10**6
        else:
            for index in range(40):
                keep(f"any-{index}")
            assert usage_of(running, name)["stored_bytes"] == before + 17 * 10**6
        counted = usage_of(running, name)["stored_bytes"]
    running.close()
    running = cluster(1, tokens=tokens.path, data_dir=tmp_path / "data")
    assert usage_of(running, "free")["stored_bytes"] == counted, "also after a restart"
    connect(running, "last", token_file=tokens.add("admin", "admin")).delete("free")
    assert "stored_bytes" not in usage_of(running, "free")


def test_bytes_that_it_may_store(cluster, connect, tokens) -> None:
    """Parameters at once, tables as rows come; what is refused is not counted."""
    running = cluster(1, tokens=tokens.path)
    quota = {"stored_bytes": 40_000}
    client = connect(running, "w0", token_file=tokens.add("ci", "create", quota=quota))
    client.parameter("small", size=1000, optimizer=SGD)
    held = usage_of(running)["stored_bytes"]
    assert held >= 4000
    with pytest.raises(
        shardwell.LimitError, match=r"token 'ci' is at its limit stored_bytes=40000"
    ):
        client.parameter("large", size=100_000, optimizer=SGD)
    assert usage_of(running) == {**usage_of(running), "stored_bytes": held, "parameters": 1}
    table = client.table("rows", row_count=10**6, dim=8, optimizer=SGD, mode="async")
    with pytest.raises(shardwell.LimitError, match=r"token 'ci' is at its limit stored_bytes"):
        table.put_row_gradients(np.arange(5000), np.ones((5000, 8), np.float32))
    other = connect(running, "w1", token_file=tokens.add("other", "create"))
    with pytest.raises(shardwell.LimitError, match="token 'ci'"):  # whose the table is
        other.table("rows").put_row_gradients(np.arange(5000), np.ones((5000, 8), np.float32))
    other.parameter("large", size=100_000, optimizer=SGD)
    assert running.servers[0].shard.stored_bytes == sum(
        usage_of(running, name)["stored_bytes"] for name in ("ci", "other")
    )


def test_what_it_owns_is_known_after_a_restart(cluster, connect, tokens, tmp_path) -> None:
    file = tokens.add("ci", "create", quota={"parameters": 2, "tables": 1})
    where = {"tokens": tokens.path, "data_dir": tmp_path / "data"}
    for life in range(2):
        running = cluster(1, **where)
        client = connect(running, f"w{life}", token_file=file)
        for name in ("a", "b"):
            client.parameter(name, size=100, optimizer=SGD)
        table = client.table("t", row_count=100, dim=2, optimizer=SGD)
        if not life:
            table.put_row_gradients([1, 2], np.ones((2, 2), np.float32))
        with pytest.raises(shardwell.LimitError, match="parameters=2"):
            client.parameter("c", size=100, optimizer=SGD)
        with pytest.raises(shardwell.LimitError, match="tables=1"):
            client.table("u", row_count=100, dim=2, optimizer=SGD)
        found = usage_of(running)
        assert (found["parameters"], found["tables"]) == (2, 1)
        assert found["stored_bytes"] == running.servers[0].shard.stored_bytes > 0
        client.close()
        running.close()


def test_files_from_before_there_were_tokens(cluster, connect, tokens, tmp_path) -> None:
    running = cluster(1, data_dir=tmp_path / "data", tokens=None)
    client = connect(running, "w0", token_file=False)
    net = client.parameter("a", size=100, optimizer=SGD)
    net.init(np.zeros(100, np.float32))
    client.close()
    running.close()
    running = cluster(1, data_dir=tmp_path / "data", tokens=tokens.path)
    client = connect(running, "w0", token_file=tokens.add("ci", "create", quota={"parameters": 0}))
    assert (client.parameter("a").exchange(np.ones(100, np.float32)) == -1).all()


def test_how_many_may_be_connected(cluster, connect, tokens) -> None:
    running = cluster(1, tokens=tokens.path)
    file = tokens.add("ci", "create", quota={"members": 1})
    first = connect(running, "w0", token_file=file)
    eventually("it is counted", lambda: usage_of(running).get("members") == 1)
    second = connect(running, "w1", token_file=file, timeout_s=5)
    second.parameter("p", size=3, optimizer=SGD).init(np.zeros(3, np.float32))
    with pytest.raises(shardwell.LimitError, match=r"token 'ci' is at its limit members=1") as full:
        second.parameter("p").put_gradient(np.ones(3, np.float32))
    assert full.value.retryable is False
    connect(running, "w2", token_file=tokens.add("other", "create")).parameter("p")
    first.close()
    eventually("there is room", lambda: not usage_of(running).get("members"))

    def contributes() -> bool:
        try:
            second.parameter("p").put_gradient(np.ones(3, np.float32))
        except shardwell.LimitError:
            return False
        return True

    eventually("it is let in", contributes)
    second.close()
    eventually("nothing is left", lambda: "members" not in usage_of(running))


@pytest.mark.parametrize("same_host", [False, True])
def test_a_token_s_streams_have_a_limit(cluster, connect, tokens, same_host) -> None:
    """As many as may be open; the idle ones of the same token make room, and count no more."""
    running = cluster(1, tokens=tokens.path)
    file = tokens.add("ci", "create", quota={"streams": 1})
    client = connect(running, "w0", token_file=file, same_host=same_host)
    client.parameter("p", size=9, optimizer=SGD, mode="async").init(np.zeros(9, np.float32))
    for number in range(6):
        other = connect(running, f"w{number}x", token_file=file, same_host=same_host)
        other.parameter("p").exchange(np.ones(9, np.float32))
        assert usage_of(running)["streams"] == 1
    busy = client.parameter("q", size=9, optimizer=SGD, worker_count=2)
    busy.init(np.zeros(9, np.float32))
    waiting = in_background(lambda: busy.exchange(np.ones(9, np.float32)))

    def waits() -> bool:
        (entry,) = [one for one in client.status()[0].parameters if one.spec.name == "q"]
        return entry.contributed_worker_count == 1

    # Before its gradient is counted its stream may not be open, and another would be let in.
    eventually("it waits", waits)
    with pytest.raises(shardwell.LimitError, match="token 'ci' is at its limit streams=1"):
        other.parameter("p").exchange(np.ones(9, np.float32))
    client.close()
    with pytest.raises(shardwell.ClosedError):
        waiting.result(PATIENCE_S)
    eventually("all are gone", lambda: "streams" not in usage_of(running))


@pytest.mark.parametrize("same_host", [False, True])
def test_bytes_a_second(cluster, connect, tokens, same_host) -> None:
    """A rate holds over a while, whichever way payloads go; another's calls do not wait."""
    rate = 4_000_000
    running = cluster(1, tokens=tokens.path, chunk_size_bytes=2**16)
    slow = connect(
        running,
        "w0",
        token_file=tokens.add("ci", "create", quota={"bytes_per_s": rate}),
        same_host=same_host,
    )
    fast = connect(running, "w1", token_file=tokens.add("other", "create"), same_host=same_host)
    size = 2**18
    one = slow.parameter("one", size=size, optimizer=SGD, codec="fp32")
    two = fast.parameter("two", size=size, optimizer=SGD, codec="fp32")
    for net in (one, two):
        net.init(np.zeros(size, np.float32))
    gradient = np.ones(size, np.float32)
    one.exchange(gradient)
    began_s = time.monotonic()
    over = in_background(lambda: [one.exchange(gradient) for _ in range(4)])
    counts = 0
    while not over.done():
        two.exchange(gradient)
        counts += 1
    over.result(0)
    slow_s = time.monotonic() - began_s
    moved_bytes = 4 * 2 * 4 * size
    # One second's worth may be had at once; the rest has to come at the rate. No more is asserted:
    # how long it takes beyond that is the machine's.
    assert slow_s > moved_bytes / rate - 1.5
    assert counts > 4


def test_calls_a_second(cluster, connect, tokens) -> None:
    """A flood of small calls is slowed, and refused where it would have to wait for long."""
    running = cluster(1, tokens=tokens.path)
    file = tokens.add("ci", "read", quota={"bytes_per_s": 16 * 1024 * 20})
    client = connect(running, "w0", token_file=file)
    began_s = time.monotonic()
    for _ in range(50):
        client.status()  # two calls
    assert time.monotonic() - began_s > 100 / 20 - 2
    usage = running.servers[0].shard.usages.of("ci")
    assert usage.delay_s(10**7) > 10
    with pytest.raises(shardwell.LimitError, match=r"token 'ci' is at its limit bytes_per_s"):
        client.status()


def test_calls_that_are_open(cluster, connect, tokens) -> None:
    """Of any kind: here those that wait to give first weights."""
    running = cluster(1, tokens=tokens.path)
    file = tokens.add("ci", "create", quota={"calls": 6})
    client = connect(running, "w0", token_file=file)
    net = client.parameter("net", size=9, optimizer=SGD)
    claim = pb.ClaimInitRequest(
        shard=channels_of(client)[0].identity,
        parameter="net",
        worker_id="w0",
    )
    claim.crc32c = wire_crc.of_message(claim)
    waits = pb.ClaimInitRequest(
        shard=claim.shard, parameter="net", worker_id="w1", wait_timeout_ms=60_000
    )
    waits.crc32c = wire_crc.of_message(waits)
    metadata = [("authorization", f"Bearer {file.read_text().strip()}")]
    with grpc.insecure_channel(running.target) as channel:
        ask = channel.unary_unary("/shardwell.v1.ParameterServerService/ClaimInit")
        ask(claim.SerializeToString(), metadata=metadata)
        asked = [ask.future(waits.SerializeToString(), metadata=metadata) for _ in range(20)]
        refused = 20 - 5  # one is that by which the client attends
        eventually("most are refused", lambda: sum(c.done() for c in asked) == refused)
        errors = {c.details() for c in asked if c.done()}
        assert all("token 'ci' is at its limit calls=6" in error for error in errors)
        assert connect(running, "w2", token_file=tokens.add("other", "create")).status()
        for call in asked:
            call.cancel()
    eventually("they are gone", lambda: usage_of(running)["calls"] == 1)
    net.init(np.zeros(9, np.float32))
    assert (net.exchange(np.ones(9, np.float32)) == -1).all()


def test_a_session_has_few_calls_by_which_it_attends(cluster, tokens) -> None:
    """Or one client could take all that a shard has."""
    running = cluster(1, tokens=tokens.path)
    metadata = [("authorization", f"Bearer {tokens.add('ci', 'read').read_text().strip()}")]
    request = session_pb2.AttendRequest(worker_id="w", session=7, host="here")
    request.shard.cluster_id, request.shard.shard_count = running.cluster_id, 1
    wire_crc.seal_message(request)
    with grpc.insecure_channel(running.target) as channel:
        attend = channel.unary_stream("/shardwell.v1.SessionService/Attend")
        attended = []
        for _ in range(50):
            attended.append(attend(request.SerializeToString(), metadata=metadata))
            attended[-1].initial_metadata()
        server = running.servers[0]
        eventually("the older ones are ended", lambda: usage_of(running)["calls"] <= 4)
        assert server.shard.sessions.count == 1
        assert usage_of(running)["members"] == 1
        for call in attended:
            call.cancel()
    eventually("it has left", lambda: not usage_of(running))


def test_watching_health_takes_no_stream(cluster, connect, tokens) -> None:
    running = cluster(1, tokens=tokens.path)
    with grpc.insecure_channel(running.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(40)]
        eventually(
            "most are refused",
            lambda: sum(watch.done() for watch in watches) == len(watches) - 16,
        )
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status == 1
        for watch in watches:
            watch.cancel()
        eventually("there is room", lambda: not endpoint_of(running.servers[0]).health._call_count)
        silent = threading.Event()

        def nothing() -> Iterator[bytes]:
            silent.wait(PATIENCE_S)
            yield from ()

        for method in ("Check", "Watch"):
            ask = channel.stream_stream(f"/grpc.health.v1.Health/{method}")
            asked = [ask(nothing()) for _ in range(100)]
            eventually("most are refused", lambda a=asked: sum(c.done() for c in a) == 100 - 64)
            assert connect(running, "w0", token_file=tokens.add("ci", "read")).status()
            for call in asked:
                call.cancel()
            eventually(
                "there is room", lambda: not endpoint_of(running.servers[0]).health._call_count
            )
        silent.set()


def test_rows_stay_within_the_quota(cluster, connect, tokens, tmp_path) -> None:
    """Whatever room their files would like; also after a restart, by whomever they come."""
    quota = {"stored_bytes": 5_000_000}
    maker = tokens.add("ci", "create", quota=quota)
    friend = tokens.add("friend", "contribute")
    where = {"tokens": tokens.path, "data_dir": tmp_path / "data"}
    running = cluster(1, **where)
    client = connect(running, "w0", token_file=maker)
    table = client.table("rows", row_count=10**6, dim=8, optimizer=SGD, mode="async")

    def filled(table: Any, start: int) -> int:
        """How far it comes."""
        while True:
            try:
                table.put_row_gradients(np.arange(start, start + 500), np.ones((500, 8)))
            except shardwell.LimitError as error:
                said.append(error.message)
                return start
            start += 500

    said: list[str] = []
    count = filled(table, 0)
    assert count * 8 * 4 > 300_000
    assert usage_of(running)["stored_bytes"] <= 5_000_000
    client.close()
    running.close()
    running = cluster(1, **where)
    assert filled(connect(running, "w1", token_file=friend).table("rows"), count) < count + 5000
    assert usage_of(running)["stored_bytes"] <= 5_000_000
    assert all("token 'ci' is at its limit stored_bytes=5000000" in text for text in said)
    tokens.add("ci", "create", quota={"stored_bytes": 6_000_000})
    usages = running.servers[0].shard.usages
    eventually("it is more now", lambda: usages.of("ci").quota.stored_bytes == 6_000_000)


def test_what_is_done_is_paid_for(cluster, connect, tokens) -> None:
    """A rate slower than a message: it takes its time, and nothing is refused that was counted."""
    running = cluster(1, tokens=tokens.path, chunk_size_bytes=2**16)
    file = tokens.add("ci", "create", quota={"bytes_per_s": 100_000})
    net = connect(running, "w0", token_file=file, same_host=False).parameter(
        "net", size=2**16, optimizer=SGD, codec="fp32"
    )
    net.init(np.zeros(2**16, np.float32))
    began_s = time.monotonic()
    assert (net.exchange(np.ones(2**16, np.float32)) == -1).all()
    assert time.monotonic() - began_s > 2 * 2**18 / 100_000 - 1.5


def test_who_calls_and_says_nothing(cluster, connect, tokens, monkeypatch) -> None:
    """Strangers are refused before their request; a token's calls count without it, and end."""
    monkeypatch.setattr(calls, "_REQUEST_S", 1.0)
    running = cluster(1, tokens=tokens.path)
    secret = tokens.add("ci", "read", quota={"calls": 8}).read_text().strip()
    silent = threading.Event()

    def nothing() -> Iterator[bytes]:
        silent.wait(PATIENCE_S)
        yield from ()

    with grpc.insecure_channel(running.target) as channel:
        for path in ("ParameterServerService/GetStatus", "GroupService/JoinGroup"):
            ask = channel.stream_unary(f"/shardwell.v1.{path}")
            strangers = [ask.future(nothing()) for _ in range(12)]
            eventually("strangers are refused", lambda s=strangers: all(c.done() for c in s))
            assert {c.code() for c in strangers} == {grpc.StatusCode.UNAUTHENTICATED}
        metadata = [("authorization", f"Bearer {secret}")]
        known = [ask.future(nothing(), metadata=metadata) for _ in range(12)]
        eventually("some are over the quota", lambda: sum(c.done() for c in known) >= 4)
        assert connect(running, "w0", token_file=tokens.add("other", "read")).status()
        eventually("the others end", lambda: all(c.done() for c in known))
        assert {c.code() for c in known} == {
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE,
        }
        silent.set()
    assert not usage_of(running)
