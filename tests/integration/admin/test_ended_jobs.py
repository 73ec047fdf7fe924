"""Goal: jobs that have ended, or died for good, are distinguished from those that hang.

Method: clients that end in order, or without a word, on shards with an admin port.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

import shardwell
from harness.inside import vanish
from harness.polling import PATIENCE_S, eventually
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
