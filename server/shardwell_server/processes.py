"""Child processes that never outlive their parent.

A child gets a pipe as its standard input, which the parent holds open and never writes to: when the
parent is gone, however it went, the child reads the end and stops (`stop_when_parent_ends`).
Children have a session of their own, so that Ctrl-C reaches the parent alone, which then stops them
in order.

A shard's process sees to itself, too: room for files, and an end instead of half a life.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn

from shardwell.process import telemetry

_LOG = logging.getLogger("shardwell_server")
_is_shard = False
"""Whether this process is a shard's."""
PARENT_FLAG = "--exit-with-parent"
"""Tells a command of this package to call `stop_when_parent_ends`."""


class ChildProcess:
    """`python ARGUMENTS`, with its standard output readable line by line.

    Without the working directory on its path: a file there called random.py is the user's, and none
    of Python's modules.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stderr: IO[str] | int | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=None if environment is None else dict(environment),
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def read_line(self) -> str:
        """The next line of its output without the newline; "" at the end. Blocks."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def read_first_line(self, timeout_s: float) -> str | None:
        """Its first line, as `read_line`; None if none has come in time."""
        with selectors.DefaultSelector() as selector:
            assert self._process.stdout is not None
            selector.register(self._process.stdout, selectors.EVENT_READ)
            # Lines are written whole, so one that has begun is soon complete.
            return self.read_line() if selector.select(timeout_s) else None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Waits for its end; the exit code, or None if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_stop(self) -> None:
        """Sends SIGTERM; does not wait."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL and waits until it is gone."""
        self._process.kill()
        self._process.wait()

    def close(self, grace_s: float) -> int:
        """Stops it if it runs, by force after the grace; the exit code. Safe to repeat."""
        self.ask_to_stop()
        code = self.wait(grace_s)
        if code is None:
            self.kill()
            code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        return code


def stop_when_parent_ends(stop: Callable[[], None], fd: int = 0) -> None:
    """Calls `stop`, from another thread, when the pipe `fd` is at its end: the parent is gone."""

    def watch() -> None:
        while os.read(fd, 4096):
            pass
        stop()

    threading.Thread(target=watch, name="shardwell-parent", daemon=True).start()


def describe_exit(code: int | None) -> str:
    """How a process ended, for a message."""
    if code is None:
        return "its output closed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


def end_when_a_thread_dies() -> None:
    """Ends a shard's process when an error ends one of its threads, gRPC's among them.

    A shard whose threads are gone, mostly for want of memory, answers no call and still looks
    alive; one that has ended is started again, and goes on from its files.
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
    """Ends the process, which has released everything.

    A shard's without Python's own end, in which gRPC waits for its threads, also for one that the
    system did not have.
    """
    if _is_shard:
        telemetry.flush()
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
