"""The command `shardwell` and other programs as child processes, with bounded waits."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from harness.polling import PATIENCE_S
from harness.programs import forkserver
from harness.tokens import TOKEN_FILE_VARIABLE

START_TIMEOUT_S = PATIENCE_S
END_TIMEOUT_S = PATIENCE_S
_SERVING = "serving on "
TRAINING_WORKER = Path(__file__).with_name("training_worker.py")


class Program:
    """A running child whose output is read line by line. A context manager that kills it.

    Args:
        arguments: Behind `python`.
        environment: Variables besides this process's, of which it has none of Shardwell's but the
            token of all tests, where there is one.
        stdin: Argument of subprocess.Popen; default: DEVNULL.
        is_forked: Started by forkserver.py, unless $SHARDWELL_TEST_UNFORKED is set.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: int | None = None,
        is_forked: bool = False,
    ) -> None:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith("SHARDWELL_") or k == TOKEN_FILE_VARIABLE
        }
        variables = {**kept, **(environment or {})}
        self.process: subprocess.Popen[str] | forkserver.ForkedProgram
        if is_forked and not os.environ.get("SHARDWELL_TEST_UNFORKED"):
            self.process = forkserver.fork_server().start(arguments, variables, stdin=stdin)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=variables,
                text=True,
            )
        self.lines: list[str] = []
        """What it has printed so far, as far as it was read."""
        self.log: list[str] = []
        """Its lines on stderr."""
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read_output, name="program-output"),
            threading.Thread(target=self._read_log, name="program-log"),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def read_line(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The next line of its output; fails at its end or after `timeout_s`."""
        try:
            line = self._unread.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"no line within {timeout_s:g} s; {self._story()}") from None
        assert line is not None, f"it ended with code {self.process.wait()}; {self._story()}"
        self.lines.append(line)
        return line

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def end(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Waits for its end; the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s:g} s; {self._story()}") from None
        for reader in self._readers:
            reader.join(timeout_s)
        while (line := self._unread.get()) is not None:
            self.lines.append(line)
        self._unread.put(None)
        return code

    def close(self) -> None:
        """Kills it if it runs, and waits until it is gone."""
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _story(self) -> str:
        return f"output {self.lines}, log {self.log[-5:]}"

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._unread.put(line.rstrip("\n"))
        self._unread.put(None)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


class ServingShard(Program):
    """`shardwell serve` on a free port, unless the flags say otherwise."""

    def __init__(self, *flags: str, index: int = 0, count: int = 1, port: int = 0) -> None:
        super().__init__(
            "-m",
            "shardwell_server",
            "serve",
            f"--shard-index={index}",
            f"--shard-count={count}",
            f"--listen=127.0.0.1:{port}",
            *flags,
            is_forked=True,
        )

    def address(self) -> str:
        """Waits until it serves; HOST:PORT."""
        line = self.read_line()
        assert line.startswith(_SERVING), line
        return line.removeprefix(_SERVING)


def run_command(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """`shardwell ARGUMENTS` until it ends: exit code, output, log."""
    command = ("-m", "shardwell_server", *arguments)
    with Program(*command, environment=environment, is_forked=True) as program:
        code = program.end(3 * END_TIMEOUT_S)  # a launch starts programs again
        return code, "\n".join(program.lines), "\n".join(program.log)
