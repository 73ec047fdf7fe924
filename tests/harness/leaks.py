"""What a test may leave behind, which is nothing: threads, child processes, listening ports."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"


@dataclass(frozen=True)
class Belongings:
    """What this process has now."""

    threads: frozenset[threading.Thread]
    """Non-daemon threads, and those of Shardwell whatever they are."""
    child_pids: frozenset[int]
    """Children, zombies included."""
    ports: frozenset[int]
    """TCP ports on which this process listens."""

    @staticmethod
    def now() -> Belongings:
        """Looks."""
        return Belongings(
            frozenset(
                thread
                for thread in threading.enumerate()
                if not thread.daemon or thread.name.startswith("shardwell")
            ),
            frozenset(child_pids(os.getpid())),
            frozenset(listening_ports()),
        )

    def beyond(self, earlier: Belongings) -> list[str]:
        """What is here that was not there earlier, in words."""
        return [
            *(f"thread {thread.name!r}" for thread in self.threads - earlier.threads),
            *(f"child process {pid}" for pid in self.child_pids - earlier.child_pids),
            *(f"listening port {port}" for port in self.ports - earlier.ports),
        ]


def child_pids(parent_pid: int) -> set[int]:
    """Processes whose parent is `parent_pid`."""
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


def listening_ports() -> set[int]:
    """TCP ports on which this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
