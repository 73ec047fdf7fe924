"""A table in mapped files: whatever instruction its process is killed at, each change is whole.

Files of a table's directory; the arrays are plain little-endian numbers, by place:

    table.json        what it is
    keys, update_counts, last_steps, weights, slot-0, slot-1
    sums, has_sum     where gradients are summed
    row_checks, key_checks, sum_checks                          (row_checks.py)
    records           where the table stands                    (records/table_records.py)
    marks             what each worker has contributed          (records/worker_steps.py)
    undo              the rows that are being changed           (row_undo.py)
    events            seats, learning rates                     (records/event_log.py)

A change, in the order of its writes (docs/adr/0010-tables.md):

    undo: rows, valid | the rows, their checks | record | mark

The record is the instant of change. Before it, an undo entry with the record's sequence number
takes the rows back; after it, the entry is void, and the mark is written again from the record.

Files are sparse up to the table's capacity (files/sparse.py). What is in them is believed when its
check fits: records, marks, events, undo and the rows' keys at the start, rows before their first
use. So opening a table reads 24 bytes a row, and 9 more where gradients are summed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from shardwell.errors import StorageError
from shardwell.numerics.codec import Float32
from shardwell_server.store.event import Event
from shardwell_server.store.files.layout import write_layout
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.files.presence import NamedFiles
from shardwell_server.store.files.sparse import SparseFile, reserve_all
from shardwell_server.store.lazy_memory import lazy_zeros
from shardwell_server.store.mmap.row_guard import RowGuard
from shardwell_server.store.mmap.row_undo import RowUndo, entry_bytes
from shardwell_server.store.mmap.synced_files import SyncedFiles
from shardwell_server.store.records.event_log import EventLog
from shardwell_server.store.records.table_records import (
    RECORDS_BYTES,
    StoredTableRecord,
    TableRecords,
)
from shardwell_server.store.records.worker_steps import WorkerSteps, recover_marks, seat_count
from shardwell_server.store.row_arrays import (
    Rows,
    WrittenRows,
    check_capacity,
    make_arrays,
    scatter_rows,
)
from shardwell_server.store.table_contract import Places, Position, TableLayout, TableRecord

_PART_BITS = 16


class MmapTable(SyncedFiles):
    """See TableStorage and the module."""

    _UNMAPPED = ("table.json", "events")

    def __init__(
        self,
        directory: Path,
        layout: TableLayout,
        salt: int,
        kind: str,
        reached: Callable[[str], None],
    ) -> None:
        """Maps the files; `kind` is "create" or "open"."""
        self.directory = directory
        self.rolled_back_row_count = 0
        """Rows of a change that was cut off, and taken back when the files were opened."""
        self._layout = layout
        self._reached = reached
        self._files: list[MappedFile] = []
        self._row_files: list[tuple[SparseFile, int]] = []

        def fixed(name: str, size_bytes: int) -> MappedFile:
            self._files.append(getattr(MappedFile, kind)(directory / name, size_bytes))
            reached("file")
            return self._files[-1]

        def array(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Rows:
            if name == "has_sum" and not layout.with_sum:
                return lazy_zeros(shape, dtype)
            width = shape[1] if len(shape) > 1 else 1
            stride = width * np.dtype(dtype).itemsize
            file: SparseFile = getattr(SparseFile, kind)(directory / name, shape[0] * stride)
            if width > 1:
                file.expect_random_access()
            reached("file")
            self._files.append(file)
            self._row_files.append((file, stride))
            values: Rows = file.data.view(dtype).reshape(shape)
            return values

        arrays = make_arrays(layout, layout.row_capacity, array)
        self.keys, self.update_counts, self.last_steps, self.weights = arrays[:4]
        self.slots, self.sums, self.has_sum = arrays[4:]
        self._arrays = arrays
        self._salt = salt
        self._lock = threading.Lock()
        """Held while a change is under way, or rows are copied to an image."""
        self._guard = RowGuard(directory, layout, arrays, salt, array)
        changing = self._guard.arrays
        self.undo_bytes = entry_bytes(changing, layout.rows_per_change_max)
        """See TableStorage."""
        undo_file = fixed("undo", self.undo_bytes)
        self._undo = RowUndo(undo_file, 0, changing, layout.rows_per_change_max, salt, reached)
        self._copies = make_arrays(
            layout, layout.rows_per_change_max, lambda _, *shape: lazy_zeros(*shape)
        )
        self._records = TableRecords(fixed("records", RECORDS_BYTES), salt, reached)
        self._stored = StoredTableRecord(0, TableRecord(), None)
        self._marks = WorkerSteps(directory / "marks", 1, salt, reached)
        self._events = EventLog(directory / "events", salt, reached)
        self._seat_count = 0
        self._reserved_row_count = 0
        self.named_files = NamedFiles(directory, self._files, ("table.json", "marks", "events"))
        """What must keep its name for as long as this is used."""

    @classmethod
    def create(
        cls, directory: Path, layout: TableLayout, salt: int, reached: Callable[[str], None]
    ) -> Self:
        """New files in an empty directory.

        Raises:
            OSError, OverflowError: they can't be made.
        """
        made = cls(directory, layout, salt, "create", reached)
        made._records.put(made._stored)
        (directory / "marks").touch()
        reached("file")
        made._marks.open()
        made._events.create()
        write_layout(directory / "table.json", layout, salt)
        return made

    @classmethod
    def recover(
        cls,
        directory: Path,
        layout: TableLayout,
        salt: int,
        reached: Callable[[str], None],
        *,
        is_torn: bool = False,
    ) -> Self:
        """What an earlier process left: takes back what it was in the middle of.

        Raises:
            StorageError: a file was damaged; it is named.
        """
        made = cls(directory, layout, salt, "open", reached)
        made._stored = made._records.get(layout.row_capacity)
        row_used = made._stored.record.row_used
        made._reserved_row_count = row_used
        for file, stride in made._row_files:
            if is_torn:
                file.reserve(row_used * stride)
            else:
                file.stands_reserved(row_used * stride)
        sequence = made._undo.pending()
        if sequence is not None:
            if sequence == made._stored.sequence:
                made.rolled_back_row_count = made._undo.roll_back()
            else:
                made._undo.void()
        made._guard.check_keys(row_used)
        made._seat_count = seat_count(made._events.read())
        latest = made._stored.position
        mark = (-1, -1) if latest is None else (latest.seat_index, _mark(latest))
        recover_marks(made._marks, made._seat_count, [mark], is_torn=is_torn)
        return made

    @property
    def record(self) -> TableRecord:
        return self._stored.record

    def positions(self) -> list[Position]:
        found = []
        for seat_index in range(self._seat_count):
            (mark,) = self._marks.row(seat_index)
            step, part_count = divmod(max(mark, 0), 1 << _PART_BITS)
            found.append(Position(seat_index, step, part_count))
        return found

    def events(self) -> Sequence[Event]:
        return self._events.read()

    def log(self, event: Event) -> None:
        self._events.append(event)
        self._seat_count += event.get("kind") == "seat"

    def compact(self, events: Sequence[Event]) -> None:
        self._events.compact(events)

    def add_seat(self) -> None:
        self._marks.make_room(self._seat_count + 1)
        self._marks.begin(self._seat_count)

    def reserve(self, row_count: int) -> None:
        check_capacity(self._layout, row_count)
        if row_count > self._reserved_row_count:
            self._reserved_row_count = reserve_all(
                self._row_files, self._reserved_row_count, row_count, self._layout.row_capacity
            )
            self._reached("room for rows")

    @property
    def reserved_row_count(self) -> int:
        return self._reserved_row_count

    def change(self, places: Places, *, values: bool, sums: bool) -> MmapRowChange:
        assert places.size <= self._layout.rows_per_change_max
        assert not places.size or 0 <= places.min() <= places.max() < self._reserved_row_count
        self._guard.verify(places)
        return MmapRowChange(self, places, values=values, sums=sums and self.sums is not None)

    def verify(self, places: Places) -> None:
        self._guard.verify(places)

    def make_durable(self) -> None:
        """See TableStorage. What is committed survives the process, and no loss of power."""

    def sync(self) -> None:
        """See TableStorage."""

    def make_image(self, is_stopping: Callable[[], bool]) -> None:
        """See TableStorage."""

    def copy_rows(self, source: MmapTable, start: int, stop: int) -> None:
        """Makes rows what they are in another table of the same layout and salt; there is room."""
        for into, array in zip(self._guard.arrays, source._guard.arrays, strict=True):
            np.copyto(into[start:stop], array[start:stop])

    def copy_standing(self, source: MmapTable) -> None:
        """Takes over where another table stands, and what workers have contributed to it.

        Raises:
            StorageError: there is no room for the marks.
        """
        self._records.put(source._stored)
        self._marks.make_room(source._seat_count)
        for seat_index in range(source._seat_count):
            self._marks.put(seat_index, 0, source._marks.get(seat_index, 0))

    def put(self, stored: StoredTableRecord) -> None:
        """Makes a record stand, on disk and then here, and the mark that it names."""
        self._records.put(stored)
        self._stored = stored
        if stored.position is not None:
            self._marks.put(stored.position.seat_index, 0, _mark(stored.position))

    def _note(self, stored: StoredTableRecord, rows: WrittenRows) -> None:
        """Called with what a change wrote, before it stands; may refuse it by a StorageError."""


class MmapRowChange:
    """See RowChange."""

    def __init__(self, of: MmapTable, places: Places, *, values: bool, sums: bool) -> None:
        self._of = of
        self._places = places
        self._kinds = {"values": values, "sums": sums}
        self._given: dict[int, Float32] = {}
        self._is_saved = False
        self._is_committed = False
        n, copies = places.size, of._copies
        self.weights: Float32 = copies.weights[: n * values]
        self.slots: tuple[Float32, ...] = tuple(slot[: n * values] for slot in copies.slots)
        self.sums: Float32 | None = None if copies.sums is None else copies.sums[: n * sums]

    def __enter__(self) -> MmapRowChange:
        self._of._lock.acquire()
        try:
            self._begin()
        except BaseException:
            self._of._lock.release()
            raise
        return self

    def _begin(self) -> None:
        """Saves rows, and copies them."""
        of, places, guard = self._of, self._places, self._of._guard
        if places.size and places.min() < of.record.row_used:  # new rows need no undo
            sequence = of._stored.sequence
            numbers = [
                *(guard.of_values if self._kinds["values"] else ()),
                *(guard.of_sums if self._kinds["sums"] else ()),
            ]
            saved = dict(zip(numbers, of._undo.save(sequence, places, numbers), strict=True))
            self._is_saved = True
            for number, copy in guard.numbered(self.weights, self.slots, self.sums):
                if number in saved:
                    np.copyto(copy, saved[number])

    def write(
        self,
        *,
        weights: Float32 | None = None,
        slots: Sequence[Float32] = (),
        sums: Float32 | None = None,
    ) -> None:
        guard = self._of._guard
        assert len(slots) in (0, len(self._of.slots))
        for number, rows in guard.numbered(weights, slots, sums):
            scatter_rows(guard.arrays[number], self._places, rows)
            self._given[number] = rows

    def commit(self, record: TableRecord, position: Position | None) -> None:
        of, row_used = self._of, self._of.record.row_used
        assert row_used <= record.row_used <= of._reserved_row_count
        assert position is None or position.seat_index < of._seat_count
        if not self._kinds["sums"]:
            of.has_sum[row_used : record.row_used] = False
        of._reached("rows")
        rows = of._guard.write(self._places, of._copies, row_used, self._given, **self._kinds)
        of._reached("rows' checks")
        new_rows = of._guard.write_new(row_used, record.row_used)
        of._reached("new rows' checks")
        stored = StoredTableRecord(of._stored.sequence + 1, record, position)
        try:
            of._note(stored, rows._replace(new_rows=new_rows))
        except StorageError:
            self._roll_back()  # while nobody reads
            raise
        self._is_committed = True
        of.put(stored)
        if self._is_saved:
            of._undo.void()  # which it is already; so that damage there is of no matter

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self._is_committed:
                self._roll_back()
        finally:
            self._of._lock.release()

    def _roll_back(self) -> None:
        if self._is_saved:
            self._of._undo.roll_back()
            self._is_saved = False


def _mark(position: Position) -> int:
    assert position.part_count < 1 << _PART_BITS
    return position.step << _PART_BITS | position.part_count
