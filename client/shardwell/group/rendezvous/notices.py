"""Log lines that say what a worker waits for while a group comes together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_LOG = logging.getLogger("shardwell.group")
FIRST_NOTICE_S = 2.0
"""Workers that a launcher starts together rarely come further apart."""
_PAUSE_S_MAX = 60.0


class WaitingNotices:
    """One line after 2 s, and others at pauses that double, up to a minute."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._pause_s = FIRST_NOTICE_S
        self._due_s = self._began_s + self._pause_s

    def note(self, what: Callable[[], str]) -> None:
        """Logs what is waited for, if a line is due; `what` continues "... has waited 2 s "."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        _LOG.warning("a worker has waited %.3g s %s", now_s - self._began_s, what())
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
        self._due_s = now_s + self._pause_s
