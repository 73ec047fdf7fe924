"""Processes that live at the same time and take turns: while one crew acts, the others sleep.

Both ends: `Crew` in the benchmark, `work` in each of its workers. The standard library alone, since
workers may run in other interpreters. Lines of JSON on a Unix socket; a worker reads it blocking.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

START_MARGIN_S = 0.02
"""From the order to the moment when all ranks of a crew start, which none may sleep through."""
CREW_TIMEOUT_S = 60.0
"""For a crew to be there, and for a step, where nothing else is said."""
Order = dict[str, Any]


class Bench:
    """What one worker can be asked to do."""

    def meet(self, contacts: list[Any]) -> None:
        """Gets what `contact` of each rank was; connects."""

    def contact(self) -> Any:
        """What the other ranks must know."""

    def prepare(self, order: Order) -> None:
        """All that the clock does not see."""

    def act(self) -> None:
        """What the clock sees."""
        raise NotImplementedError

    def finish(self) -> dict[str, Any]:
        """Figures to report, besides times."""
        return {}

    def close(self) -> None:
        """Ends everything."""


class Step(NamedTuple):
    """One step of a whole crew."""

    seconds: float
    """From the common start until the last rank is done."""
    cpu_s: float
    """Of a process, at the mean."""
    reports: list[dict[str, Any]]
    """The ranks' reports, by rank."""


def worker_parser() -> argparse.ArgumentParser:
    """The flags of every worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--size", type=int, required=True)
    return parser


def work(path: str, rank: int, bench: Bench) -> None:
    """Does what the crew says, until it says no more, or is gone."""
    try:
        _work(path, rank, bench)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # whatever threads still wait for


def _work(path: str, rank: int, bench: Bench) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw")

        def tell(value: Any) -> None:
            stream.write(json.dumps(value) + "\n")
            stream.flush()

        def heard() -> Any:
            return json.loads(stream.readline() or "null")  # null: the end

        tell([rank, bench.contact()])
        contacts = heard()
        if contacts is None:
            raise EOFError("the benchmark has ended before all workers were there")
        bench.meet(contacts)
        tell("ready")
        while (order := heard()) is not None:
            bench.prepare(order)
            tell("prepared")
            start = heard()
            if start is None:
                break
            time.sleep(max(start - time.perf_counter(), 0.0))
            cpu = time.process_time()
            bench.act()
            tell([time.perf_counter(), time.process_time() - cpu, bench.finish()])
        bench.close()


class Crew:
    """The workers of one kind. A context manager that leaves none behind.

    Args:
        commands: What starts them; each is given `--socket` and `--size`. One command may start
            several workers, which then know their ranks; else the i-th is given `--rank i`.
        size: Workers.
        environment: Variables besides those of this process.
        timeout_s: For a crew to be there, and for a step.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        size: int,
        environment: dict[str, str] | None = None,
        timeout_s: float = CREW_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._stack = contextlib.ExitStack()
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._streams: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack.callback(self._end)
        try:
            listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(directory / "socket"))
            listener.listen(size)
            parts = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
            path = {"PYTHONPATH": os.pathsep.join(filter(None, parts))}
            for index, command in enumerate(commands):
                rank = ["--rank", str(index)] if len(commands) == size else []
                words = [*command, "--socket", str(directory / "socket"), "--size", str(size)]
                self._processes.append(
                    subprocess.Popen(
                        [*words, *rank],
                        env={**os.environ, **path, **(environment or {})},
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # so that Ctrl-C is for the benchmark alone
                    )
                )
            self._meet(listener, size)
        except BaseException:
            self._stack.close()
            raise

    def step(self, **order: Any) -> Step:
        """One step of all ranks, started at the same moment."""
        self._tell(order)
        for stream in self._streams:
            assert self._heard(stream) == "prepared"
        start = time.perf_counter() + START_MARGIN_S
        self._tell(start)
        heard = [self._heard(stream) for stream in self._streams]
        return Step(
            max(end for end, _, _ in heard) - start,
            sum(cpu for _, cpu, _ in heard) / len(heard),
            [more for _, _, more in heard],
        )

    def close(self) -> None:
        """Ends the processes."""
        with contextlib.suppress(OSError):
            self._tell(None)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        self._stack.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, *reason: object) -> None:
        if kind is None:
            self.close()
        else:  # some may be in the middle of a step, and hear nothing
            self._stack.close()

    def _meet(self, listener: socket.socket, size: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        streams: dict[int, Any] = {}
        contacts: dict[int, Any] = {}
        listener.settimeout(0.5)
        while len(streams) < size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._check(deadline)
                continue
            connection.settimeout(self._timeout_s)
            stream = connection.makefile("rw")
            connection.close()
            self._stack.callback(_close, stream)
            rank, contact = self._heard(stream)
            streams[rank], contacts[rank] = stream, contact
        self._streams = [streams[rank] for rank in range(size)]
        self._tell([contacts[rank] for rank in range(size)])
        for stream in self._streams:
            assert self._heard(stream) == "ready"

    def _check(self, deadline: float) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all workers of {self._processes[0].args!r} came in time")

    def _tell(self, value: Any) -> None:
        line = json.dumps(value) + "\n"
        for stream in self._streams:
            stream.write(line)
            stream.flush()

    def _heard(self, stream: Any) -> Any:
        try:
            line = stream.readline()
        except TimeoutError:
            line = ""
        if not line:
            raise RuntimeError(f"a worker of {self._processes[0].args!r} ended or is stuck")
        return json.loads(line)

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _close(stream: Any) -> None:
    """Closes a connection whose other end may be gone, with messages unsent."""
    with contextlib.suppress(OSError):
        stream.close()


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time that processes have had."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # clock_getcpuclockid(3)'s


def worker_command(name: str, *flags: str, python: str = sys.executable) -> list[str]:
    """What starts a worker that lies beside this file."""
    return [python, str(Path(__file__).with_name(name)), *flags]
