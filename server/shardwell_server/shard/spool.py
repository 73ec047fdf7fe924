"""Copies of arrays in an unlinked file.

Memory stays bounded, and nothing is left behind however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from fastcrc import crc32

Array = npt.NDArray[Any]
_NONE = -1


class Copied(NamedTuple):
    """Where a copy lies, and its check."""

    offset: int
    crc32c: int


class Spool:
    """For one thread at a time.

    Args:
        directory: Where the file is made by the first copy; None: the system's for such files.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file = _NONE
        self._end = 0

    @property
    def where(self) -> str:
        """The directory."""
        return str(self._directory or tempfile.gettempdir())

    def copy(self, arrays: Iterable[Array]) -> Copied:
        """Writes arrays, which are C-contiguous.

        Raises:
            OSError: the disk failed, or is full.
        """
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
