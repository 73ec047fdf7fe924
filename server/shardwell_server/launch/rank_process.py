"""One worker of `shardwell run`: its process, and the group of all that it starts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from shardwell_server.launch import announced
from shardwell_server.launch.output import RankOutput, shows_colors
from shardwell_server.launch.reaper import send_to_group

_STDOUT_FD, _STDERR_FD = 1, 2
_PR_SET_CHILD_SUBREAPER = 36


class RankProcess:
    """A worker in a session of its own: signals go to it and to all that it has started.

    Args:
        rank: Its rank.
        program: Path of the executable.
        command: Its arguments, its name first.
        environment: All its variables.
        keeper_fd: Where it tells its keeper of itself.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        rank: int,
        program: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        keeper_fd: int,
    ) -> None:
        self.rank = rank
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", announced.__file__, str(keeper_fd), program, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            pass_fds=[keeper_fd],
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.outputs = [
            RankOutput(rank, source, sink_fd, is_colored=shows_colors(sink_fd))
            for source, sink_fd in (
                (self._process.stdout, _STDOUT_FD),
                (self._process.stderr, _STDERR_FD),
            )
        ]
        self._has_group = True

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; as subprocess has it."""
        return self._process.poll()

    @property
    def is_gone(self) -> bool:
        """It has ended, and nothing that it started is left in its group."""
        if self.exit_code is None:
            return False
        # Ours by `adopt_orphans`; what has ended is counted in a group until somebody waits for it.
        with contextlib.suppress(ChildProcessError):
            while self._has_group and os.waitpid(-self.pid, os.WNOHANG)[0] != 0:
                pass
        return not self.send(0)

    def send(self, number: int) -> bool:
        """Sends a signal to the group; whether there was somebody. Also from signal handlers."""
        # Once nobody is left, the number may be another's.
        if self._has_group and not send_to_group(self.pid, number):
            self._has_group = False
        return self._has_group

    def kill(self) -> None:
        """Kills the group, and waits for the worker."""
        self.send(signal.SIGKILL)
        self._process.wait()


def adopt_orphans() -> None:
    """Makes what workers leave behind ours to wait for, where the system can (Linux).

    Else it falls to process 1, which in many a container waits for nobody.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
