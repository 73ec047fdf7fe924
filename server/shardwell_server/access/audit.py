"""The audit log: who opened, made, restored or removed what, and who was refused.

One JSON object a line, in a file of its own, which is rotated; never a line a chunk or step. Lines
are written by a thread: nobody who is served waits for the disk. Where they come faster than it
writes, some are left out, and the next line says how many.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from shardwell.errors import ArgumentError

_LOG = logging.getLogger("shardwell_server")
FILE_BYTES_MAX = 16 * 2**20
"""Of one file, after which another is begun."""
FILE_COUNT_MAX = 8
"""Of those that are kept beside the one that is written, FILE.1 being the newest."""
_WAITING_COUNT_MAX = 10_000
"""Lines that wait for the disk."""
_VALUE_LENGTH_MAX = 400

Note: TypeAlias = Callable[..., None]
"""Takes the kind of event and its fields."""


def no_audit(event: str, **fields: Any) -> None:
    """Where there is no log."""


class AuditLog:
    """Any thread may use it; `close` ends its own.

    Args:
        path: Its file, which goes on where it is there.
        bound: What each line has besides: which shard writes it.

    Raises:
        ArgumentError: it can't be written.
    """

    def __init__(self, path: Path, **bound: str | int) -> None:
        self._bound = bound
        self._left_out = 0
        self._lines: queue.Queue[str | None] = queue.Queue(_WAITING_COUNT_MAX)
        try:
            self._file = _PrivateFile(path)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"the audit log {path} can't be written: {error}") from None
        self._thread = threading.Thread(target=self._write, name="shardwell-audit", daemon=True)
        self._thread.start()

    def note(self, event: str, **fields: Any) -> None:
        """Adds a line.

        Args:
            event: What happened.
            fields: The rest; those that are None or empty are left out.
        """
        given = {name: _bounded(value) for name, value in fields.items() if value not in (None, "")}
        time = datetime.now(UTC).isoformat(timespec="milliseconds")  # noqa: TID251
        line = {"time": time, "event": event, **self._bound, **given}
        if self._left_out:
            line["left_out"] = self._left_out
        try:
            self._lines.put_nowait(json.dumps(line))
        except queue.Full:
            self._left_out += 1
        else:
            self._left_out = 0

    def close(self) -> None:
        """Writes what waits."""
        self._lines.put(None)
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            record = logging.LogRecord("audit", logging.INFO, "", 0, line, None, None)
            self._file.handle(record)


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Files that their owner alone may read."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path, maxBytes=FILE_BYTES_MAX, backupCount=FILE_COUNT_MAX, encoding="utf-8"
        )
        self.setFormatter(logging.Formatter("%(message)s"))

    def _open(self) -> Any:
        return open(
            self.baseFilename,
            "a",
            encoding="utf-8",
            opener=lambda path, flags: os.open(path, flags, 0o600),
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Says in the other log that a line is lost: the disk is full, say."""
        _LOG.error("a line of the audit log could not be written", exc_info=True)


def _bounded(value: Any) -> Any:
    return value[:_VALUE_LENGTH_MAX] if isinstance(value, str) else value
