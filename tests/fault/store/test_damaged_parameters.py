"""Goal: flipped bits in a parameter's files are refused by name or do no harm; they never become
other weights.

Method: images of a story's files (finished, just created, and cut off in the middle of changes) are
damaged at every kind of place, one at a time, and the story is gone on with. Oracle: the story in
memory, undisturbed. Places are computed, not drawn: every byte of what is small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.faults.damage import Damage
from harness.stories.crash import Written, recovered, state_at
from harness.stories.images import image_of, restore
from harness.stories.killed import ParameterStory, WritesOf
from harness.stories.parameter import (
    CONFIG,
    SYNC,
    State,
    contribute,
    initialize,
    short_blocks,
    state_of,
)
from shardwell.errors import StorageError
from shardwell_server.config import ShardConfig
from shardwell_server.store.files.data_dir import DataDir, DataDirError

STORY = ParameterStory()
FIRST, SECOND = "parameters/000001", "parameters/000002"
PAGE = 4096
EVENTS_HEAD = 49


@pytest.fixture(autouse=True)
def _short_blocks() -> Iterator[None]:
    with short_blocks():
        yield


@pytest.fixture
def writes(writes_of: WritesOf) -> list[Written]:
    return writes_of(STORY)


def refusal(use: Callable[[], object]) -> str | None:
    """Why files are refused; None if they are not."""
    try:
        use()
    except StorageError as error:
        return str(error)
    return None


@pytest.fixture
def finished(tmp_path: Path, writes: list[Written]) -> Damage:
    """The end of the story: sums of meaning and of none, entries that are void, several seats."""
    last = writes[-1]._replace(answered_count=STORY.call_count)
    return Damage(STORY, last, tmp_path / "damaged")


def pending(writes: list[Written], path: Path, array: str) -> Damage:
    """Cut off when the last block of an array was written, before its record."""
    for before, after in itertools.pairwise(writes):
        if before.point == "block" and after.point == "record":
            name = f"{FIRST}/{array}"
            earlier = writes[writes.index(before) - 1]
            if before.image[name] != earlier.image[name]:
                return Damage(STORY, before, path)
    raise AssertionError("the story has none")


SMALL = ["weights", "gradient_sum", "slot-0", "parameter.json", "records"]
"""Of which `make test` takes the first and the last."""
ALL_SMALL = [(directory, name) for directory in (FIRST, SECOND) for name in SMALL]
ALL_SMALL.remove((SECOND, "gradient_sum"))  # one contribution makes a step


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("directory", "name"), ALL_SMALL)
def test_a_flipped_bit_in_a_small_file(finished: Damage, directory: str, name: str) -> None:
    path = f"{directory}/{name}"
    size = len(finished.image[path] or b"")
    offsets = [*range(0, size, 3)] if name != "records" else [*range(256), *range(256, size, 5)]
    for offset in offsets:
        message = finished.flip(path, offset)
        assert message is None or name in message
    assert finished.refused_count > len(offsets) // 8
    if name in ("weights", "slot-0", "parameter.json"):
        assert finished.harmless_count <= 1  # the last line's end
    else:
        assert finished.harmless_count > 0


def test_a_flipped_bit_in_marks(finished: Damage) -> None:
    """Three seats of three chunks in rows of a page; then a row without a seat."""
    name = f"{FIRST}/marks"
    for row in range(3):
        for offset in range(3 * 16):
            message = finished.flip(name, row * PAGE + offset)
            # What the record of a chunk knows is written again.
            assert message is None or "marks" in message
        finished.flip(name, row * PAGE + 3 * 16)
    assert finished.refused_count > 60
    assert finished.flip(name, 3 * PAGE) is not None


def test_zeros_in_marks_are_no_gradients_that_never_came(finished: Damage) -> None:
    for directory, seat_count, chunk_count in ((FIRST, 3, 3), (SECOND, 2, 2)):
        for row in range(seat_count):
            for chunk_index in range(chunk_count):
                start = row * PAGE + chunk_index * 16
                finished.zero(f"{directory}/marks", start, start + 16)
                finished.zero(f"{directory}/marks", start, start + 8)
            finished.zero(f"{directory}/marks", row * PAGE, (row + 1) * PAGE)
        finished.zero(f"{directory}/marks", 0, seat_count * PAGE)
    assert finished.refused_count > 15


def test_a_flipped_bit_in_events(finished: Damage) -> None:
    name = f"{FIRST}/events"
    contents = finished.image[name] or b""
    end = int(contents[len("shardwell events 1") : EVENTS_HEAD - 10])
    lines_ends = [i for i in range(end) if contents[i : i + 1] == b"\n"]
    offsets = {*range(EVENTS_HEAD + 10), *range(0, end, 4), *lines_ends}
    for offset in sorted(offsets):
        message = finished.flip(name, offset)
        assert message is not None
        assert "events" in message
    assert finished.refused_count == len(offsets)
    for offset in range(end, len(contents), 97):
        assert finished.flip(name, offset) is None


def test_a_flipped_bit_in_undo_entries_of_the_past(finished: Damage) -> None:
    contents = finished.image[f"{FIRST}/undo"] or b""
    for entry in range(0, len(contents), len(contents) // 3):
        for offset in (*range(48), PAGE, PAGE + 63, 2 * PAGE, 2 * PAGE + 63, 3 * PAGE - 1):
            finished.flip(f"{FIRST}/undo", entry + offset)
    assert finished.harmless_count > 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("array", ["weights", "gradient_sum"])
def test_a_flipped_bit_in_an_undo_entry_that_is_needed(
    tmp_path: Path, writes: list[Written], array: str
) -> None:
    damage = pending(writes, tmp_path / "damaged", array)
    contents = damage.image[f"{FIRST}/undo"] or b""
    for entry in range(0, len(contents), len(contents) // 3):
        for offset in (*range(48), *range(PAGE, PAGE + 80, 7), *range(2 * PAGE, 2 * PAGE + 80, 7)):
            damage.flip(f"{FIRST}/undo", entry + offset)
        for start, stop in ((0, 8), (0, 40), (8, 40), (PAGE, PAGE + 64), (0, 3 * PAGE)):
            damage.zero(f"{FIRST}/undo", entry + start, entry + stop)
        for progress in (1, 8, 9, 16, 17, 1024, 1025, 2**62):
            words = np.frombuffer(contents, np.uint64).copy()
            words[entry // 8] = progress
            damage.of(f"{FIRST}/undo", words.tobytes(), f"progress {progress}")
    assert damage.refused_count > 30
    for name in SMALL:
        for offset in range(0, len(damage.image[f"{FIRST}/{name}"] or b""), 11):
            damage.flip(f"{FIRST}/{name}", offset)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("directory", [FIRST, SECOND])
def test_a_flipped_bit_before_first_weights(
    tmp_path: Path, writes: list[Written], directory: str
) -> None:
    """Optimizer state has its first values from the start, which first weights do not set."""
    created = next(w for w in writes if w.image.get(directory, b"") is None)
    damage = Damage(STORY, created, tmp_path / "damaged")
    for name in SMALL:
        contents = damage.image.get(f"{directory}/{name}") or b""
        for offset in range(0, len(contents), 5):
            damage.flip(f"{directory}/{name}", offset)
    assert damage.refused_count > 50
    assert damage.harmless_count > 20


def test_files_of_another_parameter(tmp_path: Path) -> None:
    """Of the same sizes, each without damage in its own place."""
    path = tmp_path / "two"
    with recovered(path_made(path)) as shard:
        for number, name in enumerate(("left", "right")):
            made, _ = shard.parameters.open(replace(SYNC, name=name))
            initialize(made, "w0", np.full(37, number, np.float32))
            for chunk_index, size in enumerate((16, 16, 5)):
                for worker in ("w0", "w1"):
                    gradient = np.full(size, 3 + number, np.float32)
                    contribute(made, worker, chunk_index, 0, gradient)
        expected = state_of(shard)
    image = image_of(path)
    refused = set()
    for name, contents in image.items():
        if contents is None or not name.startswith(FIRST):
            continue
        other = name.replace(FIRST, SECOND)
        for damaged in ({name: image[other], other: contents}, {name: image[other]}):
            restore({**image, **damaged}, path)
            states: list[State] = []
            message = refusal(lambda states=states: states.append(state_at(path)))
            if message is None:
                assert states == [expected], name
            else:
                assert str(path / FIRST) in message or str(path / SECOND) in message
                refused.add(name.rpartition("/")[2])
    assert refused >= {"parameter.json", "weights", "gradient_sum", "records", "marks", "events"}


def path_made(path: Path) -> Path:
    path.mkdir()
    return path


def test_damage_of_whose_directory_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    DataDir(path, CONFIG).close()
    (path / "parameters").mkdir()
    identity = path / "shard.json"
    contents = identity.read_bytes()
    other = ShardConfig(shard_index=1, shard_count=2, cluster_id=CONFIG.cluster_id)
    harmless = 0
    for offset in range(len(contents)):
        damaged = bytearray(contents)
        damaged[offset] ^= 1 << (offset % 8)
        identity.write_bytes(damaged)
        with pytest.raises(DataDirError, match=r"shard\.json"):
            DataDir(path, other)
        message = refusal(lambda: DataDir(path, CONFIG).close())
        harmless += message is None
        assert message is None or str(identity) in message
    assert harmless < 5  # blanks that became other blanks
    for kept in range(len(contents) - 1):
        identity.write_bytes(contents[:kept])
        with pytest.raises(DataDirError, match=r"shard\.json"):
            DataDir(path, CONFIG)
    identity.unlink()
    for config in (CONFIG, other):
        with pytest.raises(DataDirError, match=r"shard\.json is missing"):
            DataDir(path, config)
    identity.write_bytes(contents)
    DataDir(path, CONFIG).close()
