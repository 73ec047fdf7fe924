"""The identity of a process and its machine, in words that another process there can look up."""

from __future__ import annotations

import os

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PROCESS_NAMESPACE = "/proc/self/ns/pid"
_STARTED_FIELD = 19
"""Of /proc/PID/stat behind the name: when the process started, in ticks since the machine did."""


def own_identity() -> str:
    """This process's; "" where the system does not say."""
    try:
        return f"{_surroundings()} {os.getpid()} {_state_of(os.getpid())[1]}"
    except (OSError, ValueError):
        return ""


def has_ended(identity: str) -> bool:
    """True if the process of an `own_identity` is known to have ended."""
    try:
        surroundings, pid, started = identity.rsplit(" ", 2)
        if surroundings != _surroundings():
            return False
        if int(pid) <= 0:  # which would be a group
            return False
        os.kill(int(pid), 0)
        state, found = _state_of(int(pid))
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):  # not for this user to know
        return False
    return state in ("Z", "X") or found != started


def _surroundings() -> str:
    with open(_BOOT_ID, encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink(_PROCESS_NAMESPACE)}"


def _state_of(pid: int) -> tuple[str, str]:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], fields[_STARTED_FIELD]
