"""Goal: the notebooks of docs/tutorial do what their texts say, and show what they print.

Method: each runs in a process of its own, in an empty folder; its cells assert what the text
claims. A cell that raises fails the run, and leaves no process behind. The newcomer of the third
starts as late as it may on a busy machine: it waits until the others have made as many steps as the
notebook asks for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from harness.programs.commands import Program
from integration.docs.test_docs import ROOT

NOTEBOOKS = sorted(ROOT.glob("docs/tutorial/*.ipynb"))
RUN = str(ROOT / "tools" / "notebooks.py")
END_TIMEOUT_S = 200.0
"""One starts a dozen processes, beside the other tests."""
LATE = """
import sys

if sys.orig_argv[-2:] == ["spot.py", "w2"]:
    import shardwell

    with shardwell.connect(worker_id="before-w2") as client:
        client.parameter("spot").get_weights(min_version=1000)
"""
"""What each Python runs before its program."""


def run_notebook(path: Path, **variables: str) -> Program:
    """Runs it to its end, with the command `shardwell` on the PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = {"PATH": os.pathsep.join(folders), **variables}
    with Program(RUN, str(path), environment=environment) as program:
        program.end(END_TIMEOUT_S)
    return program


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_in_order(path: Path, tmp_path: Path, tmp_path_factory, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    late = tmp_path_factory.mktemp("late")
    (late / "sitecustomize.py").write_text(LATE)
    program = run_notebook(path, PYTHONPATH=str(late))
    assert program.process.returncode == 0, program.log
    assert not any("sitecustomize" in line for line in program.log)
    shown = [
        line
        for cell in json.loads(path.read_text())["cells"]
        for output in cell.get("outputs", [])
        for line in output["text"]
    ]
    assert [without_numbers(line) for line in program.lines] == [*map(without_numbers, shown)]


def without_numbers(line: str) -> str:
    """Ports, accuracies and steps differ from run to run."""
    return re.sub(r"\d[\d.]*", "N", line.strip())


def test_a_cell_that_raises_fails_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [
        "import subprocess, sys",
        "asleep = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(asleep.pid, file=sys.stderr, flush=True)",
        "assert 1 == 2",
    ]
    notebook = {"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    path = tmp_path / "failing.ipynb"
    path.write_text(json.dumps(notebook))
    program = run_notebook(path)
    assert program.process.returncode == 1
    assert any("failing.ipynb, cell 3" in line for line in program.log)
    assert not Path(f"/proc/{program.log[0]}").exists()


def test_links_of_tutorials_lead_somewhere() -> None:
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        text = "".join(line for cell in cells for line in cell["source"])
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            assert (path.parent / target.partition("#")[0]).exists(), (path.name, target)


def test_pages_have_code_and_outputs() -> None:
    found = importlib.util.spec_from_file_location("notebooks", RUN)
    assert found
    assert found.loader
    notebooks = importlib.util.module_from_spec(found)
    found.loader.exec_module(notebooks)
    for path in NOTEBOOKS:
        page = notebooks.markdown_of(path)
        assert page.startswith("# Tutorial ")
        assert page.count("```python\n") >= 5
        assert page.count("```text\n") >= 5
        assert max(map(len, page.splitlines())) <= 120
