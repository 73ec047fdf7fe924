"""Members whose program ends without `close`: they end, and leave.

Method: programs of their own, because what Python waits for at a process's end can't be seen from
within one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.polling import PATIENCE_S, Stopwatch

PROGRAM = """
import sys
import numpy as np
import shardwell

target, rank, ending = sys.argv[1], int(sys.argv[2]), sys.argv[3]
group = shardwell.join_group("job", rank, 2, rendezvous=target, timeout_s=50)
array = np.full(3_000_000, rank + 1.0, np.float32)
group.all_reduce(array)
assert (array == 3).all()
if ending == "exits":
    with group:
        group.broadcast(np.ones(30_000_000, np.float32))
        sys.exit()
if ending == "raises":
    raise RuntimeError("training failed")
if ending == "calls":
    try:
        group.barrier()
    except shardwell.WorkerLostError as error:
        print(error.rank)
"""


def endings(target: str, *ways: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank's program."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, target, str(rank), way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, way in enumerate(ways)
    ]
    watch, found = Stopwatch(), []
    try:
        for program in programs:
            out, log = program.communicate(timeout=max(PATIENCE_S - watch.elapsed_s, 0.1))
            found.append((program.returncode, out, log))
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    return found


@pytest.mark.parametrize("ending", ["returns", "exits"])
def test_programs_that_do_not_close_end(cluster, ending) -> None:
    """With what they have sent received: the last call succeeds everywhere."""
    for code, _, log in endings(cluster(1).target, ending, ending):
        assert code == 0, log


@pytest.mark.parametrize("failing", [0, 1])
def test_a_program_that_fails_ends_and_the_others_hear_of_it(cluster, failing) -> None:
    ways = ["calls", "calls"]
    ways[failing] = "raises"
    found = endings(cluster(1).target, *ways)
    code, _, log = found[failing]
    assert (code, "training failed" in log) == (1, True), log
    code, out, log = found[1 - failing]
    assert (code, out.strip()) == (0, str(failing)), log
