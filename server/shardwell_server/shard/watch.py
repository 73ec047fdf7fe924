"""The later work of a shard, for which no call asks: one thread, and what it does.

A step whose grace is over, a member that has not come back: no message brings these about.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from shardwell.errors import ShardwellError, StorageError

_LOG = logging.getLogger("shardwell_server")
_AGAIN_S = 1.0
"""The time after which a write is tried again that a disk has refused."""


class Timer(Protocol):
    """A runner of things later."""

    def after(self, delay_s: float, act: Callable[[], float | None]) -> None:
        """Has `act` called after so many seconds; never waits."""


class Watch:
    """A thread that starts with the first work, and ends with `close`. Any thread may call.

    `act` returns in how many seconds it is to be called again; None: never.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], float | None]]] = []
        """A heap: when, a number that tells two of one time apart, and what."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, delay_s: float, act: Callable[[], float | None]) -> None:
        at_s = time.monotonic() + delay_s
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (at_s, next(self._numbers), act))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="shardwell-watch", daemon=True
                )
                self._thread.start()
            elif self._due[0][0] == at_s:
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread; what it does now is done on return. Safe to repeat."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (act := self._next()) is not None:
            again_s: float | None = None
            try:
                again_s = act()
            except StorageError as error:
                _LOG.warning("a step can't close now, and is tried again: %s", error)
                again_s = _AGAIN_S
            except ShardwellError as error:
                _LOG.warning("a step can't close: %s", error)
            except Exception:  # of one act: the others are still to be done
                _LOG.exception("%r failed on the shard's watch, and is not tried again", act)
            if again_s is not None:
                self.after(again_s, act)
            del act  # what it looks after may be deleted before the next one is due

    def _next(self) -> Callable[[], float | None] | None:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                if self._due and self._due[0][0] <= now_s:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(self._due[0][0] - now_s if self._due else None)
        return None
