"""A table in mapped files: whatever instruction its process is killed at, each change is whole.

Files of a table's directory; the arrays are plain little-endian numbers, by place:

    table.json        what it is
    keys, update_counts, last_steps, weights, slot-0, slot-1
    sums, has_sum     where gradients are summed
    row_checks, key_checks, sum_checks                          (row_checks.py)
    records           counters of the table                   (records/atomic_records.py)
    marks             what each worker has contributed          (records/worker_steps.py)
    undo              the rows that are being changed           (row_undo.py)
    events            seats, learning rates                     (records/event_log.py)
    image-*, journal-*    what survives the machine             (storage.py)

A change, in the order of its writes (docs/adr/0010-tables.md):

    undo: rows, valid | the rows, their checks | record | mark

The record is the instant of change. Before it, an undo entry with the record's sequence number
takes the rows back; after it, the entry is void, and the mark is written again from the record.

Files are sparse up to the table's capacity (files/sparse.py). Their contents are believed when
their checks fit: records, marks, events, undo and the rows' keys at the start, rows before their
first use. So opening a table reads 24 bytes a row, and 9 more where gradients are summed.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardwell.errors import StorageError
from shardwell.numerics import row_batches
from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import Operations
from shardwell_server.store.contract import (
    Int64,
    Layout,
    Places,
    Position,
    TableLayout,
    TableRecord,
    TableStorage,
    check_not_retired,
)
from shardwell_server.store.files.layout import Home
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.files.sparse import SparseFile, copy_sparse, reserve_all
from shardwell_server.store.journal.journal import Journal, image_path, images
from shardwell_server.store.journal.table_entries import (
    TableEntry,
    TableJournal,
    pack_entry,
    pack_mark,
)
from shardwell_server.store.lazy_memory import lazy_zeros
from shardwell_server.store.mmap.kept import KeptRows
from shardwell_server.store.mmap.row_guard import RowGuard
from shardwell_server.store.mmap.storage import MmapStorage
from shardwell_server.store.records.atomic_records import StoredTableRecord, TableRecords, file_size
from shardwell_server.store.row_arrays import (
    Rows,
    check_capacity,
    make_arrays,
    write_again,
)
from shardwell_server.store.row_undo import RowUndo, entry_bytes

_PART_BITS = 16
_BLOCK_BYTES = 4 << 20
"""Rows copied to an image while changes wait: about a millisecond."""


class _StoppedError(Exception):
    """An image is given up."""


class MmapTable(MmapStorage, TableStorage):
    """The rows of one table, in files."""

    def __init__(self, home: Home, *, is_new: bool) -> None:
        layout: TableLayout = home.layout
        super().__init__(home, is_new=is_new)
        self._row_files: list[tuple[SparseFile, int]] = []

        def array(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Rows:
            if name == "has_sum" and not layout.with_sum:
                return lazy_zeros(shape, dtype)
            width = shape[1] if len(shape) > 1 else 1
            stride = width * np.dtype(dtype).itemsize
            file = self._opened(SparseFile, name, shape[0] * stride)
            if width > 1:
                file.expect_random_access()
            self._row_files.append((file, stride))
            values: Rows = file.data.view(dtype).reshape(shape)
            return values

        arrays = make_arrays(layout, layout.row_capacity, array)
        self.keys, self.update_counts, self.last_steps, self.weights = arrays[:4]
        self.slots, self.sums, self.has_sum = arrays[4:]
        self._arrays = arrays
        self._lock = threading.Lock()
        """Held while a change is under way, or rows are copied to an image."""
        self._guard = RowGuard(home, arrays, array)
        changing, count_max = self._guard.arrays, layout.rows_per_change_max
        self.undo_bytes = entry_bytes(changing, count_max)
        undo = self._opened(MappedFile, "undo", self.undo_bytes)
        self._undo = RowUndo(undo, 0, changing, count_max, home.salt, home.reached)
        self._copies = make_arrays(layout, count_max, lambda _, *shape: lazy_zeros(*shape))
        self._records = TableRecords(self._opened(MappedFile, "records", file_size(1)), home)
        self._stored = StoredTableRecord(0, self.record, None)
        self._kept = KeptRows(home)
        self._image_lock = threading.Lock()
        self._marked = (-1, 0)
        """The number and size of the segment when it had a mark alone."""

    def _fill(self) -> None:
        self._records.put(self._stored)

    @classmethod
    def recover(cls, home: Home, *, is_torn: bool = False) -> Self:
        made = super().recover(home, is_torn=is_torn)
        if made.has_image:
            made._replay()
        made.is_torn = False
        return made

    def _take_back(self) -> list[tuple[int, int]]:
        self._stored = self._records.get(self.layout.row_capacity)
        self.record = self._stored.record
        row_used = self.record.row_used
        self.reserved_row_count = row_used
        for file, stride in self._row_files:
            if self.is_torn:
                file.reserve(row_used * stride)
            else:
                file.stands_reserved(row_used * stride)
        sequence = self._undo.pending()
        if sequence == self._stored.sequence:
            self.rolled_back_count = self._undo.roll_back()
        elif sequence is not None:
            self._undo.void()
        self._guard.check_keys(row_used)
        latest = self._stored.position
        return [(-1, -1) if latest is None else (latest.seat_index, _mark(latest))]

    def renamed(self, layout: Layout | TableLayout) -> Self:
        with self._image_lock:  # no image is being made
            made = super().renamed(layout)
        made._guard.table = layout.name
        return made

    @staticmethod
    def _copy_file(source: Path, target: Path) -> None:
        copy_sparse(source, target)

    def facts(self) -> dict[str, Any]:
        return {
            "row_used": self.record.row_used,
            "version": self.record.version,
            "taken_back_row_count": self.rolled_back_count,
        }

    def positions(self) -> list[Position]:
        found = []
        for seat_index in range(self._seat_count):
            (mark,) = self._marks.row(seat_index)
            step, part_count = divmod(max(mark, 0), 1 << _PART_BITS)
            found.append(Position(seat_index, step, part_count))
        return found

    def reserve(self, row_count: int, at_most: int | None = None) -> None:
        check_capacity(self.layout, row_count)
        if row_count > self.reserved_row_count:
            capacity = self.layout.row_capacity
            capacity = capacity if at_most is None else min(capacity, at_most)
            self.reserved_row_count = reserve_all(
                self._row_files, self.reserved_row_count, row_count, capacity
            )
            self._reached("room for rows")

    def change(
        self, places: Places, *, values: bool, sums: bool, in_place: bool = False
    ) -> MmapRowChange:
        check_not_retired(self)
        assert not in_place
        assert places.size <= self.layout.rows_per_change_max
        assert not places.size or 0 <= places.min() <= places.max() < self.reserved_row_count
        self._guard.verify(places)
        return MmapRowChange(self, places, values=values, sums=sums and self.sums is not None)

    def verify(self, places: Places) -> None:
        self._guard.verify(places)

    def keep_rows(self, step: int, ids: Int64, rows: Float32) -> bool:
        is_kept = self._kept.put(step, ids, rows)
        self._reached("kept rows")
        return is_kept

    def kept_rows(self) -> list[tuple[int, Int64, Float32]]:
        return self._kept.read()

    # The journal.

    def _replay(self) -> None:
        (*_, number) = images(self.home.path)
        journal = TableJournal(self.home, self._arrays)
        for entry in journal.entries(number, self._stored.sequence):
            self._write_again(entry)

    def _write_again(self, entry: TableEntry) -> None:
        stored, rows = entry.stored, entry.rows
        self.reserve(stored.record.row_used, stored.record.row_used)
        write_again(rows, self._arrays, stored.record.row_used)
        has_sums = bool(rows.sums) or rows.clears
        self._guard.write(
            rows.places, self._copies, rows.new_start, {}, values=bool(rows.values), sums=has_sums
        )
        self._guard.write_new(rows.new_start, stored.record.row_used)
        position = stored.position
        if position is not None and position.seat_index >= self._seat_count:
            raise StorageError(
                f"{self.home.path}: its journal has a gradient of seat {position.seat_index}, and "
                f"{self.home.path / 'events'} {self._seat_count} seats: one of them was replaced; "
                "restore a checkpoint",
                table=self.layout.name,
            )
        self.put(stored)

    def start_journal(self, *, syncs_each: bool, is_new: bool = False) -> None:
        super().start_journal(syncs_each=syncs_each, is_new=is_new)
        self.make_image()

    def make_image(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        journal = self._journal
        if journal is None or not journal.wants_image:
            return
        with self._image_lock, contextlib.suppress(_StoppedError):
            check_not_retired(self)
            with self._lock:
                number = self._begin_segment(journal)
            with journal.imaging(number) as path:
                image = MmapTable.create(self.home._replace(path=path))
                self._copy_to(image, is_stopping)
                image.sync_contents()

    def _begin_segment(self, journal: Journal) -> int:
        """Runs while no change is under way."""
        number = journal.number
        if (
            self._marked != (number, journal.size_bytes)
            or image_path(self.home.path, number).exists()
            or journal.has_failed
        ):
            number = journal.begin_segment(anyway=True)
            journal.append(pack_mark(self._stored, self._salt), math.inf)  # no image is due
            self._marked = (number, journal.size_bytes)
        return number

    def _copy_to(self, image: MmapTable, is_stopping: Callable[[], bool]) -> None:
        """Copies all rows while changes go on, then the record."""
        step = max(_BLOCK_BYTES // self.layout.row_size_bytes, 1)
        start = 0
        while not is_stopping():
            stop = min(start + step, self.record.row_used)
            image.reserve(stop)
            with self._lock:  # a row that is being changed fits no check
                self.verify(np.arange(start, stop))
                for into, array in zip(image._guard.arrays, self._guard.arrays, strict=True):
                    np.copyto(into[start:stop], array[start:stop])
                if stop == self.record.row_used:
                    image._records.put(self._stored)
                    image._marks.make_room(self._seat_count)
                    for seat_index in range(self._seat_count):
                        image._marks.put(seat_index, 0, self._marks.get(seat_index, 0))
                    return
            start = stop
        raise _StoppedError

    def put(self, stored: StoredTableRecord) -> None:
        self._records.put(stored)
        self._stored, self.record = stored, stored.record
        if stored.position is not None:
            self._marks.put(stored.position.seat_index, 0, _mark(stored.position))


class MmapRowChange:
    """Rows go to the undo file before they change; `commit` replaces the record."""

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
        self.weights_before = self.weights

    def __enter__(self) -> MmapRowChange:
        of, places, guard = self._of, self._places, self._of._guard
        of._lock.acquire()
        try:
            if places.size and places.min() < of.record.row_used:  # new rows need no undo
                numbers = [
                    *(guard.of_values if self._kinds["values"] else ()),
                    *(guard.of_sums if self._kinds["sums"] else ()),
                ]
                rows = of._undo.save(of._stored.sequence, places, numbers)
                saved = dict(zip(numbers, rows, strict=True))
                self._is_saved = True
                for number, copy in guard.numbered(self.weights, self.slots, self.sums):
                    if number in saved:
                        np.copyto(copy, saved[number])
                        if copy is self.weights:
                            self.weights_before = saved[number]
        except BaseException:
            of._lock.release()
            raise
        return self

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
            row_batches.scatter(guard.arrays[number], self._places, rows)
            self._given[number] = rows

    def update(self, operations: Operations, gradients: Float32) -> None:
        raise AssertionError("no change here is in place")

    def commit(self, record: TableRecord, position: Position | None) -> None:
        of, row_used = self._of, self._of.record.row_used
        assert row_used <= record.row_used <= of.reserved_row_count
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
            if of._journal is not None:
                entry = TableEntry(stored, rows._replace(new_rows=new_rows))
                image_bytes = record.row_used * of.layout.row_size_bytes
                of._journal.append(pack_entry(entry, of._salt), image_bytes)
        except StorageError:
            self._roll_back()  # while no call reads
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
