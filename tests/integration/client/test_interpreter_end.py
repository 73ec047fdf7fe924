"""Goal: calls while the interpreter ends work, or end with an error of ours that says what to do.

Method: programs of their own, which call everything that starts threads from a thread that outlives
the main one, and from atexit handlers that were registered at different times.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import pytest

from harness.programs.commands import Program
from shardwell.threads.asking import ask_all
from shardwell.threads.daemon_threads import DaemonThreads

PROGRAM = """
import atexit, os, sys, threading

when, target, directory = sys.argv[1:]
calls = []

def act():
    for name, call in calls:
        try:
            call()
        except Exception as error:
            print(name, type(error).__module__, type(error).__name__, error, flush=True)
        else:
            print(name, "works", flush=True)

if when == "before import":
    atexit.register(act)
import numpy as np
import shardwell
if when == "after import":
    atexit.register(act)
client = shardwell.connect(target, worker_id="w0")
net = client.parameter("net", size=300_000, optimizer=shardwell.SGD(learning_rate=0.5))
net.init(np.zeros(net.size, np.float32))
table = client.table("users", row_count=100, dim=4, optimizer=shardwell.SGD(learning_rate=0.5))
group = shardwell.join_group("job", 0, 1, rendezvous=target)
ones, rows = np.ones(net.size, np.float32), np.ones((2, 4), np.float32)

def begun():
    exchange = net.begin_exchange(ones)
    exchange.ready(0, net.size)
    exchange.finish()

calls += [
    ("exchange", lambda: net.exchange(ones)),
    ("begin", begun),
    ("put", lambda: net.put_gradient(ones)),
    ("get", lambda: net.get_weights()),
    ("async", lambda: net.get_weights_async().result(30)),
    ("rows", lambda: (table.put_row_gradients([1, 2], rows), table.get_rows([1, 99]))),
    ("save", lambda: client.save_checkpoint(os.path.join(directory, "saved"))),
    ("reduce", lambda: group.all_reduce(ones.copy())),
    ("reduce-async", lambda: group.all_reduce_async(ones.copy()).result(30)),
    ("leave", group.close),
    ("close", client.close),
]
if when == "connected":
    atexit.register(act)

def late():
    threading.main_thread().join()
    act()

if when == "thread":
    threading.Thread(target=late).start()
"""
NAMES = ["exchange", "begin", "put", "get", "async", "rows", "save", "reduce", "reduce-async"]
ENDS = ["leave", "close"]
STARTS_THREADS = sys.version_info < (3, 12)
"""Whether Python starts a thread when the main one has ended; else gRPC may begin no call."""
NO_THREADS = "shardwell.errors ClosedError this call needs a thread, and Python starts none"


def ended(cluster, directory: Path, when: str) -> list[str]:
    """What the program prints; nothing else may be on its standard error."""
    with Program("-c", PROGRAM, when, cluster(2).target, str(directory)) as program:
        assert program.end(120.0) == 0, program.log
    assert program.log == []
    return program.lines


@pytest.mark.parametrize("when", ["thread", "connected", "after import"])
def test_calls_at_the_interpreters_end(cluster, tmp_path, when) -> None:
    lines = ended(cluster, tmp_path, when)
    works = [f"{name} works" for name in (*NAMES, *ENDS)]
    for line, expected, name in zip(lines, works, (*NAMES, *ENDS), strict=True):
        assert line == expected or line.startswith(f"{name} {NO_THREADS}"), line
    if STARTS_THREADS:
        assert lines == works
        assert (tmp_path / "saved").is_dir()


def test_a_handler_that_runs_after_the_client_was_closed(cluster, tmp_path) -> None:
    lines = ended(cluster, tmp_path, "before import")
    for name, line in zip(NAMES, lines, strict=False):
        assert line.startswith(f"{name} shardwell.errors ClosedError"), line
        assert "because the interpreter ends" in line
        assert "registered after `import shardwell`" in line
    assert lines[len(NAMES) :] == [f"{name} works" for name in ENDS]


def test_work_where_no_thread_can_be_had(monkeypatch) -> None:
    def refused(thread: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("threading.Thread.start", refused)
    with monkeypatch.context() as empty:
        empty.setattr("shardwell.threads.pool._pool._idle", deque())
        assert ask_all(range(3), lambda each: 2**each) == [1, 2, 4]
        with pytest.raises(ValueError, match="invalid literal"):
            ask_all(["1", "x"], int)
    with pytest.raises(RuntimeError, match="interpreter shutdown"):
        DaemonThreads(4, "test").submit(int)
