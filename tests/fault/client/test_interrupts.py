"""Goal: after Ctrl-C at any instant of any call the client works; nothing is lost or doubled.

Method: processes that get real SIGINTs, hundreds of them, at random instants of their calls; then
the same client must make one call more of each kind. Oracle: sums of whole numbers, which float32
adds exactly.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from harness.programs.commands import Program

pytestmark = pytest.mark.timeout(170)

WORKER = Path(__file__).parents[2] / "harness" / "programs" / "interrupted_worker.py"
PROCESS_COUNT = 2
INTERRUPT_COUNT = 60
PATIENCE_S = 150.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind",
    ["parameters", "tables", "connections", "int8", "checkpoints", "groups", "groups of threads"],
)
def test_a_client_works_after_each_interrupt(cluster, kind: str) -> None:
    # Each its own cluster: a step of these workers needs no other worker.
    running = [cluster(2, chunk_size_bytes=4096) for _ in range(PROCESS_COUNT)]
    options = [str(WORKER), kind]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}  # which has the harness
    workers = [
        Program(*options, one.target, str(seed), str(INTERRUPT_COUNT), environment=environment)
        for seed, one in enumerate(running)
    ]
    try:
        for worker in workers:
            found = json.loads(worker.read_line(PATIENCE_S))
            assert found["interrupts"] >= INTERRUPT_COUNT
            assert found["found"] == found["expected"], found
            assert worker.end() == 0
    finally:
        for worker in workers:
            worker.close()
