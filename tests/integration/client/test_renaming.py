"""Goal: what gets another name goes on under it, bit for bit; the old name is free on all shards.

Method: real shards with and without files, real clients; beside it the same training, not renamed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import run_command
from harness.threads import in_background
from harness.tokens import Tokens
from shardwell_server import LocalCluster

ADAM = shardwell.Adam(learning_rate=0.125)
SIZE = 300
KINDS = ["parameter", "table"]
UNKNOWN = {"parameter": shardwell.UnknownParameterError, "table": shardwell.UnknownTableError}


def opened(client: shardwell.Client, kind: str, name: str = "m", worker_count: int = 1) -> Any:
    if kind == "table":
        return client.table(
            name,
            row_count=50,
            dim=2,
            optimizer=ADAM,
            initializer=shardwell.Zeros(),
            worker_count=worker_count,
        )
    made = client.parameter(name, size=SIZE, optimizer=ADAM, worker_count=worker_count)
    made.init(np.zeros(SIZE, np.float32))
    return made


def step(one: Any) -> Any:
    """A step of a worker, another one for each; what came of it."""
    value = np.float32(one.next_step % 5 - 1.5)
    if isinstance(one, shardwell.Table):
        return one.exchange_rows([1, 2], np.full((2, 2), value))
    return one.exchange(np.full(SIZE, value))


def read(one: Any) -> Any:
    return one.get_rows([1, 2]) if isinstance(one, shardwell.Table) else one.get_weights()


def names_on(client: shardwell.Client) -> list[set[str]]:
    """Of all parameters and tables, by shard."""
    return [
        {each.spec.name for each in (*shard.parameters, *shard.tables)} for shard in client.status()
    ]


@pytest.fixture(params=["memory", "mmap"])
def running(request, cluster, tmp_path: Path) -> Any:
    return cluster(3, data_dir=tmp_path if request.param == "mmap" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_under_its_new_name(running, connect, kind) -> None:
    client = connect(running, "w0")
    one, beside = opened(client, kind), opened(client, kind, "beside")
    one.set_learning_rate(0.5)
    beside.set_learning_rate(0.5)
    for _ in range(3):
        np.testing.assert_array_equal(step(one), step(beside))
    stored = [shard.stored_bytes for shard in client.status()]
    client.rename("m", "old")
    assert names_on(client) == [{"old", "beside"}] * 3
    assert [shard.stored_bytes for shard in client.status()] == stored
    with pytest.raises(shardwell.ClosedError):
        step(one)
    old = opened(client, kind, "old")
    assert old.next_step == 3
    np.testing.assert_array_equal(read(old), read(beside))
    for _ in range(3):
        np.testing.assert_array_equal(step(old), step(beside))
    again = opened(client, kind)  # the name is free
    assert again.next_step == 0
    step(again)
    assert [each["old"] for each in by_name(client, kind)] == [6] * 3


def by_name(client: shardwell.Client, kind: str) -> list[dict[str, int]]:
    """Versions of all of a kind, by shard."""
    return [
        {each.spec.name: each.version for each in shard.tables}
        if kind == "table"
        else {each.spec.name: each.version_min for each in shard.parameters}
        for shard in client.status()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_of_an_old_handle_reaches_neither_name(running, connect, kind) -> None:
    worker, ops = connect(running, "w0"), connect(running, "ops")
    one = opened(worker, kind)
    step(one)
    ops.rename("m", "old", force=True)
    opened(ops, kind)
    for now in (True, False):
        with pytest.raises(UNKNOWN[kind], match="'old'"):
            one.set_learning_rate(0.5, now=now)
    for shard in ops.status():
        held = shard.tables if kind == "table" else shard.parameters
        assert {each.spec.name: each.learning_rate for each in held} == {"m": 0.125, "old": 0.125}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_and_deleted(running, connect, kind) -> None:
    client = connect(running, "w0")
    one, beside = opened(client, kind), opened(client, kind, "beside")
    for number in range(3):
        for each in (one, beside):
            step(each)
        client.rename("m", "n")
        client.rename("n", "m")
        one = opened(client, kind)
        assert one.next_step == number + 1
    np.testing.assert_array_equal(step(one), step(beside))
    freed_bytes = client.delete("m")
    assert freed_bytes == client.delete("beside") > 0
    assert names_on(client) == [set()] * 3
    with pytest.raises(UNKNOWN[kind], match="no shard has a"):
        client.rename("m", "n", kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_files_have_the_new_name(connect, kind, tmp_path: Path) -> None:
    with (
        LocalCluster(2, data_dir=tmp_path) as first,
        shardwell.connect(first.target, worker_id="w0") as client,
    ):
        one = opened(client, kind)
        values = [step(one) for _ in range(3)][-1]
        client.rename("m", "n")
        client.rename("n", "old")
    for _ in range(2):
        with (
            LocalCluster(2, data_dir=tmp_path) as again,
            shardwell.connect(again.target, worker_id="w0") as client,
        ):
            old = opened(client, kind, "old")
            np.testing.assert_array_equal(read(old), values)
            assert names_on(client) == [{"old"}] * 2
            values = step(old)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_in_use_is_refused_and_goes_on(running, connect, kind) -> None:
    worker, ops = connect(running, "w0"), connect(running, "ops")
    used = opened(worker, kind)
    step(used)
    with pytest.raises(shardwell.MembersAliveError, match=r"'w0' .*or rename it all the same"):
        ops.rename("m", "old")
    assert names_on(ops) == [{"m"}] * 3
    step(used)
    worker.close()
    ops.rename("m", "old")
    assert names_on(ops) == [{"old"}] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_workers_of_the_old_name_hear_the_new_one(running, connect, kind) -> None:
    """One waits for another worker, one is idle; they go on under the new name."""
    waiting, idle, ops = (connect(running, name) for name in ("w0", "w1", "ops"))
    of_waiting, of_idle = opened(waiting, kind, worker_count=2), opened(idle, kind, worker_count=2)
    call = in_background(lambda: step(of_waiting))
    eventually(
        "it waits",
        lambda: any(
            each.wait.open_for_s is not None
            for shard in ops.status()
            for each in (*shard.parameters, *shard.tables)
        ),
    )
    ops.rename("m", "old", force=True)
    with pytest.raises(UNKNOWN[kind], match="renamed to 'old' by 'ops'"):
        call.result(PATIENCE_S)
    for verb in (step, read):
        for one in (of_waiting, of_idle):
            with pytest.raises(UNKNOWN[kind], match="was renamed to 'old' by 'ops'; open 'old'"):
                verb(one)
    two = opened(waiting, kind, "old", 2), opened(idle, kind, "old", 2)
    # What shards had counted of the first is counted once.
    ends = [in_background(lambda one=one: step(one)) for one in two if one.next_step == 0]
    for end in ends:
        end.result(PATIENCE_S)
    assert {one.next_step for one in two} == {1}
    assert by_name(ops, kind) == [{"old": 1}] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_taken_is_refused(running, connect, kind) -> None:
    client = connect(running, "w0")
    one = opened(client, kind)
    step(one)
    for other in KINDS:
        opened(client, other, f"a-{other}")
        with pytest.raises(shardwell.SpecMismatchError, match=rf"has a .* 'a-{other}'; nothing"):
            client.rename("m", f"a-{other}")
    with pytest.raises(shardwell.ArgumentError, match="another name; got 'm' for both"):
        client.rename("m", "m")
    with pytest.raises(shardwell.ArgumentError, match="new_name"):
        client.rename("m", "../x")
    with pytest.raises(shardwell.UnknownParameterError, match="nothing is left to rename"):
        client.rename("nothing", "other")
    step(one)


def test_it_takes_the_rights_to_both_names(cluster, connect, tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    running = cluster(2, tokens=tokens.path)
    owner = connect(
        running, "w0", token_file=tokens.add("owner", "create:mine-", "contribute", "read")
    )
    step(opened(owner, "parameter", "mine-m"))
    with pytest.raises(shardwell.AccessDeniedError, match="'theirs'"):
        owner.rename("mine-m", "theirs")
    for right in ("contribute", "create"):
        other = connect(running, "w1", token_file=tokens.add("other", right))
        with pytest.raises(shardwell.AccessDeniedError):
            other.rename("mine-m", "mine-n", force=True)
        other.close()
    owner.rename("mine-m", "mine-n")
    assert opened(owner, "parameter", "mine-n").next_step == 1
    assert owner.delete("mine-n") > 0  # whose it is still


@pytest.mark.parametrize("kind", KINDS)
def test_the_command(running, connect, kind) -> None:
    client = connect(running, "w0")
    step(opened(client, kind))
    code, output, errors = run_command("rename", "m", "old", f"--shards={running.target}")
    assert (code, output) == (1, "")
    assert "is in use by 'w0'" in errors
    client.close()
    code, output, errors = run_command("rename", "m", "old", f"--shards={running.target}")
    assert (code, output.strip(), errors) == (0, "renamed m to old", "")
    code, output, errors = run_command("rename", "m", "old", f"--shards={running.target}")
    assert code == 1
    assert "nothing is left to rename" in errors
