"""Goal: our side of each migration guide is a program that works when it is copied.

Method: the page's program is saved as the page says and started by the page's command, on a cluster
where it needs one; all workers end with one model that knows held-out digits. Where the page kills
a worker and starts it again, so does the test, as those of the quickstarts.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from harness.programs.commands import Program
from integration.docs.test_docs import ROOT, case
from integration.docs.test_quickstarts import (
    KILL,
    PrintedProgram,
    check_killed_training,
    pages_of,
    programs_of,
)

PAGES = pages_of("migrate")
ACCURACY_MIN = 0.85
"""Asynchronous rows reach 0.88, the others 0.9 and more."""
END_TIMEOUT_S = 120.0
"""Of two workers that each import PyTorch, beside the other tests."""


@pytest.mark.parametrize(
    "program", [case(each, each.page, each.text) for each in programs_of(PAGES)]
)
def test_our_side_trains(
    cluster, connect, tmp_path: Path, monkeypatch, program: PrintedProgram
) -> None:
    if KILL in program.commands:
        check_killed_training(cluster, connect, tmp_path, monkeypatch, program)
        return
    monkeypatch.chdir(tmp_path)
    Path(program.saved_as).write_text(program.text)
    (command,) = program.commands
    words = [sys.executable if word == "python" else word for word in shlex.split(command)[1:]]
    environment = {"SHARDWELL_SHARDS": cluster(2).target, "OMP_NUM_THREADS": "1"}
    with Program("-m", "shardwell_server", *words, environment=environment) as run:
        assert run.end(END_TIMEOUT_S) == 0, run.log
    ends = re.findall(r"\[\d\] accuracy (\S+) on held-out digits", "\n".join(run.lines))
    assert len(ends) == 2
    assert min(map(float, ends)) >= ACCURACY_MIN


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_both_sides(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.count("```py\n") == 2
    assert text.count("```python\n") == 1
    for heading in ("## Names", "## What you gain", "## What you lose"):
        assert f"\n{heading}\n" in text
