"""Ends the workers' process groups when `shardwell run` is gone without having done so.

Run as a script in a session of its own: `reaper.py GRACE_S`. Its standard input is a pipe on which
workers tell "+PID" when they start, and their parent "-PID" when nothing is left of a process
group. The pipe's end is the parent's end, also with kill -9; then SIGTERM to each group that is
left, and SIGKILL after the grace.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_LOOK_INTERVAL_S = 0.02


def send_to_group(pid: int, number: int) -> bool:
    """Sends a signal to all of a process group; whether there is somebody in it."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody, but with another user's rights
    return True


def main() -> None:
    """Blocks until the pipe's end."""
    grace_s = float(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept: set[int] = set()
    for line in sys.stdin:
        pid = int(line)
        if pid > 0:
            kept.add(pid)
        else:
            kept.discard(-pid)
    left = {pid for pid in kept if send_to_group(pid, signal.SIGTERM)}
    deadline_s = time.monotonic() + grace_s
    while left and time.monotonic() < deadline_s:
        time.sleep(_LOOK_INTERVAL_S)
        left = {pid for pid in left if send_to_group(pid, 0)}
    for pid in left:
        send_to_group(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
