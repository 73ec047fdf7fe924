"""Events of a parameter: lines of JSON, of which as many count as the first line says.

    shardwell events 1 00000000000000000151 5a3f09c1      length of what counts, CRC of this line
    1b2c3d4e {"kind": "seat", "worker_id": "w0"}           CRC32C of the rest of the line

`append` writes the line behind what counts, then the first line, in one call of the system that a
kill can't divide. What lies behind was never acknowledged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell.specs.formats import EVENTS
from shardwell_server.store.contract import Event
from shardwell_server.store.files.mapped import (
    failing,
    identity_of,
    is_at,
    opened,
    reserve,
    storage_error,
    sync_path,
)

_LOG = logging.getLogger("shardwell_server")
_MAGIC = f"shardwell events {EVENTS.newest}"
_FORMAT = re.compile(rb"shardwell events ([0-9]{1,9}) ")
_HEAD_BYTES = len(f"{_MAGIC} {0:020d} {0:08x}\n")
_COMPACT_BYTES = 1 << 20
_GROWTH_BYTES = 4096
_HEAD_TEXT = f"{_MAGIC} ".encode() + b"%020d "
_encoded = json.JSONEncoder(sort_keys=True).encode


class EventLog:
    """The events of one parameter or table. Any thread may append."""

    def __init__(
        self,
        path: Path,
        salt: int,
        reached: Callable[[str], None],
        *,
        is_synced: bool = False,
        keeps_open: bool = False,
    ) -> None:
        """Takes its place; `is_synced`: an event is on disk, not only with the kernel, at once.

        `keeps_open`: a log of many events keeps a descriptor of its file from one to the next.
        """
        self.is_synced = is_synced
        self._keeps_open = keeps_open
        self._kept: contextlib.nullcontext[int] | None = None
        """The file as long as it is open; `close` lets it go, as does the end of this object."""
        self._identity: tuple[int, int] | None = None
        """Of that file. None before another one takes its name."""
        self.path = path
        self._salt = salt
        self._reached = reached
        self._lock = threading.Lock()
        self._end = _HEAD_BYTES
        self._reserved = 0
        self._compact_at = _COMPACT_BYTES

    def create(self, events: Sequence[Event] = ()) -> None:
        lines = b"".join(self._line(event) for event in events)
        end = _HEAD_BYTES + len(lines)
        with opened(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
            reserve(file, end + _GROWTH_BYTES)
            self._reached("room for events")
            os.pwrite(file, lines, _HEAD_BYTES)
            self._reached("all events")
            os.pwrite(file, self._head(end), 0)
            self._reached("all events' end")
            if self.is_synced:
                os.fsync(file)
        self._end, self._reserved = end, end + _GROWTH_BYTES

    def read(self, *, is_cut_off: bool = False) -> list[Event]:
        """Returns the events; `is_cut_off`: those before the first that power was lost in."""
        with failing(self.path, "reading it"):
            data = self.path.read_bytes()
        head, end = data[:_HEAD_BYTES], 0
        length = head[len(_MAGIC) : -9].strip()
        if length.isdigit():
            end = int(length)
        text, crc = head[:-9], f"{crc32.iscsi(head[:-9], self._salt):08x}\n".encode()
        if head == text + crc and (form := _FORMAT.match(head)):
            EVENTS.check(self.path, int(form[1]))
        if not _HEAD_BYTES <= end <= len(data) or head != self._head(end):
            if is_cut_off:  # power was lost before any of it was on the disk
                self.begin()
                return []
            raise self._damaged("its first line")
        texts: list[bytes] = []
        read_end = _HEAD_BYTES
        for number, line in enumerate(data[_HEAD_BYTES:end].splitlines(keepends=True), start=2):
            text = line[9:-1]
            if line != b"%08x %b\n" % (crc32.iscsi(text, self._salt), text):
                if is_cut_off:
                    end = read_end
                    break
                raise self._damaged(f"line {number}")
            texts.append(text)
            read_end += len(line)
        try:  # all at once, in a third of the time
            events: list[Event] = json.loads(b"[%b]" % b",".join(texts))
        except ValueError:
            raise self._damaged("a line") from None
        self._end, self._reserved = end, len(data)
        return events

    def append(self, event: Event) -> None:
        line = self._line(event)
        with self._lock:
            end = self._end + len(line)
            try:
                with self._kept or self._opened() as file:
                    if end > self._reserved:
                        reserve(file, end + _GROWTH_BYTES)
                        self._reserved = end + _GROWTH_BYTES
                        self._reached("room for events")
                    os.pwrite(file, line, self._end)
                    self._reached("event")
                    if self.is_synced:
                        os.fdatasync(file)
                    os.pwrite(file, self._head(end), 0)
                    self._reached("event's end")
                    if self.is_synced:
                        os.fdatasync(file)
            except OSError as error:
                self._let_go()
                raise storage_error(self.path, error, "writing an event") from None
            self._end = end

    def _opened(self) -> AbstractContextManager[int]:
        if not self._keeps_open:
            return opened(self.path, os.O_RDWR)
        file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._release = weakref.finalize(self, os.close, file)
        self._kept = contextlib.nullcontext(file)
        self._identity = identity_of(os.fstat(file))
        return self._kept

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept = self._identity = None
            self._release()

    def close(self) -> None:
        """Closes the file; a later event opens it again."""
        with self._lock:
            self._let_go()

    @property
    def has_name(self) -> bool:
        """Returns True unless its file is open, and its path leads to none, or to another one."""
        identity = self._identity  # without the lock, which a slow disk may have
        return identity is None or is_at(identity, self.path) or self._identity != identity

    @property
    def is_long(self) -> bool:
        """True if `compact` replaces it."""
        return self._end >= self._compact_at

    def begin(self) -> None:
        """Makes an empty log, whole or not at all, in a directory that has no such log."""
        with failing(self.path, "making it"):
            self._take_place(())

    def _take_place(self, events: Sequence[Event]) -> None:
        path = self.path.with_suffix(".new")
        following = EventLog(path, self._salt, self._reached, is_synced=self.is_synced)
        following.create(events)
        self._let_go()
        os.replace(path, self.path)
        if self.is_synced:
            sync_path(self.path.parent)
        self._reached("compacted events' name")
        self._end, self._reserved = following._end, following._reserved

    def compact(self, events: Sequence[Event]) -> None:
        with self._lock:
            if not self.is_long:
                return
            path = self.path.with_suffix(".new")
            try:
                self._take_place(events)
            except OSError as error:  # the events stand where they are
                _LOG.warning(
                    "events were not compacted",
                    extra={"reason": storage_error(self.path, error, "compacting it").message},
                )
                with contextlib.suppress(OSError):
                    path.unlink()
                self._compact_at = 2 * self._end
                return
            self._compact_at = max(_COMPACT_BYTES, 2 * self._end)

    def _line(self, event: Event) -> bytes:
        text = _encoded(event).encode()
        return b"%08x %b\n" % (crc32.iscsi(text, self._salt), text)

    def _head(self, end: int) -> bytes:
        text = _HEAD_TEXT % end
        return b"%b%08x\n" % (text, crc32.iscsi(text, self._salt))

    def _damaged(self, what: str) -> StorageError:
        return StorageError(
            f"{self.path}: {what} was damaged; restore the directory from a copy or a checkpoint"
        )
