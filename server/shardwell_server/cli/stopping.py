"""How a foreground command learns that it is to stop: SIGTERM, Ctrl-C, or its parent's end."""

from __future__ import annotations

import math
import queue
import signal
import time
from types import FrameType

from shardwell_server.processes import stop_when_parent_ends

_LOOK_INTERVAL_S = 0.5
"""A signal that comes just before the thread sleeps does not wake it; its handler runs after so
long."""


class StopSignal:
    """Set once, waited for by one thread.

    Not a `threading.Event`: a signal handler that sets one can deadlock with the thread that it
    interrupts in `wait`. SimpleQueue's `put` is made to be called from handlers.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Asks to stop. From any thread or signal handler; safe to repeat."""
        self._requests.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until it is set, or the time is over; whether it is set."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            rest_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                self._requests.get(timeout=min(rest_s, _LOOK_INTERVAL_S))
            except queue.Empty:
                if rest_s <= _LOOK_INTERVAL_S:
                    return False
                continue
            self._requests.put(None)
            return True


def stop_requested(*, exit_with_parent: bool = False) -> StopSignal:
    """What is set when the process is asked to stop. Main thread only: it takes the signals."""
    stop = StopSignal()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    if exit_with_parent:
        stop_when_parent_ends(stop.set)
    return stop
