"""The contribution log: a line of JSON for each chunk whose step closes, with who is in its mean.

    {"format": 1, "parameter": "net", "incarnation": "5d3f...", "shard": 0, "chunk": 3,
     "offset": 1536, "size": 512, "step": 7, "contributors": ["w1", "w0"]}

`offset` and `size` are elements of the whole parameter, `contributors` are in the order of the sum,
and `incarnation`, which a name that is made anew gets anew, is hexadecimal. A line is one write to
a file that is only appended to. A shard that is started again writes what a kill may have kept it
from, with `"restored": true`. So of several lines with one incarnation, shard, chunk and step the
last counts, one that is restored only where there is no other; and a line that is cut off, which a
kill or a full disk may leave, is none.

Lines are not synced: after a loss of power the last ones may be missing.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import NamedTuple

from shardwell.errors import ArgumentError
from shardwell.placement.slices import Slice
from shardwell.specs.formats import CONTRIBUTIONS

_LOG = logging.getLogger("shardwell_server")
_BEGIN = f'{{"format": {CONTRIBUTIONS.newest}, "parameter": "'.encode()
_BEGIN_UNNUMBERED = b'{"parameter": "'
"""Beginning of a line of 0.2.0."""
_FORMAT = re.compile(rb'{"format": ([0-9]{1,9}), ')


class ClosedSet(NamedTuple):
    """The contributors to a step of a chunk."""

    parameter: str
    incarnation: int
    chunk_index: int
    where: Slice
    """Of the chunk, in the whole parameter."""
    step: int
    worker_ids: tuple[str, ...]
    """In the order of the sum."""
    is_restored: bool
    """True if an earlier process may have noted it."""


class ContributionLog:
    """The contribution log of one shard. Any thread may use it.

    Lines that can't be written are left out, and counted: training goes on. A file that is
    something else, or a log of another format, is refused and stays as it is.
    """

    def __init__(self, path: Path, shard_index: int) -> None:
        self._path = path
        self._shard_index = shard_index
        self._lock = threading.Lock()
        self._left_out = 0
        self._reason = ""
        try:
            self._file = _opened(path)
        except OSError as error:
            raise ArgumentError(
                f"the contribution log {path} can't be written: {error.strerror}; give "
                "--contribution-log a file that this user may write, or leave it out"
            ) from None
        try:
            self._is_torn = self._ends_torn()
        except BaseException:
            self._file.close()
            raise

    def _ends_torn(self) -> bool:
        """Returns True if the last line is cut off; refuses a file that is no log."""
        if not self._path.is_file():
            return False  # pipes and devices are only written to
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        begin = (self._file.read(len(_BEGIN)) or b"").partition(b"\n")[0]
        if form := _FORMAT.match(begin):
            CONTRIBUTIONS.check(self._path, int(form[1]))
        known = (_BEGIN, _BEGIN_UNNUMBERED)
        if size and not (begin and any(each.startswith(begin[: len(each)]) for each in known)):
            raise ArgumentError(
                f"{self._path} is no contribution log: it does not begin with {_BEGIN.decode()!r}; "
                "move it away, or give the log another name"
            )
        self._file.seek(max(size - 1, 0))
        return self._file.read(1) not in (b"", b"\n")

    def take(self, closed: ClosedSet) -> None:
        """Writes a line."""
        line = {
            "format": CONTRIBUTIONS.newest,
            "parameter": closed.parameter,
            "incarnation": f"{closed.incarnation:x}",
            "shard": self._shard_index,
            "chunk": closed.chunk_index,
            "offset": closed.where.offset,
            "size": closed.where.size,
            "step": closed.step,
            "contributors": closed.worker_ids,
            **({"restored": True} if closed.is_restored else {}),
        }
        data = f"{json.dumps(line)}\n".encode()
        with self._lock:
            if self._file.closed:
                return
            if self._is_torn:
                data = b"\n" + data
            try:
                written = self._file.write(data) or 0
            except OSError as error:
                self._leave_out(error.strerror or str(error))
                return
            self._is_torn = written < len(data) and (written > 0 or self._is_torn)
            if written < len(data):
                self._leave_out("the disk took a part of a line")

    def _leave_out(self, reason: str) -> None:
        if not self._left_out:
            _LOG.error(
                "lines of the contribution log are left out",
                extra={"path": str(self._path), "reason": reason},
            )
        self._left_out += 1
        self._reason = reason

    @property
    def trouble(self) -> str:
        """The reason why the log lacks sets, for people; empty: it lacks none."""
        if not self._left_out:
            return ""
        return (
            f"the contribution log {self._path} lacks {self._left_out} sets of this process, which "
            f"could not be written: {self._reason}; free space there; training goes on"
        )

    def close(self) -> None:
        """Closes the file. Safe to repeat."""
        with self._lock:
            self._file.close()


def _opened(path: Path) -> io.FileIO:
    """Opens the file without a buffer: each write is one of the system's."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    return io.FileIO(path, "ab+", opener=lambda name, _: os.open(name, flags, 0o600))
