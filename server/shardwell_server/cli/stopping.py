"""How a foreground command learns that it is to stop: SIGTERM, Ctrl-C, or its parent's end."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from shardwell_server.processes import stop_when_parent_ends


def stop_requested(*, exit_with_parent: bool = False) -> threading.Event:
    """An event that is set when the process is asked to stop. Main thread only."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    if exit_with_parent:
        stop_when_parent_ends(stop.set)
    return stop


def wait_until(stop: threading.Event) -> None:
    """Blocks until the event is set, letting signals through."""
    while not stop.wait(3600.0):
        pass
