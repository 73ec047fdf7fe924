"""Goal: Ctrl-C in join_group, at whatever instant, leaves nothing that a later call waits for.

Method: not by chance. A process is interrupted at the first instant of a call, then at the second
one of the next call, and so on; after each it makes a group that must come in time. Instants are
those of the caller, and, while it waits, those of the threads that join, close and renew for it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.programs.commands import Program

SCHEDULE = Path(__file__).parents[2] / "harness" / "programs" / "interrupt_schedule.py"
KINDS = ("alone", "pair", "elastic")
THREADS = ("caller", "call")


def _interrupted(cluster, kind: str, thread: str, *which: int, timeout_s: float) -> dict[str, Any]:
    arguments = [str(SCHEDULE), kind, thread, cluster(1).target, *map(str, which)]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with Program(*arguments, environment=environment) as program:
        found: dict[str, Any] = json.loads(program.read_line(timeout_s))
        assert program.end() == 0
    assert found["interrupts"] > 0
    assert found["failures"] == []
    return found


@pytest.mark.timeout(170)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_joined_after_interrupts_at_some_instants(cluster, kind, thread) -> None:
    _interrupted(cluster, kind, thread, 3, 29, 20, timeout_s=150)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_joined_after_interrupts_at_all_instants(cluster, kind, thread) -> None:
    found = _interrupted(cluster, kind, thread, 0, 1, 10_000, timeout_s=3500)
    assert found["is_complete"], found


BROKEN_OFF = """
import _imp, sys
import numpy as np
import shardwell

_imp.acquire_lock()  # as an import leaves it that Ctrl-C broke off in the main thread
target = sys.argv[1]
with shardwell.join_group(
    "job", rank=0, size=1, rendezvous=target, join_timeout_s=20
) as group:
    group.barrier(timeout_s=20)
with shardwell.connect(target, worker_id="w0", timeout_s=20) as client:
    net = client.parameter("net", size=10, optimizer=shardwell.SGD(0.5))
    net.init(np.zeros(10))
    net.exchange(np.ones(10))
    table = client.table("rows", row_count=10, dim=2, optimizer=shardwell.SGD(0.5))
    table.put_row_gradients([1], np.ones((1, 2), np.float32))
    client.status()
print("done")
"""


def test_calls_need_no_lock_that_a_broken_off_import_keeps(cluster) -> None:
    """Found by interrupts of a process's first call: the next one waited until its deadline."""
    with Program("-c", BROKEN_OFF, cluster(1).target) as program:
        assert program.end() == 0, program.log
        assert program.lines == ["done"]
