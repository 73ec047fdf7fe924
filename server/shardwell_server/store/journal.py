"""What was counted, in order, in files that are synced to disk.

The image of a parameter or table (journaled_parameter.py, journaled_table.py) and the journal since
make it again after its machine lost power. Segments are numbered; an image of number k needs the
segments from k on. What follows the last whole entry of a segment was never synced, or was damaged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from shardwell_server.store.mapped_file import storage_error, sync_directory

Part: TypeAlias = "bytes | memoryview[int]"
"""Bytes of an entry."""
_PREFIX = "journal-"
FAILED_NAME = "failed-journal"
"""A file that is there while a segment may lack what could not be synced."""


def segments(directory: Path) -> dict[int, Path]:
    """The segments in a directory by number, in order."""
    found = {int(path.name.removeprefix(_PREFIX)): path for path in directory.glob(f"{_PREFIX}*")}
    return dict(sorted(found.items()))


class Journal:
    """The segment that is written. Any thread may append; who appends orders the entries."""

    def __init__(self, directory: Path, reached: Callable[[str], None]) -> None:
        self._reached = reached
        self._directory = directory
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._file = -1
        self._size = 0
        self._written = 0
        self._synced = 0
        self.has_failed = (directory / FAILED_NAME).exists()
        """Whether a sync has failed, now or in an earlier process, and no image was made since."""
        self.number = 0
        """Of the segment that is written."""

    def begin_segment(self, *, anyway: bool = False) -> int:
        """Goes on in a new segment; returns its number.

        Unless nothing was written to this one, which is then as good; but for `anyway`.

        Raises:
            StorageError: it can't be made.
        """
        if self._file >= 0 and self._size == 0 and not anyway:
            return self.number
        number = max([self.number, *segments(self._directory)], default=0) + 1
        path = self._path(number)
        file = -1
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._reached("journal segment")
            sync_directory(self._directory)
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise storage_error(path, error, "beginning it") from None
        with self._sync_lock, self._append_lock:
            if self._file >= 0:
                with contextlib.suppress(OSError):  # told by the next `sync`
                    self._sync_file()
                os.close(self._file)
            self._file, self._size, self.number = file, 0, number
        return number

    @property
    def size_bytes(self) -> int:
        """Bytes of the segment that is written."""
        return self._size

    def append(self, parts: Sequence[Part]) -> None:
        """Adds an entry; it is durable after the next `sync`.

        Raises:
            StorageError: it can't be written; nothing changed.
        """
        size = sum(len(part) for part in parts)
        with self._append_lock:
            try:
                written = os.pwritev(self._file, parts, self._size)
                while written < size:  # a signal, or a disk that is nearly full
                    rest = b"".join(bytes(part) for part in parts)[written:]
                    written += os.pwrite(self._file, rest, self._size + written)
            except OSError as error:
                os.ftruncate(self._file, self._size)
                raise storage_error(self._path(self.number), error, "writing a gradient") from None
            self._reached("journal entry")
            self._size += size
            self._written += 1

    def sync(self) -> None:
        """Returns when everything appended before is on disk; threads share the disk's work.

        Raises:
            StorageError: the disk failed; what was not synced must not be acknowledged.
        """
        wanted = self._written
        if self._synced >= wanted and not self.has_failed:
            return
        with self._sync_lock:
            if self._synced >= wanted and not self.has_failed:
                return
            try:
                self._sync_file()
            except OSError as error:
                raise storage_error(self._path(self.number), error, "syncing it") from None

    def _sync_file(self) -> None:
        """One `fdatasync`; the lock of syncs is held."""
        wanted = self._written
        if self.has_failed:  # the kernel tells of a lost page once
            raise OSError(errno.EIO, "an earlier sync failed, until an image is written")
        self._ask_disk()
        self._synced = wanted

    def _ask_disk(self) -> None:
        """Remembers it where the disk has failed."""
        try:
            os.fdatasync(self._file)
        except OSError:
            self.has_failed = True
            with contextlib.suppress(OSError):
                (self._directory / FAILED_NAME).touch()
            raise

    def sync_segment(self) -> None:
        """Returns when the segment that is written is on disk, whatever has failed before it.

        For an image that was begun with it, and needs no other.

        Raises:
            OSError: the disk failed.
        """
        with self._sync_lock:
            self._ask_disk()

    def repaired(self) -> None:
        """An image stands that was begun after the newest segment was."""
        with self._sync_lock:
            if self.has_failed:
                (self._directory / FAILED_NAME).unlink(missing_ok=True)
                self.has_failed = False

    def _path(self, number: int) -> Path:
        return self._directory / f"{_PREFIX}{number:06d}"

    def close(self) -> None:
        """Syncs and closes."""
        with self._sync_lock, self._append_lock:
            if self._file >= 0:
                try:
                    self._sync_file()
                finally:
                    os.close(self._file)
                    self._file = -1
