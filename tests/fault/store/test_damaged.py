"""Goal: files that are gone, cut, blank, or not a store's own are refused by name or do no harm;
they never become other weights or rows.

Method: the files of the stories of a parameter and of a table, run to the end, are damaged one at
a time, and gone on with. Oracle: the stories in memory, undisturbed. Single bits are flipped in
test_damaged_parameters.py and test_damaged_tables.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastcrc import crc32

from harness.faults.damage import Damage
from harness.stories.images import in_memory, restore
from harness.stories.killed import ParameterStory, StoredStory, TableStory, WritesOf
from shardwell.errors import StorageError

STORIES: dict[str, StoredStory] = {"parameter": ParameterStory(), "table": TableStory()}
PAGE = 4096
_OPTIONAL = "tables/000001/kept"
"""Without it, rows of an earlier version are not to be had; entries that do not fit are ignored."""
GROWING = {"events", "marks"}
"""Files that may be cut off while they grow."""


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


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
