"""Workers of one program, one of which is killed -9 in the middle of training and started again.

Proxies slow the steps down until the worker has been killed, so that no training ends before. That
worker alone connects through them where all others wait for it; where they go on, all do, until it
is back.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.faults.proxy import Proxy
from harness.polling import eventually
from harness.programs.commands import Program
from shardwell import Client
from shardwell_server import LocalCluster

END_TIMEOUT_S = 90.0
"""Under the 120 s that a worker waits for one that does not come."""
STEP_DELAY_S = 0.02
"""Of each read of a proxy's, until a worker was killed."""
KILLED_AFTER = 2
"""Steps that all have ended."""


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
        for proxy in self._proxies:
            proxy.slow_down(delay_s=STEP_DELAY_S)
        killed = self._start(workers[0], self._slowed)
        environment = self._direct if self._waits else self._slowed
        others = [self._start(arguments, environment) for arguments in workers[1:]]
        eventually(
            "steps have ended",
            lambda: killed.process.poll() is not None or self._versions() >= KILLED_AFTER,
            timeout_s=END_TIMEOUT_S,  # a framework compiles its first step, slowed, beside others
        )
        assert killed.process.poll() is None, killed.log
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
