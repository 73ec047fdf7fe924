"""Programs and calls in processes that start in milliseconds: forked from one that has imported
what they need.

To import gRPC, NumPy and the service costs more processor time than most programs of tests do, and
frameworks cost ten times as much: what a program's text imports of those is imported before it is
forked, and stays for the next. A
program here is a process as others are, with arguments, environment, streams and an end of its own;
what it lacks is the start of Python and the first import. Others have these: signals that come
then, commands as users type them, all that `cluster` and `demo` start (test_signals.py,
test_docs.py). The forking process has one thread and never uses gRPC.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pickle
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from harness.polling import readable

_MODULES = (
    "harness.data.first_weights_plan",
    "harness.data.table_plan",
    "harness.data.training_plan",
    "harness.programs.group_worker",
    "harness.programs.session_worker",
    *(f"shardwell_server.cli.{name}" for name in ("checkpoint", "health", "serve", "status")),
    "shardwell_server.local_cluster",
)
_FRAMEWORKS = {
    "torch": ("shardwell.torch", "torch.nn.functional", "torch.optim"),
    "transformers": ("transformers.trainer",),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "jax": ("shardwell.jax", "jax.numpy"),
    "optax": ("optax",),
    "sklearn": ("sklearn.datasets",),
}
"""Modules imported for a program whose text imports a framework."""
_READ_AT_IMPORT = ("JAX_", "XLA_", "KERAS_")
"""Variables that frameworks read as they are imported: nothing is, before a program with one."""
_MESSAGE_BYTES_MAX = 200 * 1024
_PR_SET_PDEATHSIG = 1
_TESTS = str(Path(__file__).resolve().parents[2])
_PATH = os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
_LINE_COUNT_KEPT = 60

Asked: TypeAlias = tuple[Sequence[str], Mapping[str, str], str, Sequence[str]]
"""Arguments behind `python`, environment, working directory, modules to import before."""


def modules_of(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The modules that a program imports of frameworks, by its text: a script, or behind `-c`."""
    if arguments[0] == "-m" or any(name.startswith(_READ_AT_IMPORT) for name in environment):
        return []
    text = arguments[1] if arguments[0] == "-c" else Path(arguments[0]).read_text()
    imported = re.findall(r"^\s*(?:import|from) (.*)$", text, re.M)
    named = {word for line in imported for word in re.findall(r"[\w.]+", line)}
    roots = {name.partition(".")[0] for name in named} | ({"torch", "jax"} & named)
    return [module for root, found in _FRAMEWORKS.items() if root in roots for module in found]


class ForkedProgram:
    """A program that runs, or has ended; as subprocess.Popen has it, with streams of text."""

    def __init__(self, server: ForkServer, pid: int, *streams: int) -> None:
        stdin, stdout, stderr = streams
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[str] | None = os.fdopen(stdin, "w") if stdin >= 0 else None
        self.stdout: IO[str] = os.fdopen(stdout)
        self.stderr: IO[str] | None = os.fdopen(stderr) if stderr >= 0 else None
        self._server = server
        self._lock = threading.Lock()
        self._handle = os.pidfd_open(pid)  # it is a zombie at worst

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for its end; the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        with self._lock:
            if self.returncode is None:
                if not select.select([self._handle], [], [], timeout_s)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0.0)
                self.returncode = self._server.reap(self.pid)
                os.close(self._handle)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends one, unless it was waited for."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks. Any thread may start programs."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # One thread, so that a fork has all of them.
                env={
                    **os.environ,
                    "PYTHONPATH": _PATH,
                    "OPENBLAS_NUM_THREADS": "1",
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                },
            )
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Whose children the programs are."""
        return self._process.pid

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None = None,
        has_errors_apart: bool = True,
    ) -> ForkedProgram:
        """Starts `python ARGUMENTS`.

        Args:
            arguments: "-m" and a module, "-c" and a program, or a script; then its own.
            environment: All of it.
            stdin: subprocess.PIPE; else there is none.
            has_errors_apart: Whether what it writes to stderr has a pipe of its own.
        """
        mine: list[int] = []
        theirs: list[int] = []
        for number in range(3):
            if number == 0 and stdin != subprocess.PIPE:
                mine.append(-1)
                theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                continue
            if number == 2 and not has_errors_apart:
                mine.append(-1)
                theirs.append(os.dup(theirs[1]))
                continue
            reading, writing = os.pipe2(os.O_CLOEXEC)
            mine.append(writing if number == 0 else reading)
            theirs.append(reading if number == 0 else writing)
        modules = modules_of(arguments, environment)
        asked: Asked = (list(arguments), dict(environment), os.getcwd(), modules)
        try:
            pid = self._ask(pickle.dumps(asked), theirs)
        finally:
            for file in theirs:
                os.close(file)
        return ForkedProgram(self, pid, *mine)

    def reap(self, pid: int) -> int:
        """The exit code of a program that has ended."""
        return self._ask(pickle.dumps(pid), [])

    def _ask(self, request: bytes, files: Sequence[int]) -> int:
        assert len(request) <= _MESSAGE_BYTES_MAX
        with self._lock:
            socket.send_fds(self._socket, [request], files)
            answer = self._socket.recv(_MESSAGE_BYTES_MAX)
        assert answer, "the process that forks has ended"
        return int(answer)

    def close(self) -> None:
        """Ends it, and what it started."""
        self._socket.shutdown(socket.SHUT_RDWR)  # other forked processes may hold it, too
        self._socket.close()
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """That of this process."""
    return ForkServer()


class ForkedCall:
    """A call of a function in a process of its own, whose output and errors come through one pipe.

    The process ends when the function returns, with code 0.
    """

    def __init__(self, function: Callable[..., None], arguments: Sequence[Any]) -> None:
        self._process = fork_server().start(
            ("-m", "harness.programs.forked_call", pickle.dumps((function, arguments)).hex()),
            {**os.environ, "PYTHONPATH": _PATH},
            has_errors_apart=False,
        )
        self.pid = self._process.pid
        """Its process id, which stays its own until it was reaped here."""
        self.lines: deque[str] = deque(maxlen=_LINE_COUNT_KEPT)
        """The last lines that were read."""
        self.exit_code: int | None = None
        """None until it was reaped; -9 after SIGKILL."""
        self._unread = b""

    def fileno(self) -> int:
        """Readable when there is output, or it has ended."""
        return self._process.stdout.fileno()

    def read_lines(self) -> list[str] | None:
        """Blocks for output: whole lines, perhaps none; None at its end."""
        data = os.read(self.fileno(), 65536)
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
            self._process.kill()
        return self.reap()

    def reap(self) -> int:
        """Waits until it is gone; its exit code. Safe to repeat."""
        if self.exit_code is None:
            self.exit_code = self._process.wait()
            self._process.stdout.close()
        return self.exit_code


class ForkedCalls:
    """Starts them; any thread may. A context manager that kills those that are left."""

    def __init__(self) -> None:
        self._calls: list[ForkedCall] = []

    def start(self, function: Callable[..., None], *arguments: Any) -> ForkedCall:
        """Calls a module's function in a new process."""
        self._calls.append(ForkedCall(function, arguments))
        return self._calls[-1]

    def __enter__(self) -> ForkedCalls:
        return self

    def __exit__(self, *reason: object) -> None:
        for call in self._calls:
            call.kill()


# In the process that forks.


def _serve() -> Callable[[], None] | None:
    """Starts programs until the other end of standard input is closed; in a program: what it is."""
    sys.path.remove(str(Path(__file__).parent))
    for module in _MODULES:
        __import__(module)
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            data, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES_MAX, 3)
            if not data:
                return None
            asked = pickle.loads(data)
            if isinstance(asked, int):
                code = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
                requests.send(str(code).encode())
                continue
            for module in asked[3]:
                with contextlib.suppress(ImportError):  # of which the program itself will say more
                    importlib.import_module(module)
            gc.freeze()  # what programs share is neither looked through nor written to in each
            thread_count = len(os.listdir("/proc/self/task"))
            assert thread_count == 1, f"{thread_count} threads, of which a fork would keep one"
            parent_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                break
            for file in files:
                os.close(file)
            requests.send(str(pid).encode())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return functools.partial(_become, asked)


def _become(asked: Asked) -> None:
    """The program, in this process."""
    arguments, environment, directory, _ = asked
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = [path for path in sys.path if path != _TESTS]
    if arguments[0] == "-m":
        sys.path[:] = [directory, *paths, *known]
        sys.argv[:] = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path[:] = ["", *paths, *known]
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    else:
        sys.path[:] = [str(Path(arguments[0]).parent), *paths, *known]
        sys.argv[:] = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    become = _serve()
    if become is not None:
        become()
