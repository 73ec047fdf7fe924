"""Goal: a token lets in, for as long as it is good; what ends with it goes on with the next.

Method: real shards and clients, files that are replaced under training, and the weights of
undisturbed training as the oracle.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.certificates import authority, of_client, of_server
from harness.inside import channels_of, endpoint_of, generation_of, session_of
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together
from harness.tokens import Tokens, bearing
from harness.wire_client import crc as wire_crc
from shardwell.v1 import group_pb2, group_pb2_grpc, peer_pb2, peer_pb2_grpc
from shardwell_server import GroupCluster, ShardConfig, ShardServer

SGD = shardwell.SGD(learning_rate=1.0)
SIZE = 300


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    (tmp_path / "tokens").mkdir()
    return Tokens(tmp_path / "tokens")


def in_seconds(seconds: float) -> str:
    moment = datetime.now(UTC) + timedelta(seconds=seconds)  # noqa: TID251
    return moment.isoformat()


def opened(client: shardwell.Client, **fields: Any) -> shardwell.Parameter:
    net = client.parameter("net", size=SIZE, optimizer=SGD, codec="fp32", **fields)
    net.init(np.zeros(SIZE, np.float32))
    return net


ONES = np.ones(SIZE, np.float32)


def trained_on(net: shardwell.Parameter) -> None:
    """Until something is refused."""
    while True:
        net.exchange(ONES)


# Which token, and from where.


@pytest.mark.parametrize("processes", [False, True])
def test_a_token_lets_in(cluster, connect, tokens, processes) -> None:
    file = tokens.add("w", "create")
    running = cluster(2, tokens=tokens.path, processes=processes)
    net = opened(connect(running, "w0", token_file=file))
    assert (net.exchange(ONES) == -1).all()
    assert (net.exchange(ONES) == -2).all()


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (False, "a token is needed: give token_file="),
        ("wrong", "no such token is known here"),
        ("expired", "token 'expired' expired at 2001-01-01T00:00:00Z"),
    ],
)
def test_a_refused_client_gets_an_error_at_once(cluster, connect, tokens, file, reason) -> None:
    tokens.add("expired", "admin", expires="2001-01-01T00:00:00Z")
    (tokens.directory / "wrong.token").write_text("nobody-s-secret\n")
    given = file and tokens.directory / f"{file}.token"
    running = cluster(1, tokens=tokens.path)
    began_s = time.monotonic()
    with pytest.raises(shardwell.AuthenticationError, match=reason) as caught:
        connect(running, "w0", token_file=given, connect_timeout_s=20)
    assert time.monotonic() - began_s < 10
    assert not caught.value.retryable
    assert caught.value.shard_index == 0
    assert running.target in caught.value.message
    if given:
        assert str(given) in caught.value.message


def test_the_environment_names_a_token_file(cluster, tokens, monkeypatch) -> None:
    running = cluster(1, tokens=tokens.path)
    monkeypatch.setenv("SHARDWELL_TOKEN_FILE", str(tokens.add("w", "read")))
    shardwell.connect(running.target).close()
    with pytest.raises(shardwell.AuthenticationError, match=r"\$SHARDWELL_TOKEN_FILE"):
        shardwell.connect(running.target, token_file=False)
    monkeypatch.setenv("SHARDWELL_TOKEN_FILE", "")
    with pytest.raises(shardwell.AuthenticationError, match="a token is needed"):
        shardwell.connect(running.target)


@pytest.mark.parametrize("contents", ["", "\n", "two words", "ü", "a" * 4097, "a\nb", "\0"])
def test_files_without_a_token(tmp_path, contents) -> None:
    (tmp_path / "token").write_text(contents)
    with pytest.raises(shardwell.ArgumentError, match=r"token has no token: expected one of 1 to"):
        shardwell.connect("127.0.0.1:1", token_file=tmp_path / "token")


@pytest.mark.parametrize(
    ("path", "what"), [("missing", "No such file"), ("a\0b", "embedded null"), (".", "directory")]
)
def test_files_that_can_not_be_read(tmp_path, path, what) -> None:
    with pytest.raises(shardwell.ArgumentError, match=f"can't be read: .*{what}"):
        shardwell.connect("127.0.0.1:1", token_file=f"{tmp_path}/{path}")


@pytest.mark.parametrize("path", ["", 5, True, b"token"])
def test_token_files_that_are_no_path_are_refused(path: Any) -> None:
    with pytest.raises(shardwell.ArgumentError, match="token_file must be the path of a file"):
        shardwell.connect("127.0.0.1:1", token_file=path)


@pytest.mark.parametrize("target", ["192.0.2.1:7070", "127.0.0.1:1,shard-1.example.org:7070"])
def test_no_token_goes_over_a_network_in_the_clear(tokens, target) -> None:
    file = tokens.add("w", "read")
    with pytest.raises(shardwell.ArgumentError, match=r"would go to \S+:7070 in the clear: give"):
        shardwell.connect(target, token_file=file, connect_timeout_s=0.1)
    place = target.rpartition(",")[2]
    with pytest.raises(shardwell.ArgumentError, match="in the clear"):
        shardwell.join_group("g", 0, 1, None, place, token_file=file, listen="127.0.0.1:0")


def test_a_shard_without_tokens_minds_none(cluster, connect, tokens) -> None:
    running = cluster(1, tokens=None)
    assert connect(running, "w0", token_file=tokens.add("w", "read")).status()


def test_the_right_that_is_missing_is_named(cluster, connect, tokens) -> None:
    running = cluster(2, tokens=tokens.path)
    opened(connect(running, "maker", token_file=tokens.add("maker", "create")))
    client = connect(running, "reader", token_file=tokens.add("ci", "read:ne", "create:other"))
    net = client.parameter("net")
    assert (net.get_weights() == 0).all()
    with pytest.raises(
        shardwell.AccessDeniedError,
        match=r"token 'ci' may read parameter 'net', not contribute to it; that needs a token with",
    ) as caught:
        net.exchange(ONES)
    assert isinstance(caught.value, PermissionError)
    assert caught.value.parameter == "net"
    with pytest.raises(shardwell.AccessDeniedError, match="may read parameter 'new', not create"):
        connect(running, "r", token_file=tokens.add("reads", "read")).parameter(
            "new", size=3, optimizer=SGD
        )
    assert (net.get_weights() == 0).all()


# Tokens that end.


def test_a_step_waits_for_the_next_token(cluster, connect, tokens, caplog) -> None:
    """The token expires, the file has no other one yet; nothing is lost when it comes."""
    running = cluster(2, tokens=tokens.path)
    client = connect(running, "w0", token_file=tokens.add("w", "create", expires=in_seconds(3)))
    net = opened(client)
    assert (net.exchange(ONES) == -1).all()
    eventually(
        "its streams are ended",
        lambda: not any(endpoint_of(s).streams.count for s in running.servers),
    )
    waiting = in_background(lambda: net.exchange(ONES))
    eventually("it says so", lambda: "calls wait for another one" in caplog.text)
    assert "token 'w' expired at" in caplog.text
    assert not waiting.done()
    tokens.add("w", "create")
    assert (waiting.result(PATIENCE_S) == -2).all()
    assert (net.exchange(ONES) == -3).all()


def test_a_wait_for_a_token_has_the_call_s_deadline(cluster, connect, tokens) -> None:
    running = cluster(1, tokens=tokens.path)
    net = opened(connect(running, "w0", token_file=tokens.add("w", "create"), timeout_s=3))
    tokens.remove("w")
    with pytest.raises(
        shardwell.AuthenticationError, match=r"waited \S+ s: .*known here"
    ) as caught:
        trained_on(net)
    assert caught.value.retryable
    tokens.add("w", "create")
    step = net.next_step
    assert (net.exchange(ONES) == -1 - step).all()


def test_revoking_ends_what_is_under_way(cluster, connect, tokens) -> None:
    """A call that waits for others, an idle stream and the attendance, within seconds."""
    running = cluster(1, tokens=tokens.path)
    client = connect(running, "w0", token_file=tokens.add("w", "create"))
    net = opened(client, worker_count=2)
    waiting = in_background(lambda: net.exchange(ONES, timeout_s=60))
    server = running.servers[0]
    eventually(
        "it waits",
        lambda: endpoint_of(server).streams.count == 1 and server.shard.sessions.count == 1,
    )
    tokens.remove("w")
    began_s = time.monotonic()
    eventually(
        "all has ended",
        lambda: not (endpoint_of(server).streams.count or server.shard.sessions.count),
    )
    assert time.monotonic() - began_s < 5
    client.close()
    with pytest.raises(shardwell.ClosedError):
        waiting.result(PATIENCE_S)


def test_rights_that_are_taken_away(cluster, connect, tokens) -> None:
    running = cluster(1, tokens=tokens.path)
    net = opened(connect(running, "w0", token_file=tokens.add("w", "create", secret="the-same")))
    net.exchange(ONES)
    tokens.add("w", "read", secret="the-same")
    with pytest.raises(shardwell.AccessDeniedError, match="token 'w' may read"):
        trained_on(net)
    # Of the step that was under way some chunks may have been counted.
    assert set((-net.get_weights()).tolist()) <= {net.next_step, net.next_step + 1}


def test_a_token_of_another_name(cluster, connect, tokens) -> None:
    """The session was that of the first; its steps go on, and the first may no more end it."""
    file = tokens.add("first", "create")
    running = cluster(2, tokens=tokens.path)
    net = opened(connect(running, "w0", token_file=file))
    net.exchange(ONES)
    second = tokens.add("second", "create")
    file.write_bytes(second.read_bytes())
    net.exchange(ONES)  # maybe over streams that are there
    tokens.remove("first")
    for step in range(2, 5):
        assert (net.exchange(ONES) == -1 - step).all()
    owners = [s.shard.sessions._attending for s in running.servers]
    eventually(
        "the session is the second's",
        lambda: all(one.owner == "second" for each in owners for one in each.values()),
    )


@pytest.mark.parametrize(
    "seconds", [6, pytest.param(60, marks=pytest.mark.exhaustive)], ids=["a moment", "a minute"]
)
@pytest.mark.parametrize("same_host", [False, True])
def test_tokens_replaced_every_second_under_training(
    cluster, connect, tokens, seconds, same_host
) -> None:
    """Each secret ends when the next one comes, also for those who have not read it yet."""
    running = cluster(2, tokens=tokens.path)
    file = tokens.add("w", "create")
    clients = [
        connect(running, f"w{rank}", token_file=file, same_host=same_host) for rank in range(2)
    ]
    nets = [
        client.parameter("net", size=SIZE, optimizer=SGD, worker_count=2, codec="fp32")
        for client in clients
    ]
    nets[0].init(np.zeros(SIZE, np.float32))
    until_s = time.monotonic() + seconds
    step_counts = [0, 0]
    steps = range(10**9)
    over = [False]

    def work(rank: int) -> None:
        for step in steps:
            if rank == 0 and time.monotonic() > until_s and not over[0]:
                over[0] = True
                last[0] = step
            if step > last[0]:
                return
            assert (nets[rank].exchange(ONES) == -1 - step).all()
            step_counts[rank] += 1

    last = [10**9]
    both = [in_background(lambda rank=rank: work(rank)) for rank in range(2)]
    renewals = 0
    while not all(each.done() for each in both) and time.monotonic() < until_s + PATIENCE_S:
        time.sleep(0.5)
        tokens.add("w", "create")
        renewals += 1
    for each in both:
        each.result(PATIENCE_S)
    assert step_counts[0] == step_counts[1] > 10
    assert renewals > seconds


# Sessions.


def test_a_session_is_its_token_s(cluster, connect, tokens) -> None:
    """Another token neither contributes by it nor ends it, even with its number."""
    running = cluster(1, tokens=tokens.path)
    owner = connect(running, "w0", token_file=tokens.add("owner", "create"))
    net = opened(owner)
    net.exchange(ONES)
    thief = connect(running, "w0", token_file=tokens.add("thief", "create"), timeout_s=2)
    number = session_of(owner).number
    channel = channels_of(thief)[0]
    channel.session = session_of(owner)
    with pytest.raises(grpc.RpcError) as caught:
        channel.end_session(PATIENCE_S).result()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(shardwell.SessionUnknownError, match="attends by token 'thief'"):
        running.servers[0].shard.sessions.check(number, "w0", "thief")
    assert (net.exchange(ONES) == -2).all()


# Secrets.


def test_secrets_are_shown_nowhere(cluster, connect, tokens, caplog) -> None:
    file = tokens.add("w", "read", secret="something-secret-4711")
    stranger = tokens.directory / "stranger.token"
    stranger.write_text("other-secret-4711")
    with caplog.at_level(logging.DEBUG, "shardwell"), caplog.at_level(logging.DEBUG):
        running = cluster(1, tokens=tokens.path)
        client = connect(running, "w0", token_file=file)
        with pytest.raises(shardwell.AccessDeniedError) as denied:
            client.parameter("net", size=3, optimizer=SGD)
        with pytest.raises(shardwell.AuthenticationError) as unknown:
            connect(running, "w1", token_file=stranger)
        (tokens.path).write_text('{"tokens": [{"name": "other-secret-4711"')
        eventually("it is logged", lambda: "what was there before is used" in caplog.text)
    said = f"{caplog.text} {denied.value} {unknown.value} {client!r} {vars(client)!r}"
    said += f" {channels_of(client)[0]._token!r} {running.servers[0].config!r}"
    assert "is no JSON; what was there before is used" in caplog.text
    assert "secret-4711" not in said
    assert client.status()


@pytest.mark.parametrize(
    ("contents", "what"),
    [
        ("", "is no JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "tokens must be a list"),
        ('{"tokens": [], "more": 1}', "has 'more', which is none of its fields"),
        ('{"tokens": [5]}', "a token must be a JSON object"),
        ('{"tokens": [{"name": "a b"}]}', "a token's name must be"),
        ('{"tokens": [{"name": "a", "sha256": "x", "rights": ["read"]}]}', "64 lower-case"),
        ('{"tokens": [{"name": "a", "sha256": [%s], "rights": []}]}', "rights must be a list"),
        ('{"tokens": [{"name": "a", "sha256": [%s], "rights": ["reed"]}]}', "a right is RIGHT"),
        (
            '{"tokens": [{"name": "a", "sha256": [%s], "rights": ["read"], "expires": "soon"}]}',
            "expires must be a time with its zone",
        ),
        (
            '{"tokens": [{"name": "a", "sha256": [%s], "rights": ["read"],'
            ' "expires": "2027-01-01T00:00:00"}]}',
            "expires must be a time with its zone",
        ),
        (
            '{"tokens": [{"name": "a", "sha256": [%s], "rights": ["read"], "quota": {"x": 1}}]}',
            "quota has 'x'",
        ),
        (
            '{"tokens": [{"name": "a", "sha256": [%s], "rights": ["read"],'
            ' "quota": {"streams": -1}}]}',
            "quota streams must be",
        ),
        (
            '{"tokens": [{"name": "a", "sha256": [%s], "rights": ["read"]},'
            ' {"name": "b", "sha256": [%s], "rights": ["read"]}]}',
            "two tokens have the same secret",
        ),
    ],
)
def test_files_of_tokens_that_are_none(tmp_path, contents, what) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(contents.replace("%s", '"' + "ab" * 32 + '"'))
    config = ShardConfig(shard_index=0, shard_count=1, tokens=path)
    with pytest.raises(shardwell.ArgumentError, match=what) as caught:
        ShardServer(config)
    assert str(path) in caught.value.message


def test_a_file_of_tokens_that_is_broken_later(cluster, connect, tokens, caplog) -> None:
    """The tokens that were read last stay, and not all are let in."""
    running = cluster(1, tokens=tokens.path)
    file = tokens.add("w", "create")
    connect(running, "w0", token_file=file)
    for breaking in (lambda: tokens.path.write_text("{"), tokens.path.unlink):
        breaking()
        assert connect(running, "w1", token_file=file).status()
        with pytest.raises(shardwell.AuthenticationError):
            connect(running, "w2", token_file=False)
        eventually("it is logged", lambda: "what was there before is used" in caplog.text)
        caplog.clear()
    tokens.remove("w")
    eventually("it is read again", lambda: not is_let_in(running, file))


def is_let_in(running: Any, file: Path) -> bool:
    try:
        shardwell.connect(running.target, token_file=file).close()
    except shardwell.AuthenticationError as error:
        # The second where it went while the client was being let in.
        reasons = ("no such token is known here", "was revoked, or has changed")
        assert any(words in error.message for words in reasons)  # noqa: PT017
        return False
    return True


# Groups.


def join(tokens_file: Any, rank: int, target: Any, **given: Any) -> shardwell.Group:
    return shardwell.join_group(
        "prod-g", rank, 2, None, target, token_file=tokens_file, join_timeout_s=PATIENCE_S, **given
    )


def summed(group: shardwell.Group) -> list[float]:
    with group:
        array = np.full(SIZE, group.rank + 1.0, np.float32)
        group.all_reduce(array)
        return [float(array[0]), float(array[-1])]


def test_who_may_join_a_group(cluster, tokens) -> None:
    target = cluster(1, tokens=tokens.path).target
    worker, reader = tokens.add("w", "contribute:prod-"), tokens.add("r", "read")
    stranger = tokens.add("s", "admin:other-")
    for file, reason in (
        (reader, "token 'r' may read group 'prod-g', not contribute"),
        (stranger, "token 's' has no right to group 'prod-g'"),
    ):
        with pytest.raises(shardwell.AccessDeniedError, match=reason):
            join(file, 0, target)
    with pytest.raises(shardwell.AuthenticationError, match="a token is needed"):
        join(False, 0, target)
    both = together([lambda rank=rank: summed(join(worker, rank, target)) for rank in range(2)])
    assert both == [[3.0, 3.0]] * 2


def test_a_worker_that_serves_the_meeting_place(tokens, tmp_path) -> None:
    """A worker that has the same token is let in there."""
    from harness.programs.ports import free_port

    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    worker, other = tokens.add("w", "contribute"), tokens.add("other", "admin")
    first = in_background(lambda: summed(join(worker, 0, addresses)))
    for file, reason in ((other, "not that of the worker"), (False, "a token is needed")):
        with pytest.raises(shardwell.AuthenticationError, match=reason):
            eventually_asked(file, addresses)
    assert summed(join(worker, 1, addresses)) == first.result(PATIENCE_S) == [3.0, 3.0]


def eventually_asked(file: Any, addresses: list[str]) -> None:
    """Joins, once a worker serves the meeting place."""
    join(file, 1, addresses)


def test_a_member_answers_only_those_that_were_let_in(cluster, tokens) -> None:
    """A caller that does not know its id learns neither that nor anything else."""
    target = cluster(1, tokens=tokens.path).target
    worker = tokens.add("w", "contribute")
    groups = together([lambda rank=rank: join(worker, rank, target) for rank in range(2)])
    members = generation_of(groups[0]).members
    opening = peer_pb2.PeerOpen(
        group="prod-g",
        generation=generation_of(groups[0]).number,
        from_member_id=members[1].member_id,
        from_rank=1,
        to_member_id="guessed",
    )
    said = []
    with grpc.insecure_channel(members[0].address) as channel:
        stub = peer_pb2_grpc.PeerServiceStub(channel)
        for call in (
            lambda: stub.Greet(
                peer_pb2.GreetRequest(group="prod-g", member_id="guessed"), timeout=PATIENCE_S
            ),
            lambda: list(
                stub.Agree(iter([peer_pb2.AgreeRequest(open=opening)]), timeout=PATIENCE_S)
            ),
            lambda: list(
                stub.ReceiveChunks(peer_pb2.ReceiveChunksRequest(open=opening), timeout=PATIENCE_S)
            ),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            said.append(f"{caught.value.details()} {caught.value.trailing_metadata()}")
    assert not any(member.member_id in text for member in members for text in said)
    sockets = Path("/proc/net/unix").read_text()
    assert not any(member.member_id in sockets for member in members)
    together([group.close for group in groups])


def test_members_count_in_the_quota(cluster, tokens) -> None:
    running = cluster(1, tokens=tokens.path)
    target = running.target
    file = tokens.add("w", "contribute", quota={"members": 1})
    waiting = in_background(lambda: join(file, 0, target))
    meetings = endpoint_of(running.servers[0]).meetings._meetings
    eventually("it waits", lambda: meetings.group_count == 1)

    def is_full() -> bool:
        try:
            shardwell.join_group("prod-h", 0, 1, None, target, token_file=file).close()
        except shardwell.LimitError as error:
            return "token 'w' is at its limit members=1" in error.message
        return False

    assert is_full()
    with pytest.raises(grpc.RpcError) as caught:  # nor is one that says that it was there before
        renewed(target, file, "prod-i")
    assert "token 'w' is at its limit members=1" in str(caught.value.details())
    with pytest.raises(grpc.RpcError):  # nor one that has the id of the first
        renewed(target, file, "prod-i", waiting_id(meetings))
    other = tokens.add("v", "contribute")
    joined = join(other, 1, target)
    together([joined.close, waiting.result(PATIENCE_S).close])
    eventually("there is room again", lambda: not is_full())


def renewed(target: str, file: Path, group: str, member_id: str = "m") -> None:
    request = group_pb2.RenewLeaseRequest(
        spec=group_pb2.GroupSpec(name=group, size=1, strategy="ring", codec=1),
        member=group_pb2.Member(member_id=member_id, address="127.0.0.1:1", description="d"),
        generation=1 << 32,
        member_count=1,
        lease_ms=1000,
    )
    with bearing(grpc.insecure_channel(target), file.read_text().strip()) as channel:
        stub = group_pb2_grpc.GroupServiceStub(channel)
        stub.RenewLease(wire_crc.seal_message(request), timeout=PATIENCE_S)


def waiting_id(meetings: Any) -> str:
    (gathering,) = meetings._gatherings.values()
    (member_id,) = gathering.seating.applicants
    return str(member_id)


def test_a_shard_beside_each_worker(tokens, cluster) -> None:
    """Its shards let in who has the group's token."""
    target = cluster(1, tokens=tokens.path).target
    worker, other = tokens.add("w", "contribute"), tokens.add("other", "admin")

    def work(rank: int) -> float:
        with (
            join(worker, rank, target) as group,
            GroupCluster(group) as running,
            shardwell.connect(running.target, worker_id=f"w{rank}", token_file=worker) as client,
        ):
            net = opened(client, worker_count=2)
            if rank == 0:
                with pytest.raises(shardwell.AuthenticationError, match="not that of the worker"):
                    shardwell.connect(running.target, token_file=other)
            return float(net.exchange(ONES)[0])

    assert together([lambda rank=rank: work(rank) for rank in range(2)]) == [-1.0, -1.0]


@pytest.mark.parametrize("tls", [False, True])
def test_a_group_that_other_machines_reach_needs_tls(cluster, tls, monkeypatch) -> None:
    files = authority()
    mine: Any = of_server(files) if tls else False
    target = cluster(1, tls=mine or None, tokens=None).target
    given = {"listen": "0.0.0.0:0", "advertise": "127.0.0.1:1"}
    if not tls:
        with pytest.raises(shardwell.ArgumentError, match=r"listen on 0\.0\.0\.0:0 without TLS"):
            shardwell.join_group("g", 0, 1, None, target, **given)
    shardwell.join_group("g", 0, 1, None, target, tls=mine, insecure=not tls, **given).close()
    monkeypatch.setenv("SHARDWELL_INSECURE", "1")
    shardwell.join_group("g", 0, 1, None, target, tls=mine, **given).close()


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({}, r"no TLS \(--tls-cert, --tls-key\) and no tokens \(--tokens\)"),
        ({"tls": True}, r"there is no tokens \(--tokens\)"),
        ({"tokens": True}, r"there is no TLS \(--tls-cert, --tls-key\)"),
        ({"tls": True, "tokens": True}, None),
        ({"insecure": True}, None),
    ],
)
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:7070", "192.0.2.1:7070", "shard-0:7070"])
def test_a_shard_is_closed_by_default(tokens, given, lacks, listen) -> None:
    files = authority()
    made = {
        "tls": of_server(files) if given.get("tls") else None,
        "tokens": tokens.path if given.get("tokens") else None,
        "insecure": given.get("insecure", False),
    }
    if lacks is None:
        ShardConfig(shard_index=0, shard_count=1, listen=listen, **made)
        return
    with pytest.raises(shardwell.ArgumentError, match=lacks) as caught:
        ShardConfig(shard_index=0, shard_count=1, listen=listen, **made)
    commands = re.findall(r"^  shardwell (\w+)", caught.value.message, re.MULTILINE)
    assert commands == ["certs", "token", "serve"]


def test_tokens_and_tls_together(cluster, connect, tokens) -> None:
    files = authority()
    running = cluster(2, tokens=tokens.path, tls=of_server(files))
    file = tokens.add("w", "create")
    net = opened(connect(running, "w0", tls=of_client(files), token_file=file, same_host=False))
    assert (net.exchange(ONES) == -1).all()
    with pytest.raises(shardwell.AuthenticationError, match="a token is needed"):
        connect(running, "w1", tls=of_client(files), token_file=False)


@pytest.fixture(autouse=True)
def _no_token_of_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests say who has which."""
    monkeypatch.delenv("SHARDWELL_TOKEN_FILE", raising=False)


def test_a_proxy_of_the_environment_sees_no_token(cluster, tokens, monkeypatch) -> None:
    """gRPC takes what $http_proxy says for this machine, too."""
    running = cluster(1, tokens=tokens.path)
    file = tokens.add("w", "read")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        with shardwell.connect(running.target, token_file=file, same_host=False) as client:
            assert client.status()
        proxy.settimeout(0.2)
        with pytest.raises(TimeoutError):
            proxy.accept()


@pytest.mark.parametrize("what", ["pipe", "directory", "keys without a key"])
def test_unreadable_files_stop_nothing(cluster, connect, tokens, tmp_path, caplog, what) -> None:
    """Tokens that end go on to do so."""
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"kty": "oct", "k": "%s"}]}' % ("ab" * 32))
    running = cluster(1, tokens=tokens.path, jwt_keys=keys)
    file = tokens.add("w", "create")
    connect(running, "w0", token_file=file)
    sessions = running.servers[0].shard.sessions
    eventually("it attends", lambda: sessions.count == 1)
    keys.unlink()
    if what == "pipe":
        os.mkfifo(keys)
    elif what == "directory":
        keys.mkdir()
    else:
        keys.write_text('{"keys": [{"kty": "oct", "kid": "new"}]}')
    stranger = tokens.directory / "stranger.token"
    stranger.write_text("a.b.c")
    with pytest.raises(shardwell.AuthenticationError):
        connect(running, "w1", token_file=stranger)
    eventually("it is logged", lambda: "what was there before is used" in caplog.text)
    tokens.remove("w")
    eventually("it is ended", lambda: sessions.count == 0)
