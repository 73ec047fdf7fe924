"""Goal: a user's random.py or token.py in the working directory is none of what shards run.

Method: shards of all kinds are started where such files lie, each of which says that it has run.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from harness.programs.commands import Program, run_command
from shardwell_server import LocalCluster
from shardwell_server.cli.run import hidden_modules

NAMES = ("random", "token", "queue", "secrets", "statistics", "select", "string", "config", "numpy")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files of the user's."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWELL_TEST_UNFORKED", "1")
    return tmp_path


def test_shards_of_a_local_cluster(here, connect) -> None:
    with LocalCluster(1, processes=True) as cluster:
        connect(cluster, "w0").status()
    assert not (here / "ran").exists()


def test_the_command_as_a_module(here) -> None:
    with Program("-m", "shardwell_server", "cluster", "--shard-count=1") as program:
        assert program.read_line().startswith("export SHARDWELL_SHARDS=")
        program.send(signal.SIGTERM)
        assert program.end() == 0
    assert not (here / "ran").exists()


def test_a_worker_whose_program_hides_modules_gets_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue.py").write_text("")
    (tmp_path / "train.py").write_text("import queue; queue.SimpleQueue()")
    code, _, log = run_command("run", "-n1", "--", sys.executable, "train.py")
    assert code == 1
    assert f"{tmp_path / 'queue.py'} hides Python's own module 'queue' from the workers" in log
    (tmp_path / "queue.py").rename(tmp_path / "queues.py")
    (tmp_path / "train.py").write_text("raise SystemExit(1)")
    code, _, log = run_command("run", "-n1", "--", sys.executable, "train.py")
    assert code == 1
    assert "hides" not in log


def test_where_python_looks_first(tmp_path, monkeypatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "select.py").touch()
    (tmp_path / "a" / "test.py").touch()
    (tmp_path / "a" / "sys.py").touch()
    (tmp_path / "b" / "json").mkdir()
    (tmp_path / "b" / "json" / "__init__.py").touch()
    (tmp_path / "b" / "random").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    a, b = [tmp_path / "a" / "select.py"], [tmp_path / "b" / "json"]
    script = str(tmp_path / "a" / "train.py")
    assert hidden_modules(["python3", "-u", "-W", "ignore", script, "-m"]) == a
    assert hidden_modules([script]) == a
    for command in (["python", "-m", "train"], ["/usr/bin/python3.11", "-c", "pass"]):
        assert hidden_modules(command) == b
    for command in (["python", "-P", script], ["bash", script], ["python"], ["python", "-I", "x"]):
        assert hidden_modules(command) == []
    assert hidden_modules(["python", str(tmp_path / "none" / "x.py")]) == []
