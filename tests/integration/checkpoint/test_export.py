"""Goal: an export is the rows that a table has at one version; it appears when it is complete."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardwell
from harness.programs.commands import run_command
from shardwell.checkpoint import export as table_export


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("row_count", [1000, None])
def test_rows_are_those_of_the_table(cluster, connect, tmp_path, row_count, mode) -> None:
    client = connect(cluster(3), "w0")
    options = {"dim": 4, "optimizer": shardwell.Adagrad(learning_rate=0.1), "mode": mode}
    table = client.table("rows", row_count=row_count, **options)
    generator = np.random.default_rng(1)
    low = 0 if row_count else -(2**63)
    for _ in range(3):
        ids = generator.integers(low, row_count or 2**63 - 1, 300)
        table.put_row_gradients(ids, generator.standard_normal((300, 4)))
    made = client.export_table("rows", tmp_path / "new" / "rows.safetensors")
    found = load_file(made.path)
    np.testing.assert_array_equal(found["ids"], table.row_ids())
    # Rows travel in fp16 to workers, in float32 to a file.
    np.testing.assert_allclose(found["rows"], table.get_rows(found["ids"]), rtol=1e-3, atol=1e-6)
    assert (made.version, made.row_count) == (3, found["ids"].size)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows.safetensors"]
    with pytest.raises(shardwell.ArgumentError, match="exists already"):
        client.export_table("rows", made.path)
    with pytest.raises(shardwell.UnknownTableError, match="nobody"):
        client.export_table("nobody", tmp_path / "new" / "x.safetensors")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows.safetensors"]


def test_a_file_that_appears_meanwhile_stays(cluster, connect, tmp_path, monkeypatch) -> None:
    client = connect(cluster(1), "w0")
    client.table("rows", row_count=5, dim=4, optimizer=shardwell.SGD(learning_rate=0.1))
    path, write = tmp_path / "rows.safetensors", table_export._write_sorted

    def overtaken(*given: Any) -> Any:
        path.write_text("another's")
        return write(*given)

    monkeypatch.setattr(table_export, "_write_sorted", overtaken)
    with pytest.raises(shardwell.ArgumentError, match="exists already"):
        client.export_table("rows", path)
    assert path.read_text() == "another's"
    assert list(tmp_path.iterdir()) == [path]


def test_an_export_to_a_full_disk_leaves_nothing(cluster, connect, tmp_path, monkeypatch) -> None:
    """While a checkpoint is written for it, and while the file is."""
    client = connect(cluster(1), "w0")
    table = client.table("rows", row_count=5, dim=4, optimizer=shardwell.SGD(learning_rate=0.1))
    table.put_row_gradients([1], np.ones((1, 4)))
    sync, left = os.fsync, [1000]

    def full(file: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    client.export_table("rows", tmp_path / "rows.safetensors")
    sync_count = 1000 - left[0]
    for count in range(sync_count - 1):  # the last is that of the directory, which has it
        left[0] = count
        with pytest.raises(shardwell.StorageError, match="No space left on device"):
            client.export_table("rows", tmp_path / "again.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.safetensors"]


def test_a_table_without_rows_is_exported(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    client.table("rows", row_count=5, dim=4, optimizer=shardwell.SGD(learning_rate=0.1))
    client.export_table("rows", tmp_path / "rows.safetensors")
    found = load_file(tmp_path / "rows.safetensors")
    assert (found["ids"].shape, found["rows"].shape) == ((0,), (0, 4))


def test_commands_export_a_cluster_s_table_and_a_checkpoint_s(cluster, connect, tmp_path) -> None:
    source, target = cluster(2), cluster(3)
    table = connect(source, "w0").table(
        "rows", row_count=50, dim=4, optimizer=shardwell.SGD(learning_rate=0.5)
    )
    table.put_row_gradients(np.arange(10), np.ones((10, 4)))
    directory, path = str(tmp_path / "c"), str(tmp_path / "rows.safetensors")

    def run(*arguments: str) -> str:
        code, output, log = run_command(*arguments)
        assert (code, log) == (0, "")
        return output

    saved = run("checkpoint", "save", directory, "--shards", source.target, "--table", "rows")
    shown = run("checkpoint", "inspect", "--verify", directory)
    for words in ("table rows", "10 rows x 4", "SGD 0.5", "ids, weights, update_counts"):
        assert words in saved
        assert words in shown
    printed = run("checkpoint", "restore", directory, "--shards", target.target)
    assert "restored table rows from" in printed
    printed = run("table", "export", "rows", path, "--shards", target.target)
    assert printed.strip() == f"exported 10 rows of rows at version 1 to {path}"
    np.testing.assert_array_equal(load_file(path)["ids"], np.arange(10))
    code, _, log = run_command("table", "export", "rows", path, "--shards", target.target)
    assert (code, "exists already" in log) == (1, True)
