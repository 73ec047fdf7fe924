"""A check of this process's free descriptors: without, gRPC blames the server, or aborts."""

from __future__ import annotations

import errno
import os
import resource

from shardwell.errors import LimitError

_OWN = (errno.EMFILE, errno.ENFILE)


def check_descriptors(count: int, what: str) -> None:
    """Raises LimitError if `count` files, which `what` needs, could not be opened now."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.dup(opened[0]) if opened else os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in _OWN:
            return
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise LimitError(
            f"{what} needs {count} descriptors, and this process has {len(opened)} left of the "
            f"{most} that it may have open; close files, or raise the limit (ulimit -n)"
        ) from None
    finally:
        for file in opened:
            os.close(file)
