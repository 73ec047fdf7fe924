"""Goal: what a quickstart prints works when it is copied: two workers train, one is killed and
started again, and both end with one model that knows held-out digits.

Method: the page's program is saved as the page says, its workers are those that the page starts.
The first is killed with kill -9 in the middle (KilledTraining). What a page shows of the screen is
compared with what the workers print, line by line, digits apart; its commands for afterwards run.
"""

from __future__ import annotations

import collections
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

import shardwell
from harness.programs.commands import run_command
from harness.programs.killed_training import (
    END_TIMEOUT_S,
    KILLED_AFTER,
    KilledTraining,
    goes_on,
    rates_of,
    versions,
    with_rates,
)
from integration.docs.test_docs import CHUNK_SIZE_BYTES, ROOT, case, steps_of


def pages_of(folder: str) -> list[str]:
    """Paths of a folder's pages."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"docs/{folder}/*.md"))


PAGES = pages_of("quickstart")
LINE_COUNT_MAX, FURTHER_LINE_COUNT_MAX = 82, 51
"""Of a page, and for each program beyond the first."""
ACCURACY_MIN = 0.9
LENGTH = 1300
"""Digits to learn from."""
BATCH_SIZE_MAX, EPOCH_STEP_COUNT_MIN = 64, 10
"""Of any of them, and how many steps two workers make of such batches."""
EPOCHS = r"(EPOCHS, .* = |\.epochs\()(\d+)"
"""What says how often each sample counts."""
KILL = "kill -9 %1"
STARTS = r"w0 starts at step (\d+)"
ENDS = r"accuracy (\S+) on held-out digits"


class PrintedProgram(NamedTuple):
    """A program of a page, and what the page does with it."""

    page: str
    saved_as: str
    text: str
    commands: list[str]
    """What starts, kills and starts its workers again."""
    afterwards: list[str]
    """Commands of `shardwell`, once the training has ended."""

    @property
    def epoch_count(self) -> int:
        """How often each sample counts; 0: its loop counts steps."""
        found = re.search(EPOCHS, self.text)
        return int(found[2]) if found else 0

    @property
    def step_count(self) -> int:
        """At which step it ends, or what it can't end before."""
        steps = re.findall(r"^STEPS\b.*? = (\d+)", self.text, re.M)
        return int(steps[0]) if steps else self.epoch_count * EPOCH_STEP_COUNT_MIN


def programs_of(pages: list[str]) -> list[PrintedProgram]:
    """All programs of these pages."""
    found = list[PrintedProgram]()
    for page in pages:
        for step in steps_of(page):
            if step.saved_as:
                found.append(PrintedProgram(page, step.saved_as, step.text, [], []))
            elif found and found[-1].page == page:
                is_start = step.text.startswith(("python ", "kill ", "shardwell run "))
                (found[-1].commands if is_start else found[-1].afterwards).append(step.text)
    return found


def pattern_of(line: str) -> str:
    """What matches a line that is printed, with other numbers."""
    return re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", re.escape(line))


@pytest.mark.parametrize(
    "program", [case(each, "-".join(each[:2]), each.text) for each in programs_of(PAGES)]
)
def test_a_killed_worker_is_started_again(
    cluster, connect, tmp_path: Path, monkeypatch, program: PrintedProgram
) -> None:
    check_killed_training(cluster, connect, tmp_path, monkeypatch, program)


def check_killed_training(
    cluster, connect, folder: Path, monkeypatch, program: PrintedProgram
) -> None:
    """Does what a page says, in an empty folder: trains, kills a worker, and starts it again."""
    monkeypatch.chdir(folder)
    file = Path(program.saved_as)
    file.write_text(with_rates(program.text))
    start = f"python {file}"
    assert program.commands == [f"{start} w0 &", f"{start} w1 &", KILL, f"{start} w0"]
    running = cluster(2, chunk_size_bytes=CHUNK_SIZE_BYTES)
    reader = connect(running, "reader")
    environment = {"KERAS_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    with KilledTraining(running, reader, file, environment) as training:
        workers = training.run([["w0"], ["w1"]], program.step_count, first_line=STARTS)
        rates = [rates_of(each.pid) for each in (workers[0], training.killed, workers[1])]
        step = versions(reader)()
        late = training.start(["w0"])  # all is over: it has nothing to do
        assert late.end(END_TIMEOUT_S) == 0, (late.lines, late.log)
        assert not any("Traceback" in line for line in late.log), late.log
        assert versions(reader)() == step
        assert late.lines[-1] == workers[0].lines[-1], late.lines
    if "lr_scheduler" in program.text:
        assert goes_on(*rates), rates  # the other worker's are an undisturbed run's
    accounts = [found for each in reader.status()[0].parameters for found in each.samples]
    if accounts:  # workers share each epoch's samples, in as many steps as their number asks for
        (account,) = accounts
        assert account.epoch == program.epoch_count
        counted = samples_of(reader, range(versions(reader)()))
        assert {*counted.values()} == {1}, counted.most_common(8)
        left = program.epoch_count * LENGTH - len(counted)
        assert 0 <= left <= BATCH_SIZE_MAX * account.partial_count  # of a member that was lost
    else:
        assert versions(reader)() == program.step_count
    (first_step,) = re.findall(f"(?m)^{STARTS}$", "\n".join(workers[0].lines))
    assert int(first_step) >= KILLED_AFTER
    first, second = (re.fullmatch(ENDS, worker.lines[-1]) for worker in workers)
    assert first
    assert second
    assert float(first[1]) == float(second[1]) >= ACCURACY_MIN  # of one model, which both have
    printed = "\n".join(line for worker in workers for line in (*worker.lines, *worker.log))
    for line in shown(program.page):
        assert re.search(f"(?m)^{pattern_of(line)}$", printed), (line, printed)
    for command in program.afterwards:
        words = shlex.split(command)
        if words[0] == "shardwell":
            environment = {"SHARDWELL_SHARDS": running.target}
            code, _, log = run_command(*words[1:], environment=environment)
            assert code == 0, (command, log)


def samples_of(reader: shardwell.Client, steps: range) -> collections.Counter[tuple[int, int]]:
    """How often these steps had each sample, by its epoch and number."""
    (name,) = (each.spec.name for each in reader.status()[0].parameters if each.samples)
    return collections.Counter(
        (batch.epoch, index)
        for step in steps
        for batch in reader.step_samples(name, step)
        for index in batch.indices.tolist()
    )


def shown(page: str) -> list[str]:
    """Lines of the screen that a page shows."""
    blocks = re.findall(r"^```text\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    text = (ROOT / page).read_text()
    lines, program_count = text.splitlines(), text.count("```python\n")
    assert len(lines) <= LINE_COUNT_MAX + (program_count - 1) * FURTHER_LINE_COUNT_MAX
    assert max(map(len, lines)) <= 120
