"""Goal: examples/ray_torch_trainer.py trains to its end, also when a node with a shard is lost, and
so does the program of docs/ray.md.

Method: both as they stand, on two nodes of real Ray, of which one is killed after the example's
first checkpoint; what they print, and the example's weights. Skipped where Ray is not installed,
and the example where Ray Train or PyTorch is not (`make test-ray`).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from harness.polling import eventually
from harness.programs.commands import Program

pytest.importorskip("ray", reason="Ray is not installed; make test-ray installs it")

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ray_torch_trainer.py"
START_S, END_S = 120.0, 240.0
MISSING = [
    name for name in ("torch", "pandas", "sklearn") if importlib.util.find_spec(name) is None
]


def test_the_program_of_the_page(nodes: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    (block,) = re.findall(r"Save this as `on_ray.py`:\n\n```python\n(.*?)^```", page, re.M | re.S)
    program = tmp_path / "on_ray.py"
    program.write_text(block.replace('"shards"', repr(str(tmp_path / "shards"))))
    with Program(str(program), environment={"RAY_ADDRESS": nodes.address}) as running:
        assert running.end(END_S) == 0, running.log
    assert re.fullmatch(r"\[(1\. *|0\.999\d* *){3}\]", running.lines[-1]), running.lines


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_the_example_trains_though_a_node_is_lost(nodes: Any, tmp_path: Path) -> None:
    variables = {"RAY_ADDRESS": nodes.address, "PYTHONUNBUFFERED": "1"}
    first = tmp_path / "checkpoints" / "20"
    with Program(str(EXAMPLE), str(tmp_path), environment=variables) as program:
        eventually(
            "there is a checkpoint",
            lambda: first.exists() or program.process.poll() is not None,
            timeout_s=START_S,
        )
        nodes.kill_other()
        assert program.end(END_S) == 0, program.log
    output = "\n".join(program.lines)
    begun = {int(step) for step in re.findall(r"of 2 begins at step (\d+)", output)}
    assert 0 in begun, output
    assert any(step > 0 and step % 20 == 0 for step in begun), output
    accuracy = re.search(r"^accuracy (\S+) on", output, re.M)
    assert accuracy, output
    assert float(accuracy[1]) > 0.9
    (made,) = re.findall(r"^model.safetensors in (\S+)$", output, re.M)
    weights = load_file(f"{made}/model.safetensors")
    assert {name: array.shape for name, array in weights.items()} == {
        "0.weight": (32, 64),
        "0.bias": (32,),
        "2.weight": (10, 32),
        "2.bias": (10,),
    }
