"""The form of a checkpoint: a directory of safetensors files, and a manifest that lists them.

    DIR/manifest.json                               see manifest.py
    DIR/000001-NAME/slice-00000.safetensors         a parameter's slices, numbered by shard
    DIR/000001-NAME/state-00000                     what a worker keeps beside the weights
    DIR/000002-NAME/rows-00000-000000.safetensors   a table's rows, by shard, in files of 32 MiB

A slice is a contiguous range of a parameter: "weights", and the optimizer's state under the names
that torch.optim uses; all float32 of the same length. For rows see tensor_files.py. Nothing here
needs a cluster.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from shardwell.checkpoint.stores import Place, StorePath
from shardwell.checkpoint.tensor_files import (
    WEIGHTS_NAME,
    TensorsReader,
    crc_of,
    file_error,
    row_tensors,
    slice_tensors,
    tensor_names,
)
from shardwell.errors import ArgumentError, StorageError
from shardwell.process.html_table import html_table
from shardwell.specs.fragments import grouped, versions_words
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec


@dataclass(frozen=True, kw_only=True)
class SliceFile:
    """One file of a checkpoint."""

    path: str
    """The path from the checkpoint's directory on, with forward slashes."""
    offset: int
    """First element, counted from the start of the parameter."""
    size: int
    """Elements of each of its tensors."""
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """One worker's state beside the weights, as `Parameter.keep_state` kept it."""

    path: str
    """The path from the checkpoint's directory on, with forward slashes."""
    worker_id: str
    """Whose state it is."""
    step: int
    """The step that follows it: the version, or less where its worker was behind for too long."""
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class CheckpointParameter:
    """A parameter as a checkpoint holds it.

    Examples:
        >>> net = client.parameter("saved", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> entry = client.save_checkpoint("entry", parameters=["saved"]).parameters[0]
        >>> entry.name, entry.version, entry.size
        ('saved', 0, 3)
    """

    spec: ParameterSpec
    """What it was created with."""
    version: int
    """Updates that all of it has seen; in asynchronous mode, the fewest of a chunk."""
    version_max: int
    """The most updates that a chunk has seen; in synchronous mode, the same."""
    learning_rate: float | None
    """Rate of the update that follows; None where the optimizer has none."""
    files: tuple[SliceFile, ...]
    """In the order of their offsets, without gaps."""
    samples: Mapping[str, Any] = field(default_factory=dict)
    """The account of each dataset's samples in `version`, by its name; `Parameter.batches`."""
    states: tuple[StateFile, ...] = ()
    """Those of workers; see `Parameter.keep_state`."""

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.spec.name

    @property
    def size(self) -> int:
        """The number of float32 elements."""
        return self.spec.size

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The name of the tensor in each file: the weights', then those of optimizer state."""
        return (WEIGHTS_NAME, *self.spec.slot_names)


@dataclass(frozen=True, kw_only=True)
class CheckpointFamily:
    """A family of fragments as a checkpoint holds it, each at its own version.

    Examples:
        >>> outer = shardwell.Outer(client, "family", tensors={"a": (3,), "b": (2,)}, fragments=2)
        >>> weights = outer.init({"a": np.zeros(3), "b": np.zeros(2)})
        >>> [family] = client.save_checkpoint("of_family", parameters=["family"]).families
        >>> family.name, family.size
        ('family', 5)
        >>> outer.close()
    """

    name: str
    """The family's."""
    parameters: tuple[CheckpointParameter, ...]
    """Its fragments, in order."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The fragments' versions."""
        return tuple(each.version for each in self.parameters)

    @property
    def size(self) -> int:
        """The number of float32 elements."""
        return sum(each.size for each in self.parameters)


@dataclass(frozen=True, kw_only=True)
class RowsFile:
    """One file of a checkpoint: rows of a table, in no order."""

    path: str
    """The path from the checkpoint's directory on, with forward slashes."""
    row_count: int
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    """A table as a checkpoint holds it.

    Examples:
        >>> rule = shardwell.Adagrad(lr=0.1)
        >>> users = client.table("saved_users", row_count=None, dim=2, optimizer=rule)
        >>> step = users.put_row_gradients([7], np.ones((1, 2)))
        >>> entry = client.save_checkpoint("rows", tables=["saved_users"]).tables[0]
        >>> entry.row_count
        1
    """

    spec: TableSpec
    """What it was created with."""
    version: int
    """Steps that all its rows have seen; in asynchronous mode, the fewest that a shard counted."""
    version_max: int
    """The most that a shard counted; in synchronous mode, the same."""
    learning_rate: float | None
    """Rate of the update that follows; None where the optimizer has none."""
    files: tuple[RowsFile, ...]
    """By shard."""

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name

    @property
    def row_count(self) -> int:
        """The rows that the table has."""
        return sum(file.row_count for file in self.files)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The name of the tensor in each file."""
        return tensor_names(self.spec)


Entry: TypeAlias = CheckpointParameter | CheckpointTable
EntryT = TypeVar("EntryT", CheckpointParameter, CheckpointTable)


def opened(folder: Path, entry: Entry, file: SliceFile | RowsFile) -> TensorsReader:
    """Opens a file of a checkpoint, which must have the tensors of its entry."""
    if isinstance(entry, CheckpointTable):
        assert isinstance(file, RowsFile)
        return TensorsReader(folder / file.path, row_tensors(entry.spec, file.row_count))
    assert isinstance(file, SliceFile)
    return TensorsReader(folder / file.path, slice_tensors(entry.tensor_names, file.size))


def load_id_of(entry: Entry) -> int:
    """The load_id of an entry, above 0, which tells it from that of any other checkpoint."""
    digest = hashlib.blake2b(digest_size=8)
    for file in entry.files:
        digest.update(f"{file.size_bytes} {file.crc32c:08x}\n".encode())
    if isinstance(entry, CheckpointParameter) and entry.samples:
        digest.update(json.dumps(entry.samples, sort_keys=True).encode())
    for state in states_of(entry):
        digest.update(f"{state.worker_id} {state.step} {state.crc32c:08x}\n".encode())
    digest.update(f"{entry.name} {entry.version} {entry.learning_rate}\n".encode())
    digest.update(entry.spec.to_proto().SerializeToString(deterministic=True))
    return int.from_bytes(digest.digest(), "little") or 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on the disk: made by `Client.save_checkpoint` or `inspect_checkpoint`.

    Examples:
        >>> net = client.parameter("saved", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> checkpoint = client.save_checkpoint("whole", parameters=["saved"])
        >>> checkpoint.shard_count, len(checkpoint.parameters)
        (2, 1)
    """

    path: Place
    """Its directory; in an object store, what gives its URL as text."""
    cluster_id: str
    """The cluster that it was made of."""
    shard_count: int
    """Number of that cluster's shards; any number may restore it."""
    software_version: str
    """The version of shardwell that made it."""
    parameters: tuple[CheckpointParameter, ...]
    """Parameters, in the order of the manifest."""
    tables: tuple[CheckpointTable, ...] = ()
    """Tables, in the order of the manifest."""

    def _repr_html_(self) -> str:
        rows = [
            ("parameter", each.name, str(each.version), f"{each.size:,} elements")
            for each in self.parameters
            if each.spec.fragment is None
        ]
        rows += [
            ("family", each.name, versions_words(each.versions), f"{each.size:,} elements")
            for each in self.families
        ]
        rows += [
            ("table", each.name, str(each.version), f"{each.row_count:,} rows")
            for each in self.tables
        ]
        heading = f"checkpoint {self.path}, {self.size_bytes / 1e6:.1f} MB"
        return html_table(heading, ("kind", "name", "version", "size"), rows)

    @property
    def size_bytes(self) -> int:
        """The bytes of all files except the manifest."""
        return sum(file.size_bytes for file in self._files())

    @property
    def families(self) -> tuple[CheckpointFamily, ...]:
        """The families whose fragments are among the parameters, by name."""
        return tuple(
            CheckpointFamily(name=name, parameters=tuple(family.all))
            for name, family in grouped(self.parameters).families.items()
        )

    def select(self, names: Sequence[str] | None) -> tuple[CheckpointParameter, ...]:
        """The parameters of these names; None: all. A family's name is that of all its fragments.

        Raises:
            ArgumentError: there is no such parameter, or a fragment of a family is missing.
        """
        groups = grouped(self.parameters)
        if names is None:
            for family in groups.families.values():
                family.check_whole(self.path)
            return self.parameters
        chosen = groups.names_of(names, self.path)
        return self._chosen("parameter", self.parameters, chosen, groups.families)

    def select_tables(self, names: Sequence[str] | None) -> tuple[CheckpointTable, ...]:
        """The tables of these names; None: all.

        Raises:
            ArgumentError: there is no such table.
        """
        return self.tables if names is None else self._chosen("table", self.tables, names)

    def _chosen(
        self, kind: str, entries: Sequence[EntryT], names: Sequence[str], known: Iterable[str] = ()
    ) -> tuple[EntryT, ...]:
        by_name: dict[str, EntryT] = {entry.name: entry for entry in entries}
        for name in names:
            if name not in by_name:
                held = sorted({*by_name, *known})
                raise ArgumentError(f"{self.path} has no {kind} {name!r:.140}; it has {held}")
        return tuple(by_name[name] for name in dict.fromkeys(names))

    def check_files(self) -> None:
        """Looks whether all files are there, as large as they were, with their tensors.

        Raises:
            StorageError: one is not; it is named.
        """
        if isinstance(self.path, StorePath):
            found_below = self.path.below()
            for file in self._files():
                size = found_below.get(file.path, {"size": -1})["size"]
                if size != file.size_bytes:
                    raise StorageError(
                        f"{self.path / file.path} "
                        f"{'is not there' if size < 0 else f'has {size} bytes'}; expected an "
                        f"object of {file.size_bytes}; take another copy of the checkpoint"
                    )
            return
        for entry in entries_of(self):
            for file in files_of(entry):
                path = self.path / file.path
                try:
                    found = os.stat(path)
                except OSError as error:
                    raise file_error(path, error, "opening it") from None
                if not stat.S_ISREG(found.st_mode) or found.st_size != file.size_bytes:
                    raise StorageError(
                        f"{path} has {found.st_size} bytes; expected a file of {file.size_bytes}; "
                        "take another copy of the checkpoint"
                    )
                if not isinstance(file, StateFile):
                    opened(self.path, entry, file).close()

    def verify(self) -> None:
        """Reads all files and compares their CRCs.

        Raises:
            StorageError: a file was damaged; it is named.
        """
        for file in self._files():
            path = self.path / file.path
            check_crc(
                path, path.crc() if isinstance(path, StorePath) else crc_of(path), file.crc32c
            )

    def _files(self) -> list[SliceFile | RowsFile | StateFile]:
        return [file for each in entries_of(self) for file in files_of(each)]


def check_crc(path: Place, found: int, expected: int) -> None:
    """Refuses a file whose CRC32C is not that of its manifest."""
    if found != expected:
        raise StorageError(
            f"{path} was damaged: CRC32C {found:#010x}, expected {expected:#010x}; take another "
            "copy of the checkpoint"
        )


def entries_of(checkpoint: Checkpoint) -> list[Entry]:
    """The parameters of a checkpoint, then its tables."""
    return [*checkpoint.parameters, *checkpoint.tables]


def states_of(entry: Entry) -> tuple[StateFile, ...]:
    """The states of a parameter's workers; of a table none."""
    return entry.states if isinstance(entry, CheckpointParameter) else ()


def files_of(entry: Entry) -> tuple[Any, ...]:
    """All files of an entry."""
    return (*entry.files, *states_of(entry))


def below(folder: str, entry: EntryT) -> EntryT:
    """Returns an entry whose files are in a folder of the checkpoint; "": where they are."""
    if not folder:
        return entry
    moved: dict[str, Any] = {
        "files": tuple(replace(each, path=f"{folder}/{each.path}") for each in entry.files)
    }
    if isinstance(entry, CheckpointParameter):
        moved["states"] = tuple(replace(e, path=f"{folder}/{e.path}") for e in entry.states)
    return replace(entry, **moved)


def state_path(number: int, name: str, index: int) -> str:
    """The path of a worker's state, with a number as that of a slice."""
    return f"{number:06d}-{name}/state-{index:05d}"


def slice_path(number: int, name: str, shard_index: int) -> str:
    """The path of a slice; the number keeps names apart that differ in case alone."""
    return f"{number:06d}-{name}/slice-{shard_index:05d}.safetensors"


def rows_path(number: int, name: str, shard_index: int, part: int) -> str:
    """The path of a file of rows, with a number as that of a slice."""
    return f"{number:06d}-{name}/rows-{shard_index:05d}-{part:06d}.safetensors"
