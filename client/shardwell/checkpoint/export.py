"""Files that other programs read: a table's ids and rows, sorted by id; a checkpoint's weights.

    NAME.safetensors    "ids" I64 (n,), "rows" F32 (n, dim)
    NAME.parquet        "id" int64, "vector" fixed_size_list<float>[dim]; needs pyarrow
    NAME.safetensors    of a parameter or family: tensors by name, in their shapes

The last one is what `safetensors.torch.load_file` and `model.load_state_dict` take, whatever the
number of shards that the checkpoint is of.

Rows come in no order: each is written to its place in a file whose space is reserved before. So
memory holds the ids, 8 bytes a row, and a block of rows; the disk meanwhile holds the table as a
checkpoint has it, too; while a Parquet file is made, the sorted rows instead.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwell.checkpoint.cluster import Cluster
from shardwell.checkpoint.directory import sync_directory, working_directory
from shardwell.checkpoint.format import Checkpoint, CheckpointParameter, CheckpointTable, opened
from shardwell.checkpoint.save import capture_all, table_specs
from shardwell.checkpoint.steps import verified
from shardwell.checkpoint.tensor_files import (
    WEIGHTS_NAME,
    Tensors,
    TensorsWriter,
    file_error,
    layout_of,
)
from shardwell.errors import ArgumentError, StorageError
from shardwell.placement.rows import Ids
from shardwell.process.environment import install_command
from shardwell.process.local_paths import local_path
from shardwell.specs.fragments import grouped

_BLOCK_ROW_COUNT = 2**16
_BLOCK_ELEMENT_COUNT = 2**20


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
    """Refuses a path whose ending is no known format, or needs pyarrow where it is missing."""
    if path.suffix not in (".safetensors", ".parquet"):
        raise ArgumentError(
            f"a table is exported to a file that ends in .safetensors or .parquet; got {path.name}"
        )
    if path.suffix == ".parquet":
        _pyarrow()


def check_target(path: Path) -> None:
    """Refuses a path that exists, or whose format is none."""
    check_format(path)
    _check_free(path)


def export_table(cluster: Cluster, name: str, path: str | os.PathLike[str]) -> TableExport:
    """Exports a table, as `Client.export_table` says."""
    target = Path(os.path.abspath(local_path(path)))
    check_target(target)
    with working_directory(target) as partial:
        contents = cluster.contents()
        _, (entry,) = capture_all(cluster, contents, table_specs(contents, [name]), partial)
        write_export(entry, partial, target)
    return TableExport(target, entry.row_count, entry.version)


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise _taken(path)


def _taken(path: Path) -> ArgumentError:
    return ArgumentError(f"{path} exists already; remove it, or give another name")


def _give_name(made: Path, path: Path) -> None:
    """Gives a file that is complete the name `path`, unless something has it by now."""
    try:
        os.link(made, path)  # not a rename, which would replace a file made meanwhile
        sync_directory(path.parent)
    except FileExistsError:
        raise _taken(path) from None
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

    The checkpoint's `directory` is on the file system of `path`: the file is made in it first.
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
    _give_name(made, path)


def _write_sorted(entry: CheckpointTable, directory: Path, path: Path) -> Ids:
    """Makes a safetensors file with all rows by ascending id; returns the ids."""
    blocks = [some_ids for (some_ids,) in _blocks(entry, directory, "ids")]
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
            for some_ids, values in _blocks(entry, directory, "ids", WEIGHTS_NAME):
                rows[np.searchsorted(ids, some_ids)] = values
            rows.flush()
        os.fsync(file.fileno())
    return ids


def _blocks(entry: CheckpointTable, directory: Path, *names: str) -> Iterator[list[Any]]:
    """Yields tensors of those names of some rows at a time."""
    for file in entry.files:
        with opened(directory, entry, file) as reader:
            for start in range(0, file.row_count, _BLOCK_ROW_COUNT):
                stop = min(start + _BLOCK_ROW_COUNT, file.row_count)
                yield [reader.read(name, start, stop) for name in names]


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


# Weights of a checkpoint.


@dataclass(frozen=True, kw_only=True)
class ModelExport:
    """The contents of an exported file.

    Examples:
        >>> net = client.parameter("saved", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> saved = client.save_checkpoint("model", parameters=["saved"])
        >>> shardwell.export_checkpoint("model", "model.safetensors", "saved").tensor_count
        1
    """

    name: str
    """Name of the parameter, or of the family whose fragments it has."""
    version: int
    """Updates that all of it has seen; of fragments of several versions, the fewest."""
    size: int
    """Number of float32 elements."""
    tensor_count: int
    """Tensors in the file."""


def export_checkpoint(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    parameter: str | None = None,
) -> ModelExport:
    """Writes the weights of a checkpoint's parameter to a file for other programs.

    Tensors have their names and shapes; a parameter without tensors is one, under its own name.
    Of a family of outer training, the file has the tensors of all fragments. Optimizer state is
    not in it. The checkpoint is verified first. Needs no cluster.

    Args:
        path: The checkpoint's directory; with `{step}` in its name, the newest whole one.
        target: The file, which ends in .safetensors. Must not exist; it appears when it is
            complete. Beside it there must be room for it.
        parameter: Name of the parameter or family; default: the only one.

    Returns:
        The contents of the file.

    Raises:
        ArgumentError: `target` exists or ends otherwise, or there is no such parameter.
        StorageError: the checkpoint is damaged or incomplete, or the file can't be written.

    Examples:
        >>> net = client.parameter("saved", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> saved = client.save_checkpoint("exported", parameters=["saved"])
        >>> shardwell.export_checkpoint("exported", "saved.safetensors", "saved")
        ModelExport(name='saved', version=0, size=3, tensor_count=1)
    """
    made = Path(os.path.abspath(local_path(target)))
    if made.suffix != ".safetensors":
        raise ArgumentError(
            f"a model is exported to a file that ends in .safetensors; got {made.name}"
        )
    _check_free(made)
    with verified(path) as (checkpoint, folder):
        return _exported(checkpoint, folder, made, parameter)


def _exported(
    checkpoint: Checkpoint, folder: Path, made: Path, parameter: str | None
) -> ModelExport:
    name = _only_name(checkpoint) if parameter is None else parameter
    entries = checkpoint.select([name])
    tensors = _tensors(name, entries)
    export = ModelExport(
        name=name,
        version=min(entry.version for entry in entries),
        size=sum(entry.size for entry in entries),
        tensor_count=len(tensors),
    )
    metadata = {"format": "pt", "parameter": name, "version": str(export.version)}
    with working_directory(made) as partial:
        with TensorsWriter(partial / made.name, tensors, metadata) as writer:
            _write(folder, entries, writer)
            writer.finish()
        _give_name(partial / made.name, made)
    return export


def _only_name(checkpoint: Checkpoint) -> str:
    groups = grouped(checkpoint.parameters)
    names = {*groups.alone, *groups.families}
    if len(names) != 1:
        raise ArgumentError(
            f"{checkpoint.path} has {len(names)} parameters, {sorted(names)!r:.200}; say which is "
            "to be exported (parameter=, --parameter)"
        )
    return names.pop()


def _tensors(name: str, entries: Sequence[CheckpointParameter]) -> Tensors:
    found: dict[str, tuple[str, list[int]]] = {}
    for entry in entries:
        layout = entry.spec.layout
        own = (
            {entry.name: ("F32", [entry.size])}
            if layout is None
            else {tensor.name: ("F32", list(tensor.shape)) for tensor in layout}
        )
        for tensor in own:
            if tensor in found:
                raise ArgumentError(
                    f"two fragments of {name!r} have a tensor {tensor!r}; export them one by one"
                )
        found |= own
    return found


def _write(folder: Path, entries: Sequence[CheckpointParameter], writer: TensorsWriter) -> None:
    begin = 0
    for entry in entries:
        for file in entry.files:
            with opened(folder, entry, file) as reader:
                for start in range(0, file.size, _BLOCK_ELEMENT_COUNT):
                    stop = min(start + _BLOCK_ELEMENT_COUNT, file.size)
                    values = reader.read(WEIGHTS_NAME, start, stop)
                    writer.put_values(begin + file.offset + start, values)
        begin += entry.size
