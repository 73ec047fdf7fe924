"""Processes that start in milliseconds: forked from one that has imported everything already.

    with ForkServer() as fork_server:
        child = fork_server.start(function, argument)
        child.await_line("ready", timeout_s=5)
        child.kill()

They are processes like others: with a pid, files and ports of their own, and SIGKILL ends them;
their imports alone, 0.3 s, were made before. The forking process is started anew, has one thread
and never uses gRPC, so there is nothing that a fork could cut in two. Its children die with it, and
it ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.polling import PATIENCE_S, readable
from harness.programs.commands import Program

_MESSAGE_SIZE_MAX_BYTES = 64 * 1024
_LINE_COUNT_KEPT = 60
_END_TIMEOUT_S = PATIENCE_S
_PR_SET_PDEATHSIG = 1
_TESTS = str(Path(__file__).resolve().parents[2])


class ForkedProcess:
    """A child of the fork server, whose standard output and error come through one pipe."""

    def __init__(self, fork_server: ForkServer, pid: int, pipe: int) -> None:
        self.pid = pid
        """Its process id, which stays its own until it was reaped here."""
        self.lines: deque[str] = deque(maxlen=_LINE_COUNT_KEPT)
        """The last lines that were read."""
        self.exit_code: int | None = None
        """None until it was reaped; -9 after SIGKILL."""
        self._fork_server = fork_server
        self._pipe = pipe
        self._unread = b""

    def fileno(self) -> int:
        """Readable when there is output, or it has ended."""
        return self._pipe

    def read_lines(self) -> list[str] | None:
        """Blocks for output: whole lines, perhaps none; None at its end."""
        data = os.read(self._pipe, 65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        found = [line.decode(errors="replace") for line in lines]
        self.lines.extend(found)
        return found if data else None

    def await_line(self, prefix: str, *, timeout_s: float) -> str | None:
        """The rest of the first line that begins so; None if it ends without.

        Raises:
            AssertionError: there was none in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while readable([self], deadline_s - time.monotonic()):
            lines = self.read_lines()
            if lines is None:
                return None
            for line in lines:
                if line.startswith(prefix):
                    return line.removeprefix(prefix)
        raise AssertionError(f"no {prefix!r} within {timeout_s:g} s; output {list(self.lines)}")

    def kill(self) -> int:
        """Sends SIGKILL, and reaps it; its exit code, which is another one if it had ended."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.reap()

    def reap(self) -> int:
        """Waits until it is gone; its exit code. Safe to repeat."""
        if self.exit_code is None:
            self.exit_code = self._fork_server.reap(self.pid)
            os.close(self._pipe)
        return self.exit_code


class ForkServer:
    """Starts children; any thread may. A context manager that kills those that are left.

    Args:
        modules: What is imported before the first fork.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        path = os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._program = Program(
                "-m",
                "harness.programs.forkserver",
                *modules,
                stdin=theirs.fileno(),
                # One thread, so that a fork has all of them.
                environment={"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            )
        self._lock = threading.Lock()
        self._children: set[ForkedProcess] = set()
        assert self._program.read_line() == "ready"

    def start(self, function: Callable[..., None], *arguments: Any) -> ForkedProcess:
        """Calls a module's function in a new process, which ends when it returns, with code 0."""
        mine, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            pid = self._ask(pickle.dumps((function, arguments)), theirs)
        finally:
            os.close(theirs)
        child = ForkedProcess(self, pid, mine)
        self._children.add(child)
        return child

    def reap(self, pid: int) -> int:
        """Waits until a child is gone; its exit code."""
        return self._ask(pickle.dumps(pid))

    def _ask(self, request: bytes, *files: int) -> int:
        assert len(request) <= _MESSAGE_SIZE_MAX_BYTES
        with self._lock:
            socket.send_fds(self._socket, [request], files)
            answer = self._socket.recv(_MESSAGE_SIZE_MAX_BYTES)
        assert answer, f"the fork server has ended; log {self._program.log}"
        return int(answer)

    def close(self) -> None:
        """Kills and reaps what runs, and ends."""
        for child in self._children:
            child.kill()
        self._socket.close()
        code = self._program.end(_END_TIMEOUT_S)
        self._program.close()
        assert code == 0, f"the fork server ended with {code}; log {self._program.log}"

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def _serve() -> None:
    """The server's loop, until the other end of its standard input is closed."""
    for module in sys.argv[1:]:
        __import__(module)
    with socket.socket(fileno=0) as requests:
        thread_count = len(os.listdir("/proc/self/task"))
        assert thread_count == 1, f"{thread_count} threads, of which a fork would keep one"
        print("ready", flush=True)
        while True:
            data, files, _, _ = socket.recv_fds(requests, _MESSAGE_SIZE_MAX_BYTES, 1)
            if not data:
                return
            request = pickle.loads(data)
            if isinstance(request, int):
                _, status = os.waitpid(request, 0)
                requests.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            parent_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become(*request, files[0], parent_pid)
            os.close(files[0])
            requests.send(str(pid).encode())


def _become(
    function: Callable[..., None], arguments: Sequence[Any], output: int, parent_pid: int
) -> NoReturn:
    """What the new process does."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(nothing)
        os.close(output)
        sys.stdout.reconfigure(line_buffering=True)
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
