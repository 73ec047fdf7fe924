"""Goal: what concerns all shards, or many small things on them, is asked at once.

So that it takes the time of one, whatever the number of shards. Method: a real cluster, and a
barrier before the calls of a verb that only as many as are to be under way at once can pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S
from shardwell.checkpoint.capture import ParameterCapture, TableCapture
from shardwell.checkpoint.restore import TableRestore
from shardwell.rpc.shard_channel import ShardChannel

SHARD_COUNT = 4
SGD = shardwell.SGD(learning_rate=1.0)
IDS = np.arange(40)


class Meeting:
    """Makes calls wait until so many of them are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def at(self, owner: type, name: str, count: int, counts: Callable[..., bool]) -> None:
        """`counts` says, given a call's arguments, whether it is one of them."""
        barrier, real = threading.Barrier(count), getattr(owner, name)

        def met(*given: Any, **named: Any) -> Any:
            if counts(*given):
                barrier.wait(PATIENCE_S)
            return real(*given, **named)

        self._monkeypatch.setattr(owner, name, met)

    def shards(self, method: str, *, first: int = 0) -> None:
        """All calls of one RPC to the shards from `first` on meet."""
        self.at(
            ShardChannel,
            "call",
            SHARD_COUNT - first,
            lambda channel, called, *_: called == method and channel.shard_index >= first,
        )


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    return Meeting(monkeypatch)


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    return connect(cluster(SHARD_COUNT), "w0")


def table_of(client: shardwell.Client, name: str = "t") -> shardwell.Table:
    return client.table(name, row_count=100, dim=2, optimizer=SGD, initializer=shardwell.Zeros())


def put(table: shardwell.Table) -> None:
    table.put_row_gradients(IDS, np.ones((IDS.size, 2), np.float32))


def test_shard_0_knows_the_table_and_the_others_are_asked_at_once(
    client: shardwell.Client, meeting: Meeting
) -> None:
    meeting.shards("OpenTable", first=1)
    table = table_of(client)
    put(table)  # which takes a place, too
    np.testing.assert_array_equal(table.get_rows(IDS), -1)


@pytest.mark.parametrize(
    ("method", "do"),
    [
        ("GetTableStatus", lambda client, table: table.set_learning_rate(0.5)),
        ("GetTableStatus", lambda client, table: client.status()),
        ("GetStatus", lambda client, table: client.status()),
        ("GetTableStatus", lambda client, table: table.status()),
    ],
)
def test_all_shards_are_asked_at_once(
    client: shardwell.Client,
    meeting: Meeting,
    method: str,
    do: Callable[[shardwell.Client, shardwell.Table], object],
) -> None:
    table = table_of(client)
    put(table)
    meeting.shards(method)
    do(client, table)


def test_a_parameter_s_versions_are_asked_of_all_shards_at_once(
    client: shardwell.Client, meeting: Meeting
) -> None:
    model = client.parameter("m", size=40, optimizer=SGD)
    model.init(np.zeros(40, np.float32))
    meeting.shards("GetStatus")
    model.set_learning_rate(0.5)
    np.testing.assert_array_equal(model.exchange(np.ones(40, np.float32)), -0.5)


def test_several_are_saved_and_restored_at_once(
    client: shardwell.Client,
    cluster,
    connect,
    meeting: Meeting,
    tmp_path: Path,
) -> None:
    names = [f"n{number}" for number in range(8)]
    for name in names:
        put(table_of(client, f"rows-of-{name}"))
        client.parameter(name, size=40, optimizer=SGD).init(np.full(40, 2, np.float32))
    for kind in (ParameterCapture, TableCapture):
        meeting.at(kind, "take", len(names), lambda *_: True)
    meeting.at(TableRestore, "restore", len(names), lambda *_: True)
    client.save_checkpoint(tmp_path / "checkpoint")
    other = connect(cluster(2), "w0")
    other.restore_checkpoint(tmp_path / "checkpoint")
    for name in names:
        np.testing.assert_array_equal(other.parameter(name).get_weights(), 2)
        np.testing.assert_array_equal(other.table(f"rows-of-{name}").get_rows(IDS), -1)
