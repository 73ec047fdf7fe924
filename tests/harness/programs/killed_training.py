"""Workers of one program, one of which is killed -9 in the middle of training and started again.

Proxies slow the steps down until the worker has been killed, so that no training ends before. That
worker alone connects through them where all others wait for it; where they go on, all do, until it
is back. A program of PyTorch writes down the learning rates of each step, and stops before a step
if it is to.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from harness.faults.proxy import Proxy
from harness.leaks import child_pids
from harness.polling import eventually
from harness.programs.commands import Program
from shardwell import Client
from shardwell_server import LocalCluster

END_TIMEOUT_S = 90.0
"""Under the 120 s that a worker waits for one that does not come."""
LAUNCH_TIMEOUT_S = 180.0
"""Of two workers that each import PyTorch, beside the other tests."""
STEP_DELAY_S = 0.02
"""Of each read of a proxy's, until a worker was killed."""
KILLED_AFTER = 2
"""Steps that all have ended."""
PAUSE_VARIABLE = "PAUSED_BEFORE"
_RATES = f"""
import os, signal
from torch.optim.optimizer import register_optimizer_step_pre_hook


def note_rates(optimizer, *_, counted=[]):
    counted.append(optimizer)
    if str(len(counted)) == os.environ.get("{PAUSE_VARIABLE}"):
        signal.pause()
    with open(f"rates-{{os.getpid()}}", "a") as file:
        print(*[group["lr"] for group in optimizer.param_groups], file=file)


register_optimizer_step_pre_hook(note_rates)
"""


def with_rates(program: str) -> str:
    """A program that writes the rates of each step of an optimizer of PyTorch to a file.

    With $PAUSED_BEFORE it stops for good before its step of that number, from 1 on.
    """
    return _RATES + program if re.search(r"^import .*\btorch\b", program, re.M) else program


def rates_of(pid: int) -> list[str]:
    """What a process wrote, a line a step; it works in the working directory."""
    path = Path(f"rates-{pid}")
    return path.read_text().splitlines() if path.exists() else []


def goes_on(rates: list[str], before: list[str], undisturbed: list[str]) -> bool:
    """Whether rates are an undisturbed run's, from one of the steps on that were made before."""
    steps = range(1, min(len(before) + 1, len(undisturbed)))
    return any(
        rates[: len(undisturbed) - step] == undisturbed[step : step + len(rates)] for step in steps
    )


def weights_of(reader: Client) -> dict[str, bytes]:
    """The weights of all parameters."""
    found = dict[str, bytes]()
    for parameter in reader.status()[0].parameters:
        weights = reader.parameter(parameter.spec.name).get_weights()
        arrays = weights.values() if isinstance(weights, dict) else [weights]
        found[parameter.spec.name] = b"".join(np.asarray(array).tobytes() for array in arrays)
    return found


def run_launched(
    program: Path,
    in_the_middle: Callable[[], bool],
    disturbed: Mapping[str, str],
    environment: Mapping[str, str],
) -> Program:
    """Has `shardwell run` start two workers, one of which is killed -9; then runs it again.

    Args:
        program: The file that each worker runs.
        in_the_middle: Whether the training is where the kill is to come.
        disturbed: Variables of the first launch.
        environment: Variables of the second one.

    Returns:
        The second launch, which has ended with exit code 0.
    """
    launch = ("-m", "shardwell_server", "run", "-n", "2", "--", sys.executable, str(program))
    with Program(*launch, environment=disturbed) as launched:
        eventually(
            "the training is in the middle",
            lambda: launched.process.poll() is not None or in_the_middle(),
            timeout_s=LAUNCH_TIMEOUT_S,
        )
        assert launched.process.poll() is None, launched.log
        os.kill(min(child_pids(launched.pid)), signal.SIGKILL)
        assert launched.end(END_TIMEOUT_S) != 0
    with Program(*launch, environment=environment) as again:
        assert again.end(LAUNCH_TIMEOUT_S) == 0, (again.lines, again.log)
    return again


def run_launched_group(program: Path, pause_before: int) -> tuple[Program, list[int]]:
    """As `run_launched`, without shards: one is killed where both have stopped before a step.

    Returns:
        The second launch, and the steps that each of the four workers has made.
    """

    def counts() -> list[int]:
        return sorted(len(path.read_text().splitlines()) for path in Path().glob("rates-*"))

    again = run_launched(
        program,
        lambda: counts() == [pause_before - 1] * 2,
        {PAUSE_VARIABLE: str(pause_before), "OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "1"},
    )
    return again, counts()


class KilledTraining:
    """Starts workers of a program. A context manager that kills those that still run.

    Args:
        cluster: The shards.
        reader: A client of them.
        program: The file that each worker runs, in the working directory.
        environment: Variables of each worker besides those of the cluster.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        reader: Client,
        program: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self.killed: Program | None = None
        """The worker that was killed."""
        self._versions = versions(reader)
        self._program = program
        self._waits = "Elastic(" not in program.read_text()
        """Whether all workers wait for one that is gone."""
        self._proxies = [self._stack.enter_context(Proxy(each)) for each in cluster.addresses]
        self._direct = {
            "SHARDWELL_SHARDS": cluster.target,
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self._slowed = {
            **self._direct,
            "SHARDWELL_SHARDS": ",".join(proxy.address for proxy in self._proxies),
            "SHARDWELL_SAME_HOST": "off",  # else messages would not go through the proxies
        }

    def start(self, arguments: Sequence[str]) -> Program:
        """A worker at full speed."""
        return self._start(arguments, self._direct)

    def _start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Program:
        file = str(self._program)
        program = Program(file, *arguments, environment=environment, is_forked=True)
        return self._stack.enter_context(program)

    def run(
        self, workers: Sequence[Sequence[str]], step_count: int, *, first_line: str = ""
    ) -> list[Program]:
        """Trains with a kill of the first worker: all end with exit code 0.

        Args:
            workers: Arguments of each.
            step_count: The step at which the training ends, and not before the kill.
            first_line: Pattern of a line that each worker prints as it begins to train. Where the
                others go on, they stay slow until the restarted worker has printed it.

        Returns:
            The programs that ended, in the order of `workers`.
        """
        self.killed, *others = self.begin(workers, KILLED_AFTER)
        killed = self.killed
        killed.process.kill()
        killed.end()
        assert self._versions() < step_count
        started = [self.start(workers[0]), *others]
        while first_line and not re.fullmatch(first_line, started[0].read_line(END_TIMEOUT_S)):
            pass
        for proxy in self._proxies:
            proxy.slow_down()
        for worker in started:
            assert worker.end(END_TIMEOUT_S) == 0, (worker.lines, worker.log)
        return started

    def begin(self, workers: Sequence[Sequence[str]], step: int) -> list[Program]:
        """Starts workers that are slow, and waits until all shards have ended that many steps.

        Args:
            workers: Arguments of each.
            step: How many, since the cluster began.
        """
        for proxy in self._proxies:
            proxy.slow_down(delay_s=STEP_DELAY_S)
        environment = self._direct if self._waits else self._slowed
        first, *others = [
            self._start(workers[0], self._slowed),
            *(self._start(arguments, environment) for arguments in workers[1:]),
        ]
        eventually(
            "steps have ended",
            lambda: first.process.poll() is not None or self._versions() >= step,
            timeout_s=END_TIMEOUT_S,  # a framework compiles its first step, slowed, beside others
        )
        assert first.process.poll() is None, first.log
        return [first, *others]

    def run_launched(self) -> Program:
        """Trains with `shardwell run`, of which a worker is killed, and with the command again.

        Returns:
            The second launch, which has ended with exit code 0.
        """
        for proxy in self._proxies:
            proxy.slow_down(delay_s=STEP_DELAY_S)
        return run_launched(
            self._program,
            lambda: self._versions() >= KILLED_AFTER,
            self._slowed,
            self._direct,
        )

    def __enter__(self) -> KilledTraining:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()


def versions(reader: Client) -> Callable[[], int]:
    """The step that is open on all shards, of what is trained; 0 where nothing has begun."""

    def look() -> int:
        open_steps = dict[str, list[int]]()
        for shard in reader.status():
            for parameter in shard.parameters:
                if parameter.slice_size:
                    open_steps.setdefault(parameter.spec.name, []).append(parameter.version_min)
            for table in shard.tables:
                open_steps.setdefault(table.spec.name, []).append(table.version)
        return max(map(min, open_steps.values()), default=0)  # what is only averaged has fewer

    return look
