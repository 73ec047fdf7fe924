"""Processes that stand still, as on a machine that is out of reach.

`os.kill(pid, SIGSTOP)` returns before the threads of the process have seen it: on a busy machine
they go on answering for a while.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from harness.polling import eventually

_STOPPED = "T"


def stop(pid: int) -> None:
    """Stops a process, and waits until each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)
    eventually(f"process {pid} stands still", lambda: _states(pid) == {_STOPPED})


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Lets processes stand still while the block runs."""
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    """The states of its threads, as letters. One that ends meanwhile has none."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add(stat.read_text().rpartition(") ")[2][0])
    return states
