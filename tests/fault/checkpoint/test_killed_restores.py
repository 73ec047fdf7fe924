"""Goal: a restore whose client was killed at any instant is brought to its end by doing it again.

Method: clients in processes of their own restore a checkpoint and are killed before and after each
call and message, of parameters, tables, and both. Then another client restores the same again, and
the shards have what was saved, bit for bit; another checkpoint over it is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardwell
import shardwell_server
from harness.polling import PATIENCE_S, eventually
from harness.programs import killed_restore
from harness.programs.forkserver import ForkedCalls
from shardwell.checkpoint.restore import TableRestore, _UploadStream
from shardwell.v1 import table_pb2

SIZE, DIM = 700, 3
IDS = np.arange(0, 90, 2)
CHOICES: dict[str, dict[str, Any]] = {
    "parameters": {"tables": []},
    "tables": {"parameters": []},
    "mixed": {},
    "named": {"names": {"long": "long.v2", "short": "long", "rows": "rows.v2"}},
}
OPTIMIZER = shardwell.SGD(learning_rate=0.5, momentum=0.5)


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedCalls]:
    with ForkedCalls() as found:
        yield found


def opened(client: shardwell.Client, *, worker_count: int = 1) -> list[Any]:
    """Two parameters, one of them shorter than there are shards, and a table."""
    options: dict[str, Any] = {"optimizer": OPTIMIZER, "worker_count": worker_count}
    return [
        client.parameter("long", size=SIZE, **options),
        client.parameter("short", size=1, **options),
        client.table("rows", row_count=1000, dim=DIM, codec="fp32", **options),
    ]


def train(client: shardwell.Client, value: int) -> None:
    long, short, rows = opened(client)
    for parameter in (long, short):
        parameter.init(np.arange(parameter.size, dtype=np.float32))
        for step in range(3):
            parameter.put_gradient(np.full(parameter.size, value + step, np.float32))
    rows.put_row_gradients(IDS, np.full((IDS.size, DIM), value, np.float32))


@pytest.fixture
def saved(cluster, connect, tmp_path) -> list[Path]:
    """Two checkpoints of the same names, and of other values."""
    paths = []
    for value in (1, 2):
        client = connect(cluster(2), "saver")
        train(client, value)
        if value == 1:
            opened(client)[0].set_learning_rate(0.25)
        client.save_checkpoint(tmp_path / f"saved-{value}")
        paths.append(tmp_path / f"saved-{value}")
    return paths


def contents(path: Path, names: dict[str, str]) -> list[Any]:
    """What a checkpoint holds, under other names; nothing of when and where it was made."""
    found = shardwell.inspect_checkpoint(path, verify=True)
    return sorted(
        (
            names.get(each.name, each.name),
            str(dataclasses.replace(each.spec, name="any")),
            each.version,
            each.learning_rate,
            sorted(
                (tensor, values.tobytes())
                for file in each.files
                for tensor, values in load_file(path / file.path).items()
            ),
        )
        for each in (*found.parameters, *found.tables)
    )


def check_restored(client: shardwell.Client, to: Path, saved: Path, choice: str) -> None:
    """What the cluster has is what was saved, with as many shards."""
    client.save_checkpoint(to)
    wanted = {"parameters": ["long", "short"], "tables": ["rows"]}.get(choice)
    names = CHOICES[choice].get("names", {})
    found = [each for each in contents(saved, {}) if wanted is None or each[0] in wanted]
    assert contents(to, {new: old for old, new in names.items()}) == found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("choice", CHOICES)
def test_killed_at_every_instant(
    cluster, connect, tmp_path, forked: ForkedCalls, saved: list[Path], choice: str
) -> None:
    chosen = CHOICES[choice]
    for instant in itertools.count(0, 2 if choice in ("mixed", "named") else 1):
        with shardwell_server.LocalCluster(2, chunk_size_bytes=4096) as running:
            child = forked.start(
                killed_restore.restore, running.target, str(saved[0]), instant, chosen
            )
            line = child.await_line("restored after ", timeout_s=PATIENCE_S)
            code = child.reap()
            assert (code == -9) == (line is None), (code, child.lines)
            with shardwell.connect(running.target, worker_id="restorer") as client:
                for _ in range(2):
                    client.restore_checkpoint(saved[0], **chosen)
                check_restored(client, tmp_path / f"{instant}", saved[0], choice)
                with pytest.raises(shardwell.ArgumentError, match="already"):
                    client.restore_checkpoint(saved[1], **chosen)
        if line is not None:
            break
    assert instant > 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("instant", [3, 9, 15, 21])
def test_another_checkpoint_never_mixes_with_one_that_was_cut_off(
    cluster, connect, tmp_path, forked: ForkedCalls, saved: list[Path], instant: int
) -> None:
    """It replaces what does not stand yet, or is refused; then the first one goes on."""
    running = cluster(2)
    child = forked.start(killed_restore.restore, running.target, str(saved[0]), instant, {})
    assert child.await_line("restored", timeout_s=PATIENCE_S) is None
    assert child.reap() == -9
    client = connect(running, "restorer")
    try:
        client.restore_checkpoint(saved[1])
        stands = saved[1]
    except shardwell.ArgumentError:
        client.restore_checkpoint(saved[0])
        stands = saved[0]
    check_restored(client, tmp_path / "again", stands, "mixed")


def test_shards_that_were_killed_know_what_they_have(
    cluster, connect, tmp_path, forked: ForkedCalls, saved: list[Path]
) -> None:
    running = cluster(2, data_dir=tmp_path / "data", processes=True)
    child = forked.start(killed_restore.restore, running.target, str(saved[0]), 10**6, {})
    assert child.await_line("restored", timeout_s=PATIENCE_S)
    child.reap()
    for shard_index in range(2):
        running.children[shard_index].kill()
        eventually("it ended", lambda n=shard_index: running.children[n].poll() is not None)
        running.start_again(shard_index)
    client = connect(running, "restorer")
    client.restore_checkpoint(saved[0])
    check_restored(client, tmp_path / "again", saved[0], "mixed")
    with pytest.raises(shardwell.ArgumentError, match="already"):
        client.restore_checkpoint(saved[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changed", ["a step", "a rate", "first weights of its own"])
def test_what_was_trained_since_is_never_overwritten(
    cluster, connect, saved: list[Path], changed: str
) -> None:
    client = connect(cluster(2), "w0")
    if changed == "first weights of its own":
        opened(client)[0].init(np.zeros(SIZE, np.float32))
    else:
        client.restore_checkpoint(saved[0])
        long = opened(client)[0]
        if changed == "a step":
            long.put_gradient(np.ones(SIZE, np.float32))
        else:
            long.set_learning_rate(0.125)
    with pytest.raises(shardwell.ArgumentError, match="'long' has first weights already"):
        client.restore_checkpoint(saved[0])


# A restore that ended between two shards can be brought to its end, and mixes nothing. Method: the
# restoring client ends when one chosen shard has finished; workers go on where the table is
# restored already; shards are killed meanwhile.


TABLE_DIM = 3
TABLE_IDS = np.arange(60)
ONES = np.ones((TABLE_IDS.size, TABLE_DIM), np.float32)


class EndedError(Exception):
    """The restoring client ended here."""


def open_table(client: shardwell.Client) -> shardwell.Table:
    return client.table(
        "rows",
        row_count=1000,
        dim=TABLE_DIM,
        optimizer=shardwell.SGD(learning_rate=1.0),
        initializer=shardwell.Zeros(),
        codec="fp32",
        mode="async",
    )


def checkpoint(client: shardwell.Client, path: Path, *, value: float) -> Path:
    table = open_table(client)
    table.put_row_gradients(TABLE_IDS, -value * ONES)
    client.save_checkpoint(path)
    return path


@pytest.fixture
def table_saved(cluster, connect, tmp_path) -> Path:
    return checkpoint(connect(cluster(3), "saver"), tmp_path / "saved", value=7.0)


def cut_off(client: shardwell.Client, path: Path, finishing: int, monkeypatch: Any) -> None:
    """A restore that ends when one shard, alone, has finished."""
    offer = _UploadStream.offer

    def only_one(self: _UploadStream, message: bytes | None) -> bool:
        is_end = message is None or table_pb2.LoadRowsRequest.FromString(message).finish
        if is_end and self.channel.shard_index != finishing:
            return True
        return offer(self, message)

    def ending(self: _UploadStream) -> int:
        if self.channel.shard_index == finishing:
            count: int = self.call.result().row_count
            assert count
            raise EndedError
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(_UploadStream, "offer", only_one)
        patch.setattr(_UploadStream, "result", ending)
        patch.setattr(TableRestore, "_check_count", lambda *_: None)
        with pytest.raises(EndedError):
            client.restore_checkpoint(path)


def put_where_it_stands(table: shardwell.Table, shard_index: int) -> None:
    """Tries a step until the one shard has counted its part; the others refuse theirs."""

    def is_counted() -> bool:
        with pytest.raises(shardwell.NotInitializedError):
            table.put_row_gradients(TABLE_IDS, ONES)
        return bool(table.status()[shard_index].counted_row_count)

    eventually("the part is counted", is_counted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("finishing", [0, 1, 2])
@pytest.mark.parametrize("kills", [False, True])
def test_workers_that_went_on_where_the_table_stood(
    cluster, connect, tmp_path, monkeypatch, table_saved, finishing, kills
) -> None:
    running = cluster(3, data_dir=tmp_path / "data", processes=True)
    client = connect(running, "w0")
    cut_off(client, table_saved, finishing, monkeypatch)
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
    assert other.restore_checkpoint(table_saved)
    assert not any(status.loading for status in table.status())
    # The step that was begun: each of its rows counts once.
    table.put_row_gradients(TABLE_IDS, ONES)
    np.testing.assert_array_equal(table.get_rows(TABLE_IDS), 6.0)
    np.testing.assert_array_equal(table.row_ids(), TABLE_IDS)
    with pytest.raises(shardwell.ArgumentError, match="has rows already"):
        other.restore_checkpoint(table_saved)


def test_another_checkpoint_does_not_complete_it(
    cluster, connect, tmp_path, monkeypatch, table_saved
) -> None:
    second = checkpoint(connect(cluster(2), "saver"), tmp_path / "second", value=9.0)
    client = connect(cluster(3, data_dir=tmp_path / "data"), "w0")
    cut_off(client, table_saved, 1, monkeypatch)
    client.restore_checkpoint(second)  # no gradient was counted: it replaces what came
    table = open_table(client)
    np.testing.assert_array_equal(table.get_rows(TABLE_IDS), 9.0)
    assert table.status()[1].row_count + table.status()[0].row_count < TABLE_IDS.size


def test_another_checkpoint_is_refused_where_workers_went_on(
    cluster, connect, tmp_path, monkeypatch, table_saved
) -> None:
    second = checkpoint(connect(cluster(2), "saver"), tmp_path / "second", value=9.0)
    client = connect(cluster(3, data_dir=tmp_path / "data"), "w0")
    cut_off(client, table_saved, 1, monkeypatch)
    table = open_table(client)
    put_where_it_stands(table, 1)
    for _ in range(2):
        with pytest.raises(shardwell.StepOrderError, match="has counted gradients on shard 1"):
            client.restore_checkpoint(second)
    client.restore_checkpoint(table_saved)
    table.put_row_gradients(TABLE_IDS, ONES)
    np.testing.assert_array_equal(table.get_rows(TABLE_IDS), 6.0)


def test_a_shard_that_lost_its_files_is_not_one_that_was_cut_off(
    cluster, connect, tmp_path, table_saved
) -> None:
    """However often it is tried: rows that were trained on and rows of a checkpoint never mix."""
    running = cluster(3, processes=True)  # in memory: a shard that is killed has lost everything
    client = connect(running, "w0")
    client.restore_checkpoint(table_saved)
    table = open_table(client)
    table.put_row_gradients(TABLE_IDS, ONES)
    running.children[0].kill()
    eventually("it ended", lambda: running.children[0].poll() is not None)
    running.start_again(0)
    other = connect(running, "restorer")
    for _ in range(3):
        with pytest.raises(
            (shardwell.StepOrderError, shardwell.ArgumentError),
            match=r"has counted gradients|has rows already",
        ):
            other.restore_checkpoint(table_saved)


def test_what_would_be_forgotten_is_refused_until_it_is_restored(
    cluster, connect, tmp_path, monkeypatch, table_saved
) -> None:
    """A rate that only the shards that stand would keep, rows of a load that went."""
    client = connect(cluster(3, data_dir=tmp_path / "data"), "w0")
    cut_off(client, table_saved, 1, monkeypatch)
    table = open_table(client)
    put_where_it_stands(table, 1)
    for call in (lambda: table.set_learning_rate(0.25), lambda: table.evict(older_than_step=1)):
        with pytest.raises(shardwell.NotInitializedError, match="restore of it was cut off"):
            call()
    client.restore_checkpoint(table_saved)
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


def test_a_lost_shard_beside_one_whose_rows_were_evicted(cluster, connect, table_saved) -> None:
    running = cluster(3, processes=True)
    client = connect(running, "w0")
    client.restore_checkpoint(table_saved)
    table = open_table(client)
    table.put_row_gradients(TABLE_IDS, ONES)
    table.evict(older_than_step=10**6)
    running.children[0].kill()
    eventually("it ended", lambda: running.children[0].poll() is not None)
    running.start_again(0)
    other = connect(running, "restorer")
    for _ in range(3):
        with pytest.raises((shardwell.StepOrderError, shardwell.ArgumentError)):
            other.restore_checkpoint(table_saved)
