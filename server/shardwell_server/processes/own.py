"""A process of the service itself: its room for files, and its end instead of half a life."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from shardwell.process import telemetry
from shardwell.process.allocator import tune_malloc

_LOG = logging.getLogger("shardwell_server")
_UMASK = 0o077
_ARENA_COUNT_MAX = 2
"""Messages come and go on many threads; with few heaps their buffers are used again."""
_is_shard = False


def become_shard() -> None:
    """Prepares this process for being a shard's, with as many files as the system allows."""
    os.umask(_UMASK)
    tune_malloc(arena_count_max=_ARENA_COUNT_MAX)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    end_when_a_thread_dies()


def end_when_a_thread_dies() -> None:
    """Ends this process when an error ends one of its threads, gRPC's among them.

    A shard whose threads are gone, mostly for want of memory, answers no call and looks alive.
    """

    def end(error: threading.ExceptHookArgs) -> None:
        try:
            _LOG.critical(
                "a thread has died, and with it this process",
                extra={"thread_name": error.thread.name if error.thread else ""},
                exc_info=error.exc_value,
            )
        finally:
            os._exit(os.EX_SOFTWARE)

    global _is_shard
    _is_shard = True
    threading.excepthook = end


def end_process(code: int) -> NoReturn:
    """Ends the process; a shard's without Python's end, in which gRPC waits for all its threads."""
    if _is_shard:
        telemetry.flush()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def stop_when_parent_ends(stop: Callable[[], None], fd: int = 0) -> None:
    """Calls `stop`, from another thread, when the pipe `fd` is at its end: the parent is gone."""

    def watch() -> None:
        while os.read(fd, 4096):
            pass
        stop()

    threading.Thread(target=watch, name="shardwell-parent", daemon=True).start()
