"""Goal: a process counts as ended where that is certain, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from harness.polling import eventually
from shardwell.process.environment import has_ended, own_identity

TELL = "from shardwell.process.environment import own_identity; print(own_identity(), flush=True)"


def test_one_that_is_killed() -> None:
    command = [sys.executable, "-c", f"{TELL}; input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        identity = process.stdout.readline().strip()
        assert identity.split()[-2] == str(process.pid)
        assert not has_ended(identity)
        process.send_signal(signal.SIGSTOP)
        assert not has_ended(identity)
        process.kill()
        eventually("it is dead, and not waited for yet", lambda: has_ended(identity))
        process.wait()
        assert has_ended(identity)


def test_another_process_of_the_same_number() -> None:
    *surroundings, pid, started = own_identity().split(" ")
    assert has_ended(" ".join([*surroundings, pid, str(int(started) - 1)]))
    assert not has_ended(own_identity())


@pytest.mark.parametrize(
    "change",
    [
        lambda boot, namespace, pid, started: ["other", namespace, pid, started],
        lambda boot, namespace, pid, started: [boot, "pid:[1]", pid, started],
        lambda boot, namespace, pid, started: [boot, namespace, "0", started],
        lambda boot, namespace, pid, started: [boot, namespace, "-1", started],
        lambda boot, namespace, pid, started: [boot, namespace, "9" * 30, started],
        lambda boot, namespace, pid, started: [boot, namespace, "x", started],
        lambda boot, namespace, pid, started: [pid, started],
        lambda *fields: ["rubbish"],
        lambda *fields: [],
    ],
)
def test_what_nothing_is_known_of(change) -> None:
    assert os.getpid() == int(own_identity().split(" ")[-2])
    assert not has_ended(" ".join(change(*own_identity().split(" "))))
