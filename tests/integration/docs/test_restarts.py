"""Goal: a worker of a program that README or docs/ print may be killed and started again, and the
training ends as if it had not been.

Method: every program that trains with a cluster is found by its text, and run as it is printed, by
the workers that the page starts, or by one; so is the example of outer training. Proxies slow its
steps down until one of its workers has been killed in the middle. Then all must end with exit code
0, at the step that the program's loop ends at, well before any timeout.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.faults.proxy import Proxy
from harness.polling import eventually
from harness.programs.commands import Program
from integration.docs.test_docs import MISSING, PAGES, ROOT, Step, steps_of
from shardwell import Client

END_TIMEOUT_S = 90.0
"""Under the 120 s that a worker waits for one that does not come."""
STEP_DELAY_S = 0.02
"""Of each read of a proxy's, until a worker was killed."""
KILLED_AFTER = 2
"""Steps that all have ended."""
EXAMPLE = "examples/outer_digits.py"
ELSEWHERE = {
    "docs/checkpoints.md 1": "its cluster is its own, and ends with it",
    "docs/ray.md 1": "tests/integration/ray kills a node; workers are Ray's to start again",
}
"""Programs with a loop that no page starts again, and why."""


class TrainingProgram(NamedTuple):
    """A program that a page prints."""

    name: str
    text: str
    loops: tuple[str, ...]
    """What its loops of steps run over."""

    @property
    def workers(self) -> list[list[str]]:
        """Arguments of each process, as the page starts them."""
        return [["w0"], ["w1"]] if "sys.argv[1]" in self.text else [[]]

    @property
    def step_count(self) -> int:
        """At which step it ends."""
        return max(int(loop.rpartition(",")[2]) for loop in self.loops if "," in loop)


def programs() -> list[TrainingProgram]:
    """All blocks of Python that connect and have a loop of steps."""
    found = []
    example = Step(EXAMPLE, (ROOT / EXAMPLE).read_text(), is_python=True)
    for steps in (*map(steps_of, PAGES), [example]):
        for step in steps:
            loops = re.findall(r"for [\w, ]+ in (?:range|zip)\((.*)\):", step.text)
            loops += map(", ".join, re.findall(r"while ([\w.]+) < (\d+):", step.text))
            if step.is_python and loops and "connect(" in step.text:
                found.append(TrainingProgram(step.name, step.text, tuple(loops)))
    return [each for each in found if each.name not in ELSEWHERE]


def needs(program: TrainingProgram) -> bool:
    """Whether it imports what this environment does not have."""
    return any(re.search(rf"\bimport .*\b{name}\b", program.text) for name in MISSING)


@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_loops_go_on_at_the_next_step(program: TrainingProgram) -> None:
    for loop in program.loops:
        assert re.fullmatch(r"[\w.]+\.next_step(, \d+)?", loop), loop


@pytest.mark.parametrize(
    "program",
    [program for program in programs() if not needs(program)],
    ids=lambda program: program.name,
)
def test_a_killed_worker_goes_on(
    cluster, connect, tmp_path: Path, monkeypatch, program: TrainingProgram
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(program.text)
    running = cluster(2)
    reader = connect(running, "reader")
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(address)) for address in running.addresses]

        def started(arguments: list[str]) -> Program:
            environment = {
                "SHARDWELL_SHARDS": ",".join(proxy.address for proxy in proxies),
                "SHARDWELL_SAME_HOST": "off",  # else messages would not go through the proxies
                "OMP_NUM_THREADS": "1",
            }
            return stack.enter_context(
                Program("program.py", *arguments, environment=environment, is_forked=True)
            )

        for proxy in proxies:
            proxy.slow_down(delay_s=STEP_DELAY_S)
        workers = [started(arguments) for arguments in program.workers]
        killed = workers.pop(0)
        eventually(
            "steps have ended",
            lambda: killed.process.poll() is not None or versions(reader)() >= KILLED_AFTER,
        )
        assert killed.process.poll() is None, killed.log
        killed.process.kill()
        killed.end()
        for proxy in proxies:
            proxy.slow_down()
        assert versions(reader)() < program.step_count
        workers.append(started(program.workers[0]))
        for worker in workers:
            assert worker.end(END_TIMEOUT_S) == 0, (worker.lines, worker.log)
        if len(workers) > 1:  # who was away for the last steps has none to make
            late = started(program.workers[0])
            assert late.end(END_TIMEOUT_S) == 0, (late.lines, late.log)
        assert versions(reader)() == program.step_count


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
