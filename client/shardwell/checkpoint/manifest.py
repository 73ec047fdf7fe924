"""manifest.json of a checkpoint: written, and read without believing anything.

{
  "crc32c": "9ab1...",        of the file's bytes, with zeros in place of these eight digits
  "format": "shardwell-checkpoint",
  "format_version": 3,        specs/formats.py says what each number is
  "shardwell_version": "0.1.0",
  "cluster_id": "prod",
  "shard_count": 2,
  "parameters": [
    {
      "name": "model",
      "spec": {...},          shardwell.v1.ParameterSpec in protobuf's JSON
      "version": 120,         with "version_max", see CheckpointParameter
      "version_max": 120,
      "learning_rate": 0.1,
      "slots": ["momentum_buffer"],
      "files": [
        {"path": "000001-model/slice-00000.safetensors", "offset": 0, "size": 336,
         "bytes": 2880, "crc32c": "01d0..."}, ...
      ],
      "samples": {"train": {"length": 50000, "done": [[0, 81920]], ...}}
                              where there are any: see docs/adr/0042-samples.md; shard 0 reads it
      "states": [{"path": "000001-model/state-00000", "worker_id": "model-0", "step": 120,
                  "bytes": 1873, "crc32c": "01d0..."}, ...]
                              where there are any: see docs/adr/0043-states.md
  "tables": [                 as parameters; their files without "offset" and "size":
        {"path": "000002-users/rows-00000-000000.safetensors", "rows": 1000,
         "bytes": 528792, "crc32c": "77fe..."}, ...
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fastcrc import crc32
from google.protobuf import json_format

from shardwell.checkpoint.format import (
    Checkpoint,
    CheckpointParameter,
    CheckpointTable,
    Entry,
    RowsFile,
    SliceFile,
    StateFile,
    states_of,
)
from shardwell.checkpoint.stores import MANIFEST_NAME, Place, StorePath
from shardwell.checkpoint.tensor_files import file_error
from shardwell.errors import ArgumentError, StorageError
from shardwell.numerics.arguments import check_integer
from shardwell.specs.formats import CHECKPOINT
from shardwell.specs.layout import SIZE_MAX
from shardwell.specs.names import check_name
from shardwell.specs.optimizers import check_learning_rate
from shardwell.specs.parameter import STEP_MAX, ParameterSpec
from shardwell.specs.table import ROW_COUNT_MAX, TableSpec

_FORMAT = "shardwell-checkpoint"
_SIZE_MAX_BYTES = 2**28
"""Most bytes of a manifest: a million files."""
_NO_CRC = "00000000"
_CRC = re.compile(rb'"crc32c": "([0-9a-f]{8})"')
_FILE_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

FieldT = TypeVar("FieldT")


class _Number(NamedTuple):
    """A number that says what a file covers: its field, and the numbers that it may be."""

    name: str
    least: int
    most: int


_COVERS: Mapping[Any, Mapping[str, _Number]] = {
    SliceFile: {"offset": _Number("offset", 0, SIZE_MAX), "size": _Number("size", 1, SIZE_MAX)},
    StateFile: {"step": _Number("step", 0, STEP_MAX)},
    RowsFile: {"rows": _Number("row_count", 1, ROW_COUNT_MAX)},
}
_KINDS: Mapping[str, tuple[Any, Any, Any]] = {
    "parameter": (CheckpointParameter, ParameterSpec, SliceFile),
    "table": (CheckpointTable, TableSpec, RowsFile),
}


def write_manifest(directory: Path, checkpoint: Checkpoint) -> None:
    """Writes the manifest, to the disk."""
    path = directory / MANIFEST_NAME
    fields = {
        "crc32c": _NO_CRC,
        "format": _FORMAT,
        "format_version": CHECKPOINT.newest,
        "shardwell_version": checkpoint.software_version,
        "cluster_id": checkpoint.cluster_id,
        "shard_count": checkpoint.shard_count,
        "parameters": [_to_json(entry) for entry in checkpoint.parameters],
    }
    if checkpoint.tables:
        fields["tables"] = [_to_json(entry) for entry in checkpoint.tables]
    text = json.dumps(fields, indent=2)
    data = f"{text}\n".encode()
    crc = f'"crc32c": "{crc32.iscsi(data):08x}"'.encode()
    try:
        with path.open("xb") as file:
            file.write(_CRC.sub(crc, data, count=1))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise file_error(path, error, "writing it") from None


def _to_json(entry: Entry) -> dict[str, Any]:
    states = [{**_file_json(each), "worker_id": each.worker_id} for each in states_of(entry)]
    return {
        "name": entry.name,
        "spec": json_format.MessageToDict(
            entry.spec.to_proto(),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        ),
        "version": entry.version,
        "version_max": entry.version_max,
        "learning_rate": entry.learning_rate,
        "slots": list(entry.spec.slot_names),
        **(
            {"samples": entry.samples}
            if isinstance(entry, CheckpointParameter) and entry.samples
            else {}
        ),
        **({"states": states} if states else {}),
        "files": [_file_json(file) for file in entry.files],
    }


def _file_json(file: Any) -> dict[str, Any]:
    return {
        "path": file.path,
        **{key: getattr(file, each.name) for key, each in _COVERS[type(file)].items()},
        "bytes": file.size_bytes,
        "crc32c": f"{file.crc32c:08x}",
    }


def read_checkpoint(place: Place, *, verify: bool = False) -> Checkpoint:
    """Reads the checkpoint of one place, as `inspect_checkpoint` does."""
    checkpoint = read_manifest(place)
    checkpoint.check_files()
    if verify:
        checkpoint.verify()
    return checkpoint


def read_manifest(place: Place, name: str = MANIFEST_NAME) -> Checkpoint:
    """Reads a checkpoint's manifest; its files are not looked at."""
    path = place / name
    data = _content(path)
    found = _CRC.search(data, 0, 64)
    try:
        if len(data) > _SIZE_MAX_BYTES:
            raise ValueError(f"it has more than {_SIZE_MAX_BYTES} bytes")
        fields = json.loads(data)
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise ValueError(f"it does not say that its format is {_FORMAT!r}")
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is no manifest of a checkpoint: {error}") from None
    CHECKPOINT.check(path, fields.get("format_version"), fields.get("shardwell_version"))
    blank = _CRC.sub(f'"crc32c": "{_NO_CRC}"'.encode(), data, count=1)
    if found is None or found[1] != f"{crc32.iscsi(blank):08x}".encode():
        raise StorageError(f"{path} was damaged: its CRC32C is not what it says; take another copy")
    try:
        return _checkpoint(place, fields)
    except (ValueError, TypeError, KeyError, json_format.ParseError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise StorageError(f"{path} can't be used: {reason}") from None


def _content(path: Place) -> bytes:
    data, why = None, "there is no such object"
    try:
        if isinstance(path, StorePath):
            data = path.read(_SIZE_MAX_BYTES)
        else:
            with path.open("rb") as file:
                data = file.read(_SIZE_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        why = str(error.strerror)
    except OSError as error:
        raise file_error(Path(path), error, "reading it") from None
    if data is None:
        raise StorageError(
            f"{path.parent} is no checkpoint: reading {path} failed: {why}; give the directory "
            "that a save made, or of several the newest: 'ckpt/{step}'"
        )
    return data


# Below, whatever is wrong is a ValueError, TypeError, KeyError or ParseError.


def _checkpoint(path: Place, fields: dict[str, Any]) -> Checkpoint:
    entries = {
        what: tuple(
            _entry(each, what) for each in _typed({"tables": [], **fields}, f"{what}s", list)
        )
        for what in _KINDS
    }
    for what, found in entries.items():
        names = [entry.name for entry in found]
        if len(set(names)) != len(names):
            raise ArgumentError(f"a {what} occurs twice in {names}")
    return Checkpoint(
        path=path,
        cluster_id=check_name("cluster_id", fields["cluster_id"]),
        shard_count=check_integer("shard_count", fields["shard_count"], 1, 2**32),
        software_version=_typed(fields, "shardwell_version", str),
        parameters=entries["parameter"],
        tables=entries["table"],
    )


def _entry(fields: Any, what: str) -> Any:
    kind, spec_kind, file_kind = _KINDS[what]
    message = json_format.ParseDict(_typed(fields, "spec", dict), spec_kind.MESSAGE())
    rate = fields["learning_rate"]
    more: dict[str, Any] = {}
    if what == "parameter":
        more["samples"] = _typed({"samples": {}, **fields}, "samples", dict)
        states = _typed({"states": [], **fields}, "states", list)
        more["states"] = tuple(
            _file(each, StateFile, worker_id=check_name("worker_id", each["worker_id"]))
            for each in states
        )
    entry = kind(
        **more,
        spec=spec_kind.from_proto(message),
        version=check_integer("version", fields["version"], 0, STEP_MAX),
        version_max=check_integer("version_max", fields["version_max"], 0, STEP_MAX),
        learning_rate=None if rate is None else check_learning_rate("learning_rate", rate),
        files=tuple(_file(each, file_kind) for each in _typed(fields, "files", list)),
    )
    _check_entry(entry, fields, what)
    if isinstance(entry, CheckpointParameter):
        _check_cover(entry.spec, entry.files)
    return entry


def _check_entry(entry: Entry, fields: dict[str, Any], what: str) -> None:
    expected = (entry.spec.name, list(entry.spec.slot_names))
    found = (fields["name"], fields["slots"])
    if found != expected:
        raise ArgumentError(f"name and slots are {found!r:.200}; the spec's are {expected}")
    if (entry.learning_rate is None) != (
        getattr(entry.spec.optimizer, "learning_rate", None) is None
    ):
        raise ArgumentError(
            f"{what} {entry.name!r} has learning rate {entry.learning_rate}: {entry.spec.optimizer}"
        )
    is_one = entry.version == entry.version_max
    if entry.version > entry.version_max or (entry.spec.mode == "sync" and not is_one):
        raise ArgumentError(
            f"{what} {entry.spec.name!r} has versions {entry.version} to {entry.version_max}"
        )


def _file(fields: Any, kind: Any, **more: Any) -> Any:
    path = _typed(fields, "path", str)
    if not all(_FILE_PART.fullmatch(part) for part in path.split("/")):
        raise ArgumentError(f"{path!r:.200} is no path below the checkpoint's directory")
    crc = _typed(fields, "crc32c", str)
    if not re.fullmatch(r"[0-9a-f]{8}", crc):
        raise ArgumentError(f"the CRC32C of {path} must be eight hexadecimal digits; got {crc!r}")
    cover = {
        each.name: check_integer(key, fields[key], each.least, each.most)
        for key, each in _COVERS[kind].items()
    }
    size_bytes = check_integer("bytes", fields["bytes"], 1, 2**62)
    return kind(path=path, size_bytes=size_bytes, crc32c=int(crc, 16), **cover, **more)


def _check_cover(spec: ParameterSpec, files: Iterable[SliceFile]) -> None:
    expected = 0
    for file in files:
        if file.offset != expected:
            raise ArgumentError(
                f"{file.path} of parameter {spec.name!r} begins at element {file.offset}; "
                f"expected {expected}"
            )
        expected += file.size
    if expected != spec.size:
        raise ArgumentError(
            f"the files of parameter {spec.name!r} have {expected} elements; expected {spec.size}"
        )


def _typed(fields: Any, name: str, kind: type[FieldT]) -> FieldT:
    value = fields[name]
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} must be a {kind.__name__}; got {value!r:.80}")
    return value
