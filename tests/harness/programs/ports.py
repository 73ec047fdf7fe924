"""Ports that a test may close and listen on again later."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

_FIRST = 10_000
_FIRST_OF_SYSTEM = 32_768
_TRY_COUNT = 20


def free_port() -> int:
    """A port of 127.0.0.1 on which no process listens, nor will before it is asked for.

    It is none of those that the system gives out, to listeners on port 0 and to connections, and
    tests that run at the same time in other processes of pytest-xdist have others.
    """
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = (_stop() - _FIRST) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for _ in range(_TRY_COUNT):
        port = _FIRST + index * share + random.SystemRandom().randrange(share)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port found")


def _stop() -> int:
    try:
        range_ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return _FIRST_OF_SYSTEM
    return int(range_.split()[0])
