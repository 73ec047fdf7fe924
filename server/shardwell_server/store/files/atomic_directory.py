"""Directories that are made and removed whole, numbered, so that no path is made from a name.

000001/        one that was made
000002.new/    one whose making, or removal, was cut off; removed at the next start
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwell.errors import StorageError
from shardwell_server.store.files.mapped import storage_error, sync_directory

_NUMBER = re.compile(r"[0-9]{6,}")


class AtomicDirectories:
    """The numbered directories below one path. One thread at a time."""

    def __init__(self, path: Path, reached: Callable[[str], None], *, is_synced: bool) -> None:
        self._path = path
        self._reached = reached
        self.is_synced = is_synced
        self._next_number = 1
        self._given_up: Path | None = None
        """The path that holds the next number, because it could not be removed."""

    def existing(self) -> Iterator[Path]:
        """Yields the finished directories, in order; removes unfinished ones. Called first."""
        try:
            self._path.mkdir(exist_ok=True)
            entries = sorted(self._path.iterdir())
        except OSError as error:
            raise storage_error(self._path, error, "reading it") from None
        for entry in entries:
            number = entry.name.removesuffix(".new")
            if not (_NUMBER.fullmatch(number) and entry.is_dir() and not entry.is_symlink()):
                raise StorageError(f"{entry} is none of shardwell's files; move it away")
            self._next_number = max(self._next_number, int(number) + 1)
            if entry.name.endswith(".new"):
                try:
                    shutil.rmtree(entry)
                except OSError as error:
                    raise storage_error(entry, error, "removing what was never made") from None
            else:
                yield entry

    @contextlib.contextmanager
    def making(self, fill: Callable[[Path], None], doing: str) -> Iterator[Path]:
        """Yields a directory that `fill` filled under another name; none after an error."""
        directory = self._path / f"{self._next_number:06d}"
        at = making = directory.with_suffix(".new")
        try:
            self._path.mkdir(exist_ok=True)
            if directory == self._given_up:  # this process's own; a user may have copied one there
                os.replace(directory, making)
                self._given_up = None
            if making.exists():
                shutil.rmtree(making)
            making.mkdir()
            fill(making)
            self._reached("files")
            if self.is_synced:
                sync_directory(making)
            os.replace(making, directory)
            at = directory
            if self.is_synced:
                sync_directory(self._path)
            self._reached("files' name")
            yield directory
        except Exception as error:
            with contextlib.suppress(OSError, MemoryError):
                if at is directory:
                    self._given_up = directory
                    os.replace(directory, making)
                    self._given_up = None
                shutil.rmtree(making, ignore_errors=True)
            if isinstance(error, OSError):
                raise storage_error(directory, error, doing) from None
            if isinstance(error, (MemoryError, OverflowError)):
                reason = str(error) or "no memory"
                raise StorageError(f"{directory}: {doing} failed: {reason}; add shards") from None
            raise
        self._next_number += 1

    def remove(self, directory: Path) -> None:
        """Removes a directory: without its name it is gone; its files go at the next start."""
        gone = directory.with_suffix(".new")
        try:
            os.replace(directory, gone)
        except OSError as error:
            raise storage_error(directory, error, "removing it") from None
        self._reached("removed files' name")
        shutil.rmtree(gone, ignore_errors=True)
        self._reached("removed files")

    def sync(self) -> None:
        if self._path.exists():
            sync_directory(self._path)
