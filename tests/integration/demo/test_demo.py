"""The demo as a user runs it: a process, its exit code, its output, and what it leaves behind.

A test finds its victims in /proc: shards and workers have sessions of their own, so a
process group does not show them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.leaks import child_pids, is_running
from harness.polling import PATIENCE_S, eventually
from harness.programs.ports import free_port

pytest.importorskip("sklearn", reason="scikit-learn brings the digits")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

COMMAND = [sys.executable, "-m", "shardwell_server"]
DEADLINE_S = 240.0


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command, killed with all its children if a test leaves it running."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHARDWELL_")}
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    output, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output, errors


def children_of(pid: int) -> dict[int, str]:
    """Command lines of a process's children, by process id."""
    children = {}
    for child_pid in child_pids(pid):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{child_pid}/cmdline").read_bytes()
            children[child_pid] = line.replace(b"\0", b" ").decode()
    return children


def wait_for_children(process: subprocess.Popen[str], shards: int, workers: int) -> dict[int, str]:
    """Waits until so many are there, each of them running its own command."""

    def look() -> dict[int, str]:
        assert process.poll() is None, process.communicate()
        children = children_of(process.pid)
        serving = sum(" serve " in line for line in children.values())
        training = sum(" demo-worker " in line for line in children.values())
        return children if serving >= shards and training >= workers else {}

    what = f"{shards} shards and {workers} workers are there"
    return eventually(what, look, timeout_s=DEADLINE_S)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Reads lines of its output until one matches; pytest's timeout bounds it."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"no line matches {pattern!r}; it ended with {process.wait()}")


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--shard-count=2", "--workers=2", "--steps=200"),
        ("--shard-count=1", "--workers=2", "--steps=200", "--mode=async", "--codec=bf16"),
    ],
    ids=["sync", "async"],
)
def test_it_learns_and_says_what_it_moved(arguments):
    with started("demo", *arguments) as process:
        code, output, errors = finish(process)
    assert (code, errors) == (0, "")
    shown = re.search(r"^held-out accuracy +(\d\.\d{3}), (\d+) of 450 digits", output, re.M)
    assert shown, output
    assert float(shown[1]) >= 0.95
    assert float(shown[1]) == pytest.approx(int(shown[2]) / 450, abs=0.0006)
    losses = re.search(r"^loss +(\S+) at the first step, (\S+) at the last", output, re.M)
    assert losses, output
    # An asynchronous worker's first step may follow many of another's.
    assert float(losses[1]) > (0.5 if "--mode=async" in arguments else 1.5)
    assert float(losses[2]) < min(0.5, float(losses[1]))
    # A step of a worker moves all weights each way, two bytes each, and little else; the first
    # weights go once, as float32.
    size = 64 * 1024 + 1024 + 1024 * 10 + 10
    for way in ("sent", "received"):
        moved = re.search(rf"^{way} +([\d.]+) MB by all workers", output, re.M)
        assert moved, output
        assert float(moved[1]) == pytest.approx(2 * 200 * size * 2 / 1e6, rel=0.05)
    ratio = re.search(r"^codec +\S+, ([\d.]+) times less than float32", output, re.M)
    assert ratio, output
    assert 1.9 < float(ratio[1]) < 2.2
    assert "step 200/200" in output
    assert f"Passed: held-out accuracy {shown[1]} is at least 0.95." in output


def test_too_few_steps_fail_with_a_sentence():
    with started("demo", "--shard-count=1", "--workers=1", "--steps=2") as process:
        code, output, errors = finish(process)
    assert code == 1
    assert re.fullmatch(r"Failed: held-out accuracy 0\.\d{3} is below 0\.95\.\n", errors)
    assert re.search(r"^steps +2 by every worker", output, re.M)


def test_workers_come_leave_and_die_while_it_learns():
    with started("demo", "--chaos", "--seed=3") as process:
        code, output, errors = finish(process)
    assert (code, errors) == (0, ""), output
    for done, seen in (
        (r"kill -9 (w\d)", "{} is lost, the others go on"),
        (r"SIGTERM to (w\d)", "{} has left, the others go on"),
        (r"(w\d) is started", "{} takes part"),
    ):
        found = re.search(rf"^step \d+: {done}$", output, re.M)
        assert found, output
        assert seen.format(found[1]) in output[found.end() :], output
    assert re.search(r"^step 1500/1500 .* accuracy 0\.9\d\d  members w\d w\d", output, re.M), output
    assert re.search(r"^workers +4 began; \d came, \d left, \d lost", output, re.M), output
    digits = re.search(
        r"^digits +([\d,]+) counted, none twice; all 1,347 in (\d+) of (\d+) epochs", output, re.M
    )
    assert digits, output
    counted, whole, begun = (int(each.replace(",", "")) for each in digits.groups())
    # Members, and those that have just gone, hold 1,024 digits each, which is less than an epoch.
    assert begun - 10 <= whole < counted / 1347 + 1, output
    assert re.search(r"^in part +(none|\d+ of w\d in step \d+, epoch \d+)", output, re.M), output
    assert re.search(r"^Passed: held-out accuracy 0\.9\d\d is at least 0\.95\.$", output, re.M)


def test_chaos_that_has_not_learnt_fails():
    with started("demo", "--chaos", "--shard-count=1", "--workers=3", "--steps=3") as process:
        code, output, errors = finish(process)
    assert code == 1
    assert re.fullmatch(r"Failed: held-out accuracy 0\.\d{3} is below 0\.95\.\n", errors)
    assert re.search(r"^workers +3 began; ", output, re.M), output


def test_outer_training_learns_and_says_what_it_moved():
    """Eight outer steps of fp32: each moves all weights once each way, as do the first weights."""
    arguments = ("--outer", "--codec=fp32", "--steps=320", "--outer-steps=40", "--overlap=3")
    with started("demo", *arguments) as process:
        code, output, errors = finish(process)
    assert (code, errors) == (0, ""), output
    assert "codec fp32, an outer step every 40 steps, in 2 fragments" in output
    assert re.search(r"^step 320/320 .* accuracy 0\.9\d\d  outer step 8$", output, re.M), output
    assert re.search(r"^outer steps +8 of each of 2 fragments, one in 40 steps", output, re.M)
    size = 64 * 1024 + 1024 + 1024 * 10 + 10
    moved = {}
    for way in ("sent", "received"):
        found = re.search(rf"^{way} +([\d.]+) MB by all workers, .*\(measured\)", output, re.M)
        assert found, output
        moved[way] = float(found[1])
        assert 0.98 * 4 * 8 * 4 * size < 1e6 * moved[way] < 1.02 * 4 * (8 + 1) * 4 * size
    synchronous = 4 * 320 * (2 * size + -(-size // 256)) / 1e6
    shown = re.search(
        r"^synchronous +([\d.]+) MB .* as fp16 \(computed\), (\d+) times", output, re.M
    )
    assert shown, output
    assert float(shown[1]) == pytest.approx(synchronous, abs=0.06)
    assert int(shown[2]) == pytest.approx(synchronous / moved["sent"], abs=1.0)
    times = re.search(
        r"^fragments +travelled ([\d.]+) s for each worker: ([\d.]+) s hidden behind its steps, "
        r"([\d.]+) s waited",
        output,
        re.M,
    )
    assert times, output
    assert float(times[1]) == pytest.approx(float(times[2]) + float(times[3]), abs=0.02)
    assert re.search(r"^Passed: held-out accuracy 0\.9\d\d is at least 0\.95\.$", output, re.M)


def test_outer_training_as_it_is_by_default():
    """Twelve outer steps of int8, a byte an element: 1/80 of 600 steps of fp16, or less."""
    with started("demo", "--outer") as process:
        code, output, errors = finish(process)
    assert (code, errors) == (0, ""), output
    assert "4 workers on 2 shards, codec int8, an outer step every 50 steps" in output
    shown = re.search(r"^synchronous .* as fp16 \(computed\), (\d+) times as much", output, re.M)
    assert shown, output
    assert int(shown[1]) >= 80
    assert re.search(r"^Passed: held-out accuracy 0\.9\d\d is at least 0\.95\.$", output, re.M)


def test_outer_training_that_has_not_learnt_fails():
    """No outer step ends in ten inner ones: shards have the first weights."""
    with started("demo", "--outer", "--codec=fp32", "--workers=2", "--steps=10") as process:
        code, output, errors = finish(process)
    assert code == 1
    assert re.fullmatch(r"Failed: held-out accuracy 0\.\d{3} is below 0\.95\.\n", errors)
    assert re.search(r"^outer steps +0 of each of 2 fragments", output, re.M), output


@needs_proc
def test_ctrl_c_ends_outer_training_and_leaves_nothing_behind():
    arguments = ("--outer", "--codec=fp32", "--workers=2", "--steps=100000")
    with started("demo", *arguments) as process:
        children = wait_for_children(process, shards=2, workers=2)
        read_until(process, r"outer step [1-9]")
        process.send_signal(signal.SIGINT)
        code, _, errors = finish(process)
        assert code == 130
        assert errors == "Stopped by Ctrl-C; shards and workers have ended.\n"
        assert [pid for pid in children if is_there(pid)] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--outer", "--mode=async"), "leave out --sync, --mode and --chaos"),
        (("--outer", "--sync=ring"), "leave out --sync, --mode and --chaos"),
        (("--outer", "--chaos"), "leave out --sync, --mode and --chaos"),
        (("--outer-steps=50",), "are for --outer; give it"),
        (("--outer", "--outer-steps=51"), "multiple of"),
        (("--outer", "--fragments=3"), "fragments=2 or fewer"),
        (("--outer", "--overlap=25"), "overlap"),
    ],
)
def test_outer_training_that_can_not_be_is_refused_at_once(arguments, words):
    with started("demo", *arguments) as process:
        code, output, errors = finish(process)
    assert (code, output) == (2, "")
    assert words in errors


@pytest.mark.parametrize(
    ("argument", "words"),
    [("--mode=async", "leave out --sync and --mode"), ("--workers=2", "needs 3 workers")],
)
def test_chaos_that_can_not_be_is_refused_at_once(argument, words):
    with started("demo", "--chaos", argument) as process:
        code, output, errors = finish(process)
    assert (code, output) == (2, "")
    assert words in errors


def test_more_workers_than_digits_are_refused_at_once():
    with started("demo", "--workers=33") as process:
        code, output, errors = finish(process)
    assert (code, output) == (2, "")
    assert "1 to 32 workers; got 33" in errors


@pytest.mark.sampled(1)
@needs_proc
@pytest.mark.parametrize("moment", ["shards", "workers", "training"])
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_stopped_demo_leaves_nothing_behind(moment, number, name):
    with started("demo", "--workers=2", "--steps=100000") as process:
        workers = 0 if moment == "shards" else 2
        children = wait_for_children(process, shards=2, workers=workers)
        if moment == "training":
            read_until(process, r"^step +[1-9]")
        process.send_signal(number)
        children |= children_of(process.pid)
        code, _, errors = finish(process)
        assert code == 128 + number
        assert errors == f"Stopped by {name}; shards and workers have ended.\n"
        assert [pid for pid in children if is_there(pid)] == []


@pytest.mark.sampled(1)
@needs_proc
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            '"worker_id": "w1"',
            r"worker w1 has ended with signal 9 \(SIGKILL\) at step \d+ of 100000",
        ),
        ("--shard-index=1 ", r"shard 1 has ended with signal 9 \(SIGKILL\)"),
    ],
    ids=["worker", "shard"],
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_process_ends_the_demo_and_is_named(mode, command, expected):
    with started("demo", "--workers=2", "--steps=100000", f"--mode={mode}") as process:
        children = wait_for_children(process, shards=2, workers=2)
        read_until(process, r"^step +[1-9]")
        victims = [pid for pid, line in children.items() if command in line]
        assert len(victims) == 1
        os.kill(victims[0], signal.SIGKILL)
        code, _, errors = finish(process)
        assert code == 1
        assert re.fullmatch(rf"shardwell: {expected}\n", errors), errors
        assert [pid for pid in children if is_there(pid)] == []


@needs_proc
def test_children_end_with_a_demo_that_is_killed():
    with started("demo", "--workers=2", "--steps=100000") as process:
        children = wait_for_children(process, shards=2, workers=2)
        read_until(process, r"^step +[1-9]")
        process.kill()
        eventually(
            "all children end",
            lambda: not any(is_running(pid) for pid in children),
            timeout_s=PATIENCE_S,
        )


@pytest.mark.exhaustive
def test_workers_of_a_deployment_train_on_shards_that_start_after_them():
    """As docker compose has it: settings from the environment, the shards last."""
    port = free_port()
    settings = {
        "SHARDWELL_SHARDS": f"127.0.0.1:{port}",
        "SHARDWELL_WORKER_COUNT": "2",
        "SHARDWELL_STEPS": "200",
        "SHARDWELL_CODEC": "bf16",
        "SHARDWELL_MODE": "sync",
    }
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [*COMMAND, "train-digits"],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={
                        **os.environ,
                        **settings,
                        "SHARDWELL_WORKER_ID": f"digits-worker-{number}",
                    },
                )
            )
            for number in (1, 2)
        ]
        for worker in workers:
            stack.callback(worker.kill)
        shard = stack.enter_context(
            started(
                "serve",
                "--shard-index=0",
                "--shard-count=1",
                f"--listen=127.0.0.1:{port}",
                "--log-level=error",
            )
        )
        outputs = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], outputs
        again = subprocess.run(
            [*COMMAND, "train-digits", "--worker-id=digits-worker-1"],
            capture_output=True,
            text=True,
            env={**os.environ, **settings},
            timeout=DEADLINE_S,
            check=True,
        ).stdout
        shard.terminate()
        assert finish(shard)[0] == 0
    for output, index in zip(outputs, (1, 0), strict=True):
        assert f"({index} of 2) is connected to 127.0.0.1:{port}; step 0 of 200" in output
        assert "step 200/200  loss 0." in output
        assert "Passed: held-out accuracy 0.9" in output
    assert "step 200 of 200" in again, "a worker that is started again has nothing left to do"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sync", ["ring", "tree", "centralized", "threads"])
def test_every_way_of_synchronising_trains_as_well(sync: str) -> None:
    with started("demo", "--sync", sync, "--workers", "3", "--steps", "200") as process:
        code, output, errors = finish(process)
    assert code == 0, errors
    accuracy = re.search(r"held-out accuracy +([\d.]+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95
    assert ("codec" in output.splitlines()[0]) == (sync != "threads")


def test_what_a_group_can_not_do_is_refused() -> None:
    for arguments, message in (
        (("--sync", "ring", "--mode", "async"), "asynchronously"),
        (("--sync", "tree", "--codec", "fp16+lz4"), "codec"),
    ):
        with started("demo", *arguments) as process:
            code, _, errors = finish(process)
        assert code == 2
        assert message in errors
