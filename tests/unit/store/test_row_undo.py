"""Goal: rows that were saved can be taken back, whatever write a change was cut off after.

Method: changes of drawn rows in drawn arrays, with an image of the entry and of the rows after each
write. Oracle: copies of the arrays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import StorageError
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.row_arrays import Rows
from shardwell_server.store.row_undo import RowUndo, entry_bytes

ROW_COUNT = 40
ROW_COUNT_MAX = 7
SALT = 12345
SHAPES: list[tuple[tuple[int, ...], type]] = [
    ((ROW_COUNT, 3), np.float32),
    ((ROW_COUNT,), np.bool_),
    ((ROW_COUNT,), np.int64),
    ((ROW_COUNT, 1), np.float32),
]


def some_arrays() -> list[Rows]:
    return [
        np.arange(np.prod(shape), dtype=np.int64).reshape(shape).astype(kind)
        for shape, kind in SHAPES
    ]


class Entry:
    """An entry of its own file, the second of two, and the arrays that it is of."""

    def __init__(self, path: Path, reached: Callable[[str], None]) -> None:
        self.arrays = some_arrays()
        size = entry_bytes(self.arrays, ROW_COUNT_MAX)
        if not path.exists():
            MappedFile.create(path, 2 * size)
        self.file = MappedFile.open(path, 2 * size)
        self.undo = RowUndo(self.file, size, self.arrays, ROW_COUNT_MAX, SALT, reached)

    def state(self) -> list[bytes]:
        return [array.tobytes() for array in self.arrays]

    def restore(self, entry: bytes, state: list[bytes]) -> None:
        self.file.data[:] = np.frombuffer(entry, np.uint8)
        for array, contents in zip(self.arrays, state, strict=True):
            array[:] = np.frombuffer(contents, array.dtype).reshape(array.shape)


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return Entry(tmp_path / "undo", lambda _: None)


@given(
    places=st.lists(st.integers(0, ROW_COUNT - 1), unique=True, max_size=ROW_COUNT_MAX),
    numbers=st.sets(st.integers(0, len(SHAPES) - 1)),
    before=st.booleans(),
)
def test_cut_off_after_any_write(places: list[int], numbers: set[int], before: bool) -> None:
    images: list[tuple[str, bytes, list[bytes]]] = []

    def reached(point: str) -> None:
        images.append((point, made.file.data.tobytes(), made.state()))

    with tempfile.TemporaryDirectory() as path:
        made = Entry(Path(path) / "undo", reached)
        if before:  # another entry, which was never voided
            made.undo.save(6, np.array([1, 2, 3]), [0, 2])
        old = made.state()
        images.clear()
        chosen, rows = sorted(numbers), np.array(places, np.int64)
        saved = made.undo.save(7, rows, chosen)
        for number, copy in zip(chosen, saved, strict=True):
            assert copy.tobytes() == made.arrays[number][rows].tobytes()
            assert copy.flags.c_contiguous
            assert not copy.flags.writeable
        for number in chosen:
            for place in places:
                made.arrays[number][place] = 77
                reached("row written")
        new = made.state()
        made.undo.void()
        reached("after")
        again = Entry(Path(path) / "undo", lambda _: None)
        for point, contents, state in images:
            again.restore(contents, state)
            sequence = again.undo.pending()
            if sequence == 7:
                again.undo.roll_back()
                assert again.undo.pending() is None
                assert again.state() == old, point
            else:  # nothing was written yet, or all of it
                assert sequence is None or point == "undo voided"
                assert state in (old, new)
                assert state == old or point in ("undo voided", "after")


def test_taking_back_may_be_cut_off_and_begun_again(entry: Entry) -> None:
    old = entry.state()
    entry.undo.save(1, np.array([3, 9]), [0, 1, 2])
    for array in entry.arrays[:3]:
        array[[3, 9]] = 0
    cut_off = entry.file.data.tobytes()
    entry.undo.roll_back()
    assert entry.state() == old
    entry.restore(cut_off, entry.state())
    entry.arrays[0][9] = 5
    assert entry.undo.pending() == 1
    entry.undo.roll_back()
    assert entry.state() == old


def test_damage_of_every_byte_that_counts(entry: Entry, tmp_path: Path) -> None:
    assert entry.undo.pending() is None
    entry.undo.save(3, np.array([30, 2]), [0, 3])
    whole = entry.file.data.copy()
    blank = np.flatnonzero(whole)
    start = entry_bytes(entry.arrays, ROW_COUNT_MAX)
    head = np.arange(start, start + 32)
    for offset in np.union1d(blank, head):
        entry.file.data[:] = whole
        entry.file.data[offset] ^= 1 << (int(offset) % 8)
        with pytest.raises(StorageError, match=rf"undo: the entry at byte {start} was damaged"):
            entry.undo.pending()
    entry.file.data[:] = whole
    other = RowUndo(entry.file, start, entry.arrays, ROW_COUNT_MAX, SALT + 1, lambda _: None)
    with pytest.raises(StorageError, match="was damaged"):
        other.pending()
    assert entry.undo.pending() == 3


def test_the_largest_change_and_the_empty_one(entry: Entry) -> None:
    old = entry.state()
    every = np.arange(ROW_COUNT_MAX)[::-1].copy()
    entry.undo.save(0, every, range(len(SHAPES)))
    for array in entry.arrays:
        array[:ROW_COUNT_MAX] = 0
    assert entry.undo.pending() == 0
    entry.undo.roll_back()
    assert entry.state() == old
    assert entry.undo.save(1, np.array([], np.int64), [0])[0].shape == (0, 3)
    assert entry.undo.pending() == 1
    entry.undo.roll_back()
    assert entry.state() == old
    with pytest.raises(ValueError, match="broadcast"):
        entry.undo.save(2, np.arange(ROW_COUNT_MAX + 1), [0])
