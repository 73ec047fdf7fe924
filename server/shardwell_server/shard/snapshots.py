"""Snapshots of a parameter or table: its state at one version, taken while training goes on.

A thread that is about to change something that a snapshot has not read yet copies it first, into a
spool: an unlinked file, so that memory stays bounded, and nothing is left behind however the
process ends. No thread waits. parameter/snapshot.py and table/snapshot.py say in which pieces.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from fastcrc import crc32

from shardwell.errors import DeadlineError, LimitError, ShardwellError, StorageError

Array = npt.NDArray[Any]
_NONE = -1


class Copied(NamedTuple):
    """The place of a copy, and its check."""

    offset: int
    crc32c: int


class Spool:
    """The copies of arrays in an unlinked file. For one thread at a time."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file = _NONE
        self._end = 0

    @property
    def where(self) -> str:
        return str(self._directory or tempfile.gettempdir())

    def copy(self, arrays: Iterable[Array]) -> Copied:
        """Writes arrays, which are C-contiguous."""
        if self._file == _NONE:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                self._file = os.dup(file.fileno())
        offset, crc = self._end, 0
        for array in arrays:
            view = array.reshape(-1).view(np.uint8).data
            crc = crc32.iscsi(view, crc)
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count
        copied = Copied(self._end, crc)
        self._end = offset
        return copied

    def read(self, copied: Copied, into: Iterable[Array]) -> bool:
        """Fills arrays of the same shapes; False if they are not what was written."""
        offset, crc = copied.offset, 0
        for array in into:
            view = array.reshape(-1).view(np.uint8).data
            offset += os.preadv(self._file, [view], offset)
            crc = crc32.iscsi(view, crc)
        return crc == copied.crc32c

    def close(self) -> None:
        """Frees the disk space. Safe to repeat."""
        if self._file != _NONE:
            os.close(self._file)
            self._file = _NONE


class Snapshot:
    """A snapshot that is under way; messages call it `what`: "snapshot" or "scan".

    Any thread calls `is_wanted`, which returns True while the client still reads it.
    """

    def __init__(
        self,
        what: str,
        version: int,
        spool_dir: Path | None,
        is_wanted: Callable[[], bool],
        **where: Any,
    ) -> None:
        self.version = version
        self.learning_rate = 0.0
        """The rate of the update that follows."""
        self.failure: ShardwellError | None = None
        self._what = what
        self._where = where
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._spool = Spool(spool_dir)

    def drop(self, failure: ShardwellError) -> None:
        """Ends it and frees its disk space. Safe to repeat."""
        with self._lock:
            self.failure = self.failure or failure
            self._spool.close()

    def _copying(self, of: str, copy: Callable[[], None]) -> bool:
        """Copies `of` by `copy`, with the lock held, and says whether it did; never fails."""
        if self.failure is not None:
            return False
        if not self._is_wanted():
            self.drop(
                DeadlineError(f"the {self._what} was not read before its deadline; call again")
            )
            return False
        try:
            with self._lock:
                self._check()
                copy()
        except OSError as error:
            self.drop(
                StorageError(
                    f"{self._spool.where}: copying {of} for a {self._what} failed: "
                    f"{error.strerror}; free space on that disk, or make checkpoints while no "
                    "worker trains",
                    **self._where,
                )
            )
            return False
        except ShardwellError as error:
            self.drop(error)
            return False
        return True

    def _read(self, of: str, copied: Copied, into: Iterable[Array]) -> None:
        """Reads a copy; StorageError: the spool can't be read, or was damaged."""
        with self._lock:
            self._check()
            is_whole = self._spool.read(copied, into)
        if not is_whole:
            raise StorageError(
                f"a copy of {of} was damaged on its way through a file in {self._spool.where}; "
                "check that disk, then call again",
                **self._where,
            )

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


SnapshotT = TypeVar("SnapshotT", bound=Snapshot)


class Snapshots(Generic[SnapshotT]):
    """The snapshots of one parameter or table that are under way."""

    def __init__(self, what: str, count_max: int, **where: Any) -> None:
        self.pending: tuple[SnapshotT, ...] = ()
        """Snapshots that changes must heed; mostly empty. Replaced, never changed."""
        self._plural = what
        self._count_max = count_max
        self._where = where
        self._list_lock = threading.Lock()

    @contextlib.contextmanager
    def _listed(self, snapshot: SnapshotT) -> Iterator[None]:
        with self._list_lock:
            if len(self.pending) >= self._count_max:
                raise LimitError(
                    f"limit snapshot_count_max={self._count_max}: as many {self._plural} are under "
                    "way; call again when one has ended",
                    **self._where,
                )
            self.pending = (*self.pending, snapshot)
        try:
            yield
        finally:
            with self._list_lock:
                self.pending = tuple(each for each in self.pending if each is not snapshot)
            snapshot.drop(StorageError("it has ended"))
