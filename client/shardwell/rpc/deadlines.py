"""Deadlines for calls that have none of their own: streams that outlive a step.

One thread a client; it sleeps while nothing is watched, and looks a few times a second otherwise,
so that watching a step costs the step no more than two entries in a dict. Once a block has been
left, `expired` says for good whether its watch has acted, or is about to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOOK_INTERVAL_S = 0.1


class Watch:
    """One deadline, a context manager around what it bounds; `expired` once it has acted."""

    __slots__ = ("_lock", "_watches", "act", "deadline_s", "expired")

    def __init__(
        self,
        deadline_s: float,
        act: Callable[[], None],
        watches: dict[int, Watch],
        lock: threading.Lock,
    ) -> None:
        self.deadline_s = deadline_s
        self.act = act
        self.expired = False
        self._watches = watches
        self._lock = lock

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._watches.pop(id(self), None)


class Watchdog:
    """Calls back when a watched block of code takes too long. Any thread may watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, timeout_s: float, act: Callable[[], None]) -> Watch:
        """Calls `act` from the watchdog's thread if the block has not ended after `timeout_s`."""
        watch = Watch(time.monotonic() + timeout_s, act, self._watches, self._lock)
        with self._lock:
            self._watches[id(watch)] = watch
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="shardwell-watchdog", daemon=True
                )
                self._thread.start()
        if not self._wake.is_set():
            self._wake.set()
        return watch

    def close(self) -> None:
        """Ends the thread. Watches that are left never expire."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            if self._closed:
                return
            time.sleep(_LOOK_INTERVAL_S)
            now = time.monotonic()
            with self._lock:
                watches = self._watches.values()
                late = [w for w in watches if w.deadline_s <= now and not w.expired]
                for watch in late:
                    watch.expired = True
                if not self._watches:
                    self._wake.clear()
            for watch in late:
                watch.act()
