"""Goal: each of examples/ does what it says.

Method: each is run as it is, by real processes. What pages tell people to do: test_docs.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import signal
import sys
from pathlib import Path

import pytest

import shardwell
from harness.programs.commands import Program
from shardwell_server import LocalCluster

ROOT = Path(__file__).resolve().parents[3]
END_TIMEOUT_S = 250.0
"""One trains for 15 s on two cores, beside whatever else is tested there."""


def output_of(*arguments: str, target: str = "") -> list[str]:
    environment = {"SHARDWELL_SHARDS": target} if target else {}
    is_script = arguments[0] != "-m"
    with Program(*arguments, environment=environment, is_forked=is_script) as program:
        assert program.end(END_TIMEOUT_S) == 0, program.log
    return program.lines


@pytest.mark.parametrize("name", ["worker.py", "all_reduce.py", "local_cluster.py"])
def test_examples_of_the_server(name: str) -> None:
    with LocalCluster(2) as cluster:
        assert output_of(str(ROOT / "examples" / name), target=cluster.target)


def test_the_smallest_worker_leaves_between_two_steps(tmp_path: Path) -> None:
    """Started again, it goes on where it was."""
    program = ROOT / "examples" / "worker.py"
    stopped = tmp_path / "worker.py"
    mark = "request.check()"
    assert mark in program.read_text()
    asked = "import os, signal; model.next_step == 7 and os.kill(os.getpid(), signal.SIGTERM); "
    stopped.write_text(program.read_text().replace(mark, asked + mark))
    with LocalCluster(2) as cluster:
        environment = {"SHARDWELL_SHARDS": cluster.target}
        with Program(str(stopped), environment=environment) as first:
            assert first.end() == 128 + signal.SIGTERM, first.log
        with shardwell.connect(cluster.target, worker_id="observer") as client:
            (status,) = client.status()[0].parameters
            assert (status.version_min, list(status.done_worker_ids)) == (7, ["w0"])
        (line,) = output_of(str(program), target=cluster.target)
        assert line.endswith(" 1.  2.  3.  4.  5.  6.  7.]")


def test_the_example_of_workers_that_come_and_go() -> None:
    program = str(ROOT / "examples" / "spot_worker.py")
    with LocalCluster(2) as cluster, contextlib.ExitStack() as stack:
        environment = {"SHARDWELL_SHARDS": cluster.target}
        workers = [
            stack.enter_context(Program(program, f"w{n}", environment=environment, is_forked=True))
            for n in range(3)
        ]
        assert [worker.end(END_TIMEOUT_S) for worker in workers] == [0] * 3
        (last,) = {worker.lines[-1] for worker in workers}  # the same bits on all
        found = [float(value) for value in last.strip("[]").split()]
        assert found == pytest.approx(list(range(8)), abs=0.01)


@pytest.mark.skipif(importlib.util.find_spec("pykeen") is None, reason="PyKEEN brings the facts")
@pytest.mark.exhaustive
def test_the_example_of_tables() -> None:
    program = str(ROOT / "examples" / "knowledge_graph.py")
    with LocalCluster(2) as cluster:
        command = ("-m", "shardwell_server", "run", "-n", "2", "--", sys.executable, program)
        lines = output_of(*command, target=cluster.target)
    shown = re.findall(r"MRR (\S+)  hits@10 (\S+)", "\n".join(lines))
    assert len(shown) == 2
    for mrr, hits in shown:
        assert float(mrr) > 0.75
        assert float(hits) > 0.95


def test_the_example_of_a_group() -> None:
    program = str(ROOT / "examples" / "group.py")
    lines = output_of("-m", "shardwell_server", "run", "-n", "4", "--", sys.executable, program)
    assert sum("[2.33" in line for line in lines) == 4
    assert sum("[3.]" in line for line in lines) == 4


def test_the_example_of_a_sharded_optimizer() -> None:
    program = str(ROOT / "examples" / "sharded_optimizer.py")
    lines = output_of("-m", "shardwell_server", "run", "-n", "2", "--", sys.executable, program)
    shown = [re.fullmatch(r"\[.\] 325 of 650 momenta here; accuracy (\S+)", x) for x in lines]
    assert all(shown)
    first, second = (found[1] for found in shown if found)
    assert first == second
    assert float(first) > 0.93


def accuracies_of_two(name: str, target: str, **environment: str) -> list[float]:
    """What two workers of an example print at the end."""
    program = str(ROOT / "examples" / name)
    variables = {"SHARDWELL_SHARDS": target, **environment}
    with (
        Program(program, "w0", environment=variables, is_forked=True) as first,
        Program(program, "w1", environment=variables, is_forked=True) as second,
    ):
        assert first.end(END_TIMEOUT_S) == 0, first.log
        assert second.end(END_TIMEOUT_S) == 0, second.log
    found = [re.search(r"accuracy (\S+) on", each.lines[-1]) for each in (first, second)]
    return [float(each[1]) for each in found if each]


@pytest.mark.extras
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch trains the model")
def test_the_example_of_outer_training() -> None:
    """Killed and started again: test_restarts.py."""
    with LocalCluster(2) as cluster:
        first, second = accuracies_of_two("outer_digits.py", cluster.target, OMP_NUM_THREADS="1")
        assert first == second > 0.94  # of one model, which both have
        with shardwell.connect(cluster.target, worker_id="observer") as client:
            versions = {p.spec.name: p.version_min for p in client.status()[0].parameters}
        assert versions == {"outer-digits.fragment-0": 12, "outer-digits.fragment-1": 12}


def test_the_example_of_scikit_learn() -> None:
    with LocalCluster(2) as cluster:
        first, second = accuracies_of_two("scikit_learn.py", cluster.target)
    assert first == second > 0.9  # of one model, which both have


@pytest.mark.extras
@pytest.mark.skipif(
    importlib.util.find_spec("keras") is None, reason="make test-extras installs it"
)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_example_of_keras(backend: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed; it is not a dependency")
    variables = {"KERAS_BACKEND": backend, "KERAS_HOME": str(tmp_path)}
    with LocalCluster(2) as cluster:
        first, second = accuracies_of_two("keras_digits.py", cluster.target, **variables)
    assert first == second > 0.9


def test_one_after_the_other_on_one_cluster() -> None:
    """Each as it is; the first one again, after the others."""
    with LocalCluster(2) as cluster:
        lines = {}
        for name in ("worker.py", "all_reduce.py", "local_cluster.py", "worker.py"):
            lines[name] = output_of(str(ROOT / "examples" / name), target=cluster.target)
        first, second = accuracies_of_two("scikit_learn.py", cluster.target)
        with shardwell.connect(cluster.target) as client:
            parameters = {each.spec.name for each in client.status()[0].parameters}
            for name in parameters:
                client.delete(name)
        again = output_of(str(ROOT / "examples" / "worker.py"), target=cluster.target)
    assert parameters == {"worker-line", "all-reduce-mean", "scikit-learn-digits"}
    for (printed,) in (lines["worker.py"], again):
        weights = [float(word) for word in printed.strip("[]").split()]
        assert weights == pytest.approx(range(8), abs=1e-3)
    assert lines["all_reduce.py"] == ["[1.5 1.5 1.5 1.5 1.5]"] * 4
    assert first == second > 0.9


def test_names_are_each_example_s_own() -> None:
    """Also of those that need what is not installed everywhere."""
    owners: dict[str, str] = {}
    opening = r"client\.(?:parameter|table)\(\s*\"([^\"]+)\"|\bname=\"([^\"]+)\""
    for path in (ROOT / "examples").glob("*.py"):
        for found in re.finditer(opening, path.read_text()):
            name = found[1] or found[2]
            assert owners.setdefault(name, path.name) == path.name, name
    assert len(owners) >= 8


def test_every_example_is_run() -> None:
    named = {"worker.py", "all_reduce.py", "local_cluster.py", "group.py", "knowledge_graph.py"}
    named |= {"spot_worker.py", "sharded_optimizer.py", "keras_digits.py", "scikit_learn.py"}
    named |= {"outer_digits.py"}
    named |= {"ray_torch_trainer.py"}  # by tests/integration/ray
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == named
