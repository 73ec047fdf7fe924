"""What a test may leave behind, which is nothing: threads, child processes, listening ports."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.programs import forkserver
from shardwell.threads.pool import IDLE_NAME, TIMER_NAME

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_OF_ALL = (IDLE_NAME, TIMER_NAME)
"""Names of threads of the process's pool that do nothing for anyone."""
_IS_LISTENING = socket.SO_ACCEPTCONN
_KNOWS_CHILDREN = Path("/proc/thread-self/children").exists()
"""Whether the kernel lists them; without, every process is looked at, which takes milliseconds."""


@dataclass(frozen=True)
class Resources:
    """What this process has now."""

    threads: frozenset[threading.Thread]
    """Non-daemon threads, and those of Shardwell whatever they are."""
    child_pids: frozenset[int]
    """Children, and those that were forked from one of them, zombies included."""
    ports: frozenset[int]
    """TCP ports on which this process listens."""

    @staticmethod
    def now() -> Resources:
        """Looks."""
        fork_server_pid = forkserver.fork_server().pid  # there before anything is looked at
        return Resources(
            frozenset(
                thread
                for thread in threading.enumerate()
                if not thread.daemon
                or (thread.name.startswith("shardwell") and thread.name not in _OF_ALL)
            ),
            frozenset(child_pids(os.getpid()) | child_pids(fork_server_pid)),
            frozenset(listening_ports()),
        )

    def beyond(self, earlier: Resources) -> list[str]:
        """The resources that did not exist earlier, in words."""
        return [
            *(f"thread {thread.name!r}" for thread in self.threads - earlier.threads),
            *(f"child process {pid}" for pid in self.child_pids - earlier.child_pids),
            *(f"listening port {port}" for port in self.ports - earlier.ports),
        ]


def child_pids(parent_pid: int) -> set[int]:
    """Processes whose parent is `parent_pid`, zombies included."""
    if not _KNOWS_CHILDREN:
        return _child_pids_among_all(parent_pid)
    found: set[int] = set()
    for entry in Path(f"/proc/{parent_pid}/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, entry.read_text().split()))
    return found


def _child_pids_among_all(parent_pid: int) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent_pid:
                found.add(int(entry.parent.name))
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descriptor_count() -> int:
    """Files, sockets and pipes that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def listening_ports() -> set[int]:
    """TCP ports on which this process listens.

    Each socket is asked: /proc/net/tcp takes the kernel milliseconds, and every test looks twice.
    """
    ports = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # it is no socket, or is closed by now
            one = socket.socket(fileno=int(entry.name))
            try:
                if one.family in _INTERNET and one.getsockopt(socket.SOL_SOCKET, _IS_LISTENING):
                    ports.add(one.getsockname()[1])
            finally:
                one.detach()  # it is another's
    return ports
