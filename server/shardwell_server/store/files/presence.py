"""A watch over mapped files: each must still have its name.

A mapped file lives on when its name is removed, and the next start will not find it. So a store
looks at the names now and then, and acknowledges nothing any more once one is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from shardwell.errors import StorageError
from shardwell_server.store.files.mapped import identity_of, is_at


class NamedFile(Protocol):
    """A file that is in use, though its name may be gone."""

    path: Path

    @property
    def has_name(self) -> bool:
        """True if its path leads to it, or it is not in use."""


class NamedFiles:
    """A directory's files in use, and `names` that may be replaced. One thread at a time."""

    def __init__(self, directory: Path, files: Sequence[NamedFile], names: Sequence[str]) -> None:
        self._directory = str(directory)
        self._files = files
        self._names = [str(directory / name) for name in names]
        self._seen: tuple[int, int] | None = None
        self._trusted: tuple[int, int] | None = None

    def missing(self) -> str | None:
        """Returns a file that lost its name; an equal directory is trusted at the second look."""
        try:
            found = os.stat(self._directory)
            stamp = (found.st_ino, found.st_mtime_ns)
        except OSError:
            return self._directory
        if stamp == self._trusted:
            return None
        for file in self._files:
            if not file.has_name:
                return str(file.path)
        for path in self._names:
            if not os.path.lexists(path):
                return path
        self._trusted = stamp if stamp == self._seen else None
        self._seen = stamp
        return None


class Presence:
    """The presence of a store's files. Any thread may `check`, one at a time may `look`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._gone: str | None = None

    @property
    def is_gone(self) -> bool:
        return self._gone is not None

    def begin(self) -> None:
        self._identity = identity_of(os.stat(self._path))

    def check(self) -> None:
        if self._gone is not None:
            raise StorageError(self._gone)

    def look(self, names: Sequence[str], opened: Iterable[NamedFiles]) -> None:
        if self._gone is None:
            self._gone = self._missing(names, opened)
        self.check()

    def _missing(self, names: Sequence[str], opened: Iterable[NamedFiles]) -> str | None:
        assert self._identity is not None
        if not is_at(self._identity, self._path):
            what = f"data directory {self._path} was removed, moved or replaced"
        else:
            paths = (str(self._path / name) for name in names)
            missing = next((path for path in paths if not os.path.lexists(path)), None)
            missing = missing or next(filter(None, (files.missing() for files in opened)), None)
            if missing is None:
                return None
            what = f"data directory {self._path} has lost {missing}, which was removed or replaced"
        return (
            f"{what} while the shard runs: nothing is acknowledged any more; stop the shard, put "
            "the directory back as it was, or restore a checkpoint, and start it again"
        )
