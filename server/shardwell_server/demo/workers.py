"""The demo's workers: child processes, and what they have reported so far.

Of reports that are read together the latest is kept, and pipes bound what was not read yet.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shardwell.process.connected import Closing
from shardwell_server.demo.reports import DemoError, Report, parse_line
from shardwell_server.processes.child import PARENT_FLAG, Child, describe_exit, python
from shardwell_server.processes.supervise import Supervisor

SILENCE_MAX_S = 90.0
"""A worker that is silent for so long is stuck; longer than its own deadlines."""
_GRACE_S = 2.0
_STDERR_LINE_COUNT_MAX = 20
_ONE_THREAD = {
    f"{library}_THREADS": "1"
    for library in ("OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "BLIS_NUM", "VECLIB_MAXIMUM")
}
"""As many math threads as cores in every worker would have the workers fight for the cores."""


class WorkerTask(Protocol):
    """The part of a worker's task that its pool knows."""

    @property
    def worker_id(self) -> str:
        """The worker's name."""

    @property
    def step_count(self) -> int:
        """The number of steps of the whole task."""

    def command(self) -> list[str]:
        """Returns the arguments of Python that run it, and report on standard output."""


class Member:
    """The process of one worker, and its reports up to the last look."""

    def __init__(
        self, task: WorkerTask, supervisor: Supervisor[Child], folder: Path | None
    ) -> None:
        self.task = task
        self.latest: Report | None = None
        self.loss: float | None = None
        self.measures: Mapping[str, float] = {}
        self.first_loss: float | None = None
        self.first_step_s: float | None = None
        self.heard_s = time.monotonic()
        self.is_let_go = False
        """True if it was ended on purpose, so that any end is right."""
        self._error: str | None = None
        self._folder = folder
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see close
        self._child = supervisor.add(self._started).process

    def _started(self, _restart_count: int) -> Child:
        environment = {**os.environ, **_ONE_THREAD}
        if self._folder is not None:
            paths = (str(self._folder), os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return Child(
            python(*self.task.command(), PARENT_FLAG),
            environment=environment,
            stderr=self._stderr,
        )

    @property
    def step(self) -> int:
        """The steps that it has made, by its latest report."""
        return 0 if self.latest is None else self.latest.step

    def has_finished(self) -> bool:
        """Returns True if it ended after all its steps; DemoError: before, or it is silent."""
        name = f"worker {self.task.worker_id}"
        is_running = self._child.poll() is None
        while lines := self._child.read_lines():
            for line in lines:
                self._take(line)
        if self.is_let_go:
            return not is_running
        if is_running and not self._child.is_silent:
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
        said = self._stderr_tail()
        raise DemoError(
            f"{name} has ended with {describe_exit(code)} at step {self.step} of "
            f"{self.task.step_count}" + (f"; its last words:\n{said}" if said else ""),
            worker_id=self.task.worker_id,
        )

    def let_go(self, *, by_force: bool) -> None:
        """Ends it on purpose: by SIGKILL, waiting for its end, or by SIGTERM, not waiting."""
        self.is_let_go = True
        if by_force:
            self._child.kill()
        else:
            self._child.ask_to_stop()

    def close(self) -> None:
        """Drops its output, once it has ended."""
        self._stderr.close()

    def _take(self, line: str) -> None:
        try:
            report = parse_line(line)
        except ValueError:
            return  # something that a library printed
        self.heard_s = time.monotonic()
        if isinstance(report, str):
            self._error = report
            return
        if report.loss is not None:
            self.loss = report.loss
            if self.first_loss is None:
                self.first_loss = report.loss
                self.first_step_s = self.heard_s
        if report.measures:
            self.measures = report.measures
        self.latest = report

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return "".join(self._stderr.readlines()[-_STDERR_LINE_COUNT_MAX:]).rstrip()


class WorkerPool(Closing):
    """All workers, which import from `folder`. A context manager that leaves none behind."""

    def __init__(self, tasks: Sequence[WorkerTask], folder: Path | None = None) -> None:
        self.members: list[Member] = []
        self._folder = folder
        self._supervisor: Supervisor[Child] = Supervisor(_GRACE_S)
        try:
            for task in tasks:
                self.start(task)
        except BaseException:
            self.close()
            raise

    def start(self, task: WorkerTask) -> None:
        """Starts one more worker."""
        self.members.append(Member(task, self._supervisor, self._folder))

    @property
    def living(self) -> list[Member]:
        """The workers that were not ended on purpose."""
        return [member for member in self.members if not member.is_let_go]

    def has_finished(self) -> bool:
        """Returns True if all workers have ended well; DemoError names one that can't."""
        # Each is looked at, whatever the first says: any of them may have failed.
        finished = [member.has_finished() for member in self.members]
        return all(finished)

    def close(self) -> None:
        """Stops all workers and waits for their end. Safe to repeat."""
        try:
            self._supervisor.close()
        finally:
            for member in self.members:
                member.close()
