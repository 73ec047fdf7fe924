"""A child process, with the group of all that it starts, its output and its end.

A child that is tied gets a pipe as its standard input, which the parent holds open and never writes
to: when the parent is gone, however it went, the child reads the end and stops
(`own.stop_when_parent_ends`). It has a session of its own, so that Ctrl-C reaches the parent alone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from shardwell_server.processes.guard import send_to_group

PARENT_FLAG = "--exit-with-parent"
_READ_SIZE_BYTES = 64 * 1024


def python(*arguments: str) -> list[str]:
    """Returns a command of Python that takes no module from the working directory."""
    return [sys.executable, "-P", *arguments]


class Child:
    """A process in a group of its own: signals go to it and to all that it has started."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        program: str | None = None,
        environment: Mapping[str, str] | None = None,
        stderr: IO[str] | int | None = None,
        is_tied: bool = True,
    ) -> None:
        self._process = subprocess.Popen(
            command,
            executable=program,
            stdin=subprocess.PIPE if is_tied else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=None if environment is None else dict(environment),
            start_new_session=is_tied,
            process_group=None if is_tied else 0,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._rest = b""
        self.is_silent = False
        self._has_group = True
        self._asked: int | None = None

    @property
    def outputs(self) -> list[IO[bytes]]:
        """Returns its standard output, and its standard error where that is a pipe."""
        return [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe is not None]

    def read_lines(self, timeout_s: float = 0.0) -> list[str]:
        """Returns whole lines of output that come within `timeout_s`; [] if none does."""
        output = self.outputs[0]
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not self.is_silent and selector.select(timeout_s):
                data = os.read(output.fileno(), _READ_SIZE_BYTES)
                self.is_silent = not data
                *lines, self._rest = (self._rest + data).split(b"\n")
                if lines:
                    return [line.decode(errors="replace") for line in lines]
        return []

    def is_ready(self) -> bool:
        """Returns True once it does its work."""
        return True

    def poll(self) -> int | None:
        """Returns its exit code, as subprocess has it; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Waits for its end; returns as `poll` after `timeout_s` at the latest."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    @property
    def is_gone(self) -> bool:
        """True if it has ended, and nothing that it started is left in its group."""
        if self.poll() is None:
            return False
        # Ours by `adopt_orphans`; what has ended is counted in a group until it is waited for.
        with contextlib.suppress(ChildProcessError):
            while self._has_group and os.waitpid(-self.pid, os.WNOHANG)[0] != 0:
                pass
        return not self.send(0)

    def send(self, number: int) -> bool:
        """Signals the group; returns True if it had a process. Also from signal handlers."""
        # Once the group is empty, the number may be another's.
        if self._has_group and not send_to_group(self.pid, number):
            self._has_group = False
        return self._has_group

    def tell(self, number: int) -> None:
        """Sends a signal to the process alone; also from signal handlers."""
        self._process.send_signal(number)

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal, the first time; also from signal handlers.

        SIGTERM is for the process alone at first: the step that a worker may end needs its
        children, such as the processes of a DataLoader.
        """
        if self._asked is None:
            self._asked = number
            is_alone = number == signal.SIGTERM and self.poll() is None
            (self.tell if is_alone else self.send)(number)

    def ask_the_rest(self) -> None:
        """Sends SIGTERM to the group, if the process has ended by it."""
        if self._asked == signal.SIGTERM:
            self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the group, and waits for the process."""
        self.send(signal.SIGKILL)
        self._has_group = False
        self._process.kill()  # which may have left its group
        self._process.wait()

    def close(self, grace_s: float) -> None:
        """Stops it if it runs, by force after the grace, and closes its pipes. Safe to repeat."""
        self.ask_to_stop()
        self.wait(grace_s)
        self.kill()
        for pipe in (self._process.stdin, *self.outputs):
            if pipe is not None:
                pipe.close()


def describe_exit(code: int | None) -> str:
    """Describes the end of a process in words."""
    if code is None:
        return "its output closed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"
