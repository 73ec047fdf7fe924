"""What a shard's process does about itself: room for files, and an end instead of half a life."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import threading
from typing import NoReturn

_LOG = logging.getLogger("shardwell_server")
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""
_is_shard = False
"""Whether this process is a shard's."""


def end_when_a_thread_dies() -> None:
    """Ends a shard's process when an error ends one of its threads, gRPC's among them.

    A shard whose threads are gone, mostly for want of memory, answers nobody and still looks alive;
    one that has ended is started again, and goes on from its files.
    """

    def end(error: threading.ExceptHookArgs) -> None:
        try:
            _LOG.critical(
                "a thread has died, and with it this process",
                extra={"thread_name": error.thread.name if error.thread else ""},
                exc_info=error.exc_value,
            )
        finally:
            os._exit(EXIT_CODE)

    global _is_shard
    _is_shard = True
    threading.excepthook = end


def end_process(code: int) -> NoReturn:
    """Ends the process, which has released everything.

    A shard's without Python's own end, in which gRPC waits for its threads, also for one that the
    system did not have.
    """
    if _is_shard:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def raise_file_limit() -> None:
    """Lets this process have as many files as it may; a parameter maps half a dozen."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
