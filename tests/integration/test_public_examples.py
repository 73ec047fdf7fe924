"""Goal: what the README and examples/ tell people to type does what they say.

Method: each Python block of the README and each example is run as it stands, by real processes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.commands import Program
from shardwell_server import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
WORKER, GROUP, TRAINER, TABLE, CHECKPOINT, SAFETENSORS = BLOCKS


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where a reader would have saved the block; also the working directory."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def output_of(*arguments: str, target: str = "") -> list[str]:
    environment = {"SHARDWELL_SHARDS": target} if target else {}
    with Program(*arguments, environment=environment) as program:
        assert program.end(60.0) == 0, program.log
    return program.lines


def test_the_worker(directory: Path) -> None:
    (directory / "worker.py").write_text(WORKER)
    with LocalCluster(2) as cluster:
        environment = {"SHARDWELL_SHARDS": cluster.target}
        with (
            Program("worker.py", "w0", environment=environment) as first,
            Program("worker.py", "w1", environment=environment) as second,
        ):
            assert first.end(60.0) == second.end(60.0) == 0, (first.log, second.log)
    assert first.lines == second.lines
    values = [float(number) for number in re.findall(r"[\d.]+", first.lines[-1])]
    assert values == pytest.approx([1.0, 1.0, 1.0], abs=1e-3)


def test_the_table(directory: Path) -> None:
    (directory / "rows.py").write_text(TABLE)
    assert output_of("rows.py") == ["[     7 123456]"]


def test_the_group(directory: Path) -> None:
    (directory / "train.py").write_text(GROUP)
    lines = output_of("-m", "shardwell_server", "run", "-n", "4", "--", sys.executable, "train.py")
    told = [f"[{rank}] rank {rank} of 4: [1.5 1.5 1.5]" for rank in range(4)]
    assert sorted(line for line in lines if "rank" in line) == told


def test_the_trainer() -> None:
    loss, *weights = (
        float(number) for number in re.findall(r"[\d.]+(?:e-\d+)?", output_of("-c", TRAINER)[-1])
    )
    assert loss < 1e-3
    assert weights == pytest.approx([1.0, 1.0, 1.0], abs=1e-2)


def test_the_checkpoint_and_who_reads_it(directory: Path) -> None:
    output_of("-c", CHECKPOINT)
    assert output_of("-c", SAFETENSORS + "\nprint(weights.shape)") == ["(650,)"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["worker.py", "all_reduce.py", "local_cluster.py"])
def test_examples_of_the_server(name: str) -> None:
    with LocalCluster(2) as cluster:
        assert output_of(str(ROOT / "examples" / name), target=cluster.target)


@pytest.mark.skipif(importlib.util.find_spec("pykeen") is None, reason="PyKEEN brings the facts")
@pytest.mark.exhaustive
def test_the_example_of_tables() -> None:
    program = str(ROOT / "examples" / "knowledge_graph.py")
    with LocalCluster(2) as cluster:
        command = ("-m", "shardwell_server", "run", "-n", "2", "--", sys.executable, program)
        lines = output_of(*command, target=cluster.target)
    told = re.findall(r"MRR (\S+)  hits@10 (\S+)", "\n".join(lines))
    assert len(told) == 2
    for mrr, hits in told:
        assert float(mrr) > 0.75
        assert float(hits) > 0.95


def test_the_example_of_a_group() -> None:
    program = str(ROOT / "examples" / "group.py")
    lines = output_of("-m", "shardwell_server", "run", "-n", "4", "--", sys.executable, program)
    assert sum("[2.33" in line for line in lines) == 4
    assert sum("[3.]" in line for line in lines) == 4


def test_every_example_is_run() -> None:
    named = {"worker.py", "all_reduce.py", "local_cluster.py", "group.py", "knowledge_graph.py"}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == named
