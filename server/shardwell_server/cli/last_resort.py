"""What a shard's process does about itself: room for files, and an end instead of half a life."""

from __future__ import annotations

import logging
import os
import resource
import threading

_LOG = logging.getLogger("shardwell_server")
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


def end_when_a_thread_dies() -> None:
    """Ends the process when an error ends one of its threads, gRPC's among them.

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

    threading.excepthook = end


def raise_file_limit() -> None:
    """Lets this process have as many files as it may; a parameter maps half a dozen."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
