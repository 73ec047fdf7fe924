"""The demo's workers: child processes, and what they have reported so far.

Each worker has a thread that reads its reports and keeps the latest, so memory is bounded however
late they are looked at.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shardwell.process.connected import Closing
from shardwell_server.demo.errors import DemoError
from shardwell_server.demo.reports import Report, parse_line
from shardwell_server.processes import PARENT_FLAG, ChildProcess, describe_exit

SILENCE_MAX_S = 90.0
"""A worker that reports nothing for so long is taken for stuck; longer than its own deadlines."""
_GRACE_S = 2.0
_STDERR_LINE_COUNT_MAX = 20
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}
"""As many math threads as cores in every worker would have the workers fight for the cores."""


class WorkerTask(Protocol):
    """The part of a worker's task that its pool knows."""

    @property
    def worker_id(self) -> str:
        """Its name."""

    @property
    def step_count(self) -> int:
        """Steps that it has made when it has done all."""

    def command(self) -> list[str]:
        """The arguments of Python that do it, and report on standard output."""


class Member:
    """One worker's process. Its fields are written by its own thread and read by any."""

    def __init__(self, task: WorkerTask, folder: Path | None = None) -> None:
        self.task = task
        self.latest: Report | None = None
        self.loss: float | None = None
        self.measures: Mapping[str, float] = {}
        self.first_loss: float | None = None
        self.first_step_s: float | None = None
        self.heard_s = time.monotonic()
        self.is_let_go = False
        """True if it was ended on purpose, so that it is right however it ends."""
        self._error: str | None = None
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see close
        self._child = ChildProcess(
            [*task.command(), PARENT_FLAG],
            environment={**os.environ, **_ONE_THREAD, **_imports_from(folder)},
            stderr=self._stderr,
        )
        self._thread = threading.Thread(
            target=self._read, name=f"demo-{task.worker_id}", daemon=True
        )
        self._thread.start()

    @property
    def step(self) -> int:
        """Steps that it has made, by its latest report."""
        return 0 if self.latest is None else self.latest.step

    def has_finished(self) -> bool:
        """True if it has made all its steps and ended; DemoError: it ended before, or is silent."""
        name = f"worker {self.task.worker_id}"
        if self.is_let_go:
            return not self._thread.is_alive()
        if self._thread.is_alive():
            silence_s = time.monotonic() - self.heard_s
            if silence_s > SILENCE_MAX_S:
                raise DemoError(
                    f"{name} (process {self._child.pid}) has reported nothing for "
                    f"{silence_s:.0f} s, at step {self.step} of {self.task.step_count}",
                    worker_id=self.task.worker_id,
                )
            return False
        code = self._child.wait(_GRACE_S)
        if code == 0 and self.step >= self.task.step_count:
            return True
        if self._error is not None:
            raise DemoError(f"{name}: {self._error}", worker_id=self.task.worker_id)
        told = self._stderr_tail()
        raise DemoError(
            f"{name} has ended with {describe_exit(code)} at step {self.step} of "
            f"{self.task.step_count}" + (f"; its last words:\n{told}" if told else ""),
            worker_id=self.task.worker_id,
        )

    def ask_to_stop(self) -> None:
        """Sends SIGTERM; does not wait."""
        self._child.ask_to_stop()

    def let_go(self, *, by_force: bool) -> None:
        """Ends it on purpose: by SIGKILL, waiting for its end, or by SIGTERM, not waiting."""
        self.is_let_go = True
        if by_force:
            self._child.kill()
        else:
            self._child.ask_to_stop()

    def close(self) -> None:
        """Stops it if it runs, and waits for its end."""
        self.ask_to_stop()
        if self._child.wait(_GRACE_S) is None:
            self._child.kill()
        self._thread.join()  # reads to the end, so its stream may be closed
        self._child.close(_GRACE_S)
        self._stderr.close()

    def _read(self) -> None:
        while line := self._child.read_line():
            try:
                told = parse_line(line)
            except ValueError:
                continue  # something that a library printed
            self.heard_s = time.monotonic()
            if isinstance(told, str):
                self._error = told
                continue
            if told.loss is not None:
                self.loss = told.loss
                if self.first_loss is None:
                    self.first_loss = told.loss
                    self.first_step_s = self.heard_s
            if told.measures:
                self.measures = told.measures
            self.latest = told

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return "".join(self._stderr.readlines()[-_STDERR_LINE_COUNT_MAX:]).rstrip()


def _imports_from(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([others] if others else [])])}


class WorkerPool(Closing):
    """All workers. A context manager that leaves none behind.

    A child does not import from its working directory, but from `folder`.
    """

    def __init__(self, tasks: Sequence[WorkerTask], folder: Path | None = None) -> None:
        self.members: list[Member] = []
        self._folder = folder
        self._stack = contextlib.ExitStack()
        try:
            for task in tasks:
                self.start(task)
        except BaseException:
            self.close()
            raise

    def start(self, task: WorkerTask) -> None:
        """Starts one more worker."""
        member = Member(task, self._folder)
        self.members.append(member)
        self._stack.callback(member.close)

    @property
    def living(self) -> list[Member]:
        """Workers that were not ended on purpose."""
        return [member for member in self.members if not member.is_let_go]

    def has_finished(self) -> bool:
        """True if all workers have made their steps and ended; DemoError names one that can't."""
        # Each is looked at, whatever the first says: any of them may have failed.
        finished = [member.has_finished() for member in self.members]
        return all(finished)

    def close(self) -> None:
        """Stops all workers and waits for their end. Safe to repeat."""
        for member in self.members:
            member.ask_to_stop()
        self._stack.close()
