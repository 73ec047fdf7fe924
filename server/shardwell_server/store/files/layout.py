"""parameter.json and table.json: what the other files of their directory are."""

from __future__ import annotations

import dataclasses
import json
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell.specs.formats import DIRECTORY, WHOLE_BLOCKS
from shardwell_server.store.contract import Layout, TableLayout
from shardwell_server.store.files.mapped import failing

Kind = TypeVar("Kind", Layout, TableLayout)


class Home(NamedTuple):
    """The directory of one parameter or table, and what each of its files needs."""

    path: Path
    layout: Any
    salt: int
    """The start of all CRCs and checks, so that no other's files fit."""
    reached: Callable[[str], None]
    """A call at each point where a kill leaves another state; of tests."""

    @property
    def layout_name(self) -> str:
        return f"{self.layout.kind}.json"


def write_layout(path: Path, layout: Layout | TableLayout, salt: int) -> None:
    """Writes a layout's file."""
    text = json.dumps(
        {
            "format_version": DIRECTORY.newest,
            "byte_order": sys.byteorder,
            "salt": salt,
            **{each.name: getattr(layout, each.name) for each in dataclasses.fields(layout)},
        },
        indent=2,
    )
    path.write_text(f"{text}\n{crc32.iscsi(text.encode()):08x}\n")


def read_layout(path: Path, kind: type[Kind]) -> tuple[Kind, int]:
    """Reads layout and salt from a file; StorageError: it is damaged, or another version's."""
    try:
        with failing(path, "reading it"):
            text, _, crc = path.read_text().strip().rpartition("\n")
        found = json.loads(text)
    except ValueError as error:
        raise StorageError(f"{path} is no JSON ({error}); restore it from a copy") from None
    found = found if isinstance(found, dict) else {}
    number = found.pop("format_version", None)
    DIRECTORY.check(path, number)
    if crc != f"{crc32.iscsi(text.encode()):08x}":
        raise StorageError(
            f"{path} was damaged: its last line is no CRC32C of the rest; restore it"
        )
    order, salt = found.pop("byte_order", sys.byteorder), found.pop("salt", None)
    if order != sys.byteorder:
        raise StorageError(
            f"{path} is {order}-endian; expected {sys.byteorder}-endian: run shardwell on such a "
            "machine as wrote it"
        )
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    description = values.get("description", {})
    description.pop("former_names", None)  # of 0.2.0, which gave names to what had another
    if number < WHOLE_BLOCKS and kind is Layout:
        description.get("spec", {})["cutsBlocks"] = True
    try:
        return kind(**values), operator.index(salt)
    except TypeError as error:
        raise StorageError(
            f"{path} does not have the fields of its format ({error}); {DIRECTORY.advice}"
        ) from None
