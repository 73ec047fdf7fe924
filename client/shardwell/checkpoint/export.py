"""A table's ids and rows as one file that others read, sorted by id.

    NAME.safetensors    "ids" I64 (n,), "rows" F32 (n, dim)
    NAME.parquet        "id" int64, "vector" fixed_size_list<float>[dim]; needs pyarrow

Rows come in no order: each is written to its place in a file whose space is reserved before. So
memory holds the ids, 8 bytes a row, and a block of rows; the disk meanwhile holds the table as a
checkpoint has it, too; while a Parquet file is made, the sorted rows instead.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwell.checkpoint.directory import sync_directory
from shardwell.checkpoint.format import CheckpointTable
from shardwell.checkpoint.tensor_files import RowsReader, file_error, layout_of
from shardwell.errors import ArgumentError, StorageError
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell.process.environment import install_command

_BLOCK_ROW_COUNT = 2**16
_NO_ROWS: Float32 = np.empty((0, 0), np.float32)


class TableExport(NamedTuple):
    """A file that `Client.export_table` made.

    Examples:
        >>> rule = shardwell.Adagrad(lr=0.1)
        >>> users = client.table("written", row_count=None, dim=2, optimizer=rule)
        >>> step = users.put_row_gradients([7], np.ones((1, 2)))
        >>> client.export_table("written", "written.safetensors").row_count
        1
    """

    path: Path
    """The file."""
    row_count: int
    """Rows in it."""
    version: int
    """The table's; in asynchronous mode, the fewest steps that a shard had counted."""


def check_format(path: Path) -> None:
    """Returns if an export can be written in the format that the path's name ends with.

    Raises:
        ArgumentError: it is no known one, or pyarrow is missing.
    """
    if path.suffix not in (".safetensors", ".parquet"):
        raise ArgumentError(
            f"a table is exported to a file that ends in .safetensors or .parquet; got {path.name}"
        )
    if path.suffix == ".parquet":
        _pyarrow()


def check_target(path: Path) -> None:
    """Returns if an export may be written to `path`.

    Raises:
        ArgumentError: it exists, or see `check_format`.
    """
    check_format(path)
    check_free(path)


def check_free(path: Path) -> None:
    """Returns if there is nothing at `path`.

    Raises:
        ArgumentError: there is.
    """
    if os.path.lexists(path):
        raise ArgumentError(f"{path} exists already; remove it, or give another name")


def give_name(made: Path, path: Path) -> None:
    """Gives a file that is complete the name `path`, if there is still nothing there.

    Raises:
        ArgumentError: there is.
        StorageError: it can't be.
    """
    try:
        os.link(made, path)  # not a rename, which would replace a file made meanwhile
        sync_directory(path.parent)
    except FileExistsError:
        raise ArgumentError(f"{path} exists already; remove it, or give another name") from None
    except OSError as error:
        raise file_error(path, error, "writing it") from None


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ArgumentError(
            f"exporting to Parquet needs pyarrow; run: {install_command('pyarrow>=14')}, or export "
            "to .safetensors"
        ) from None


def write_export(entry: CheckpointTable, directory: Path, path: Path) -> None:
    """Makes the file from a checkpoint of the table; it appears when it is complete.

    Args:
        entry: The table.
        directory: Where its files are; on the file system of `path`, which is made in it first.
        path: The export.

    Raises:
        StorageError: a file can't be read or written; a row occurs twice.
        ArgumentError: `path` exists by now.
    """
    made = directory / path.name
    try:
        if path.suffix == ".parquet":
            sorted_path = directory / "sorted"
            ids = _write_sorted(entry, directory, sorted_path)
            for file in entry.files:  # so that there are two copies at a time
                (directory / file.path).unlink()
            _write_parquet(entry, ids, sorted_path, made)
        else:
            _write_sorted(entry, directory, made)
    except OSError as error:
        if isinstance(error, (ArgumentError, StorageError)):
            raise
        raise file_error(path, error, "writing it") from None
    give_name(made, path)


def _write_sorted(entry: CheckpointTable, directory: Path, path: Path) -> Ids:
    """Makes a safetensors file with all rows by ascending id; returns the ids."""
    blocks = [state_ids for state_ids, _ in _blocks(entry, directory, with_rows=False)]
    ids = np.concatenate([np.empty(0, np.int64), *blocks])
    ids.sort()
    if (ids[1:] == ids[:-1]).any():
        twice = ids[1:][ids[1:] == ids[:-1]][0]
        raise StorageError(f"table {entry.name!r}: row id {twice} occurs twice")
    n, dim = ids.size, entry.spec.dim
    tensors = {"ids": ("I64", [n]), "rows": ("F32", [n, dim])}
    head, offsets = layout_of(tensors, {"format": "shardwell-export"})
    with path.open("xb+") as file:
        # Written through a mapping, where a full disk would end the process.
        os.posix_fallocate(file.fileno(), 0, offsets["rows"] + 4 * n * dim)
        file.write(head)
        file.write(ids.astype("<i8", copy=False).data)
        file.flush()
        if n:
            rows = np.memmap(path, "<f4", "r+", offsets["rows"], (n, dim))
            for some_ids, values in _blocks(entry, directory, with_rows=True):
                rows[np.searchsorted(ids, some_ids)] = values
            rows.flush()
        os.fsync(file.fileno())
    return ids


def _blocks(
    entry: CheckpointTable, directory: Path, *, with_rows: bool
) -> Iterator[tuple[Ids, Float32]]:
    """The rows of a checkpoint, block by block."""
    for file in entry.files:
        size = _BLOCK_ROW_COUNT if with_rows else file.row_count
        with RowsReader(directory / file.path, entry.spec, file.row_count) as reader:
            for start in range(0, file.row_count, size):
                stop = min(start + size, file.row_count)
                yield (
                    reader.read_ids(start, stop),
                    (reader.read_weights(start, stop) if with_rows else _NO_ROWS),
                )


def _write_parquet(entry: CheckpointTable, ids: Ids, sorted_path: Path, path: Path) -> None:
    arrow, parquet = _pyarrow()
    dim = entry.spec.dim
    vector = arrow.list_(arrow.float32(), dim)
    schema = arrow.schema(
        [arrow.field("id", arrow.int64(), False), arrow.field("vector", vector, False)]
    )
    offset = sorted_path.stat().st_size - 4 * dim * ids.size
    with path.open("xb") as file:
        with parquet.ParquetWriter(file, schema) as writer:
            for start in range(0, ids.size, _BLOCK_ROW_COUNT):
                some_ids = ids[start : start + _BLOCK_ROW_COUNT]
                values = np.fromfile(
                    sorted_path, "<f4", some_ids.size * dim, offset=offset + 4 * dim * start
                )
                rows = arrow.FixedSizeListArray.from_arrays(arrow.array(values), type=vector)
                writer.write_table(arrow.table([arrow.array(some_ids), rows], schema=schema))
        file.flush()
        os.fsync(file.fileno())
