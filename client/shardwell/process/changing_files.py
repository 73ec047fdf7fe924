"""Contents of files, which are read again whenever the files change.

States: good, as it was read; changed, the files' times or sizes differ; then good again, or unfit,
in which case the last that was good stays in use, an error in the log says why, and the next change
is looked at.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from shardwell.errors import ArgumentError

ReadT = TypeVar("ReadT")
FilePath: TypeAlias = str | os.PathLike[str]
_Stamps: TypeAlias = tuple[tuple[int, ...] | None, ...]


class ChangingFiles(Generic[ReadT]):
    """The contents of files, for any thread; `log` gets the reason where changed ones are unfit."""

    def __init__(
        self, paths: Sequence[FilePath], read: Callable[[], ReadT], log: logging.Logger
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._log = log
        self._lock = threading.Lock()
        self._stamps = self._found()
        self._last = read()

    @property
    def last(self) -> ReadT:
        """The contents that the last call of `now` found good."""
        return self._last

    def have_changed(self) -> bool:
        """Returns whether `now` would read the files again."""
        return self._found() != self._stamps

    def now(self) -> ReadT:
        """The contents that are good now: the same object as long as nothing has changed."""
        stamps = self._found()
        with self._lock:
            if stamps != self._stamps:
                try:
                    found = self._read()
                except Exception as error:
                    where = ", ".join(str(os.fspath(path)) for path in self._paths)
                    reason = f"{where} can't be read ({type(error).__name__})"
                    if isinstance(error, ArgumentError):  # another's text may have files' secrets
                        reason = error.message
                    self._log.error("%s; what was there before is used", reason)
                    self._stamps = stamps
                else:
                    if self._found() == stamps:  # else they are read once more, by the next
                        self._stamps, self._last = stamps, found
            return self._last

    def _found(self) -> _Stamps:
        stamps: list[tuple[int, ...] | None] = []
        for path in self._paths:
            try:
                found = os.stat(path)
            except (OSError, ValueError):  # of which the reader tells
                stamps.append(None)
            else:
                stamps.append((found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size))
        return tuple(stamps)
