"""Goal: clients that are forgotten leave nothing behind, here or on the shards.

Method: what a notebook does: a cell that connects and never closes, run again and again.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.polling import eventually

pytestmark = pytest.mark.timeout(120)

SGD = shardwell.SGD(learning_rate=1.0)
CELL_COUNT = 40
SIZE = 100
SLACK = 8
"""Threads, or descriptors, that may be on their way out."""


def cell(target: str) -> shardwell.Parameter:
    """Connects, takes a step of a parameter and of a table, and closes nothing.

    The last run's objects are gone: names are given anew, line by line.
    """
    client = shardwell.connect(target, worker_id="notebook", timeout_s=20)
    table = client.table("t", row_count=9, dim=2, optimizer=SGD, mode="async", cache_row_count=4)
    table.put_row_gradients([1], np.ones((1, 2), np.float32))
    table.get_rows([1])
    model = client.parameter("m", size=SIZE, optimizer=SGD, mode="async", codec="fp32")
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(np.ones(SIZE, np.float32))
    return model


def test_cells_that_are_run_again_and_again(cluster, connect) -> None:
    running = cluster(2, processes=True)
    observer = connect(running, "observer")
    cell(running.target)
    gc.collect()
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(CELL_COUNT):
        cell(running.target)
    gc.collect()

    def is_flat() -> bool:
        now = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        return all(n <= b + SLACK for n, b in zip(now, before, strict=True))

    eventually("threads and descriptors are let go", is_flat, timeout_s=30)
    eventually(
        "the shards' streams are let go",
        lambda: all(status.open_stream_count == 0 for status in observer.status()),
        timeout_s=30,
    )
    model = connect(running, "w1").parameter(
        "m", size=SIZE, optimizer=SGD, mode="async", codec="fp32"
    )
    np.testing.assert_array_equal(model.get_weights(), -(CELL_COUNT + 1))


def test_a_parameter_keeps_its_client(cluster) -> None:
    """Who keeps the parameter alone, or the table, goes on with it."""
    model = cell(cluster(2).target)
    gc.collect()
    np.testing.assert_array_equal(model.exchange(np.ones(SIZE, np.float32)), -2)
    model.close()
    del model
    gc.collect()


def test_a_process_that_closes_nothing_ends(cluster, tmp_path: Path) -> None:
    from harness.programs.commands import Program

    program = tmp_path / "forgetful.py"
    program.write_text(
        "import sys, numpy as np, shardwell\n"
        "client = shardwell.connect(sys.argv[1], timeout_s=20)\n"
        "model = client.parameter('m', size=5, optimizer=shardwell.SGD(learning_rate=1.0))\n"
        "model.init(np.zeros(5, np.float32))\n"
        "print(model.exchange(np.ones(5, np.float32)).tolist(), flush=True)\n"
        "future = model.get_weights_async(min_version=9)\n"
    )
    with Program(str(program), cluster(1).target) as running:
        assert running.read_line() == "[-1.0, -1.0, -1.0, -1.0, -1.0]"
        assert running.end() == 0, running.log
