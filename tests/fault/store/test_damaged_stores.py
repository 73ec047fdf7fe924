"""Goal: damaged files are refused by name or do no harm; they never become other weights.

Method: images of a story's files (finished, just created, and cut off in the middle of changes) are
damaged at every kind of place, one at a time, and the story is gone on with. Oracle: the story in
memory, undisturbed. Places are computed, not drawn: every byte of what is small.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fastcrc import crc32

from harness.stories.crash import (
    Undisturbed,
    Written,
    go_on,
    recovered,
    state_at,
    undisturbed_story,
    writes_of_story,
)
from harness.stories.images import Image, image_of, in_memory, restore
from harness.stories.parameter import (
    CONFIG,
    SYNC,
    State,
    contribute,
    initialize,
    short_blocks,
    state_of,
    story,
)
from shardwell.errors import StorageError
from shardwell_server.config import ShardConfig
from shardwell_server.store.files.data_dir import DataDir, DataDirError

STORY = story()
FIRST, SECOND = "parameters/000001", "parameters/000002"
PAGE = 4096
EVENTS_HEAD = 49


@pytest.fixture(autouse=True)
def _short_blocks() -> Iterator[None]:
    with short_blocks():
        yield


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return undisturbed_story()


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    return writes_of_story(tmp_path_factory.mktemp("story"))


def refusal(use: Callable[[], object]) -> str | None:
    """Why files are refused; None if they are not."""
    try:
        use()
    except StorageError as error:
        return str(error)
    return None


class Damage:
    """Tries damages of one image and keeps count of how they ended."""

    def __init__(self, written: Written, path: Path, undisturbed: Undisturbed) -> None:
        self.image = written.image
        self.refused_count = self.harmless_count = 0
        self._answered_count = written.answered_count
        self._path = path
        self._undisturbed = undisturbed

    def of(self, name: str, contents: bytes | None, what: str) -> str | None:
        """What a shard says that finds a file so (None: not at all); None if it does no harm."""
        if contents == self.image[name]:
            return None
        image = {**self.image, name: contents}
        if contents is None:
            del image[name]
        path = restore(image, self._path)

        def use() -> None:
            with recovered(path) as shard:
                go_on(shard, self._answered_count, self._undisturbed)

        try:
            told = refusal(use)
        except BaseException as error:
            error.add_note(f"{name}: {what}")
            raise
        self.refused_count += told is not None
        self.harmless_count += told is None
        assert told is None or str(path) in told, f"{what}: no file in {told}"
        return told

    def flip(self, name: str, offset: int) -> str | None:
        """One bit of a byte, a different one for each."""
        contents = bytearray(self.image[name] or b"")
        contents[offset] ^= 1 << (offset * 3 % 8)
        return self.of(name, bytes(contents), f"a bit of byte {offset}")

    def zero(self, name: str, start: int, stop: int) -> str | None:
        contents = bytearray(self.image[name] or b"")
        contents[start:stop] = bytes(len(contents[start:stop]))
        return self.of(name, bytes(contents), f"zeros in [{start}, {stop})")


@pytest.fixture
def finished(tmp_path: Path, undisturbed: Undisturbed, writes: list[Written]) -> Damage:
    """The end of the story: sums of meaning and of none, entries that are void, several seats."""
    last = writes[-1]._replace(answered_count=len(STORY))
    return Damage(last, tmp_path / "damaged", undisturbed)


def pending(writes: list[Written], path: Path, undisturbed: Undisturbed, array: str) -> Damage:
    """Cut off when the last block of an array was written, before its record."""
    for before, after in itertools.pairwise(writes):
        if before.point == "block" and after.point == "record":
            name = f"{FIRST}/{array}"
            earlier = writes[writes.index(before) - 1]
            if before.image[name] != earlier.image[name]:
                return Damage(before, path, undisturbed)
    raise AssertionError("the story has none")


SMALL = ["parameter.json", "weights", "gradient_sum", "slot-0", "records"]
ALL_SMALL = [(directory, name) for directory in (FIRST, SECOND) for name in SMALL]
ALL_SMALL.remove((SECOND, "gradient_sum"))  # one contribution makes a step


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("directory", "name"), ALL_SMALL)
def test_a_flipped_bit_in_a_small_file(finished: Damage, directory: str, name: str) -> None:
    path = f"{directory}/{name}"
    size = len(finished.image[path] or b"")
    offsets = [*range(0, size, 3)] if name != "records" else [*range(256), *range(256, size, 5)]
    for offset in offsets:
        told = finished.flip(path, offset)
        assert told is None or name in told
    assert finished.refused_count > len(offsets) // 8
    if name in ("weights", "slot-0", "parameter.json"):
        assert finished.harmless_count <= 1  # the last line's end
    else:
        assert finished.harmless_count > 0


def test_a_flipped_bit_in_marks(finished: Damage) -> None:
    """Three seats of three chunks in rows of a page; then a row that nobody has."""
    name = f"{FIRST}/marks"
    for row in range(3):
        for offset in range(3 * 16):
            told = finished.flip(name, row * PAGE + offset)
            # What the record of a chunk knows is written again.
            assert told is None or "marks" in told
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
        told = finished.flip(name, offset)
        assert told is not None
        assert "events" in told
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
    tmp_path: Path, writes: list[Written], undisturbed: Undisturbed, array: str
) -> None:
    damage = pending(writes, tmp_path / "damaged", undisturbed, array)
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
    tmp_path: Path, writes: list[Written], undisturbed: Undisturbed, directory: str
) -> None:
    """Optimizer state has its first values from the start, which first weights do not set."""
    created = next(w for w in writes if w.image.get(directory, b"") is None)
    damage = Damage(created, tmp_path / "damaged", undisturbed)
    for name in SMALL:
        contents = damage.image.get(f"{directory}/{name}") or b""
        for offset in range(0, len(contents), 5):
            damage.flip(f"{directory}/{name}", offset)
    assert damage.refused_count > 50
    assert damage.harmless_count > 20


def test_sizes_that_changed(finished: Damage) -> None:
    garbage = bytes(range(1, 256)) * 17
    for name, contents in finished.image.items():
        if contents is None:
            continue
        size = len(contents)
        for kept in {0, 1, size // 2, size - 1, (size - 1) // PAGE * PAGE}:
            told = finished.of(name, contents[:kept], f"cut to {kept} of {size} bytes")
            assert told is None or name in told
        for more in (b"\0", bytes(PAGE), garbage[:PAGE]):
            told = finished.of(name, contents + more, f"{len(more)} bytes more")
            assert told is None or name in told
    assert finished.refused_count > 60


def test_files_that_are_gone(finished: Damage) -> None:
    for name, contents in finished.image.items():
        if contents is not None:
            told = finished.of(name, None, "gone")
            assert told is not None
            assert name in told


def test_zeros_in_every_file(finished: Damage) -> None:
    for name, contents in finished.image.items():
        if contents is None or name.endswith("undo"):
            continue
        for start, stop in ((0, 8), (0, 64), (16, 24), (64, 128), (0, 512), (0, len(contents))):
            told = finished.zero(name, start, stop)
            assert told is None or name.rpartition("/")[0] in told
    assert finished.refused_count > 40


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
            told = refusal(lambda states=states: states.append(state_at(path)))
            if told is None:
                assert states == [expected], name
            else:
                assert str(path / FIRST) in told or str(path / SECOND) in told
                refused.add(name.rpartition("/")[2])
    assert refused >= {"parameter.json", "weights", "gradient_sum", "records", "marks", "events"}


def path_made(path: Path) -> Path:
    path.mkdir()
    return path


def test_directories_that_are_not_ours_or_twice(finished: Damage, tmp_path: Path) -> None:
    image = finished.image
    copied: Image = {
        name.replace(FIRST, "parameters/000007"): contents
        for name, contents in image.items()
        if name.startswith(FIRST)
    }
    with pytest.raises(StorageError, match=r"000007 holds parameter 'sync', as another"):
        state_at(restore({**image, **copied}, tmp_path / "copy"))
    for extra in ("parameters/notes.txt", "parameters/000009", "parameters/x"):
        with pytest.raises(StorageError, match=extra):
            state_at(restore({**image, extra: b"mine"}, tmp_path / "extra"))
    with pytest.raises(StorageError, match=r"000009/parameter\.json"):
        state_at(restore({**image, "parameters/000009": None}, tmp_path / "empty"))


@pytest.mark.parametrize("directory", [FIRST, SECOND])
def test_a_newer_format_is_refused(finished: Damage, tmp_path: Path, directory: str) -> None:
    """Whatever else a newer version writes."""

    text = (finished.image[f"{directory}/parameter.json"] or b"").decode().rpartition("}")[0] + "}"
    found = json.loads(text)
    for changed in ({**found, "format_version": 2}, {"format_version": 2, "new": 1}):
        text = json.dumps(changed)
        contents = f"{text}\n{crc32.iscsi(text.encode()):08x}\n".encode()
        told = finished.of(f"{directory}/parameter.json", contents, "format version 2")
        assert told is not None
        assert "format version 2" in told
        assert "run the version of shardwell that wrote it" in told


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
        told = refusal(lambda: DataDir(path, CONFIG).close())
        harmless += told is None
        assert told is None or str(identity) in told
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
