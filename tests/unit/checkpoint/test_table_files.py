"""Goal: files of a table's checkpoint say what they held, or are refused by name; an export has
each row once, in order.

Method: as test_files.py; what is read is compared with what was written, by the package
safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardwell
from harness.data.manifests import MANIFEST, change_manifest
from shardwell.checkpoint.directory import whole_directory
from shardwell.checkpoint.export import check_target, write_export
from shardwell.checkpoint.format import Checkpoint, CheckpointTable, RowsFile, opened, rows_path
from shardwell.checkpoint.manifest import write_manifest
from shardwell.checkpoint.tensor_files import read_rows, write_rows
from shardwell.errors import ArgumentError, StorageError
from shardwell.specs.table import TableSpec
from shardwell.wire.row_state import RowState

OPTIMIZERS = [
    shardwell.SGD(learning_rate=0.1),
    shardwell.RowWiseAdagrad(learning_rate=0.1),
    shardwell.Adam(),
    shardwell.FTRL(learning_rate=0.1),
]


def spec_of(optimizer: Any = OPTIMIZERS[2], dim: int = 3) -> TableSpec:
    return TableSpec(
        name="rows",
        row_count=None,
        dim=dim,
        optimizer=optimizer,
        initializer=shardwell.Zeros(),
        worker_count=1,
    )


def state_of(spec: TableSpec, ids: list[int]) -> RowState:
    """Rows whose every number follows from their id."""
    column = np.array(ids, np.float32)[:, None]
    widths = (spec.dim, *spec.slot_widths)
    weights, *slots = (
        (column + np.arange(width) / 16 + 100 * index).astype(np.float32)
        for index, width in enumerate(widths)
    )
    keys = np.array(ids, np.int64)
    return RowState(keys, weights, tuple(slots), np.abs(keys) + 1, np.abs(keys) + 2)


def write(path: Path, spec: TableSpec, batches: list[list[list[int]]]) -> Checkpoint:
    """A whole checkpoint of one table: for each shard its files, given by their ids."""
    with whole_directory(path) as partial:
        (partial / "000001-rows").mkdir()
        files = []
        for shard_index, shard in enumerate(batches):
            for part, ids in enumerate(shard):
                relative = rows_path(1, "rows", shard_index, part)
                pieces = [state_of(spec, ids[:2]), state_of(spec, ids[2:])]
                size_bytes, crc = write_rows(partial / relative, spec, pieces)
                files.append(
                    RowsFile(path=relative, row_count=len(ids), size_bytes=size_bytes, crc32c=crc)
                )
        checkpoint = Checkpoint(
            path=path,
            cluster_id="c",
            shard_count=len(batches),
            software_version="0.1.0",
            parameters=(),
            tables=(
                CheckpointTable(
                    spec=spec,
                    version=7,
                    version_max=7,
                    learning_rate=getattr(spec.optimizer, "learning_rate", None),
                    files=tuple(files),
                ),
            ),
        )
        write_manifest(partial, checkpoint)
    return checkpoint


SHARDS = [[[5, -3, 2**62], [0, 9]], [[7, -(2**63)]]]


@pytest.fixture
def path(tmp_path) -> Path:
    write(tmp_path / "c", spec_of(), SHARDS)
    return tmp_path / "c"


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_what_was_written_is_read(tmp_path, optimizer) -> None:
    spec = spec_of(optimizer)
    made = write(tmp_path / "c", spec, SHARDS)
    assert shardwell.inspect_checkpoint(tmp_path / "c", verify=True) == made
    (entry,) = made.tables
    assert (entry.row_count, len(entry.files)) == (7, 3)
    for file, ids in zip(entry.files, [ids for shard in SHARDS for ids in shard], strict=True):
        expected = state_of(spec, ids)
        tensors = load_file(tmp_path / "c" / file.path)
        assert set(tensors) == set(entry.tensor_names)
        for name, array in zip(entry.tensor_names, expected.arrays, strict=True):
            assert tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(tensors[name], array)
        with opened(tmp_path / "c", entry, file) as reader:
            rows = read_rows(reader, spec, 0, file.row_count - 1)
            for found, array in zip(rows.arrays, expected.arrays, strict=True):
                np.testing.assert_array_equal(found, array[:-1])


def test_every_damaged_byte_is_found(path) -> None:
    (target, *_) = sorted((path / "000001-rows").iterdir())
    data = target.read_bytes()
    for at in (0, 9, len(data) // 2, len(data) - 1):
        target.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StorageError, match=target.name):
            shardwell.inspect_checkpoint(path, verify=True)
    for bad in (data[:-1], data + b"x"):
        target.write_bytes(bad)
        with pytest.raises(StorageError, match=f"{target.name} has {len(bad)} bytes"):
            shardwell.inspect_checkpoint(path)
    target.unlink()
    with pytest.raises(StorageError, match=target.name):
        shardwell.inspect_checkpoint(path)


def _first(fields: dict[str, Any]) -> dict[str, Any]:
    return fields["tables"][0]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a path upwards": (lambda f: _first(f)["files"][0].update(path="../x"), "no path below"),
    "no rows": (lambda f: _first(f)["files"][0].update(rows=0), "rows"),
    "other rows": (lambda f: _first(f)["files"][0].update(rows=4), "tensors"),
    "another dim": (lambda f: _first(f)["spec"].update(dim=4), "tensors"),
    "other slots": (lambda f: _first(f).update(slots=[]), "slots"),
    "no rate": (lambda f: _first(f).update(learning_rate=None), "learning rate"),
    "two versions": (lambda f: _first(f).update(version_max=8), "versions 7 to 8"),
    "twice": (lambda f: f["tables"].append(_first(f)), "a table occurs twice"),
    "no list": (lambda f: f.update(tables={}), "tables must be a list"),
    "a spec of a parameter": (lambda f: _first(f).update(spec={"size": 3}), "size"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_manifests_that_contradict_themselves(path, name) -> None:
    change, match = CHANGES[name]
    change_manifest(path, change)
    with pytest.raises(StorageError, match=match):
        shardwell.inspect_checkpoint(path)


def test_versions_of_the_format(path, tmp_path) -> None:
    """Those of releases are read, too: 2, and 1 without tables."""
    assert json.loads((path / MANIFEST).read_text())["format_version"] == 3
    change_manifest(path, lambda fields: fields.update(format_version=2))
    assert len(shardwell.inspect_checkpoint(path).tables) == 1
    change_manifest(path, lambda fields: (fields.pop("tables"), fields.update(format_version=1)))
    assert shardwell.inspect_checkpoint(path).tables == ()


def test_an_export_has_each_row_once_in_order(path, tmp_path) -> None:
    (entry,) = shardwell.inspect_checkpoint(path).tables
    target = tmp_path / "rows.safetensors"
    check_target(target)
    write_export(entry, path, target)
    found = load_file(target)
    assert found["ids"].tolist() == [-(2**63), -3, 0, 5, 7, 9, 2**62]
    assert (found["ids"].dtype, found["rows"].dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(found["rows"], state_of(entry.spec, found["ids"]).weights)


def test_an_export_that_can_not_be(path, tmp_path, monkeypatch) -> None:
    (entry,) = shardwell.inspect_checkpoint(path).tables
    target = tmp_path / "rows.safetensors"
    with pytest.raises(ArgumentError, match=r"ends in \.safetensors or \.parquet; got rows\.npz"):
        check_target(tmp_path / "rows.npz")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ArgumentError, match=r"-m pip install 'pyarrow>=14'"):
        check_target(tmp_path / "rows.parquet")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shardwell.checkpoint.export.os.posix_fallocate", full)
        with pytest.raises(StorageError, match="No space left on device"):
            write_export(entry, path, target)
    assert not target.exists()
    target.write_text("mine")
    with pytest.raises(ArgumentError, match="exists already"):
        check_target(target)


def test_a_row_that_occurs_twice(tmp_path) -> None:
    made = write(tmp_path / "c", spec_of(), [[[1, 2]], [[2]]])
    with pytest.raises(StorageError, match="row id 2 occurs twice"):
        write_export(made.tables[0], made.path, tmp_path / "rows.safetensors")


def test_parquet(path, tmp_path, monkeypatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("shardwell.checkpoint.export._BLOCK_ROW_COUNT", 4)
    (entry,) = shardwell.inspect_checkpoint(path).tables
    write_export(entry, path, tmp_path / "rows.parquet")
    found = parquet.read_table(tmp_path / "rows.parquet")
    assert str(found.schema.field("vector").type) == "fixed_size_list<element: float>[3]"
    assert found["id"].to_pylist() == [-(2**63), -3, 0, 5, 7, 9, 2**62]
    expected = state_of(entry.spec, found["id"].to_pylist()).weights
    assert found["vector"].to_pylist() == expected.tolist()
