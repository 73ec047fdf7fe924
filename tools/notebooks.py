"""Runs notebooks of docs/tutorial, whose cells are plain Python, and makes pages of them.

    python tools/notebooks.py NOTEBOOK            # runs its cells in order; fails where one raises
    python tools/notebooks.py --write NOTEBOOK    # stores what they print as their outputs

Cells run in the working directory, in one namespace. What a cell prints is its output; a cell that
ends with an expression shows nothing.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(path: Path) -> list[str]:
    """Runs all cells of code.

    Returns:
        What each has printed.

    Raises:
        Exception: whatever a cell raises; its traceback names the notebook and the cell.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    sys.path.insert(0, "")  # as in Jupyter, the working directory
    printed = []
    try:
        for number, text in enumerate(_code(path), 1):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, f"{path.name}, cell {number}", "exec"), namespace)
            printed.append(output.getvalue())
    finally:  # where a cell has raised, its shards and workers still run
        for each in gc.get_objects():
            if isinstance(each, subprocess.Popen) and each.poll() is None:
                each.kill()
                each.wait()
    return printed


def write(path: Path) -> None:
    """Runs a notebook, and stores the outputs in its file."""
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, run(path), strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}
        cell["outputs"] = [stream] if text else []
        cell["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def markdown_of(path: Path) -> str:
    """A notebook as Markdown: its texts, its code, and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{text}\n```")
            output = "".join(line for each in cell["outputs"] for line in each["text"])
            if output:
                parts.append(f"```text\n{output.rstrip()}\n```")
        else:
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def _code(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--write", name]:
            write(Path(name).resolve())
        case [name]:
            for text in run(Path(name)):
                print(text, end="")
        case _:
            sys.exit(__doc__)
