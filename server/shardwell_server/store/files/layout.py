"""parameter.json and table.json: what the other files of their directory are."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, TypeVar

from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell_server.store.contract import Layout, TableLayout
from shardwell_server.store.files.mapped import storage_error

_FORMAT_VERSION = 1
Kind = TypeVar("Kind", Layout, TableLayout)


def write_layout(path: Path, layout: Layout | TableLayout, salt: int) -> None:
    """Writes the file.

    Raises:
        OSError: it can't be written.
    """
    text = json.dumps(
        {
            "format_version": _FORMAT_VERSION,
            "byte_order": sys.byteorder,
            "salt": salt,
            **{each.name: getattr(layout, each.name) for each in dataclasses.fields(layout)},
        },
        indent=2,
    )
    path.write_text(f"{text}\n{crc32.iscsi(text.encode()):08x}\n")


def read_layout(path: Path, kind: type[Kind]) -> tuple[Kind, int]:
    """The layout and salt in a file.

    Raises:
        StorageError: it is damaged, or another version's.
    """
    try:
        text, _, crc = path.read_text().strip().rpartition("\n")
        found = json.loads(text)
    except OSError as error:
        raise storage_error(path, error, "reading it") from None
    except ValueError as error:
        raise StorageError(f"{path} is no JSON ({error}); restore it from a copy") from None
    if crc != f"{crc32.iscsi(text.encode()):08x}":
        raise StorageError(
            f"{path} was damaged: its last line is no CRC32C of the rest; restore it"
        )
    version, order = found.pop("format_version", None), found.pop("byte_order", sys.byteorder)
    if (version, order) != (_FORMAT_VERSION, sys.byteorder):
        raise StorageError(
            f"{path} has format version {version}, {order}-endian; expected {_FORMAT_VERSION}, "
            f"{sys.byteorder}-endian: run the version of shardwell that wrote it, on such a machine"
        )
    salt = found.pop("salt")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    return kind(**values), salt
