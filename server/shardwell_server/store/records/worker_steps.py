"""The last step that each seat gave to each chunk, on disk.

A row a seat, an entry of 16 bytes a chunk: step + 1 (0: none) and a check that depends on
its place; a seat's row has checks from its first day, so that zeros are no entries. An entry is
written after the chunk's record, which names seat and step; so what a killed process left half
written is written again from the record, and every other entry must fit its check.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwell.errors import StorageError
from shardwell_server.store.contract import Event
from shardwell_server.store.files.layout import Home
from shardwell_server.store.files.mapped import (
    NO_WORDS,
    MappedFile,
    failing,
    opened,
    reserve,
    whole_pages,
)

_ENTRY_BYTES = 16
_MASK = 2**64 - 1
# Odd, so that a step and its check never change without the other.
_STEP_FACTOR, _SEAT_FACTOR, _CHUNK_FACTOR = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
)


class WorkerSteps:
    """A file that grows by a row a seat. Different chunks may be written at once."""

    def __init__(self, home: Home) -> None:
        self.path = home.path / "marks"
        self._chunk_count: int = home.layout.chunk_count
        self._salt = home.salt
        self._reached = home.reached
        self._row_bytes = whole_pages(self._chunk_count * _ENTRY_BYTES)
        self._row_count = 0
        self._words: memoryview[int] = NO_WORDS
        self._row_capacity = 0
        self._file: MappedFile | None = None

    def open(self) -> None:
        with failing(self.path, "opening it"):
            size = self.path.stat().st_size
        if self._row_bytes:
            capacity, rest = divmod(size, self._row_bytes)
            if rest:  # a kill may cut off the growth of a file
                with failing(self.path, "cutting off a part of a row"):
                    os.truncate(self.path, size - rest)
            self._map(capacity)

    @property
    def row_capacity(self) -> int:
        return self._row_capacity

    def make_room(self, row_count: int) -> None:
        if row_count <= self._row_capacity or not self._row_bytes:
            return
        capacity = max(row_count, min(2 * self._row_capacity, row_count + 64))
        doing = "making room for a worker"
        with failing(self.path, doing), opened(self.path, os.O_RDWR | os.O_CREAT) as file:
            try:
                reserve(file, capacity * self._row_bytes)
                self._reached("room for marks")
            except OSError:
                os.ftruncate(file, self._row_capacity * self._row_bytes)
                raise
        # A thread that still writes through the old mapping writes the same pages.
        self._map(capacity)

    def begin(self, seat_index: int) -> None:
        if self._row_bytes:
            entries = self._row(seat_index)
            blank = np.flatnonzero(~entries.any(axis=1))
            entries[blank, 1] = self._checks(seat_index, entries[:, 0])[blank]
            self._reached("row of marks")

    def put(self, seat_index: int, chunk_index: int, step: int) -> None:
        first = (seat_index * self._row_bytes + chunk_index * _ENTRY_BYTES) // 8
        words, mark = self._words, step + 1
        words[first] = mark
        self._reached("mark")
        place = seat_index * _SEAT_FACTOR + chunk_index * _CHUNK_FACTOR + self._salt
        words[first + 1] = (mark * _STEP_FACTOR + place) & _MASK
        self._reached("mark's check")

    def get(self, seat_index: int, chunk_index: int) -> int:
        return self._words[(seat_index * self._row_bytes + chunk_index * _ENTRY_BYTES) // 8] - 1

    def row(self, seat_index: int) -> list[int]:
        entries = self._row(seat_index)
        found, checks = entries[:, 0], entries[:, 1]
        bad = np.flatnonzero(checks != self._checks(seat_index, found))
        if bad.size:
            raise StorageError(
                f"{self.path}: the mark of seat {seat_index} for chunk {bad[0]} was damaged; "
                "restore the directory from a copy or a checkpoint"
            )
        return [int(step) - 1 for step in found]

    def is_blank(self, seat_index: int) -> bool:
        return not self._row(seat_index)[:, 0].any()

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def _row(self, seat_index: int) -> npt.NDArray[np.uint64]:
        first = seat_index * self._row_bytes // 8
        words = np.frombuffer(self._words, np.uint64)[first : first + 2 * self._chunk_count]
        return words.reshape(-1, 2)

    def _checks(self, seat_index: int, marks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        chunks = np.arange(self._chunk_count, dtype=np.uint64)
        place = np.uint64((seat_index * _SEAT_FACTOR + self._salt) & _MASK)
        return marks * np.uint64(_STEP_FACTOR) + chunks * np.uint64(_CHUNK_FACTOR) + place

    def _map(self, capacity: int) -> None:
        size = capacity * self._row_bytes
        self._file = MappedFile.open(self.path, size)
        self._words = self._file.words(0, size // 8)
        self._row_capacity = capacity


def seat_count(events: Sequence[Event]) -> int:
    """Returns the number of logged seats; only those have marks."""
    return sum(event.get("kind") == "seat" for event in events)


def recover_marks(
    marks: WorkerSteps, seat_count: int, latest: Sequence[tuple[int, int]], *, is_torn: bool
) -> None:
    """Opens an earlier process's marks, and writes again what was cut off.

    `latest` has seat and step of each chunk's record, seat -1 for none. Torn marks may lack seats.
    StorageError: records, marks and events do not fit each other, or the file has no room.
    """
    directory = marks.path.parent
    marks.open()
    if is_torn:  # seats that were taken after an image
        marks.make_room(seat_count)
        for seat_index in range(seat_count):
            marks.begin(seat_index)
    if latest and seat_count > marks.row_capacity:
        raise StorageError(
            f"{marks.path} has {marks.row_capacity} rows for {seat_count} seats: it was truncated; "
            "restore the directory from a copy"
        )
    for chunk_index, (seat_index, step) in enumerate(latest):
        if seat_index >= seat_count:
            raise StorageError(
                f"{directory / 'records'}: record {chunk_index} has a gradient of seat "
                f"{seat_index}, and {directory / 'events'} {seat_count} seats: one of them was "
                "replaced; restore the directory from a copy"
            )
        if seat_index >= 0:
            marks.put(seat_index, chunk_index, step)
    if latest:
        for row in range(seat_count, marks.row_capacity):
            if not marks.is_blank(row):
                raise StorageError(
                    f"{marks.path} has steps of seat {row}, and {directory / 'events'} "
                    f"{seat_count} seats: one of them was replaced; restore the directory from a "
                    "copy"
                )
