"""Goal: whatever ends in the middle of a save or a restore of a table, the result is whole.

Method: shards are processes that are killed at chosen messages; hostile streams come from a worker
made of the generated stubs alone; disks fail where they are written to.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.data.manifests import change_manifest
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.wire_client import crc as wire_crc
from harness.wire_client.alterations import Alteration, altered, with_altered
from harness.wire_client.table import WireTable, table_spec
from harness.wire_client.worker import WireWorker, error_detail
from shardwell.checkpoint import capture, restore
from shardwell.checkpoint.restore import _UploadStream
from shardwell.v1 import table_pb2 as pb
from shardwell.v1 import types_pb2 as types
from shardwell_server import LocalCluster

DIM = 3
IDS = np.arange(60)


def open_table(client: shardwell.Client) -> shardwell.Table:
    return client.table(
        "rows",
        row_count=1000,
        dim=DIM,
        optimizer=shardwell.SGD(learning_rate=1.0, momentum=0.5),
        initializer=shardwell.Zeros(),
        codec="fp32",
    )


def trained(client: shardwell.Client) -> shardwell.Table:
    table = open_table(client)
    for _ in range(2):
        table.put_row_gradients(IDS, np.ones((IDS.size, DIM)))
    return table


def assert_goes_on(client: shardwell.Client) -> None:
    """The step after `trained`, on what was restored."""
    table = open_table(client)
    assert table.next_step == 2
    rows = table.exchange_rows(IDS, np.ones((IDS.size, DIM)))
    np.testing.assert_array_equal(rows, np.float32(-1 - 1.5 - 1.75))
    np.testing.assert_array_equal(table.row_ids(), IDS)


@pytest.fixture
def saved(cluster, connect, tmp_path) -> Path:
    client = connect(cluster(2), "w0")
    trained(client)
    client.save_checkpoint(tmp_path / "c")
    return tmp_path / "c"


def kill_and_start_again(running: LocalCluster, shard_index: int) -> None:
    running.children[shard_index].kill()
    eventually("it has ended", lambda: running.children[shard_index].poll() is not None)
    running.start_again(shard_index)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("moment", ["rows", "finish"])
def test_a_shard_that_is_killed_while_a_table_is_restored(
    cluster, connect, tmp_path, monkeypatch, saved, killed, moment
) -> None:
    """It comes back with half of it on its disk, or when the other is done; all is done again."""
    running = cluster(2, data_dir=tmp_path / "data", processes=True)
    client = connect(running, "w0")
    kills = []

    def kill() -> None:
        if not kills:
            kills.append(killed)
            kill_and_start_again(running, killed)

    if moment == "rows":
        read = restore.read_rows

        def killing_read(*given: Any) -> Any:
            kill()
            return read(*given)

        monkeypatch.setattr(restore, "read_rows", killing_read)
    else:
        result = _UploadStream.result

        def killing_result(self: _UploadStream) -> int:
            count = result(self)
            kill()
            return count

        monkeypatch.setattr(_UploadStream, "result", killing_result)
    client.restore_checkpoint(saved)
    assert kills == [killed]
    assert_goes_on(client)


def test_a_restore_that_is_cut_off_takes_no_gradients(
    cluster, connect, tmp_path, monkeypatch, saved
) -> None:
    """On all shards, after all of them were killed, until it is restored again."""
    running = cluster(2, data_dir=tmp_path / "data", processes=True)
    client = connect(running, "w0")

    def failing(*_: Any) -> Any:
        raise shardwell.StorageError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(restore, "read_rows", failing)
        with pytest.raises(shardwell.StorageError, match="the disk is gone"):
            client.restore_checkpoint(saved)
    for shard_index in range(2):
        kill_and_start_again(running, shard_index)
    table = open_table(client)
    assert [status.loading for status in table.status()] == [True, True]
    for call in (
        lambda: table.put_row_gradients([1], np.ones((1, DIM))),
        lambda: table.get_rows([1]),
        table.row_ids,
        lambda: client.save_checkpoint(tmp_path / "d"),
    ):
        with pytest.raises(shardwell.NotInitializedError, match="restore of it was cut off"):
            call()
    table.close()
    client.restore_checkpoint(saved)
    assert_goes_on(client)


def test_a_shard_that_is_killed_while_a_table_is_saved(
    cluster, connect, tmp_path, monkeypatch
) -> None:
    running = cluster(2, data_dir=tmp_path / "data", processes=True)
    client = connect(running, "w0")
    trained(client)
    write, kills = capture.write_rows, []

    def killing(*given: Any) -> Any:
        if not kills:
            kills.append(1)
            kill_and_start_again(running, 1)
        return write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(capture, "write_rows", killing)
        client.save_checkpoint(tmp_path / "c")
    assert kills == [1]
    (entry,) = shardwell.inspect_checkpoint(tmp_path / "c", verify=True).tables
    assert (entry.version, entry.row_count) == (2, IDS.size)
    running.children[1].kill()
    with pytest.raises(shardwell.ShardUnavailableError, match="shard 1"):
        client.save_checkpoint(tmp_path / "d", timeout_s=BRIEF_S)
    with pytest.raises(shardwell.ShardUnavailableError, match="shard 1"):
        client.export_table("rows", tmp_path / "e.safetensors", timeout_s=BRIEF_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "data"]


def test_a_full_disk_of_the_saving_client(cluster, connect, tmp_path, monkeypatch) -> None:
    client = connect(cluster(2), "w0")
    trained(client)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shardwell.checkpoint.tensor_files.os.fsync", full)
        with pytest.raises(shardwell.StorageError, match="No space left on device"):
            client.save_checkpoint(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_ids_that_the_table_can_not_have(cluster, connect, saved) -> None:
    """The files are as they were written, and the manifest is another's."""
    change_manifest(saved, lambda fields: fields["tables"][0]["spec"].update(row_count="50"))
    client = connect(cluster(3), "w0")
    with pytest.raises(shardwell.ArgumentError, match=r"row id 5\d; its ids are 0 to 49") as caught:
        client.restore_checkpoint(saved)
    assert caught.value.table == "rows"
    assert str(saved) in caught.value.message


# Streams that load nonsense.

SPEC = table_spec(dim=2, row_count=10)


def loading(
    worker: WireWorker, rows: dict[int, list[float]] | None = None, **fields: Any
) -> list[pb.LoadRowsRequest]:
    """A good stream for one shard: an opening, rows, an end."""
    rows = {3: [1.0, 2.0], 1: [5.0, 6.0]} if rows is None else rows
    payload = np.array(list(rows), "<i8").tobytes() + np.array(list(rows.values()), "<f4").tobytes()
    payload += struct.pack(f"<{2 * len(rows)}q", *[4] * len(rows), *[2] * len(rows))
    opening = pb.TableOpen(shard=worker.identities[0], table="t", worker_id="restorer")
    messages = [
        pb.LoadRowsRequest(open=opening, rows=pb.Rows(), version=5, learning_rate=0.5),
        pb.LoadRowsRequest(
            rows=pb.Rows(**{"row_count": len(rows), **fields}),
            payload=payload,
        ),
        pb.LoadRowsRequest(rows=pb.Rows(), finish=True),
    ]
    sealed(messages)
    if "crc32c" in fields:
        messages[1].rows.crc32c = fields["crc32c"]
    return messages


def sealed(messages: list[Any]) -> None:
    """The CRCs fit the messages."""
    if messages:
        context = wire_crc.rows_load(messages[0])
        for message in messages:
            if message.HasField("rows"):
                wire_crc.seal(message, *context)


def two_openings(messages: list[Any]) -> list[Any]:
    second = altered(messages[1])
    second.open.CopyFrom(messages[0].open)
    return [messages[0], second, *messages[2:]]


def payload_alone(messages: list[Any]) -> list[Any]:
    second = altered(messages[1])
    second.ClearField("rows")
    return [messages[0], second, *messages[2:]]


ATTACKS: dict[str, Alteration] = {
    "no_opening": lambda m: m[1:],
    "two_openings": two_openings,
    "after_the_end": lambda m: [*m, altered(m[1])],
    "far_version": lambda m: with_altered(m, 0, version=2**64 - 1),
    "bad_rate": lambda m: with_altered(m, 0, learning_rate=float("nan")),
    "payload_alone": payload_alone,
    "too_many": lambda m: with_altered(m, 1, rows={"row_count": 2**20}),
    "packed": lambda m: with_altered(m, 1, rows={"lz4": True}),
    "twice": lambda m: [*m[:2], *m[1:]],
    "nothing": lambda m: [],
}


def refused(worker: WireWorker, table: WireTable, messages: list[Any]) -> types.ErrorDetail:
    with pytest.raises(grpc.RpcError) as caught:
        table.stubs[0].LoadRows(iter(messages), timeout=PATIENCE_S)
    return error_detail(caught.value)


@pytest.mark.parametrize("attack", ATTACKS)
def test_streams_that_load_nonsense(cluster, attack) -> None:
    with WireWorker(cluster(1).target, "w0") as worker:
        table = WireTable(worker, SPEC)
        messages = ATTACKS[attack](loading(worker))
        sealed(messages)
        code = types.ERROR_CODE_INVALID_ARGUMENT
        if attack == "payload_alone":
            code = types.ERROR_CODE_CORRUPT_CHUNK
        assert refused(worker, table, messages).code == code
        assert table.stubs[0].LoadRows(iter(loading(worker)), timeout=PATIENCE_S).row_count == 2
        (answer,) = table.open()
        assert (answer.next_step, answer.row_count) == (5, 2)


@pytest.mark.parametrize(
    ("rows", "fields", "code"),
    [
        ({10: [0, 0]}, {}, types.ERROR_CODE_INVALID_ARGUMENT),
        ({-1: [0, 0]}, {}, types.ERROR_CODE_INVALID_ARGUMENT),
        ({1: [0, np.nan]}, {}, types.ERROR_CODE_NON_FINITE),
        (None, {"crc32c": 1}, types.ERROR_CODE_CORRUPT_CHUNK),
        (None, {"row_count": 1}, types.ERROR_CODE_CORRUPT_CHUNK),
        (None, {"row_count": 3}, types.ERROR_CODE_CORRUPT_CHUNK),
    ],
)
def test_impossible_rows_are_refused_by_a_load(cluster, rows, fields, code) -> None:
    with WireWorker(cluster(1).target, "w0") as worker:
        table = WireTable(worker, SPEC)
        assert refused(worker, table, loading(worker, rows, **fields)).code == code
        assert table.stubs[0].LoadRows(iter(loading(worker)), timeout=PATIENCE_S).row_count == 2


def test_a_late_load_does_not_reach_a_table_that_was_made_since(cluster) -> None:
    """Of a restore into a table that was deleted meanwhile."""
    running = cluster(1)
    with WireWorker(running.target, "w0") as worker:
        deleted = WireTable(worker, SPEC).answers[0].incarnation
        with shardwell.connect(running.target, worker_id="ops") as ops:
            ops.delete("t", force=True)
        table = WireTable(worker, SPEC)
        messages = loading(worker)
        messages[0].open.incarnation = deleted
        sealed(messages)
        detail = refused(worker, table, messages)
        assert (detail.code, detail.table) == (types.ERROR_CODE_UNKNOWN_TABLE, "t")
        (status,) = table.status()
        assert (status.loading, status.incarnation) == (False, table.answers[0].incarnation)
        messages[0].open.incarnation = status.incarnation
        sealed(messages)
        assert table.stubs[0].LoadRows(iter(messages), timeout=PATIENCE_S).row_count == 2


def test_a_load_into_a_table_that_trained(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as worker:
        table = WireTable(worker, SPEC)
        table.put([1], [[1.0, 1.0]])
        detail = refused(worker, table, loading(worker))
        assert (detail.code, detail.table) == (types.ERROR_CODE_STEP_ORDER, "t")


def test_a_reader_of_rows_that_goes_away_is_forgotten(cluster) -> None:
    running = cluster(1)
    with WireWorker(running.target, "w0") as worker:
        table = WireTable(worker, SPEC)
        table.put([1], [[1.0, 1.0]])
        snapshots = running.servers[0].shard.tables.get("t").scan.snapshots
        request = pb.ScanRowsRequest(
            shard=worker.identities[0], table="t", content=pb.ScanRowsRequest.CONTENT_STATE
        )
        request.version = 3
        call = table.stubs[0].ScanRows(request, timeout=PATIENCE_S)
        assert next(call).version == 3
        assert len(snapshots.pending) == 1
        call.cancel()
        eventually("the scan is forgotten", lambda: snapshots.pending == ())
        request.version = 0
        with pytest.raises(grpc.RpcError) as caught:
            list(table.stubs[0].ScanRows(request, timeout=PATIENCE_S))
        assert error_detail(caught.value).code == types.ERROR_CODE_STEP_ORDER
