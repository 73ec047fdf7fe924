"""The file of an accumulator: made whole, used by one process at a time, believed after checks.

A new file is written under another name and gets its own when it is whole. It is locked (flock)
while it is open. `begin` and `end` write its state into its head (file_layout.py), so that the next
process knows whether it was closed. Undo lies at the end, and is cut off while it is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardwell.errors import StorageError
from shardwell_server.accumulator.file_layout import (
    HEAD_SIZE_BYTES,
    MAGIC,
    FileState,
    State,
    SumLayout,
    Summary,
    check_head,
    new_head,
)
from shardwell_server.accumulator.sums import SumMemory
from shardwell_server.store.files.boot import kernel_boot_id
from shardwell_server.store.files.mapped import PAGE_SIZE_BYTES, Mapping, storage_error, sync_path

_BLANK_BLOCK_BYTES = 1 << 20
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC


class GradientFile(SumMemory):
    """An open file, locked. `close` or `end` must be called."""

    def __init__(
        self, path: Path, file: int, layout: SumLayout, reached: Callable[[str], None]
    ) -> None:
        # The caller closes `file`, which is open and locked, where this fails.
        self._file = file
        self._layout = layout
        self._reached = reached
        head = os.pread(file, HEAD_SIZE_BYTES, 0)
        self.path, self.salt = path, check_head(path, head, layout)
        size = os.fstat(file).st_size
        if size == layout.undo_offset:
            os.ftruncate(file, layout.size_bytes)
            self._reached("room for undo")
        elif size != layout.size_bytes:
            raise self._truncated(size)
        self._mapping = Mapping(file, layout.size_bytes)
        self.data = self._mapping.data
        self.state = FileState(self, self.salt)
        self.was_open = self.state.get() is not State.CLOSED
        if self.was_open and size != layout.size_bytes:
            os.ftruncate(file, size)
            raise self._truncated(size)

    @classmethod
    def open_or_make(
        cls, path: Path, layout: SumLayout, reached: Callable[[str], None], *, recover: bool
    ) -> GradientFile:
        """Opens a file for that layout, or makes one; StorageError says why it can't be used."""
        try:
            with _locked(path) as file:
                opened = cls(path, file, layout, reached)
                opened._check_end(recover=recover)
        except FileNotFoundError:
            return cls._create(path, layout, reached)
        except OSError as error:
            raise storage_error(path, error, "opening it") from None
        return opened

    @classmethod
    def _create(cls, path: Path, layout: SumLayout, reached: Callable[[str], None]) -> GradientFile:
        making = path.with_name(path.name + ".new")
        try:
            with _locked(making, os.O_CREAT) as file:
                if path.exists():  # another process was faster, and has ended since
                    raise StorageError(f"{path} was made by another process; open it again")
                _check_begun(making, file)
                try:
                    os.ftruncate(file, 0)
                    os.ftruncate(file, layout.undo_offset)
                    os.posix_fallocate(file, 0, PAGE_SIZE_BYTES)
                    reached("file")
                    os.pwrite(file, new_head(layout, secrets.randbits(32)), 0)
                    reached("head")
                    made = cls(path, file, layout, reached)
                    os.fsync(file)
                    os.replace(making, path)
                    reached("name")
                    sync_path(path.parent)
                except BaseException:
                    with contextlib.suppress(OSError):
                        making.unlink()
                    raise
        except FileNotFoundError:
            raise StorageError(f"{path.parent} is no directory; make it first") from None
        except OSError as error:
            raise storage_error(path, error, "making it") from None
        return made

    def _truncated(self, size: int) -> StorageError:
        return StorageError(
            f"{self.path} has {size} bytes; expected {self._layout.size_bytes}: it was truncated; "
            "restore it from a copy, or remove it"
        )

    def _check_end(self, *, recover: bool) -> None:
        if not self.was_open:
            return
        if not recover:
            raise StorageError(
                f"{self.path} was not closed: its process was killed, or ended without close(); "
                "open it with recover=True, which takes back the calls that were under way, or "
                "remove it"
            )
        boot_id = kernel_boot_id()
        if boot_id is None or self.state.boot_id != boot_id:
            raise StorageError(
                f"{self.path} was not closed, and the machine has started again since: what it "
                "had not written to disk is lost, and the sums would be of different moments; "
                "remove it"
            )

    def begin(self) -> None:
        """Notes that this process has the checked file."""
        if not self.was_open:  # else it is the same start of the machine
            self.state.boot_id = kernel_boot_id() or ""
            self._reached("start of the machine")
        self.state.set(State.OPEN)
        self._reached("state")
        try:
            self._flush_head()
        except OSError as error:
            raise storage_error(self.path, error, "writing its head") from None

    def _flush_head(self) -> None:
        assert self._mapping is not None
        self._mapping.sync(PAGE_SIZE_BYTES)

    def clearing(self, clear: Callable[[], None]) -> None:
        """Calls `clear`, which takes all sums away at once: a kill meanwhile does so, too."""
        words, place, is_open = self.state.store(State.OPEN)
        try:
            self.state.set(State.CLEARING)
            self._reached("state")
            clear()
        finally:
            words[place] = is_open  # in no call, where Ctrl-C could come: else a kill clears later
        self._reached("state")

    def end(self, summary: Summary) -> None:
        """Writes everything to disk, notes that the file is closed, and lets others have it."""
        try:
            self.sync()
            self.state.summary = summary
            self._reached("summary")
            self.state.set(State.CLOSED)
            self._reached("state")
            self._flush_head()
            os.ftruncate(self._file, self._layout.undo_offset)
            self._reached("undo cut off")
        except OSError as error:
            raise storage_error(self.path, error, "closing it") from None
        finally:
            self.close()

    def close(self) -> None:
        """Lets others have it; it was not closed in their eyes, unless `end` says so."""
        _unlock(self._file)
        del self.state
        self.data, self._mapping = np.empty(0, np.uint8), None

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Takes disk space for a part of the file, or raises StorageError."""
        try:
            os.posix_fallocate(self._file, offset, size_bytes)
        except OSError as error:
            raise storage_error(self.path, error, "taking disk space for more rows") from None

    def ranges(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """The parts that are no hole."""
        end = offset + size_bytes
        while offset < end:
            try:
                start = os.lseek(self._file, offset, os.SEEK_DATA)
            except OSError:  # nothing but a hole
                return
            offset = min(os.lseek(self._file, start, os.SEEK_HOLE), end)
            if start < offset:
                yield start, offset - start


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[int]:
    """Opens and locks a file; lets others have it where the block fails."""
    file = _lock(path, flags)
    try:
        yield file
    except BaseException:
        _unlock(file)
        raise


def _lock(path: Path, flags: int) -> int:
    while True:
        file = os.open(path, _OPEN_FLAGS | flags, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
        except BlockingIOError:
            os.close(file)
            raise StorageError(
                f"{path} is in use by another accumulator; close that one, or give another path"
            ) from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it got another name, or was removed, in between


def _is_blank(file: int, start: int) -> bool:
    """Reads no holes."""
    while True:
        try:
            start = os.lseek(file, start, os.SEEK_DATA)
        except OSError:  # there is a hole up to the end
            return True
        block = os.pread(file, _BLANK_BLOCK_BYTES, start)
        if block.count(0) != len(block):
            return False
        start += len(block)


def _check_begun(path: Path, file: int) -> None:
    """Refuses a file that is more than a killed process leaves of one that it began to make.

    That is empty, or its first page is empty or a head; behind it are zeros, or a hole.
    """
    page = os.pread(file, PAGE_SIZE_BYTES, 0)
    if not page:
        return
    if not _is_blank(file, PAGE_SIZE_BYTES) or (any(page) and not page.startswith(MAGIC)):
        raise StorageError(
            f"{path} is in the way of making the file beside it, and was not left by a process "
            "that was killed while it did; move it away, or give another path"
        )


def _unlock(file: int) -> None:
    """Closes it; the lock goes at once, though mappings keep the file open."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
