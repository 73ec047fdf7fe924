"""Goal: a restore that ended between two shards can be brought to its end, and mixes nothing.

Method: the restoring client ends when one chosen shard has finished; workers go on where the table
is restored already; shards are killed meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from shardwell.checkpoint.restore import TableRestore, _UploadStream
from shardwell.v1 import table_pb2

DIM = 3
IDS = np.arange(60)
ONES = np.ones((IDS.size, DIM), np.float32)


class EndedError(Exception):
    """The restoring client ended here."""


def open_table(client: shardwell.Client) -> shardwell.Table:
    return client.table(
        "rows",
        row_count=1000,
        dim=DIM,
        optimizer=shardwell.SGD(learning_rate=1.0),
        initializer=shardwell.Zeros(),
        codec="fp32",
        mode="async",
    )


def checkpoint(client: shardwell.Client, path: Path, *, value: float) -> Path:
    table = open_table(client)
    table.put_row_gradients(IDS, -value * ONES)
    client.save_checkpoint(path)
    return path


@pytest.fixture
def saved(cluster, connect, tmp_path) -> Path:
    return checkpoint(connect(cluster(3), "saver"), tmp_path / "saved", value=7.0)


def cut_off(client: shardwell.Client, path: Path, finishing: int, monkeypatch: Any) -> None:
    """A restore that ends when one shard, alone, has finished."""
    offer = _UploadStream.offer

    def only_one(self: _UploadStream, message: bytes | None) -> bool:
        is_end = message is None or table_pb2.LoadRowsRequest.FromString(message).finish
        if is_end and self.channel.shard_index != finishing:
            return True
        return offer(self, message)

    def ending(self: TableRestore, stream: _UploadStream, call_group: Any) -> int:
        if stream.channel.shard_index == finishing:
            count: int = stream.call.result().row_count
            assert count
            raise EndedError
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(_UploadStream, "offer", only_one)
        patch.setattr(TableRestore, "_result", ending)
        patch.setattr(TableRestore, "_check_count", lambda *_: None)
        with pytest.raises(EndedError):
            client.restore_checkpoint(path)


def put_where_it_stands(table: shardwell.Table, shard_index: int) -> None:
    """Tries a step until the one shard has counted its part; the others refuse theirs."""

    def is_counted() -> bool:
        with pytest.raises(shardwell.NotInitializedError):
            table.put_row_gradients(IDS, ONES)
        return bool(table.status()[shard_index].counted_row_count)

    eventually("the part is counted", is_counted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("finishing", [0, 1, 2])
@pytest.mark.parametrize("kills", [False, True])
def test_workers_that_went_on_where_the_table_stood(
    cluster, connect, tmp_path, monkeypatch, saved, finishing, kills
) -> None:
    running = cluster(3, data_dir=tmp_path / "data", processes=True)
    client = connect(running, "w0")
    cut_off(client, saved, finishing, monkeypatch)
    table = open_table(client)
    eventually(
        "the others have seen its streams end",
        lambda: [s.loading for s in table.status()] == [n != finishing for n in range(3)],
    )
    put_where_it_stands(table, finishing)
    if kills:
        for shard_index in range(3):
            running.children[shard_index].kill()
            eventually("it ended", lambda n=shard_index: running.children[n].poll() is not None)
            running.start_again(shard_index)
    other = connect(running, "restorer")
    assert other.restore_checkpoint(saved)
    assert not any(status.loading for status in table.status())
    # The step that was begun: each of its rows counts once.
    table.put_row_gradients(IDS, ONES)
    np.testing.assert_array_equal(table.get_rows(IDS), 6.0)
    np.testing.assert_array_equal(table.row_ids(), IDS)
    with pytest.raises(shardwell.ArgumentError, match="has rows already"):
        other.restore_checkpoint(saved)


def test_another_checkpoint_does_not_complete_it(
    cluster, connect, tmp_path, monkeypatch, saved
) -> None:
    second = checkpoint(connect(cluster(2), "saver"), tmp_path / "second", value=9.0)
    client = connect(cluster(3, data_dir=tmp_path / "data"), "w0")
    cut_off(client, saved, 1, monkeypatch)
    client.restore_checkpoint(second)  # no gradient was counted: it replaces what came
    table = open_table(client)
    np.testing.assert_array_equal(table.get_rows(IDS), 9.0)
    assert table.status()[1].row_count + table.status()[0].row_count < IDS.size


def test_another_checkpoint_is_refused_where_workers_went_on(
    cluster, connect, tmp_path, monkeypatch, saved
) -> None:
    second = checkpoint(connect(cluster(2), "saver"), tmp_path / "second", value=9.0)
    client = connect(cluster(3, data_dir=tmp_path / "data"), "w0")
    cut_off(client, saved, 1, monkeypatch)
    table = open_table(client)
    put_where_it_stands(table, 1)
    for _ in range(2):
        with pytest.raises(shardwell.StepOrderError, match="has counted gradients on shard 1"):
            client.restore_checkpoint(second)
    client.restore_checkpoint(saved)
    table.put_row_gradients(IDS, ONES)
    np.testing.assert_array_equal(table.get_rows(IDS), 6.0)


def test_a_shard_that_lost_its_files_is_not_one_that_was_cut_off(
    cluster, connect, tmp_path, saved
) -> None:
    """However often it is tried: rows that were trained on and rows of a checkpoint never mix."""
    running = cluster(3, processes=True)  # in memory: a shard that is killed has lost everything
    client = connect(running, "w0")
    client.restore_checkpoint(saved)
    table = open_table(client)
    table.put_row_gradients(IDS, ONES)
    running.children[0].kill()
    eventually("it ended", lambda: running.children[0].poll() is not None)
    running.start_again(0)
    other = connect(running, "restorer")
    for _ in range(3):
        with pytest.raises(
            (shardwell.StepOrderError, shardwell.ArgumentError),
            match=r"has counted gradients|has rows already",
        ):
            other.restore_checkpoint(saved)


def test_what_would_be_forgotten_is_refused_until_it_is_restored(
    cluster, connect, tmp_path, monkeypatch, saved
) -> None:
    """A rate that only the shards that stand would keep, rows of a load that went."""
    running = cluster(3, data_dir=tmp_path / "data")
    client = connect(running, "w0")
    cut_off(client, saved, 1, monkeypatch)
    table = open_table(client)
    put_where_it_stands(table, 1)
    for call in (lambda: table.set_learning_rate(0.25), lambda: table.evict(older_than_step=1)):
        with pytest.raises(shardwell.NotInitializedError, match="restore of it was cut off"):
            call()
    client.restore_checkpoint(saved)
    assert {status.learning_rate for status in table.status()} == {1.0}
    table.set_learning_rate(0.25)
    assert {status.learning_rate for status in table.status()} == {0.25}


def test_checkpoints_that_differ_in_the_learning_rate_alone(
    cluster, connect, tmp_path, monkeypatch
) -> None:
    saver = connect(cluster(3), "saver")
    first = checkpoint(saver, tmp_path / "first", value=7.0)
    open_table(saver).set_learning_rate(0.125)
    saver.save_checkpoint(tmp_path / "second")
    client = connect(cluster(3, data_dir=tmp_path / "data"), "w0")
    cut_off(client, first, 1, monkeypatch)
    client.restore_checkpoint(tmp_path / "second")
    assert {status.learning_rate for status in open_table(client).status()} == {0.125}


def test_a_lost_shard_beside_one_whose_rows_were_evicted(cluster, connect, saved) -> None:
    running = cluster(3, processes=True)
    client = connect(running, "w0")
    client.restore_checkpoint(saved)
    table = open_table(client)
    table.put_row_gradients(IDS, ONES)
    table.evict(older_than_step=10**6)
    running.children[0].kill()
    eventually("it ended", lambda: running.children[0].poll() is not None)
    running.start_again(0)
    other = connect(running, "restorer")
    for _ in range(3):
        with pytest.raises((shardwell.StepOrderError, shardwell.ArgumentError)):
            other.restore_checkpoint(saved)
