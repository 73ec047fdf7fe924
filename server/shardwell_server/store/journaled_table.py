"""A table in mapped files that survives its machine: an image on disk, and a journal since.

Beside the files of mmap_table.py, which serve and survive the process:

    image-000003/      the same files, rows as they were at some moment after it was begun
    journal-000003     changes since then (table_journal.py)
    journal-000004     and so on; image 5, when it stands, makes these superfluous

After a loss of power the newest image replaces the files, and the changes are written again.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwell.errors import StorageError
from shardwell_server.store import image_files
from shardwell_server.store.image_files import forget_images, image_path, images
from shardwell_server.store.journal import Journal, segments
from shardwell_server.store.mapped_file import storage_error, sync_directory, sync_file
from shardwell_server.store.mmap_table import MmapTable
from shardwell_server.store.row_arrays import WrittenRows, write_again
from shardwell_server.store.sparse_file import copy_sparse
from shardwell_server.store.table_journal import (
    TableEntry,
    TableJournal,
    pack_entry,
    pack_mark,
)
from shardwell_server.store.table_records import StoredTableRecord

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


class JournaledTable(MmapTable):
    """See the module."""

    _journal: Journal | None = None
    _older_bytes = 0
    _syncs_each = False
    _wants_image = False
    _marked = (-1, 0)
    """Number and size of the segment, when it had a mark and nothing else."""
    _image_lock: threading.Lock

    def replay(self) -> None:
        """Writes again what the image that was restored lacks; to be called once, first.

        Raises:
            StorageError: a part of the journal is gone; it is named.
        """
        (*_, number) = images(self.directory)
        journal = TableJournal(self.directory, self._arrays, self._salt)
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

    def begin(self, *, syncs_each: bool) -> None:
        """Begins to journal; to be called once, when replay is over.

        Args:
            syncs_each: Whether `make_durable` waits for the disk.

        Raises:
            StorageError: the journal, or a first image, can't be written.
        """
        try:  # an earlier process may have left them with the kernel alone
            self._sync_names()
            for path in segments(self.directory).values():
                sync_file(path)
        except OSError as error:
            raise storage_error(self.directory, error, "syncing it") from None
        self._syncs_each = syncs_each
        self._image_lock = threading.Lock()
        self._events.is_synced = True
        journal = Journal(self.directory, self._reached)
        self._older_bytes = sum(p.stat().st_size for p in segments(self.directory).values())
        self._journal = journal
        self._begin_segment(journal)
        self._wants_image = not images(self.directory) or journal.has_failed
        self.make_image()

    def _note(self, stored: StoredTableRecord, rows: WrittenRows) -> None:
        """See MmapTable."""
        if self._journal is None:
            return
        self._journal.append(pack_entry(TableEntry(stored, rows), self._salt))
        size_bytes = self._older_bytes + self._journal.size_bytes
        image_bytes = stored.record.row_used * self._layout.row_size_bytes
        if size_bytes > max(2 * image_bytes, image_files.IMAGE_AT_BYTES_MIN):
            self._wants_image = True

    def make_durable(self) -> None:
        """See TableStorage."""
        if self._syncs_each:
            self.sync()

    def sync(self) -> None:
        """See TableStorage."""
        if self._journal is not None:
            try:
                self._journal.sync()
            finally:
                self._wants_image = self._wants_image or self._journal.has_failed

    def make_image(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """See TableStorage."""
        if self._journal is not None and self._wants_image:
            with self._image_lock:
                self._write_image(self._journal, is_stopping)

    def _write_image(self, journal: Journal, is_stopping: Callable[[], bool]) -> None:
        with self._lock:
            number = self._begin_segment(journal)
        standing = image_path(self.directory, number)
        making = standing.with_suffix(".new")
        try:
            making.mkdir()
            self._reached("image begun")
            image = MmapTable.create(making, self._layout, self._salt, self._reached)
            if not self._copy_to(image, is_stopping):
                return
            image.close()
            sync_directory(making)
            journal.sync_segment()  # rows may be as new as its last entry
            self._reached("image written")
            making.rename(standing)
            self._reached("image stands")
            sync_directory(self.directory)
        except OSError as error:
            raise storage_error(standing, error, "making an image") from None
        finally:
            shutil.rmtree(making, ignore_errors=True)
        journal.repaired()
        self._wants_image, self._older_bytes = False, 0
        forget_images(self.directory, self._reached, before=number)

    def _begin_segment(self, journal: Journal) -> int:
        """Goes on in a new segment, unless this one is as good; no change is under way."""
        number, size_bytes = journal.number, journal.size_bytes
        if self._marked != (number, size_bytes) or image_path(self.directory, number).exists():
            self._older_bytes += size_bytes
            number = journal.begin_segment(anyway=True)
            journal.append(pack_mark(self._stored, self._salt))
            self._marked = (number, journal.size_bytes)
        return number

    def _copy_to(self, image: MmapTable, is_stopping: Callable[[], bool]) -> bool:
        """Copies all rows while changes go on, then the record; False when it was stopped."""
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
                    return True
            start = stop
        return False

    def stop_journaling(self) -> None:
        """Makes image and journal superfluous, and removes them.

        Raises:
            StorageError: the disk failed.
        """
        if images(self.directory) or segments(self.directory):
            try:
                super().close()
            except OSError as error:
                raise storage_error(self.directory, error, "writing it to disk") from None
        forget_images(self.directory, self._reached)

    def close(self) -> None:
        """See MmapTable."""
        if self._journal is not None:
            with contextlib.suppress(OSError):  # remembered; the files themselves are enough
                self._journal.close()
        super().close()
