"""The process that waits for `shardwell run`, and ends the workers if that is killed.

`run.guarded` forks. The child runs the workers, each a process group of the session that it leads.
The parent, which the user started, becomes this script, `guard.py CHILD GRACE_S FD`: it passes
signals on, and ends with the child's exit code. Before each it writes the signal's number into the
pipe FD, so that the child knows it from one that was sent to all processes of a job. So two
programs of different names watch one another:

- the parent holds a pipe; its end makes the child stop as by SIGTERM;
- if the child is killed, the parent ends all groups of its session, which /proc lists on Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_INTERVAL_S = 0.02


def adopt_orphans() -> None:
    """Adopts orphans of child processes, to wait for them (Linux).

    Else they fall to process 1, which in many a container waits for nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def send_to_group(pid: int, number: int) -> bool:
    """Signals a process group; returns True if it has a process."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process with another user's rights
    return True


def main() -> None:
    """Blocks until the child has ended; exits with its code. The caller has blocked all signals."""
    child, grace_s, writing_fd = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    awaited = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:
            awaited.add(number)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # some systems drop what is ignored
    adopt_orphans()
    code: int | None = None
    while code is None:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                break
        else:
            came = signal.sigwait(awaited)
            if came != signal.SIGCHLD:
                with contextlib.suppress(OSError):  # the child ends, or reads none any more
                    os.write(writing_fd, bytes([came]))
                os.kill(child, came)
    if code < 0:
        words = f"the process that runs the workers was killed by signal {-code}; they are stopped"
        print(f"shardwell: {words}", file=sys.stderr)
        _end_session(child, grace_s)
    sys.exit(code if code >= 0 else 128 - code)


def _end_session(session: int, grace_s: float) -> None:
    asked: set[int] = set()
    deadline_s = time.monotonic() + grace_s
    while (groups := _groups_of(session)) and time.monotonic() < deadline_s:
        for group in groups - asked:
            send_to_group(group, signal.SIGTERM)
        asked |= groups
        time.sleep(_LOOK_INTERVAL_S)
    for group in groups:
        send_to_group(group, signal.SIGKILL)


def _groups_of(session: int) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group, its_session = entry.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.add(int(group))
    return found


if __name__ == "__main__":
    main()
