"""A table in mapped files that survives its machine: an image on disk, and a journal since.

Beside the files of table.py, which serve and survive the process:

    image-000003/      the same files, rows as they were at some moment after it was begun
    journal-000003     changes since then (store/journal/table_entries.py)
    journal-000004     and so on; image 5, when it stands, makes these superfluous

After a loss of power the newest image replaces the files, and the changes are written again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwell.errors import StorageError
from shardwell_server.store.files.mapped import storage_error
from shardwell_server.store.files.presence import Presence
from shardwell_server.store.files.sparse import copy_sparse
from shardwell_server.store.journal.image_files import image_path, images
from shardwell_server.store.journal.journaling import Journaling, forget_journal
from shardwell_server.store.journal.table_entries import (
    TableEntry,
    TableJournal,
    pack_entry,
    pack_mark,
)
from shardwell_server.store.mmap.table import MmapTable
from shardwell_server.store.records.table_records import StoredTableRecord
from shardwell_server.store.row_arrays import WrittenRows, write_again
from shardwell_server.store.table_contract import TableLayout

_BLOCK_BYTES = 4 << 20
"""Rows that are copied to an image while changes wait: about a millisecond."""


def restore_table_image(directory: Path, reached: Callable[[str], None]) -> bool:
    """Puts the newest image in the place of the files; False if there is none.

    Raises:
        StorageError: it can't be done.
    """
    newest = list(images(directory).values())[-1:]
    try:
        for image in newest:
            for path in image.iterdir():
                if path.name not in ("events", "table.json"):
                    copy_sparse(path, directory / path.name)
                    reached("file restored")
    except OSError as error:
        raise storage_error(directory, error, "going back to its image") from None
    return bool(newest)


class _StoppedError(Exception):
    """An image is given up."""


class JournaledTable(MmapTable):
    """See the module."""

    presence: Presence | None = None
    """Of the store that it belongs to."""
    _journaling: Journaling | None = None
    _marked = (-1, 0)
    """Number and size of the segment, when it had a mark and nothing else."""

    def __init__(
        self,
        directory: Path,
        layout: TableLayout,
        salt: int,
        kind: str,
        reached: Callable[[str], None],
    ) -> None:
        super().__init__(directory, layout, salt, kind, reached)
        self._image_lock = threading.Lock()

    def replay(self) -> None:
        """Writes again what the image that was restored lacks; to be called once, first.

        Raises:
            StorageError: a part of the journal is gone; it is named.
        """
        (*_, number) = images(self.directory)
        journal = TableJournal(self.directory, self._layout.name, self._arrays, self._salt)
        for entry in journal.entries(number, self._stored.sequence):
            self._write_again(entry)

    def _write_again(self, entry: TableEntry) -> None:
        stored, rows = entry.stored, entry.rows
        self.reserve(stored.record.row_used)
        write_again(rows, self._arrays, stored.record.row_used)
        has_sums = bool(rows.sums) or rows.clears
        self._guard.write(
            rows.places, self._copies, rows.new_start, {}, values=bool(rows.values), sums=has_sums
        )
        self._guard.write_new(rows.new_start, stored.record.row_used)
        position = stored.position
        if position is not None and position.seat_index >= self._seat_count:
            raise StorageError(
                f"{self.directory}: its journal has a gradient of seat {position.seat_index}, and "
                f"{self.directory / 'events'} {self._seat_count} seats: one of them was replaced; "
                "restore a checkpoint",
                table=self._layout.name,
            )
        self.put(stored)

    def begin(self, *, syncs_each: bool, is_new: bool = False) -> None:
        """Begins to journal; to be called once, when replay is over.

        Args:
            syncs_each: Whether `make_durable` waits for the disk.
            is_new: Whether it was just made, and everything is on the disk.

        Raises:
            StorageError: the journal, or a first image, can't be written.
        """
        self._events.is_synced = True
        journaling = Journaling(
            self.directory,
            self._reached,
            (lambda: None) if is_new else self.sync_names,
            syncs_each=syncs_each,
        )
        self._begin_segment(journaling)
        self._journaling = journaling
        self.make_image()

    def _note(self, stored: StoredTableRecord, rows: WrittenRows) -> None:
        if self._journaling is not None:
            image_bytes = stored.record.row_used * self._layout.row_size_bytes
            self._journaling.append(pack_entry(TableEntry(stored, rows), self._salt), image_bytes)

    def make_durable(self) -> None:
        if self.presence is not None:
            self.presence.check()
        if self._journaling is not None:
            self._journaling.make_durable()

    def sync(self) -> None:
        if self._journaling is not None:
            self._journaling.sync()

    def make_image(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        journaling = self._journaling
        if journaling is not None and journaling.wants_image:
            with self._image_lock, contextlib.suppress(_StoppedError):
                self._write_image(journaling, is_stopping)

    def _write_image(self, journaling: Journaling, is_stopping: Callable[[], bool]) -> None:
        with self._lock:
            number = self._begin_segment(journaling)
        with journaling.imaging(number) as path:
            image = MmapTable.create(path, self._layout, self._salt, self._reached)
            self._copy_to(image, is_stopping)
            image.sync_contents()
            journaling.journal.sync_segment()  # rows may be as new as its last entry

    def _begin_segment(self, journaling: Journaling) -> int:
        """Goes on in a new segment, unless this one is as good; no change is under way."""
        journal = journaling.journal
        number = journal.number
        if (
            self._marked != (number, journal.size_bytes)
            or image_path(self.directory, number).exists()
            or journal.has_failed
        ):
            number = journaling.begin_segment(anyway=True)
            journal.append(pack_mark(self._stored, self._salt))
            self._marked = (number, journal.size_bytes)
        return number

    def _copy_to(self, image: MmapTable, is_stopping: Callable[[], bool]) -> None:
        """Copies all rows while changes go on, then the record."""
        step = max(_BLOCK_BYTES // self._layout.row_size_bytes, 1)
        start = 0
        while not is_stopping():
            stop = min(start + step, self.record.row_used)
            image.reserve(stop)
            with self._lock:  # a row that is being changed fits no check
                self.verify(np.arange(start, stop))
                image.copy_rows(self, start, stop)
                if stop == self.record.row_used:
                    image.copy_standing(self)
                    return
            start = stop
        raise _StoppedError

    def stop_journaling(self) -> None:
        """Makes image and journal superfluous, and removes them.

        Raises:
            StorageError: the disk failed.
        """
        forget_journal(self.directory, self._reached, super().close)

    def close(self) -> None:
        if self._journaling is not None:
            self._journaling.close()
        super().close()
