"""Members of elastic parameters as all shards together have them, and how they are sent away."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from harness.programs.commands import run_command
from harness.programs.elastic_worker import ElasticWorker
from harness.tokens import Tokens

SIZE = 1000
ONES = np.ones(SIZE, np.float32)


def opened(client: shardwell.Client, name: str = "net", **options: Any) -> Any:
    given = options or {"members": shardwell.Elastic(member_return_s=0.2, member_lease_s=1.0)}
    model = client.parameter(
        name, size=SIZE, optimizer=shardwell.SGD(learning_rate=1.0), codec="fp32", **given
    )
    model.init(np.zeros(SIZE, np.float32))
    return model


def member(client: shardwell.Client, worker_id: str, name: str = "net") -> shardwell.MemberStatus:
    (found,) = (each for each in client.members(name) if each.worker_id == worker_id)
    return found


def command(running: Any, *words: str) -> tuple[int, str, str]:
    given = [*words, "--shards", running.target]
    return run_command("members", *given, environment={"COLUMNS": "200"})


def test_where_each_member_is(cluster, connect) -> None:
    running = cluster(3)
    first, second = (opened(connect(running, f"w{n}")) for n in range(2))
    ops = connect(running, "ops")
    assert ops.members("net") == ()
    first.exchange(ONES)
    first.exchange(ONES)
    second.get_weights()
    second.put_gradient(ONES)
    chunk_count = sum(-(-part.size // 64) for part in first.slices)
    early, late = ops.members("net")
    assert (early.worker_id, late.worker_id) == ("w0", "w1")
    assert (early.state, late.state) == ("awaited", "awaited")
    assert (early.joined_at, late.joined_at) == (0, 3)
    assert (early.next_step, late.next_step) == (2, 3)
    assert (early.counted_chunk_count, late.counted_chunk_count) == (2 * chunk_count, chunk_count)
    assert early.late_chunk_count == late.late_chunk_count == 0
    first.exchange(ONES)
    second.leave()
    present = ops.members("net")
    assert [(each.worker_id, each.state) for each in present] == [
        ("w0", "awaited"),
        ("w1", "over"),
    ]


def test_a_question_is_no_warning(cluster, connect, caplog) -> None:
    """A client asks for a parameter and a table of the name; users see warnings of the shards."""
    running = cluster(2)
    ops = connect(running, "ops")
    with pytest.raises(shardwell.UnknownParameterError):
        ops.members("net")
    opened(connect(running, "w0")).exchange(ONES)
    assert len(ops.members("net")) == 1
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_who_was_late_and_who_is_lost(cluster, connect) -> None:
    running = cluster(2)
    options = {"min_contributors": 1, "grace_s": 0.01, "member_return_s": 0.2, "member_lease_s": 1}
    ops = connect(running, "ops")
    with ExitStack() as stack:
        for number, pause_s in enumerate((0.0, 0.3)):
            stack.enter_context(
                ElasticWorker(running.target, f"w{number}", size=SIZE, pause_s=pause_s, **options)
            )
        eventually(
            "the slow one is late",
            lambda: any(
                each.worker_id == "w1" and each.late_chunk_count > 0
                for each in ops.status()[0].parameters and ops.members("subject")
            ),
        )
        fast, slow = ops.members("subject")
        assert fast.counted_chunk_count > slow.counted_chunk_count
    eventually(
        "both are lost",
        lambda: {each.state for each in ops.members("subject")} == {"lost"},
    )
    statuses = [shard.parameters[0] for shard in ops.status()]
    assert sum(each.lost_member_count for each in statuses) >= 2
    assert sum(each.late_chunk_count for each in statuses) > 0


def test_a_drained_member_hears_it_with_its_next_gradient(cluster, connect) -> None:
    running = cluster(2)
    worker, ops = opened(connect(running, "w0")), connect(running, "ops")
    worker.exchange(ONES)
    assert not worker.is_draining
    assert ops.drain("w0") == ["net"]
    assert member(ops, "w0").state == "draining"
    worker.exchange(ONES)
    assert worker.is_draining
    worker.leave()
    assert member(ops, "w0").state == "over"
    worker.exchange(ONES)  # it takes part anew
    assert not worker.is_draining
    assert member(ops, "w0").state == "awaited"


def test_a_member_that_hangs_is_removed(cluster, connect) -> None:
    """Its heartbeats go on, so that nothing else would end the others' wait."""
    running = cluster(2)
    first, second = (opened(connect(running, f"w{n}")) for n in range(2))
    first.exchange(ONES)
    second.get_weights()
    second.put_gradient(ONES)
    first.exchange(ONES)
    with pytest.raises(shardwell.WorkersMissingError):
        first.exchange(ONES, timeout_s=1.0)
    assert connect(running, "ops").remove_member("w1", "net") == ["net"]
    first.exchange(ONES)
    assert first.outcome.contributors == ("w0",)
    second.exchange(ONES)
    assert second.outcome.counted == "none"


def test_who_is_not_there(cluster, connect) -> None:
    running = cluster(2)
    worker, ops = opened(connect(running, "w0")), connect(running, "ops")
    opened(connect(running, "w0"), "crew", worker_count=1).exchange(ONES)
    table = ops.table("rows", row_count=9, dim=2, optimizer=shardwell.SGD(learning_rate=1.0))
    worker.exchange(ONES)
    for act in (ops.drain, ops.remove_member):
        with pytest.raises(shardwell.ArgumentError, match=r"'w9' is no member of any.*are: 'w0'"):
            act("w9")
        with pytest.raises(shardwell.ArgumentError, match="'w9' is no member of parameter 'net'"):
            act("w9", "net")
        with pytest.raises(shardwell.ArgumentError, match="'crew' has 1 worker, whom each step"):
            act("w0", "crew")
        with pytest.raises(shardwell.ArgumentError, match="table 'rows' has 1 worker"):
            act("w0", table.name)
        with pytest.raises(shardwell.UnknownParameterError, match="parameter or table 'nothing'"):
            act("w0", "nothing")
    worker.leave()
    with pytest.raises(shardwell.ArgumentError, match=r"'w0' is no member of .*; it has none"):
        ops.drain("w0", "net")
    with pytest.raises(shardwell.UnknownParameterError, match="'nothing'"):
        ops.members("nothing")
    assert [each.state for each in ops.members("crew")] == ["awaited"]


def test_the_command_members(cluster, connect) -> None:
    running = cluster(2)
    worker = opened(connect(running, "w0"))
    opened(connect(running, "w0"), "other", worker_count=1).exchange(ONES)
    worker.exchange(ONES)
    code, output, _ = command(running)
    assert code == 0
    assert [line.split()[:4] for line in output.split("\n") if " w0 " in line] == [
        ["net", "w0", "awaited", "0"],
        ["other", "w0", "awaited", "1"],
    ]
    code, output, _ = command(running, "net", "--json")
    (line,) = output.splitlines()
    found = json.loads(line)
    assert code == 0
    assert {key: found[key] for key in ("name", "worker_id", "state", "joined_at")} == {
        "name": "net",
        "worker_id": "w0",
        "state": "awaited",
        "joined_at": 0,
    }
    assert command(running, "drain", "w0", "net")[:2] == (0, "asked w0 to leave net")
    assert member(connect(running, "ops"), "w0").state == "draining"
    assert command(running, "remove", "w0")[:2] == (0, "removed w0 from net")
    code, output, log = command(running, "remove", "w0")
    assert (code, output) == (1, "")
    assert "shardwell: 'w0' is no member of any parameter or table; it has none" in log
    code, _, log = command(running, "nothing")
    assert code == 1
    assert "no shard has a parameter or table 'nothing'" in log


def test_rights_to_drain_and_remove_members(cluster, tmp_path) -> None:
    tokens = Tokens(tmp_path)
    running = cluster(1, tokens=tokens.path)
    file = tokens.add("maker", "create")
    with shardwell.connect(running.target, worker_id="w0", token_file=file) as client:
        opened(client).exchange(ONES)
        with pytest.raises(shardwell.AccessDeniedError, match="not administer it"):
            client.drain("w0", "net")
        assert client.members("net")[0].state == "awaited"
