"""Newcomers while descriptors run out: they are refused by name, and the rest go on."""

from __future__ import annotations

import os
import resource

from shardwell.errors import LimitError

_DESCRIPTOR_RESERVE = 16
"""Descriptors that newcomers leave: to accept a connection and refuse it by name, and for files."""
_DESCRIPTORS = "/proc/self/fd"


def admit_newcomer() -> None:
    """Refuses a client while the last descriptors are needed by those who are there.

    Raises:
        LimitError: there are no others.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir(_DESCRIPTORS))
    except FileNotFoundError:
        return  # a system that does not tell
    except OSError:
        count = most
    if most != resource.RLIM_INFINITY and count > most - _DESCRIPTOR_RESERVE:
        raise LimitError(
            f"limit of open files: the shard has {count} of {most}; raise it (ulimit -n), or use "
            "fewer workers or parameters"
        )
