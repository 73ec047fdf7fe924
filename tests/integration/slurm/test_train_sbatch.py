"""Goal: examples/slurm/train.sbatch trains, loses no gradient with a shard, and leaves nothing.

Method: a real Slurm of two nodes on this machine runs the script as it is, with certificates
and tokens. Two workers train while a shard is killed, and end well or badly; jobs are cancelled,
or their shards can't start. Skipped where there is no Slurm, or no right to start one.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.polling import eventually
from harness.programs.ports import free_port
from harness.programs.slurm import Slurm, running_slurm, why_not
from harness.required import missing

SCRIPT = str(Path(__file__).parents[3] / "examples" / "slurm" / "train.sbatch")
STEP_COUNT = 60
END = r"^(\d): (w\d) ended with (-?\d+\.0)$"
WORKER = """
import sys, time
import numpy as np, shardwell

step_count, code = int(sys.argv[1]), int(sys.argv[2])
with shardwell.connect() as client:
    net = client.parameter("net", size=1000, optimizer=shardwell.SGD(1.0), worker_count=2)
    net.init(np.zeros(1000, np.float32))
    for step in range(net.next_step, step_count):
        weights = net.exchange(np.full(1000, step % 5, np.float32))
        print("step", step, flush=True)
        time.sleep(0.05)
    assert (weights == weights[0]).all()
    print(client.worker_id, "ended with", weights[0], flush=True)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    reason = why_not()
    if reason:
        missing("slurm", reason)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as home,
        running_slurm(Path(home)) as started,
    ):
        (started.directory / "worker.py").write_text(WORKER)
        yield started


def submit(
    slurm: Slurm, step_count: int = STEP_COUNT, code: int = 0, *options: str, **variables: str
) -> str:
    program = ["python", "worker.py", str(step_count), str(code)]
    return slurm.submit(*options, SCRIPT, *program, SHARDWELL_PORT=str(free_port()), **variables)


def until(slurm: Slurm, job: str, text: str) -> None:
    """Waits until the job has printed it, and fails with its log if it ends before."""
    eventually(
        f"job {job} says {text!r}; it says {slurm.log(job)}",
        lambda: text in slurm.log(job),
        timeout_s=90.0,
    )


def processes_of(job: str) -> dict[int, str]:
    """Command lines of a job's shards and workers."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            is_there = f"SLURM_JOB_ID={job}\0".encode() in (entry / "environ").read_bytes()
            if is_there and ("shardwell serve" in line or "worker.py" in line):
                found[int(entry.name)] = line
    return found


def nothing_is_left(slurm: Slurm, job: str, shard_count: int = 2) -> None:
    eventually("all processes have ended", lambda: not processes_of(job))
    kept = sorted(path.name for path in (slurm.directory / f"shardwell-{job}").iterdir())
    assert kept == [f"shard-{index}" for index in range(shard_count)], "no credentials"


def test_training_goes_on_when_a_shard_is_killed(slurm: Slurm) -> None:
    job = submit(slurm)
    until(slurm, job, "step 10\n")
    (victim,) = [pid for pid, line in processes_of(job).items() if "--shard-index 1 " in line]
    os.kill(victim, signal.SIGKILL)
    assert slurm.end(job) == ("COMPLETED", "0:0"), slurm.log(job)
    log = slurm.log(job)
    assert "shard 1 on n2 has ended with code 137, after 0 of 10 restarts" in log
    weights = f"{-float(sum(step % 5 for step in range(STEP_COUNT)))}"
    ends = sorted(re.findall(END, log, re.M))
    assert ends == [("0", "w0", weights), ("1", "w1", weights)], log
    nothing_is_left(slurm, job)


def test_it_ends_as_its_workers_do(slurm: Slurm) -> None:
    job = submit(slurm, 5, 3, "--nodes=1", "--ntasks-per-node=3")
    assert slurm.end(job) == ("FAILED", "3:0"), slurm.log(job)
    assert re.search(r"worker w[01] on n[12] has ended with code 3", slurm.log(job))
    nothing_is_left(slurm, job, 1)


def test_a_cancelled_job_leaves_nothing(slurm: Slurm) -> None:
    job = submit(slurm, 10_000)
    until(slurm, job, "step 10\n")
    assert len(processes_of(job)) >= 4
    slurm.run("scancel", job)
    assert slurm.end(job)[0] == "CANCELLED"
    nothing_is_left(slurm, job)


def test_shards_that_can_not_start_end_it(slurm: Slurm) -> None:
    folder = slurm.directory / "blocked"
    folder.mkdir()
    (folder / "shard-1").touch()  # which is no directory
    job = submit(slurm, RUN_DIR=str(folder), RESTART_COUNT="1")
    state, code = slurm.end(job)
    log = slurm.log(job)
    assert (state, code) == ("FAILED", "1:0"), log
    assert "Not a directory" in log or "is a file" in log, log
    assert "shard 1 on n2 has ended with code 2, after 1 of 1 restarts" in log
    assert "the shards have ended before the workers, which are stopped" in log
    eventually("all processes have ended", lambda: not processes_of(job))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SCRIPT,), "usage: sbatch train.sbatch PROGRAM"),
        (("--ntasks-per-node=1", SCRIPT, "python"), "give --ntasks-per-node, 2 or more"),
    ],
)
def test_what_it_can_not_do_it_says(slurm: Slurm, arguments: tuple[str, ...], message: str) -> None:
    job = slurm.submit(*arguments)
    assert slurm.end(job) == ("FAILED", "2:0")
    assert slurm.log(job).startswith(message)
