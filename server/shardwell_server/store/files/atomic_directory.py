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
from shardwell_server.store.files.mapped import failing, storage_error, sync_path

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
        with failing(self._path, "reading it"):
            self._path.mkdir(exist_ok=True)
            entries = sorted(self._path.iterdir())
        for entry in entries:
            number = entry.name.removesuffix(".new")
            if not (_NUMBER.fullmatch(number) and entry.is_dir() and not entry.is_symlink()):
                raise StorageError(f"{entry} is none of shardwell's files; move it away")
            self._next_number = max(self._next_number, int(number) + 1)
            if entry.name.endswith(".new"):
                with failing(entry, "removing what was never made"):
                    shutil.rmtree(entry)
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
                sync_path(making)
            os.replace(making, directory)
            at = directory
            if self.is_synced:
                sync_path(self._path)
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
        with failing(directory, "removing it"):
            os.replace(directory, gone)
        self._reached("removed files' name")
        shutil.rmtree(gone, ignore_errors=True)
        self._reached("removed files")

    def sync(self) -> None:
        if self._path.exists():
            sync_path(self._path)
