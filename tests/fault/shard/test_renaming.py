"""Goal: a renaming that is cut off anywhere is finished by a repeat, and loses no gradient.

Method: the client ends, or a shard is killed, after each of a renaming's requests in turn; then
training goes on under the new name, and is compared with one that nothing disturbed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.name_changes import (
    REQUEST_COUNT,
    EndedError,
    after_requests,
    end,
    requests_of,
)
from shardwell_server import LocalCluster

ADAM = shardwell.Adam(learning_rate=0.125)
SIZE = 600
KINDS = ["parameter", "table"]
UNKNOWN = (shardwell.UnknownParameterError, shardwell.UnknownTableError)


def opened(client: shardwell.Client, kind: str, name: str = "m") -> Any:
    if kind == "table":
        return client.table(
            name, row_count=50, dim=2, optimizer=ADAM, initializer=shardwell.Zeros()
        )
    made = client.parameter(name, size=SIZE, optimizer=ADAM)
    made.init(np.zeros(SIZE, np.float32))
    return made


def step(one: Any) -> Any:
    """A step, another one for each."""
    value = np.float32(one.next_step % 5 - 1.5)
    if isinstance(one, shardwell.Table):
        return one.exchange_rows([1, 2], np.full((2, 2), value))
    return one.exchange(np.full(one.size, value))


def held(running: LocalCluster) -> list[set[str]]:
    """The names that each shard has, but for "beside"."""
    with shardwell.connect(running.target) as client:  # which waits for one that was killed
        return [
            {each.spec.name for each in (*shard.parameters, *shard.tables)} - {"beside"}
            for shard in client.status()
        ]


@pytest.mark.parametrize("number", range(1, REQUEST_COUNT + 1))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", ["memory", "mmap"])
def test_a_client_that_ends_anywhere(
    cluster, connect, monkeypatch, tmp_path: Path, store, kind, number
) -> None:
    running = cluster(2, data_dir=tmp_path if store == "mmap" else None)
    worker = connect(running, "w0")
    one, beside = opened(worker, kind), opened(worker, kind, "beside")
    step(one), step(beside)
    ends = connect(running, "ends")

    with monkeypatch.context() as patch:
        after_requests(patch, number, end)
        with pytest.raises(EndedError):
            ends.rename("m", "new", force=True)
    ends.close()
    left = [{"m" if number < 5 else "new"}, {"m" if number < 4 else "new"}]
    assert held(running) == left
    if number < 3:  # nothing is decided: it goes on
        step(one), step(beside)
    else:
        with pytest.raises(UNKNOWN, match="renamed to 'new' by 'ends'"):
            step(one)
    if 3 <= number < 5:  # neither name can be had
        with pytest.raises(UNKNOWN, match="is being renamed to 'new' by 'ends'"):
            opened(connect(running, "other"), kind)
        with pytest.raises(shardwell.SpecMismatchError, match="is about to be the name of"):
            opened(connect(running, "other"), kind, "new")
        again = connect(running, "again")
        with pytest.raises(UNKNOWN, match="it is being renamed to 'new'; finish that first"):
            again.rename("m", "newer", force=True)
        with pytest.raises(UNKNOWN, match="it is being renamed to 'new'; finish that first"):
            again.delete("m", force=True)
        again.close()
    assert held(running) == left

    again = connect(running, "again")
    if number < 5:
        again.rename("m", "new", force=number < 3)  # where it is decided, members are not asked
    with pytest.raises(UNKNOWN, match="nothing is left to rename"):
        again.rename("m", "new")
    assert held(running) == [{"new"}] * 2
    new = opened(worker, kind, "new")
    for _ in range(2):
        np.testing.assert_array_equal(step(new), step(beside))
    assert opened(worker, kind).next_step == 0


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize("number", range(1, REQUEST_COUNT + 1))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(8)
def test_a_shard_that_is_killed_anywhere(
    cluster, connect, monkeypatch, tmp_path: Path, kind, number, shard_index
) -> None:
    """The same call goes on when the shard is back."""
    running = cluster(2, data_dir=tmp_path, processes=True)
    worker = connect(running, "w0")
    one, beside = opened(worker, kind), opened(worker, kind, "beside")
    step(one), step(beside)
    ops = connect(running, "ops")

    def kill() -> None:
        running.children[shard_index].kill()
        running.start_again(shard_index)

    with monkeypatch.context() as patch:
        after_requests(patch, number, kill)
        ops.rename("m", "new", force=True)
    new = opened(worker, kind, "new")
    for _ in range(2):
        np.testing.assert_array_equal(step(new), step(beside))
        assert held(running) == [{"new"}] * 2
        kill()
    assert new.next_step == 3


@pytest.mark.parametrize("lost", [0, 1])
def test_a_shard_that_lost_its_memory(cluster, connect, lost) -> None:
    running = cluster(2, processes=True)
    one = opened(connect(running, "w0"), "parameter")
    step(one)
    running.children[lost].kill()
    running.start_again(lost)
    ops = connect(running, "ops")
    assert held(running) == [set() if lost == 0 else {"m"}, set() if lost == 1 else {"m"}]
    if lost == 0:
        with pytest.raises(UNKNOWN, match="shard 0 lost its memory"):
            ops.rename("m", "new", force=True)
        assert held(running) == [set(), {"m"}]
    else:
        ops.rename("m", "new", force=True)
        assert held(running) == [{"new"}, set()]


@pytest.mark.parametrize("kind", KINDS)
def test_late_requests_rename_nothing_that_came_since(cluster, connect, monkeypatch, kind) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    step(opened(client, kind))
    sent = requests_of(monkeypatch, lambda: client.rename("m", "new"))
    client.rename("new", "newer")
    again = opened(client, kind)
    step(again)
    for channel, request in sent:
        channel.change_name(request, 10.0)
    assert held(running) == [{"m", "newer"}] * 2
    assert (again.next_step, opened(client, kind, "newer").next_step) == (1, 1)
    step(again)
