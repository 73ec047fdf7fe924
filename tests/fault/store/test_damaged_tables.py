"""Goal: damaged files of a table are refused by name or do no harm; they never become other rows.

Method: images of a story's files (finished, and cut off in the middle of changes) are damaged at
every byte that has a meaning, one at a time, and the story is gone on with. Oracle: the story in
memory, undisturbed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fastcrc import crc32

from harness.stories.crash import SameMachine
from harness.stories.images import Image, image_of, in_memory, restore
from harness.stories.table import LAYOUT, State, make, state_of, tell
from shardwell.errors import StorageError
from shardwell_server.store.memory.store import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

TABLE = "tables/000001"
ROWS = {"weights": 12, "slot-0": 12, "slot-1": 4, "sums": 12, "has_sum": 1}
ROWS |= dict.fromkeys(("keys", "update_counts", "last_steps"), 8)
ROWS |= dict.fromkeys(("row_checks", "key_checks", "sum_checks"), 8)
"""Bytes of a row in each file of rows."""


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


def final_state() -> State:
    storage = make(MemoryStore())
    tell(storage)
    return state_of(storage)


FINAL = final_state()


def use(path: Path) -> State:
    """A new process goes on with the story, and looks at all rows."""
    storage = make(MmapStore(path, boot=SameMachine(path)))
    state_of(storage)
    tell(storage)
    return state_of(storage)


class Damage:
    """Files of one moment of the story; tries damages, and keeps count of how they ended."""

    def __init__(self, path: Path, image: Image) -> None:
        self.path = restore(image, path)
        self.image = image
        self.refused_count = self.harmless_count = 0

    def of(self, name: str, contents: bytes | None, what: str) -> str | None:
        """What a shard says that finds a file of the table so (None: it is gone, or no harm)."""
        file = self.path / TABLE / name
        if contents is None:
            file.unlink()
        else:
            file.write_bytes(contents)
        try:
            state = use(self.path)
        except StorageError as error:
            told = str(error)
            assert str(self.path / TABLE) in told, f"{name}, {what}: {told}"
            self.refused_count += 1
            return told
        except BaseException as error:
            error.add_note(f"{name}: {what}")
            raise
        finally:
            restore(self.image, self.path)
        assert state == FINAL, f"{name}: {what}"
        self.harmless_count += 1
        return None

    def contents(self, name: str) -> bytearray:
        return bytearray(self.image[f"{TABLE}/{name}"] or b"")

    def flip(self, name: str, offset: int) -> str | None:
        """One bit of a byte, a different one for each."""
        contents = self.contents(name)
        contents[offset] ^= 1 << (offset * 3 % 8)
        return self.of(name, bytes(contents), f"a bit of byte {offset}")


def images_of_story(path: Path, wanted: Callable[[str, int], bool]) -> Iterator[Image]:
    """Files after those writes that are `wanted(point, how many such points before)`."""
    counts: dict[str, int] = {}
    found: list[Image] = []

    def reached(point: str) -> None:
        if wanted(point, counts.get(point, 0)):
            found.append(image_of(path))
        counts[point] = counts.get(point, 0) + 1

    path.mkdir()
    tell(make(MmapStore(path, boot=SameMachine(path), reached=reached)), reached)
    found.append(image_of(path))
    yield from found


@pytest.fixture
def finished(tmp_path: Path) -> Damage:
    *_, image = images_of_story(tmp_path / "story", lambda *_: False)
    return Damage(tmp_path / "damaged", image)


@pytest.fixture
def cut_off(tmp_path: Path) -> Damage:
    """In the middle of a change of values and sums: rows are half written, and to be taken back."""
    image, _ = images_of_story(
        tmp_path / "story", lambda point, n: point == "sums written" and n == 4
    )
    return Damage(tmp_path / "damaged", image)


def test_every_bit_of_rows_is_guarded(finished: Damage) -> None:
    used = len(FINAL["keys"])
    for name, stride in ROWS.items():
        for offset in range(used * stride):
            told = finished.flip(name, offset)
            assert told is not None, f"{name}, byte {offset}"
            assert f"place {offset // stride} " in told, told
        finished.harmless_count = 0
        for offset in range(used * stride, used * stride + 2 * stride):
            assert finished.flip(name, offset) is None  # no row yet


def test_bits_of_what_stands_beside_rows(finished: Damage) -> None:
    refused = {}
    for name, far in {"records": 256, "marks": 40, "undo": 40}.items():
        finished.refused_count = 0
        for offset in [*range(far), *range(far, 4096 + 64, 101)]:
            if offset < len(finished.contents(name)):
                finished.flip(name, offset)
        refused[name] = finished.refused_count
    assert refused["records"] == 8 + 56 + 4  # the word, the record that stands, its CRC
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
        told = cut_off.flip("undo", offset)
        assert told is not None
        assert "undo" in told
    for name in ROWS:
        for offset in range(0, 5 * ROWS[name], 3):
            cut_off.flip(name, offset)  # harmless where it is taken back
    assert cut_off.harmless_count
    for name in ("records", "marks"):
        for offset in range(0, 256, 3):
            cut_off.flip(name, offset)


def test_files_that_are_gone_cut_or_longer(finished: Damage) -> None:
    names = [path.name for path in (finished.path / TABLE).iterdir()]
    assert set(names) > set(ROWS)
    for name in names:
        whole = bytes(finished.contents(name))
        told = finished.of(name, None, "gone")
        assert told is not None
        assert name in told
        for contents in (b"", whole[: len(whole) // 2], whole[:-1]):
            told = finished.of(name, contents, f"cut to {len(contents)}")
            may_grow = name in ("events", "marks")  # and be cut off growing
            if not may_grow and contents.strip() != whole.strip():
                assert told is not None, name
        told = finished.of(name, whole + b"\0" * 4096, "longer")
        assert (told is None) == (name in ("events", "marks")) or name == "table.json"


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
    moved_all = Damage(finished.path, image)
    with pytest.raises(StorageError, match="place 1 "):
        use(moved_all.path)


def test_files_of_another_table(finished: Damage, tmp_path: Path) -> None:
    *_, other = images_of_story(tmp_path / "other", lambda *_: False)
    for name, contents in other.items():
        if name.startswith(f"{TABLE}/") and contents != finished.image[name]:
            told = finished.of(Path(name).name, contents, "another table's")
            assert told is not None or name.endswith("undo"), name


def test_a_copy_and_what_is_not_ours(finished: Damage) -> None:
    path, image = finished.path, finished.image
    copied = {
        name.replace(TABLE, "tables/000007"): contents
        for name, contents in image.items()
        if name.startswith(TABLE)
    }
    restore({**image, **copied}, path)
    with pytest.raises(StorageError, match=r"000007 holds table 't', as another"):
        use(path)
    for extra in ("tables/notes.txt", "tables/x"):
        restore({**image, extra: b"mine"}, path)
        with pytest.raises(StorageError, match=extra):
            use(path)


def test_a_newer_format_is_refused(finished: Damage) -> None:
    text = finished.contents("table.json").decode().rpartition("}")[0] + "}"
    changed = json.dumps({**json.loads(text), "format_version": 2, "new": 1})
    contents = f"{changed}\n{crc32.iscsi(changed.encode()):08x}\n".encode()
    told = finished.of("table.json", contents, "format version 2")
    assert told is not None
    assert "format version 2" in told
    assert LAYOUT.name == "t"
