"""How long a request may wait for other workers, and what ends the wait early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardwell.errors import ShardUnavailableError

_LOOK_INTERVAL_S = 0.2
"""How often a waiting request looks whether its caller has gone or the shard is stopping."""


class CallerGoneError(Exception):
    """The caller cancelled or disconnected; there is nobody to answer."""


class Patience:
    """The deadline of one request. Not shared among threads."""

    def __init__(
        self, timeout_s: float, *, is_active: Callable[[], bool], is_stopping: Callable[[], bool]
    ) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._look_s = time.monotonic() + _LOOK_INTERVAL_S
        self._is_active = is_active
        self._is_stopping = is_stopping

    @property
    def timeout_s(self) -> float:
        """What it was given, for messages."""
        return self._timeout_s

    def wait(self, condition: threading.Condition) -> bool:
        """Waits on a held condition, a while; False when the time is over.

        Raises:
            CallerGoneError: nobody waits for the answer any more.
            ShardUnavailableError: the shard is stopping.
        """
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            return False
        condition.wait(min(remaining_s, _LOOK_INTERVAL_S))
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_INTERVAL_S
            if not self._is_active():
                raise CallerGoneError
            if self._is_stopping():
                raise ShardUnavailableError(
                    "the shard is stopping and other workers have not contributed yet; "
                    "call again when it is back"
                )
        return True
