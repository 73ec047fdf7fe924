"""Goal: a number rises with each change of what it numbers, and a number that is not known is
refused by name, before anything else of a file is read.

Method: digests of bytes, and names of fields, are kept beside the number (harness/formats.py). What
a newer version writes is its number, and nothing else that this one knows.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastcrc import crc32

import shardwell
from harness.formats import RECORD, current
from shardwell.errors import StorageError
from shardwell.specs.formats import CHECKPOINT, DIRECTORY, Format
from shardwell_server import MmapGradientAccumulator
from shardwell_server.config import ShardConfig
from shardwell_server.shard.contribution_log import ContributionLog
from shardwell_server.store.contract import Layout, TableLayout
from shardwell_server.store.files.data_dir import DataDir
from shardwell_server.store.files.layout import read_layout
from shardwell_server.store.journal.journal import sync_segments
from shardwell_server.store.records.event_log import EventLog


def test_each_number_stands_for_one_format() -> None:
    kept = json.loads(RECORD.read_text())
    found = current()
    assert set(found) == set(kept)
    for kind, now in found.items():
        then = kept[kind]
        if now == {key: then[key] for key in now}:
            continue
        differ = [key for key, value in now["is"].items() if then["is"].get(key) != value]
        if now["number"] != then["number"]:
            advice = "the number is another one"
        elif now["number"] <= then["released"]:
            advice = f"a release has {now['number']}: raise the number in specs/formats.py"
        else:
            advice = f"no release has {now['number']}: it may stay"
        pytest.fail(
            f"the format {kind!r} changed ({', '.join(differ)}); {advice}, and write down what it "
            "means: PYTHONPATH=tests .venv/bin/python -m harness.formats"
        )


def test_a_number_outside_those_that_are_read() -> None:
    some = Format(4, 2, "do this")
    for number in (2, 3, 4):
        some.check("file", number)
    for number in (1, 5, None, "3", True, 3.0, [3]):
        with pytest.raises(StorageError) as caught:
            some.check("file", number)
        assert caught.value.message == (
            f"file has format {number!r}; shardwell {shardwell.__version__} here reads format "
            "2 to 4: do this"
        )
    with pytest.raises(StorageError, match=r"format 5, written by shardwell 9\.0; .*format 2 to 4"):
        some.check("file", 5, "9.0")


def _nothing(point: str) -> None:
    pass


def _summed(path: Path) -> None:
    MmapGradientAccumulator(path, dim=4, max_rows=8).close()


def _with_crc(text: bytes, form: str | None) -> bytes:
    """A head whose CRC fits, as in these files a damaged number is to be called damaged."""
    crc = crc32.iscsi(text)
    return text + (struct.pack("<I", crc) if form is None else (form % crc).encode())


NEWER: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
    "shard.json": (
        b'{"format_version": %d, "new": 1}' % (DIRECTORY.newest + 1),
        lambda path: DataDir(path.parent, ShardConfig(shard_index=0, shard_count=1)),
    ),
    "parameter.json": (
        b'{"format_version": %d, "new": 1}\nnew' % (DIRECTORY.newest + 1),
        lambda path: read_layout(path, Layout),
    ),
    "table.json": (
        b'{"format_version": %d, "new": 1}\nnew' % (DIRECTORY.newest + 1),
        lambda path: read_layout(path, TableLayout),
    ),
    "events": (
        _with_crc(b"shardwell events 2 %020d " % 1, "%08x\n"),
        lambda path: EventLog(path, 0, _nothing).read(),
    ),
    "journal-000001": (
        _with_crc(b"SWL2" + bytes(8), None),
        lambda path: sync_segments(path.parent),
    ),
    "sums": (b"shardwell sums\r\n" + struct.pack("=I", 2) + b"new", _summed),
    "log.jsonl": (b'{"format": 2, "new": 1}\n', lambda path: ContributionLog(path, 0)),
    "manifest.json": (
        b'{"format": "shardwell-checkpoint", "format_version": %d}' % (CHECKPOINT.newest + 1),
        lambda path: shardwell.inspect_checkpoint(path.parent),
    ),
}


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_file_is_refused_by_its_number(tmp_path: Path, name: str) -> None:
    contents, read = NEWER[name]
    path = tmp_path / name
    path.write_bytes(contents)
    with pytest.raises(StorageError, match=rf"{name} has format \d; .* reads format \d( to \d)?: "):
        read(path)
    assert path.read_bytes() == contents


@pytest.mark.parametrize("change", [{"new": 1}, {"salt": None}, {"chunk_element_count": ...}])
def test_fields_that_a_layout_s_format_does_not_have(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """Versions before 0.2.0 ended in a TypeError here."""
    fields = {
        "format_version": DIRECTORY.newest,
        "salt": 1,
        "name": "net",
        "slice_size": 4,
        "chunk_element_count": 4,
        "with_sum": True,
        **change,
    }
    path = tmp_path / "parameter.json"
    text = json.dumps({key: value for key, value in fields.items() if value is not ...})
    path.write_text(f"{text}\n{crc32.iscsi(text.encode()):08x}\n")
    with pytest.raises(StorageError, match=r"does not have the fields of its format .*; run the"):
        read_layout(path, Layout)
