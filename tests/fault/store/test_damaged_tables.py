"""Goal: flipped bits in a table's files, and rows that changed places, are refused by name or do no
harm; they never become other rows.

Method: images of a story's files (finished, and cut off in the middle of changes) are damaged at
every byte that has a meaning, one at a time, and the story is gone on with. Oracle: the story in
memory, undisturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.faults.damage import Damage
from harness.stories.crash import Written
from harness.stories.images import in_memory, restore
from harness.stories.killed import TableStory, WritesOf, writes_of
from shardwell.errors import StorageError

STORY = TableStory()
TABLE = STORY.directory
ROWS = {"weights": 12, "slot-0": 12, "slot-1": 4, "sums": 12, "has_sum": 1}
ROWS |= dict.fromkeys(("keys", "update_counts", "last_steps"), 8)
ROWS |= dict.fromkeys(("row_checks", "key_checks", "sum_checks"), 8)
"""Bytes of a row in each file of rows."""


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture
def writes(writes_of: WritesOf) -> list[Written]:
    return writes_of(STORY)


@pytest.fixture
def finished(tmp_path: Path, writes: list[Written]) -> Damage:
    last = writes[-1]._replace(answered_count=STORY.call_count)
    return Damage(STORY, last, tmp_path / "damaged", TABLE)


@pytest.fixture
def cut_off(tmp_path: Path, writes: list[Written]) -> Damage:
    """In the middle of a change of values and sums: rows are half written, and to be taken back."""
    written = [written for written in writes if written.point == "sums written"][4]
    return Damage(STORY, written, tmp_path / "damaged", TABLE)


def test_every_bit_of_rows_is_guarded(finished: Damage) -> None:
    used = len(STORY.states[-1]["keys"])
    for name, stride in ROWS.items():
        for offset in range(used * stride):
            message = finished.flip(name, offset)
            assert message is not None, f"{name}, byte {offset}"
            assert f"place {offset // stride} " in message, message
        finished.harmless_count = 0
        for offset in range(used * stride, used * stride + 2 * stride):
            assert finished.flip(name, offset) is None  # no row yet


def test_flipped_bits_of_files_beside_rows(finished: Damage) -> None:
    refused = {}
    for name, far in {"records": 256, "marks": 40, "undo": 40}.items():
        finished.refused_count = 0
        for offset in [*range(far), *range(far, 4096 + 64, 101)]:
            if offset < len(finished.contents(name)):
                finished.flip(name, offset)
        refused[name] = finished.refused_count
    assert refused["records"] == 8 + 56 + 4  # the word, the current record, its CRC
    assert refused["marks"] == 16  # of one seat; what the record names is written again
    assert refused["undo"] == 8  # the word that says that an entry is valid
    for name in ("events", "table.json"):
        finished.refused_count = finished.harmless_count = 0
        for offset in range(len(finished.contents(name).rstrip(b"\0"))):
            finished.flip(name, offset)
        assert finished.refused_count > 100
        assert finished.harmless_count < 60


def test_bits_of_an_entry_that_is_to_be_taken_back(cut_off: Damage) -> None:
    contents = np.frombuffer(bytes(cut_off.contents("undo")), np.uint8)
    head = set(range(32))
    for offset in sorted({*np.flatnonzero(contents).tolist(), *head}):
        message = cut_off.flip("undo", offset)
        assert message is not None
        assert "undo" in message
    for name in ROWS:
        for offset in range(0, 5 * ROWS[name], 3):
            cut_off.flip(name, offset)  # harmless where it is taken back
    assert cut_off.harmless_count
    for name in ("records", "marks"):
        for offset in range(0, 256, 3):
            cut_off.flip(name, offset)


def test_pages_of_zeros_and_rows_that_were_moved(finished: Damage) -> None:
    for name, stride in ROWS.items():
        whole = bytes(finished.contents(name))
        zeros = bytes(4096) + whole[4096:]
        assert (finished.of(name, zeros, "zeros") is None) == (zeros == whole)
        rows = np.frombuffer(whole, np.uint8).reshape(-1, stride)
        moved = rows.copy()
        moved[[1, 2]] = rows[[2, 1]]
        if moved.tobytes() != whole and name != "sums":  # sums that count for nothing
            assert finished.of(name, moved.tobytes(), "moved") is not None, name
    every = {name: np.frombuffer(bytes(finished.contents(name)), np.uint8) for name in ROWS}
    image = dict(finished.image)
    for name, stride in ROWS.items():  # whole rows, checks too
        rows = every[name].reshape(-1, stride).copy()
        rows[[1, 2]] = rows[[2, 1]]
        image[f"{TABLE}/{name}"] = rows.tobytes()
    restore(image, finished.path)
    with pytest.raises(StorageError, match="place 1 "):
        STORY.state_at(finished.path)


def test_files_of_another_table(finished: Damage, tmp_path: Path) -> None:
    other = writes_of(STORY, restore({}, tmp_path / "other"))[-1].image
    for name, contents in other.items():
        if name.startswith(f"{TABLE}/") and contents != finished.image[name]:
            message = finished.of(Path(name).name, contents, "another table's")
            assert message is not None or name.endswith(("undo", "kept")), name
