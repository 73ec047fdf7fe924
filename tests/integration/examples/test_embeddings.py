"""Goal: embeddings learn on a cluster what they learn in one process, and the demo says so.

Method: the training loop on both kinds of table, with real servers; then the command as a user runs
it, with few steps: what it prints, its exit code, and that it leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

import shardwell
from embeddings.evaluator import TEST_MRR, VALIDATION_MRR
from embeddings.knowledge_graph import KnowledgeGraph
from embeddings.local_table import LocalTable
from embeddings.worker import (
    Task,
    open_tables,
    run_worker,
    table_specs,
    train,
)
from harness.leaks import child_pids, is_running
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import Program
from shardwell_server import LocalCluster
from shardwell_server.demo.reports import Report, Reporter

needs_pykeen = pytest.mark.skipif(
    importlib.util.find_spec("pykeen") is None, reason="PyKEEN brings the facts"
)
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
COMMAND = ("-m", "embeddings", "run")
EXAMPLES = Path(__file__).parents[3] / "examples"
DEADLINE_S = 240.0
STEP_COUNT = 12


@pytest.fixture(autouse=True)
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which README starts it, which is on the path of that process alone."""
    monkeypatch.chdir(EXAMPLES)


@pytest.fixture
def graph() -> KnowledgeGraph:
    """300 facts that were drawn, 10 of them for each of the other parts."""
    random = np.random.default_rng(3)
    keys = random.choice(40 * 5 * 40, 300, replace=False)
    facts = np.column_stack([keys // 200, keys // 40 % 5, keys % 40])
    return KnowledgeGraph(
        entity_names=tuple(f"e{i}" for i in range(40)),
        relation_names=tuple(f"r{i}" for i in range(5)),
        training=facts[:280],
        validation=facts[280:290],
        test=facts[290:],
    )


def task(target: str | None, **fields) -> Task:
    return Task(target=target, worker_id="w0", step_count=STEP_COUNT, codec="fp32", **fields)


def rows_of(tables, graph: KnowledgeGraph) -> tuple[np.ndarray, np.ndarray]:
    entities, relations = tables
    return (
        entities.get_rows(np.arange(graph.entity_count)),
        relations.get_rows(np.arange(graph.relation_count)),
    )


def test_one_worker_on_shards_makes_the_rows_that_one_process_makes(graph):
    alone = tuple(LocalTable(spec) for spec in table_specs(task(None), graph))
    first = rows_of(alone, graph)
    silent = Reporter(lambda report: None, shardwell.Traffic(), interval_s=3600.0)
    train(task(None), graph, *alone, silent)
    with LocalCluster(3) as cluster:
        one = task(cluster.target)
        run_worker(one, graph, lambda report: None, report_interval_s=3600.0)
        with shardwell.connect(cluster.target, worker_id="reader") as client:
            together = rows_of(open_tables(client, one, graph), graph)
    for before, expected, rows in zip(first, rows_of(alone, graph), together, strict=True):
        assert np.abs(expected - before).max() > 0.3, "it has learnt something"
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-4)


def test_a_worker_that_is_started_again_goes_on(graph):
    reports: list[Report] = []
    with LocalCluster(2) as cluster:
        for step_count in (5, STEP_COUNT, STEP_COUNT):
            one = Task(target=cluster.target, worker_id="w0", step_count=step_count)
            run_worker(one, graph, reports.append, report_interval_s=3600.0)
    shown = [report.step for report in reports if report.loss is None]
    assert shown == [0, 5, STEP_COUNT]
    assert reports[-1].step == STEP_COUNT
    assert reports[-1].loss is None, "nothing is left to do"


def test_alone_it_measures(graph):
    reports: list[Report] = []
    run_worker(task(None), graph, reports.append, report_interval_s=3600.0)
    assert set(reports[1].measures) == {VALIDATION_MRR}
    assert reports[-1].step == STEP_COUNT
    assert 0.0 < reports[-1].measures[TEST_MRR] < 1.0


@needs_pykeen
@pytest.mark.exhaustive
def test_it_compares_a_cluster_with_one_process():
    with Program(*COMMAND, "--shard-count=2", "--workers=2", "--steps=150") as program:
        code = program.end(DEADLINE_S)
    output = "\n".join(program.lines)
    assert "UMLS: 5216 facts among 135 entities and 46 relations" in output
    for who in ("one process", "2 workers"):
        last = rf"^{who}, step 300/300 +loss \d\.\d+ +validation MRR 0\.\d{{3}}$"
        assert re.search(last, output, re.M), output
    mrr = re.search(r"^filtered MRR +(\S+) +(\S+) +(\S+)", output, re.M)
    assert mrr, output
    alone, together, ratio = (float(figure) for figure in mrr.groups())
    assert alone > 0.85
    assert together > 0.85
    assert ratio == pytest.approx(together / alone, abs=2e-4)
    hits = re.search(r"^filtered hits@10 +(\S+) +(\S+)", output, re.M)
    assert hits, output
    assert min(float(figure) for figure in hits.groups()) > 0.95
    codec = re.search(r"^codec +fp16, ([\d.]+) times less than float32", output, re.M)
    assert codec, output
    assert 1.7 < float(codec[1]) < 2.1
    # So few steps are compared with more noise than a whole run's.
    assert ratio == pytest.approx(1.0, abs=0.05)
    shown = f"the cluster's filtered MRR is {mrr[3]} times that of one process"
    if ratio >= 0.98:
        assert (code, program.log) == (0, [])
        assert program.lines[-1] == f"Passed: {shown}, at least 0.98."
    else:
        assert (code, program.log) == (1, [f"Failed: {shown}, below 0.98."])


@pytest.mark.sampled(2)
@needs_pykeen
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--steps=0",), "0 is not in the range x>=1"),
        (("--workers=33",), "1 to 32 workers; got 33"),
    ],
)
def test_what_it_can_not_do_is_refused_at_once(arguments, shown):
    with Program(*COMMAND, *arguments) as program:
        assert program.end(DEADLINE_S) == 2
    assert program.lines == []
    assert shown in "\n".join(program.log)


def test_without_pykeen_it_says_how_to_install_it():
    """The command in a process where the package can't be found."""
    script = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'pykeen' else find(name)\n"
        "from embeddings.commands import main\n"
        "sys.argv = ['embeddings', 'run']\n"
        "main()\n"
    )
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm"}  # where bars would be shown
    with Program("-c", script, environment=terminal) as program:
        assert program.end(DEADLINE_S) == 1
    assert program.lines == []
    assert program.log == [
        "embeddings: the facts come with PyKEEN, which is not installed; run: "
        "pip install --no-deps pykeen==1.11.1"
    ]


def command_lines(parent_pid: int) -> dict[int, str]:
    """Of a process's children, by process id."""
    lines = {}
    for pid in child_pids(parent_pid):
        with contextlib.suppress(OSError):
            lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return lines


def read_until(program: Program, start: str) -> None:
    while not program.read_line().startswith(start):
        pass


@pytest.mark.sampled(1)
@needs_pykeen
@needs_proc
@pytest.mark.parametrize("moment", ["one process, step", "starting 2 workers"])
def test_a_stopped_run_leaves_nothing_behind(moment):
    with Program(*COMMAND, "--workers=2", "--steps=200") as program:
        read_until(program, moment)
        children = child_pids(program.pid)
        program.send(signal.SIGINT)
        assert program.end(DEADLINE_S) == 130
    assert program.log == ["Stopped by Ctrl-C; shards and workers have ended."]
    assert len(children) == (1 if moment.startswith("one") else 4)
    eventually("all end", lambda: not any(map(is_running, children)), timeout_s=PATIENCE_S)


@pytest.mark.sampled(1)
@needs_pykeen
@needs_proc
@pytest.mark.parametrize(
    ("victim", "shown"),
    [
        ("--worker-id=w1 ", r"worker w1 has ended with signal 9 \(SIGKILL\) at step \d+ of 20"),
        ("--shard-index=1 ", r"shard 1 has ended with signal 9 \(SIGKILL\)"),
    ],
    ids=["worker", "shard"],
)
def test_a_killed_process_ends_it_and_is_named(victim, shown):
    with Program(*COMMAND, "--workers=2", "--steps=20") as program:
        read_until(program, "starting 2 workers")
        # A process that has just been made has no command line yet.
        found = eventually(
            f"a process has {victim}",
            lambda: [pid for pid, line in command_lines(program.pid).items() if victim in line],
        )
        children = child_pids(program.pid)
        os.kill(found[0], signal.SIGKILL)
        assert program.end(DEADLINE_S) == 1
    assert re.fullmatch(f"embeddings: {shown}", "\n".join(program.log)), program.log
    eventually("all end", lambda: not any(map(is_running, children)), timeout_s=PATIENCE_S)
