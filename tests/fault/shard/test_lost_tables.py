"""Goal: when a shard without files loses its memory, no client ever gets, sends or saves half a
table.

Method: shards are processes in memory; one is killed and started again, empty; workers that had the
table open and new ones try everything, again and again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from harness.threads import together
from shardwell_server import LocalCluster
from shardwell_server.shard.table.register import TableRegister

IDS = np.arange(40)
ONES = np.ones((IDS.size, 2), np.float32)
REFUSED = (shardwell.OtherIncarnationError, shardwell.UnknownTableError)


def open_table(client: shardwell.Client, mode: str) -> shardwell.Table:
    return client.table(
        "rows",
        row_count=100,
        dim=2,
        optimizer=shardwell.SGD(learning_rate=1.0),
        initializer=shardwell.Zeros(),
        mode=mode,
    )


def lose(running: LocalCluster, shard_index: int) -> None:
    running.children[shard_index].kill()
    eventually("it has ended", lambda: running.children[shard_index].poll() is not None)
    running.start_again(shard_index)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_table_of_which_a_shard_is_lost(cluster, connect, tmp_path, mode, lost) -> None:
    running = cluster(2, processes=True)
    client = connect(running, "w0")
    table = open_table(client, mode)
    for _ in range(3):
        table.put_row_gradients(IDS, ONES)
    lose(running, lost)
    observer = connect(running, "observer")
    tries: list[Callable[[], object]] = [
        lambda: table.get_rows(IDS),
        lambda: table.put_row_gradients(IDS, ONES),
        lambda: open_table(connect(running, "new"), mode),
        lambda: open_table(connect(running, "w0"), mode),
        table.reopen,
        lambda: client.save_checkpoint(tmp_path / "saved"),
        lambda: observer.export_table("rows", tmp_path / "rows.safetensors"),
    ]
    for _ in range(2):
        for attempt in tries:
            with pytest.raises(REFUSED, match=r"lost its memory|lost their memory|no table"):
                attempt()
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_table_of_which_nothing_had_begun(cluster, connect, lost) -> None:
    running = cluster(2, processes=True)
    open_table(connect(running, "early"), "async").close()
    lose(running, lost)
    table = open_table(connect(running, "w0"), "async")
    table.put_row_gradients(IDS, ONES)
    np.testing.assert_array_equal(table.get_rows(IDS), -1)
    lose(running, lost)
    late = connect(running, "w1")
    with pytest.raises(shardwell.OtherIncarnationError, match="lost its memory"):
        open_table(late, "async")


def test_a_cluster_that_lost_all_begins_anew(cluster, connect) -> None:
    """A worker that had the table open must open it again: its step may be counted or not."""
    running = cluster(2, processes=True)
    table = open_table(connect(running, "w0"), "async")
    table.put_row_gradients(IDS, ONES)
    for shard_index in range(2):
        lose(running, shard_index)
    other = open_table(connect(running, "w1"), "async")
    other.put_row_gradients(IDS, ONES)
    with pytest.raises(shardwell.OtherIncarnationError, match="lost its memory"):
        table.put_row_gradients(IDS, ONES)
    table.reopen()
    table.put_row_gradients(IDS, ONES)
    np.testing.assert_array_equal(table.get_rows(IDS), -2)


def test_many_workers_make_one_table(cluster, connect) -> None:
    running = cluster(3)
    clients = [connect(running, f"w{number}") for number in range(8)]
    tables = together([lambda c=client: open_table(c, "async") for client in clients])
    together([lambda t=table: t.put_row_gradients(IDS, ONES) for table in tables])
    np.testing.assert_array_equal(tables[0].get_rows(IDS), -8)


def test_a_kept_table_is_the_same_after_a_kill(cluster, connect, tmp_path) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True)
    table = open_table(connect(running, "w0"), "async")
    table.put_row_gradients(IDS, ONES)
    for shard_index in range(2):
        lose(running, shard_index)
    table.put_row_gradients(IDS, ONES)
    again = open_table(connect(running, "w1"), "async")
    np.testing.assert_array_equal(again.get_rows(IDS), -2)


def test_a_table_without_an_incarnation_yet(cluster, connect, monkeypatch) -> None:
    """Shard 0 ended between making it and drawing its incarnation; the next client gets one."""

    def failing(*_: object) -> None:
        raise shardwell.StorageError("the disk is gone")

    running = cluster(2)
    client = connect(running, "w0")
    with monkeypatch.context() as patch:
        patch.setattr(TableRegister, "note_incarnation", failing)
        with pytest.raises(shardwell.StorageError, match="the disk is gone"):
            open_table(client, "async")
    table = open_table(client, "async")
    (one,) = {status.incarnation for status in table.status()}
    assert one
