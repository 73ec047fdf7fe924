"""Goal: jobs that have ended, or died for good, are distinguished from those that hang.

Method: clients that end in order, or without a word, on shards with an admin port.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

import shardwell
from harness.inside import vanish
from harness.polling import PATIENCE_S, eventually
from harness.wire_client.worker import WireWorker
from shardwell.placement.slices import Slice
from shardwell.process.environment import host_name
from shardwell.v1 import trace_pb2
from shardwell_server import LocalCluster
from shardwell_server.cli import commands
from shardwell_server.config import Limits

SGD = shardwell.SGD(learning_rate=1.0)
SOON = Limits(abandoned_after_s=0.5)
KINDS = ["parameter", "table"]


def get(running: LocalCluster, path: str) -> str:
    with urllib.request.urlopen(running.admin_urls[0] + path, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def view(running: LocalCluster) -> Any:
    return json.loads(get(running, "status.json"))


def shown(running: LocalCluster, kind: str) -> Any:
    """The one parameter or table of a cluster."""
    (found,) = view(running)[f"{kind}s"]
    return found


def metric(running: LocalCluster, kind: str, name: str) -> float:
    labels = {"kind": kind, "name": "net"}
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(get(running, "metrics"))
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return float(value)


def status_of(running: LocalCluster, *flags: str, command: str = "status") -> str:
    arguments = [command, "--shards", running.target, *flags]
    return CliRunner().invoke(commands, arguments, catch_exceptions=False).output


def opened(client: shardwell.Client, kind: str, worker_count: int = 2, **options: Any) -> Any:
    if not options:
        options = {"worker_count": worker_count}
    if kind == "table":
        return client.table("net", row_count=9, dim=2, optimizer=SGD, **options)
    net = client.parameter("net", size=10, optimizer=SGD, **options)
    net.init(np.zeros(10, np.float32))
    return net


def put(one: Any) -> None:
    if isinstance(one, shardwell.Table):
        one.put_row_gradients(np.arange(9), np.ones((9, 2), np.float32))
    else:
        one.put_gradient(np.ones(10, np.float32))


def die(client: shardwell.Client) -> None:
    """Ends its connections without a word, as the kernel does for a process that was killed."""
    vanish(client)


@pytest.fixture
def start(cluster: Any) -> Any:
    def started(**options: Any) -> LocalCluster:
        return cluster(2, admin_listen="127.0.0.1:0", tokens=None, **options)

    return started


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_have_left_has_ended(start, connect, kind) -> None:
    """In the middle of a step, too: no worker is waited for."""
    running = start(limits=SOON)
    clients = [connect(running, f"w{number}") for number in range(2)]
    parts = [opened(client, kind) for client in clients]
    for part in parts:
        put(part)
    put(parts[0])
    assert not shown(running, kind)["ended"]
    eventually("it waits", lambda: view(running)["waits"])
    clients[0].close()
    assert not shown(running, kind)["ended"]  # the other may go on
    clients[1].close()
    found = eventually("it has ended", lambda: (f := shown(running, kind))["ended"] and f)
    assert (found["missing"], found["unknown"], found["abandoned_for_s"]) == ([], 0, None)
    assert view(running)["waits"] == []
    assert metric(running, kind, "shardwell_ended") == 1
    assert metric(running, kind, "shardwell_step_open_seconds") == 0
    assert metric(running, kind, "shardwell_step_missing_workers") == 0
    assert "ended, all workers have left (--all lists them): net" in status_of(running)
    assert "done: w0, w1" in " ".join(status_of(running, "--all").split())
    assert "ended, all workers have left: net" in status_of(running, "--once", command="top")
    # A reader changes nothing; one that comes back to go on does.
    reader = connect(running, "reader")
    reader.parameter("net") if kind == "parameter" else reader.table("net")
    assert shown(running, kind)["ended"]
    opened(connect(running, "w1"), kind)
    found = eventually("it goes on", lambda: not (f := shown(running, kind))["ended"] and f)
    assert (found["step"], found["missing"]) == (1, ["w1"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_last_lost", [False, True])
def test_the_last_of_elastic_members_says_whether_it_has_ended(
    start, connect, kind, is_last_lost
) -> None:
    running = start(limits=SOON)
    clients = [connect(running, f"w{number}") for number in range(2)]
    crew = shardwell.Elastic(member_return_s=0.1)
    parts = [opened(client, kind, members=crew) for client in clients]
    for part in parts:
        put(part)
    if is_last_lost:
        clients[0].close()
        die(clients[1])
        eventually("it is abandoned", lambda: shown(running, kind)["abandoned_for_s"])
        assert not shown(running, kind)["ended"]
        return
    die(clients[0])
    eventually("one is lost", lambda: shown(running, kind)["crew_words"].count("1 lost"))
    clients[1].close()
    found = eventually("it has ended", lambda: (f := shown(running, kind))["ended"] and f)
    assert (found["missing"], found["lacking"], found["abandoned_for_s"]) == ([], "", None)
    opened(connect(running, "w0"), kind, members=crew)
    eventually("it goes on", lambda: not shown(running, kind)["ended"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_died_in_a_step_is_abandoned_and_goes_on(start, connect, kind) -> None:
    running = start(limits=SOON)
    clients = [connect(running, f"w{number}") for number in range(2)]
    parts = [opened(client, kind) for client in clients]
    for part in parts:
        put(part)
    put(parts[0])
    die(clients[0])
    (wait,) = view(running)["waits"]  # the one that lives is waited for
    assert [who["worker_id"] for who in wait["workers"]] == ["w1"]
    assert shown(running, kind)["abandoned_for_s"] is None
    die(clients[1])
    found = eventually(
        "it is abandoned", lambda: (f := shown(running, kind))["abandoned_for_s"] and f
    )
    assert found["abandoned_for_s"] >= 0.5
    assert not found["ended"]
    assert view(running)["waits"] == []
    assert metric(running, kind, "shardwell_abandoned_seconds") >= 0.5
    assert metric(running, kind, "shardwell_step_open_seconds") == 0
    text = " ".join(status_of(running).split())
    assert f"{kind} 'net' is abandoned: no worker of it has been connected for" in text
    assert "has waited" not in text
    again = opened(connect(running, "w1"), kind)
    assert again.next_step == 1
    eventually("it goes on", lambda: shown(running, kind)["abandoned_for_s"] is None)
    put(again)
    eventually("the step has ended", lambda: shown(running, kind)["step"] == 2)


def test_a_job_that_died_a_moment_ago_stands_still(start, connect) -> None:
    running = start()
    clients = [connect(running, f"w{number}") for number in range(2)]
    parts = [opened(client, "parameter") for client in clients]
    put(parts[0]), put(parts[1]), put(parts[0])
    for client in clients:
        die(client)
    eventually("both are gone", lambda: not running.servers[0].shard.sessions.count)
    assert shown(running, "parameter")["abandoned_for_s"] is None
    (wait,) = view(running)["waits"]
    assert [who["worker_id"] for who in wait["workers"]] == ["w1"]


def test_a_deletion_that_was_cut_off_is_shown(start, connect) -> None:
    """Instead of a shard that lost its memory."""
    running = start()
    client = connect(running, "w0")
    put(opened(client, "parameter", 1))
    for server in reversed(running.servers):
        registry = server.shard.parameters
        incarnation = registry.get("net").incarnation
        if server.config.shard_index == 0:
            assert registry.mark("net", incarnation, "ops", force=True, but=0)
        else:
            registry.remove("net", incarnation, incarnation, "ops")
    words = "parameter 'net' is being deleted, and shard 0 has it still"
    text = " ".join(status_of(running).split())
    assert words in text
    assert "finish it: shardwell delete net" in text
    assert "lost its memory" not in text
    status = view(running)
    assert status["lost"] == []
    assert any(words in each for each in status["troubles"])
    client.delete("net")
    eventually("it is gone", lambda: not view(running)["troubles"])


@pytest.mark.parametrize("kind", KINDS)
def test_members_of_an_ended_job_are_over(cluster, connect, kind) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{index}") for index in (0, 1)]
    for client in clients:
        put(opened(client, kind))
    reader = connect(running, "reader")
    assert [each.state for each in reader.members("net")] == ["awaited", "awaited"]
    clients[0].close()
    assert [each.state for each in reader.members("net")] == ["awaited", "over"]  # w1, then w0
    clients[1].close()
    assert [each.state for each in reader.members("net")] == ["over", "over"]
    lines = status_of(running, "--json", command="members").splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["over", "over"]


# Elastic members for operators: in `status`, `top`, on the page, as metrics and as spans.


SIZE = 1000
ONES = np.ones(SIZE, np.float32)
RULE = shardwell.SGD(learning_rate=1.0)


def read(running: Any, path: str) -> str:
    with urllib.request.urlopen(running.admin_urls[0] + path, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def member_shown(running: Any, *words: str) -> str:
    given = [*words, "--shards", running.target]
    environment = {"COLUMNS": "200"}
    result = CliRunner(env=environment).invoke(commands, given, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def metrics(running: Any) -> dict[Any, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(read(running, "metrics"))
        for sample in family.samples
    }


def test_states_late_chunks_and_who_is_lost(cluster, connect) -> None:
    """w1 is lost while its connection is gone, then w2 is drained; w0 is late for one step."""
    running = cluster(1, admin_listen="127.0.0.1:0", tokens=None)
    elastic = shardwell.Elastic(min_count=1, max_count=8, member_return_s=0.1, member_lease_s=1.0)
    options: dict[str, Any] = {"members": elastic, "min_contributors": 1, "grace_s": 0.5}
    nets = []
    for number in range(3):
        net = connect(running, f"w{number}").parameter(
            "net", size=SIZE, optimizer=RULE, codec="fp32", **options
        )
        net.init(np.zeros(SIZE, np.float32))
        net.get_weights()
        nets.append(net)
    step = nets[0].put_gradient(ONES)
    chunk_count = running.servers[0].shard.parameters.get("net").chunk_count
    nets[1].get_weights(min_version=step + 1)
    nets[2].get_weights(min_version=step + 1)
    nets[1].put_gradient(ONES)
    nets[2].put_gradient(ONES)
    late = nets[0].next_step
    nets[1].get_weights(min_version=late + 1)
    assert nets[0].put_gradient(ONES) == late
    assert nets[0].outcome.late == (Slice(0, SIZE),)
    ops = connect(running, "ops")
    ops.drain("w2")
    heartbeats = nets[1]._shards.heartbeats
    heartbeats.close()  # as of a stopped process
    eventually("w1 is lost", lambda: ops.status()[0].parameters[0].lost_member_count == 1)

    words = "1 awaited, 1 draining, 1 lost of 1 to 8 members"
    line = next(line for line in member_shown(running, "status").splitlines() if " net " in line)
    assert words in line
    assert f"late: {chunk_count} chunks" in line
    assert "never seen" not in line

    (found,) = json.loads(read(running, "status.json"))["parameters"]
    assert (found["crew"], found["crew_words"], found["late"]) == (
        "1 to 8 members",
        words,
        chunk_count,
    )
    states = {each["worker_id"]: each["state"] for each in found["members"]}
    assert states == {"w0": "awaited", "w1": "lost", "w2": "draining"}
    assert "crew_words" in read(running, "page.js")

    told = metrics(running)
    of = ("kind", "parameter"), ("name", "net")
    counts = {s: told["shardwell_members", *of, ("state", s)] for s in ("awaited", "lost", "over")}
    assert counts == {"awaited": 1, "lost": 1, "over": 0}
    assert told["shardwell_members_lost_total", *of] == 1
    assert told["shardwell_gradients_late_total", *of] == chunk_count
    assert told["shardwell_worker_chunks_late_total", *of, ("worker", "w0")] == chunk_count
    assert told["shardwell_worker_chunks_counted_total", *of, ("worker", "w0")] == chunk_count

    spans = running.servers[0].shard.spans.since(0, "net")
    kept = [(s.step, s.peer) for s in spans if s.kind == trace_pb2.SPAN_KIND_LATE]
    assert kept == [(late, "w0")] * chunk_count


def test_below_min_count_the_page_says_how_many_more(cluster, connect) -> None:
    running = cluster(2, admin_listen="127.0.0.1:0", tokens=None)
    net = connect(running, "w0").parameter(
        "net", size=SIZE, optimizer=RULE, members=shardwell.Elastic(min_count=3)
    )
    net.init(np.zeros(SIZE, np.float32))
    net.put_gradient(ONES)
    expected = "2 more members, as min_count says"

    def waits() -> list[dict[str, Any]]:
        found = json.loads(read(running, "status.json"))
        return [each for each in found["waits"] if each["open_for_s"] >= 1]

    (wait,) = eventually("it waits", waits)
    assert wait["words"].endswith(f"for {expected}")
    for command in (("status",), ("top", "--once", "--interval-s", "0.1")):
        assert expected in member_shown(running, *command)


@pytest.mark.same_host
def test_where_members_are_and_how_their_gradients_come(cluster, connect) -> None:
    """Of a client that is gone it is known where it was, and nothing of how it sends."""
    running = cluster(2, admin_listen="127.0.0.1:0", tokens=None, chunk_size_bytes=2**18)
    ways: dict[str, dict[str, Any]] = {"near": {}, "far": {"same_host": False}}
    clients = {name: connect(running, name, **options) for name, options in ways.items()}
    nets = {
        name: client.parameter("net", size=400_000, optimizer=RULE, worker_count=2)
        for name, client in clients.items()
    }
    nets["near"].init(np.zeros(400_000, np.float32))
    for net in nets.values():
        net.put_gradient(np.ones(400_000, np.float32))
    small = clients["near"].parameter("small", size=10, optimizer=RULE)
    small.init(np.zeros(10, np.float32))
    small.put_gradient(np.ones(10, np.float32))
    found = {each.worker_id: each for each in clients["far"].members("net")}
    for member in found.values():
        assert (member.host, member.pid) == (host_name(), os.getpid())
        assert (member.connected, member.software_version) == (True, shardwell.__version__)
    assert found["far"].transports == ("tcp",)
    assert found["near"].transports == ("shared memory",)
    listed = {
        each["worker_id"]: each for each in json.loads(read(running, "status.json"))["workers"]
    }
    assert listed["near"]["names"] == [["parameter", "net"], ["parameter", "small"]]
    assert (listed["far"]["behind_steps"], listed["far"]["pid"]) == (0, os.getpid())
    vanish(clients["near"])  # as the kernel does for a process that was killed

    def gone() -> Any:
        found = {each.worker_id: each for each in clients["far"].members("net")}
        return None if found["near"].connected else found["near"]

    near = eventually("it is gone", gone)
    assert (near.host, near.pid, near.transports) == (host_name(), os.getpid(), ())
    assert near.software_version == ""

    def order() -> list[str]:
        workers = json.loads(read(running, "status.json"))["workers"]
        return [each["worker_id"] for each in workers]

    eventually("who is gone comes first", lambda: order() == ["near", "far"])


def test_a_version_is_short_and_printable(cluster) -> None:
    """Of a client that says none, as of an earlier version, nothing is shown."""
    running = cluster(1, tokens=None)
    with WireWorker(running.target, "w0", attends=False) as worker:
        for bad in ("x" * 65, "1.0\n", "1.0é"):
            with pytest.raises(grpc.RpcError) as refused:
                next(worker.attend(0, software_version=bad))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "software_version must be up to 64" in refused.value.details()
        worker.attend(0)
        (attendance,) = running.servers[0].shard.sessions.by_worker().values()
        assert attendance.software_version == ""
