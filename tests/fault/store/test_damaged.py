"""Goal: files that are gone, cut, blank, or not a store's own are refused by name or do no harm;
they never become other weights or rows.

Method: the files of the stories of a parameter and of a table, run to the end, are damaged one at
a time, and gone on with. Oracle: the stories in memory, undisturbed. Single bits
are flipped in test_damaged_parameters.py, and of a table below.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastcrc import crc32

from harness.faults.damage import Damage
from harness.stories.crash import Written
from harness.stories.images import restore
from harness.stories.killed import ParameterStory, StoredStory, TableStory, WritesOf, writes_of
from shardwell.errors import StorageError

STORIES: dict[str, StoredStory] = {"parameter": ParameterStory(), "table": TableStory()}
PAGE = 4096
_OPTIONAL = "tables/000001/kept"
"""Without it, rows of an earlier version are not to be had; entries that do not fit are ignored."""
GROWING = {"events", "marks"}
"""Files that may be cut off while they grow."""


@pytest.fixture(params=STORIES)
def story(request: pytest.FixtureRequest) -> StoredStory:
    return STORIES[request.param]


@pytest.fixture
def damage(tmp_path: Path, story: StoredStory, writes_of: WritesOf) -> Damage:
    last = writes_of(story)[-1]._replace(answered_count=story.call_count)
    return Damage(story, last, tmp_path / "damaged")


def files(damage: Damage) -> Iterator[tuple[str, bytes]]:
    """All that there are."""
    for name, contents in damage.image.items():
        if contents is not None:
            yield name, contents


def test_files_that_are_gone(damage: Damage) -> None:
    for name, _ in files(damage):
        if name == _OPTIONAL:
            continue
        message = damage.of(name, None, "gone")
        assert message is not None
        assert name in message


def test_sizes_that_changed(damage: Damage) -> None:
    garbage = bytes(range(1, 256)) * 17
    for name, whole in files(damage):
        if name == _OPTIONAL:
            continue
        size, may_grow = len(whole), Path(name).name in GROWING
        for kept in {0, 1, size // 2, size - 1, (size - 1) // PAGE * PAGE}:
            message = damage.of(name, whole[:kept], f"cut to {kept} of {size} bytes")
            assert message is None or name in message
            assert message or may_grow or whole[:kept].strip() == whole.strip(), (name, kept)
        for more in (b"\0", bytes(PAGE), garbage[:PAGE]):
            message = damage.of(name, whole + more, f"{len(more)} bytes more")
            assert message is None or name in message
            assert message or may_grow or name.endswith(".json"), (name, len(more))
            assert message is None or not may_grow or any(more), (name, len(more))
    assert damage.refused_count > 60


def test_zeros_in_every_file(damage: Damage) -> None:
    for name, whole in files(damage):
        if name.endswith("undo"):
            continue
        for start, stop in ((0, 8), (0, 64), (16, 24), (64, 128), (0, 512), (0, len(whole))):
            message = damage.zero(name, start, stop)
            assert message is None or name.rpartition("/")[0] in message
    assert damage.refused_count > 40


def test_a_copy_and_what_is_not_ours(damage: Damage, story: StoredStory) -> None:
    folder = story.directory.rpartition("/")[0]
    copied = {
        name.replace(story.directory, f"{folder}/000007"): contents
        for name, contents in damage.image.items()
        if name.startswith(story.directory)
    }
    restore({**damage.image, **copied}, damage.path)
    with pytest.raises(StorageError, match=rf"000007 holds {story.what}, as another"):
        story.state_at(damage.path)
    for extra in ("notes.txt", "000009", "x"):
        restore({**damage.image, f"{folder}/{extra}": b"mine"}, damage.path)
        with pytest.raises(StorageError, match=f"{folder}/{extra}"):
            story.state_at(damage.path)
    restore({**damage.image, f"{folder}/000009": None}, damage.path)
    with pytest.raises(StorageError, match=r"000009/\w+\.json"):
        story.state_at(damage.path)


def test_files_of_a_newer_format_are_refused(damage: Damage, story: StoredStory) -> None:
    """Whatever else a newer version writes."""
    (name,) = (
        name
        for name, _ in files(damage)
        if name.startswith(story.directory) and name.endswith(".json")
    )
    found = json.loads(damage.contents(name).decode().rpartition("}")[0] + "}")
    for changed in ({**found, "format_version": 4}, {"format_version": 4, "new": 1}):
        text = json.dumps(changed)
        contents = f"{text}\n{crc32.iscsi(text.encode()):08x}\n".encode()
        message = damage.of(name, contents, "format 4")
        assert message is not None
        assert "has format 4; shardwell" in message
        assert "run the version of shardwell that wrote it" in message


# Flipped bits in a table's files, and rows that changed places, are refused by name or do no harm;
# they never become other rows. Method: images of a story's files (finished, and cut off in the
# middle of changes) are damaged at every byte that has a meaning, one at a time, and the story is
# gone on with. Oracle: the story in memory, undisturbed.


STORY = TableStory()
TABLE = STORY.directory
ROWS = {"weights": 12, "slot-0": 12, "slot-1": 4, "sums": 12, "has_sum": 1}
ROWS |= dict.fromkeys(("keys", "update_counts", "last_steps"), 8)
ROWS |= dict.fromkeys(("row_checks", "key_checks", "sum_checks"), 8)
"""Bytes of a row in each file of rows."""


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
