"""The audit log: who opened, made, restored or removed what, and who was refused.

One JSON object a line, in a file of its own, which is rotated; never a line a chunk or step. Events
that are alike are one line a minute, with a count, so that no flood writes over what was before it.
A thread writes the lines: no call waits for the disk. Where they come faster than it writes, some
are left out, and the next line says how many.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from shardwell.errors import ArgumentError

_LOG = logging.getLogger("shardwell_server")
FILE_BYTES_MAX = 16 * 2**20
FILE_COUNT_MAX = 8
"""The files that are kept beside the one that is written, FILE.1 being the newest."""
_WAITING_COUNT_MAX = 10_000
_BEGIN = b'{"time": "'
_VALUE_LENGTH_MAX = 400
_FOLDED = ("opened", "refused", "ended")
"""Events that are one line a while, as far as token, host, method, name and right are equal."""
_NAME_COUNT_MAX = 200
"""Lines of such a while that one token has from one host, before names count as one."""
_FOLD_S = 60.0
"""The length of such a while; the next line counts the others."""
_KIND_COUNT_MAX = 4096

Note: TypeAlias = Callable[..., None]


@dataclass
class _Seen:
    began_s: float
    event: str
    given: dict[str, Any]
    count: int = 0


def no_audit(event: str, **fields: Any) -> None:
    """Writes nothing."""


class AuditLog:
    """The audit log of a shard. Any thread may use it.

    An existing audit log goes on; a file that is something else stays as it is, and is refused, as
    is one that the log would be rotated to. `bound` is in each line.
    """

    def __init__(self, path: Path, **bound: str | int) -> None:
        self._bound = bound
        self._left_out = 0
        self._lock = threading.Lock()
        self._seen: dict[tuple[Any, ...], _Seen] = {}
        self._counts: dict[tuple[Any, ...], tuple[float, int]] = {}
        """The time of the first line, and the number of lines, by event, host and token."""
        self._lines: queue.Queue[str | None] = queue.Queue(_WAITING_COUNT_MAX)
        try:
            _check_logs(path)
            self._file = _PrivateFile(path)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"the audit log {path} can't be written: {error}") from None
        self._thread = threading.Thread(target=self._write, name="shardwell-audit", daemon=True)
        self._thread.start()

    def note(self, event: str, **fields: Any) -> None:
        """Adds a line; fields that are None or empty are left out."""
        given = {name: _bounded(value) for name, value in fields.items() if value not in (None, "")}
        if event in _FOLDED:
            with self._lock:
                repeated = self._folded(event, given)
            if repeated is None:
                return
            if repeated:
                given["repeated"] = repeated
        self._put(event, given)

    def _folded(self, event: str, given: dict[str, Any]) -> int | None:
        host = str(given.get("remote", "")).rpartition(":")[0]
        whose = (event, host, given.get("token"))
        alike = [given.get(name) for name in ("method", "right", "kind", "name")]
        now_s = time.monotonic()
        began_s, count = self._counts.get(whose, (now_s, 0))
        if now_s - began_s >= _FOLD_S:
            began_s, count = now_s, 0
        if count >= _NAME_COUNT_MAX:
            alike = alike[:1]
        key = (*whose, *alike)
        seen = self._seen.get(key)
        if seen is not None and now_s - seen.began_s < _FOLD_S:
            seen.count += 1
            return None
        if whose not in self._counts and len(self._counts) >= _KIND_COUNT_MAX:
            self._counts.clear()
        self._counts[whose] = began_s, count + 1
        self._seen.pop(key, None)
        self._seen[key] = _Seen(now_s, event, given)
        if len(self._seen) > _KIND_COUNT_MAX:
            self._tell_rest(self._seen.pop(next(iter(self._seen))))
        return 0 if seen is None else seen.count

    def _tell_all(self) -> None:
        with self._lock:
            for seen in self._seen.values():
                self._tell_rest(seen)

    def _tell_rest(self, seen: _Seen) -> None:
        if seen.count:
            self._put(seen.event, {**seen.given, "repeated": seen.count})
            seen.count = 0

    def _put(self, event: str, given: dict[str, Any]) -> None:
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")  # noqa: TID251
        line = {"time": moment, "event": event, **self._bound, **given}
        if self._left_out:
            line["left_out"] = self._left_out
        try:
            self._lines.put_nowait(json.dumps(line))
        except queue.Full:
            self._left_out += 1
        else:
            self._left_out = 0

    def close(self) -> None:
        """Writes the lines that wait."""
        self._tell_all()
        self._lines.put(None)
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=_FOLD_S)
            except queue.Empty:
                self._tell_all()
                continue
            if line is None:
                return
            record = logging.LogRecord("audit", logging.INFO, "", 0, line, None, None)
            self._file.handle(record)


def _check_logs(path: Path) -> None:
    """Refuses files that do not begin as an audit log, as far as they go."""
    for each in (path, *(Path(f"{path}.{number}") for number in range(1, FILE_COUNT_MAX + 1))):
        if not each.is_file():
            continue  # pipes and devices are only written to
        with each.open("rb") as file:
            begin = file.read(len(_BEGIN))
        if not _BEGIN.startswith(begin):
            raise ArgumentError(
                f"{each} exists, and is no audit log: it does not begin with "
                f"{_BEGIN.decode()!r}; move it away, or give the log another name"
            )


def _opened_private(path: str, flags: int) -> int:
    file = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(file, 0o600)
    return file


class _PrivateFile(logging.handlers.RotatingFileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(
            path, maxBytes=FILE_BYTES_MAX, backupCount=FILE_COUNT_MAX, encoding="utf-8"
        )
        self.setFormatter(logging.Formatter("%(message)s"))
        self._is_kept_whole = False

    def shouldRollover(self, record: logging.LogRecord) -> int:  # noqa: N802
        """Returns True if the file is full, and no file of the user's would be rotated away."""
        if not super().shouldRollover(record):
            return False
        try:
            _check_logs(Path(self.baseFilename))
        except (OSError, ArgumentError) as error:
            if not self._is_kept_whole:
                _LOG.error("the audit log is not rotated", extra={"reason": str(error)})
            self._is_kept_whole = True
            return False
        self._is_kept_whole = False
        return True

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_opened_private)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        _LOG.error("a line of the audit log could not be written", exc_info=True)


def _bounded(value: Any) -> Any:
    return value[:_VALUE_LENGTH_MAX] if isinstance(value, str) else value
