"""A child process: who gets its signals, and what it says."""

from __future__ import annotations

import signal

from harness.polling import eventually
from shardwell_server.processes.child import Child, python

COUNTS_SIGINT = """
import signal, time
count = 0
def note(*_):
    global count
    count += 1
    print(count, flush=True)
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGUSR1, lambda *_: print("told", flush=True))
print("ready", flush=True)
while True: time.sleep(0.01)
"""


def test_a_stop_is_asked_for_once() -> None:
    child = Child(python("-c", COUNTS_SIGINT))
    try:
        assert child.read_lines(60.0) == ["ready"]
        child.ask_to_stop(signal.SIGINT)
        assert child.read_lines(60.0) == ["1"]
        child.ask_to_stop(signal.SIGINT)
        child.tell(signal.SIGUSR1)  # Python handles it after a SIGINT that has come
        assert child.read_lines(60.0) == ["told"]
    finally:
        child.kill()
        child.close(0.0)
    assert child.poll() == -signal.SIGKILL


def test_output_ends_with_the_process() -> None:
    child = Child(python("-c", "print('a line'); print('no end', end='')"))
    try:
        lines = [child.read_lines(60.0), child.read_lines(60.0)]
        assert (lines, child.is_silent) == ([["a line"], []], True)
        eventually("it has ended", lambda: child.is_gone)
    finally:
        child.close(0.0)
    assert child.poll() == 0
