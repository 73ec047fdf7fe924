"""Goal: a worker of a program that README or docs/ print may be killed and started again, and the
training ends as if it had not been.

Method: every program that trains with a cluster is found by its text, and run as it is printed, by
the workers that the page starts, or by one; so is the example of outer training. Proxies slow its
steps down until one of its workers has been killed in the middle. Then all must end with exit code
0, at the step that the program's loop ends at, well before any timeout.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.programs.killed_training import END_TIMEOUT_S, KilledTraining, versions
from integration.docs.test_docs import PAGES, ROOT, Step, case, steps_of

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


@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_loops_go_on_at_the_next_step(program: TrainingProgram) -> None:
    for loop in program.loops:
        assert re.fullmatch(r"[\w.]+\.next_step(, \d+)?", loop), loop


@pytest.mark.parametrize("program", [case(each, each.name, each.text) for each in programs()])
def test_a_killed_worker_goes_on(
    cluster, connect, tmp_path: Path, monkeypatch, program: TrainingProgram
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(program.text)
    running = cluster(2)
    reader = connect(running, "reader")
    with KilledTraining(running, reader, Path("program.py")) as training:
        training.run(program.workers, program.step_count)
        if len(program.workers) > 1:  # who was away for the last steps has none to make
            late = training.start(program.workers[0])
            assert late.end(END_TIMEOUT_S) == 0, (late.lines, late.log)
        assert versions(reader)() == program.step_count
