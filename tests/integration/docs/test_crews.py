"""Goal: what a quickstart prints goes on from a checkpoint with another crew, on other shards, and
each sample counts once an epoch over all of it.

Method: a page's program, with fewer epochs, is run by two workers, which are all killed after a
checkpoint was saved in the middle of an epoch; then by three from that checkpoint, which are killed
alike; and from theirs by one, to the end. Shards list the samples of each step: of a killed crew
those steps count that its checkpoint has.
"""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import pytest

from harness.programs.commands import run_command
from harness.programs.killed_training import END_TIMEOUT_S, KilledTraining, versions
from integration.docs.test_docs import CHUNK_SIZE_BYTES, case
from integration.docs.test_quickstarts import (
    ENDS,
    EPOCHS,
    LENGTH,
    PAGES,
    PrintedProgram,
    programs_of,
    samples_of,
)
from shardwell.placement.ranges import size_of

KILLED_COUNT = 5
"""Workers of the crews of two and three."""
EPOCH_COUNT = 4
STEPS_OF_A_CREW = 12
"""After which a crew is saved: the first in the middle of an epoch, the second in a later one."""
ACCURACY_MIN = 0.75
"""Of so few epochs; of none it is 0.1."""


@pytest.mark.parametrize(
    "program", [case(each, "-".join(each[:2]), each.text) for each in programs_of(PAGES)]
)
def test_a_checkpoint_goes_on_with_another_crew(
    cluster, connect, tmp_path: Path, monkeypatch, program: PrintedProgram
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"KERAS_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    file = Path(program.saved_as)
    text = re.sub(EPOCHS, rf"\g<1>{EPOCH_COUNT}", program.text)
    counted = collections.Counter[tuple[int, int]]()
    saved_step = 0
    for worker_count in (2, 3, 1):
        file.write_text(re.sub(r"(worker_count\W+)2\b", rf"\g<1>{worker_count}", text))
        running = cluster(worker_count, chunk_size_bytes=CHUNK_SIZE_BYTES)
        reader = connect(running, "reader")
        if saved_step:
            crew = ("--worker-count", str(worker_count))
            run_on(running, "checkpoint", "restore", "saved/{step}", *crew)
        first_step = saved_step
        assert versions(reader)() == first_step
        workers = [[f"w{number}"] for number in range(worker_count)]
        with KilledTraining(running, reader, file, environment) as training:
            if worker_count > 1:
                started = training.begin(workers, first_step + STEPS_OF_A_CREW)
                run_on(running, "checkpoint", "save", "saved/{step}")
                for each in started:
                    each.close()
                saved_step = max(int(path.name) for path in Path("saved").iterdir())
            else:
                last = training.start(workers[0])
                assert last.end(END_TIMEOUT_S) == 0, (last.lines, last.log)
                saved_step = versions(reader)()
        counted.update(samples_of(reader, range(first_step, saved_step)))
    assert {*counted.values()} == {1}, counted.most_common(8)
    (account,) = (found for each in reader.status()[0].parameters for found in each.samples)
    assert (account.epoch, account.done_count) == (EPOCH_COUNT, 0)
    # A member that was killed in the middle of sending may have counted in some chunks alone.
    assert account.partial_count <= KILLED_COUNT
    missing_count = EPOCH_COUNT * LENGTH - len(counted)
    assert missing_count <= sum(size_of(each.ranges) for each in account.partial)
    found = re.fullmatch(ENDS, last.lines[-1])
    assert found
    assert float(found[1]) >= ACCURACY_MIN


def run_on(running: Any, *words: str) -> None:
    """Runs `shardwell` on a cluster."""
    code, _, log = run_command(*words, environment={"SHARDWELL_SHARDS": running.target})
    assert code == 0, (words, log)
