"""Goal: a deletion that is cut off anywhere is finished by a repeat; names are made as a whole.

Method: the client ends, or a shard is killed, after each of a deletion's requests in turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.deletions import (
    REQUEST_COUNT,
    EndedError,
    after_requests,
    end,
    requests_of,
)
from harness.inside import channels_of, incarnation_of, vanish
from harness.polling import eventually
from shardwell.v1 import names_pb2, table_pb2
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server import LocalCluster

SGD = shardwell.SGD(learning_rate=1.0)
SIZE = 300
KINDS = ["parameter", "table"]


def opened(client: shardwell.Client, kind: str, dim: int = 2) -> Any:
    """`dim` makes it another one."""
    if kind == "table":
        return client.table(
            "m", row_count=50, dim=dim, optimizer=SGD, initializer=shardwell.Zeros()
        )
    made = client.parameter("m", size=SIZE * dim, optimizer=SGD)
    made.init(np.zeros(SIZE * dim, np.float32))
    return made


def step(one: Any, dim: int = 2) -> Any:
    if isinstance(one, shardwell.Table):
        return one.exchange_rows([1, 2], np.ones((2, dim), np.float32))
    return one.exchange(np.ones(one.size, np.float32))


def held(running: LocalCluster) -> list[bool]:
    """Whether each shard has it."""
    with shardwell.connect(running.target) as client:  # which waits for one that was killed
        return [bool(shard.parameters or shard.tables) for shard in client.status()]


@pytest.mark.parametrize("number", range(1, REQUEST_COUNT + 1))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", ["memory", "mmap"])
def test_a_client_that_ends_anywhere(
    cluster, connect, monkeypatch, tmp_path: Path, store, kind, number
) -> None:
    running = cluster(2, data_dir=tmp_path if store == "mmap" else None)
    worker = connect(running, "w0")
    one = opened(worker, kind)
    step(one)
    ends = connect(running, "ends")
    unknown = (shardwell.UnknownParameterError, shardwell.UnknownTableError)

    with monkeypatch.context() as patch:
        after_requests(patch, number, end)
        with pytest.raises(EndedError):
            ends.delete("m", force=True)
    ends.close()
    left = held(running)
    assert left == [number < 5, number < 4]
    if number < 3:  # nothing is decided: it goes on
        np.testing.assert_array_equal(step(one), -2.0)
    elif number < 5:  # no client can make a part of it anew, with whatever spec
        for dim in (2, 3):
            with pytest.raises(unknown, match="is being deleted by 'ends'"):
                opened(connect(running, f"w{dim}"), kind, dim)
        with pytest.raises(unknown, match="deleted by 'ends'"):
            step(one)
    assert held(running) == left

    again = connect(running, "again")
    if any(left):
        # Where it is decided, members are not asked about.
        again.delete("m", force=number < 3)
    with pytest.raises(unknown, match="nothing is left to delete"):
        again.delete("m")
    assert held(running) == [False, False]
    assert [shard.stored_bytes for shard in again.status()] == [0, 0]
    np.testing.assert_array_equal(step(opened(again, kind, 3), 3), -1.0)
    with pytest.raises(unknown, match="another one was made since"):
        step(one)


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
    one = opened(worker, kind)
    step(one)
    ops = connect(running, "ops")

    def kill() -> None:
        running.children[shard_index].kill()
        running.start_again(shard_index)

    with monkeypatch.context() as patch:
        after_requests(patch, number, kill)
        assert ops.delete("m", force=True) > 0
    for _ in range(2):
        assert held(running) == [False, False]
        running.children[shard_index].kill()
        running.start_again(shard_index)
    for index in range(2):
        assert not list((tmp_path / f"shard-{index}" / f"{kind}s").iterdir())
    np.testing.assert_array_equal(step(opened(ops, kind, 3), 3), -1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_members_that_a_restarted_shard_waits_for(cluster, connect, tmp_path: Path, kind) -> None:
    """They have their time to come back; then it is deleted, by the same call."""
    running = cluster(2, data_dir=tmp_path, processes=True, session_lease_s=1.0)
    worker = connect(running, "w0")
    step(opened(worker, kind))
    ops = connect(running, "ops")
    for index in range(2):
        running.children[index].kill()
    vanish(worker)  # without a word, as if it was killed, too
    for index in range(2):
        running.start_again(index)
    assert ops.delete("m") > 0
    assert held(running) == [False, False]


@pytest.mark.parametrize("lost", [0, 1])
def test_what_is_left_of_a_cluster_that_lost_memory(cluster, connect, lost) -> None:
    running = cluster(2, processes=True)
    step(opened(connect(running, "w0"), "parameter"))
    running.children[lost].kill()
    running.start_again(lost)
    ops = connect(running, "ops")
    assert held(running) == [lost != 0, lost != 1]
    ops.delete("m", force=True)
    np.testing.assert_array_equal(step(opened(ops, "parameter", 3), 3), -1.0)


def test_a_late_request_removes_nothing_of_what_came_since(cluster, connect, monkeypatch) -> None:
    client = connect(cluster(2), "w0")
    opened(client, "parameter")
    sent = requests_of(monkeypatch, lambda: client.delete("m"))
    again = opened(client, "parameter")
    step(again)
    for channel, request in sent:
        answer = channel.call("Delete", request, names_pb2.DeleteResponse, timeout_s=10.0)
        assert answer.freed_bytes == 0
    np.testing.assert_array_equal(step(again), -2.0)


@pytest.mark.parametrize("number", [3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_lost_deletes_nothing_twice(
    cluster, connect, monkeypatch, kind, number
) -> None:
    """Meanwhile another client ended the deletion, and the name was made anew."""
    running = cluster(2)
    worker, ops, other = (connect(running, name) for name in ("w0", "ops", "other"))
    step(opened(worker, kind))
    made: list[Any] = []

    def lose() -> None:
        if number < 5:
            other.delete("m", force=True)
        made.append(opened(worker, kind, 3))
        step(made[0], 3)
        raise shardwell.ShardUnavailableError("the line broke", shard_index=0)

    with monkeypatch.context() as patch:
        after_requests(patch, number, lose)
        ops.delete("m", force=True)
    np.testing.assert_array_equal(step(made[0], 3), -2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_opening_makes_nothing_anew_on_one_shard(cluster, connect, kind) -> None:
    """Of a client that had asked shard 0 before it was deleted there."""
    running = cluster(2)
    client = connect(running, "w0")
    one = opened(client, kind)
    channel, identity = channels_of(client)[1], channels_of(client)[1].identity
    request: Any
    if kind == "parameter":
        request = pb.CreateParameterRequest(
            shard=identity, spec=one.spec.to_proto(), incarnation=incarnation_of(one)
        )
        sent: Any = ("CreateParameter", request, pb.CreateParameterResponse)
        where = {"parameter": "m"}
    else:
        (incarnation,) = {each.incarnation for each in client.status()[1].tables}
        request = table_pb2.OpenTableRequest(
            shard=identity, spec=one.spec.to_proto(), incarnation=incarnation
        )
        sent = ("OpenTable", request, table_pb2.OpenTableResponse)
        where = {"table": "m"}
    assert request.incarnation
    client.delete("m")
    unknown = (shardwell.UnknownParameterError, shardwell.UnknownTableError)
    with pytest.raises(unknown, match="was deleted by 'w0'"):
        channel.call(*sent, timeout_s=10.0, **where)
    assert held(running) == [False, False]


def test_its_files_are_free_at_once(cluster, connect, tmp_path: Path) -> None:
    """Not only their names: nothing of them is mapped any more."""
    client = connect(cluster(2, data_dir=tmp_path), "w0")
    step(opened(client, "parameter"))

    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if str(tmp_path) in line]

    assert mapped()
    client.delete("m")
    eventually("they are unmapped", lambda: not mapped())
