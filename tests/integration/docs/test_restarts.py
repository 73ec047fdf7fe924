"""Goal: a worker of a program that README or docs/ print may be killed and started again, and the
training ends as if it had not been.

Method: every program that trains with a cluster is found by its text, and run as it is printed, by
the workers that the page starts, or by one; so is the example of outer training. Proxies slow its
steps down until one of its workers has been killed in the middle. Then all must end with exit code
0, at the step that the program's loop ends at, well before any timeout, and print what the page
says. Learning rates of a schedule, and weights of a loop that computes the same whenever it is
started, are those of an undisturbed run.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.programs.killed_training import (
    END_TIMEOUT_S,
    KilledTraining,
    goes_on,
    rates_of,
    run_launched_group,
    versions,
    weights_of,
    with_rates,
)
from integration.docs.test_docs import PAGES, PRINTED, ROOT, Step, case, steps_of

EXAMPLE = "examples/outer_digits.py"
ELSEWHERE = {
    "docs/checkpoints.md 1": "its cluster is its own, and ends with it",
    "docs/ray.md 1": "tests/integration/ray kills a node; workers are Ray's to start again",
    "docs/groups.md 2": "without shards, as docs/groups.md says; test_docs.py runs it twice",
    "docs/groups.md 3": "the same",
    "docs/pytorch.md 1": "LAUNCHED has plain.py",
    "docs/pytorch.md 3": "LAUNCHED has whole.py",
    "docs/pytorch.md 4": "LAUNCHED has means.py",
    "docs/pytorch.md 10": "test_frameworks.py kills a worker of each framework",
}
"""Programs with a loop that no page starts again, and why."""
SAME_BITS = ("docs/parameters.md 1", "docs/machines.md 3", "docs/compose.md 1", "docs/jax.md 1")
"""Programs whose gradients depend on weights and steps alone, for the workers of a fixed crew."""
LAUNCHED = {
    "plain.py": r"\[0\] accuracy 0\.9\d",
    "whole.py": r"\[0\] accuracy (0\.9\d|1\.00)",
    "means.py": "",
}
"""Programs that `shardwell run` starts, and what they print."""


MAKES_STEPS = {
    *("exchange", "exchange_rows", "step", "train_step", "after_step", "backward"),
    "all_reduce",
}
"""Names of calls by which a loop is one of steps."""
BATCHES = r"for \w+ in (?:\w+\.batches\(.*\bepochs=|training\.loader\.epochs\()(\d+)\):"
EPOCH_STEP_COUNT_MIN = 10
"""Of a loop of batches, however many workers there are."""
EPOCH_OUTER_STEP_COUNT_MIN = 1
"""The same of one that makes outer steps."""
WHILE = r"while (?:\(\w+ := )?([\w.]+)\)? < (\d+):"


class TrainingProgram(NamedTuple):
    """A program that a page prints."""

    name: str
    text: str
    loops: tuple[str, ...]
    """What its loops of steps run over."""
    prints: str
    """Pattern of what a worker prints, if the page says so."""

    @property
    def workers(self) -> list[list[str]]:
        """Arguments of each process, as the page starts them."""
        return [["w0"], ["w1"]] if "sys.argv[1]" in self.text else [[]]

    @property
    def epoch_count(self) -> int:
        """How often each sample counts; 0: its loop counts steps."""
        return max(map(int, re.findall(BATCHES, self.text)), default=0)

    @property
    def step_count(self) -> int:
        """At which step it ends, or what it can't end before where its loop counts epochs."""
        if self.epoch_count:
            is_outer = "DiLoCo(" in self.text
            least = EPOCH_OUTER_STEP_COUNT_MIN if is_outer else EPOCH_STEP_COUNT_MIN
            return self.epoch_count * least
        return max(int(loop.rpartition(",")[2]) for loop in self.loops if "," in loop)


def programs() -> list[TrainingProgram]:
    """All blocks of Python that connect and have a loop of steps."""
    found = []
    example = Step(EXAMPLE, (ROOT / EXAMPLE).read_text(), is_python=True)
    for steps in (*map(steps_of, PAGES), [example]):
        for step in steps:
            loops = re.findall(r"for [\w, ]+ in (?:range|zip)\((.*)\):", step.text)
            loops += map(", ".join, re.findall(WHILE, step.text))
            has_loops = loops or re.search(BATCHES, step.text)
            if step.is_python and has_loops and "connect(" in step.text:
                prints = PRINTED.get(step.name, PRINTED.get(f"python {step.saved_as} w1", ""))
                prints = prints.replace("partial: 0", r"partial: \d")  # of the killed one
                found.append(TrainingProgram(step.name, step.text, tuple(loops), prints))
    return [each for each in found if each.name not in ELSEWHERE]


@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_loops_go_on_at_the_next_step(program: TrainingProgram) -> None:
    for loop in program.loops:
        assert re.fullmatch(r"[\w.]+\.next_step(, \d+)?", loop), loop


def test_every_loop_of_steps_is_started_again() -> None:
    found = set[str]()
    for page in PAGES:
        for step in steps_of(page):
            loops = ast.walk(ast.parse(step.text)) if step.is_python else ()
            for loop in loops:
                if isinstance(loop, ast.For | ast.While):
                    calls = {
                        ast.unparse(each.func).rpartition(".")[2]
                        for each in ast.walk(loop)
                        if isinstance(each, ast.Call)
                    }
                    found |= {step.name} if calls & MAKES_STEPS else set()
    assert found == {each.name for each in programs() if each.name != EXAMPLE} | {*ELSEWHERE}


@pytest.mark.parametrize("program", [case(each, each.name, each.text) for each in programs()])
def test_a_killed_worker_goes_on(
    cluster, connect, tmp_path: Path, monkeypatch, program: TrainingProgram
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("program.py").absolute()
    file.write_text(with_rates(program.text))
    running = cluster(2)
    reader = connect(running, "reader")
    with KilledTraining(running, reader, file) as training:
        workers = training.run(program.workers, program.step_count)
        for worker in workers:
            printed = "\n".join(worker.lines)
            assert not program.prints or re.fullmatch(program.prints, printed), printed
        if len(program.workers) > 1:  # who was away for the last steps has none to make
            late = training.start(program.workers[0])
            assert late.end(END_TIMEOUT_S) == 0, (late.lines, late.log)
        if program.epoch_count:
            (account,) = (found for each in reader.status()[0].parameters for found in each.samples)
            assert (account.epoch, account.done_count) == (program.epoch_count, 0)
        else:
            assert versions(reader)() == program.step_count
        before, rates = rates_of(training.killed.pid), rates_of(workers[0].pid)
    has_schedule = "lr_scheduler" in program.text
    if has_schedule or program.name in SAME_BITS:
        (tmp_path / "undisturbed").mkdir()
        monkeypatch.chdir(tmp_path / "undisturbed")
        other = cluster(2)
        other_reader = connect(other, "reader")
        with KilledTraining(other, other_reader, file) as training:
            undisturbed = [training.start(arguments) for arguments in program.workers]
            for worker in undisturbed:
                assert worker.end(END_TIMEOUT_S) == 0, (worker.lines, worker.log)
        if has_schedule:
            assert goes_on(rates, before, rates_of(undisturbed[0].pid)), (before, rates)
        if program.name in SAME_BITS:
            assert weights_of(reader) == weights_of(other_reader)


@pytest.mark.parametrize("saved_as", [case(name, name, "import torch") for name in LAUNCHED])
def test_a_launch_goes_on(cluster, connect, tmp_path: Path, monkeypatch, saved_as: str) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(saved_as)
    (text,) = (step.text for step in steps_of("docs/pytorch.md") if step.saved_as == saved_as)
    file.write_text(with_rates(text))
    if "join_group(" in text:  # without shards: they stop before the same step
        _, step_counts = run_launched_group(file, pause_before=15)
        assert step_counts == [14, 14, 30, 30]  # of 40; the last file was of step 10
    else:
        running = cluster(2)
        with KilledTraining(running, connect(running, "reader"), file) as training:
            again = training.run_launched()
        assert re.fullmatch(LAUNCHED[saved_as], "\n".join(again.lines)), again.lines
