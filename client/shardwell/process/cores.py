"""How many cores this process may use."""

from __future__ import annotations

import os


def core_count() -> int:
    """Cores that the system lets this process run on, where it says so; else those there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
