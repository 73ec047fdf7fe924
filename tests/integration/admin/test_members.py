"""Elastic members for operators: in `status`, `top`, on the page, as metrics and as spans."""

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
from shardwell_server.cli import commands

SIZE = 1000
ONES = np.ones(SIZE, np.float32)
RULE = shardwell.SGD(learning_rate=1.0)


def read(running: Any, path: str) -> str:
    with urllib.request.urlopen(running.admin_urls[0] + path, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def shown(running: Any, *words: str) -> str:
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
    line = next(line for line in shown(running, "status").splitlines() if " net " in line)
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
        assert expected in shown(running, *command)


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
