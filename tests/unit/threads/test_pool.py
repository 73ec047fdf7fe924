"""Goal: each task has a thread at once, whatever the others do; acts come when they are due.

Method: barriers that only tasks under way at once can pass; threads that end all the time.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import weakref
from collections import deque

import pytest

from harness.polling import PATIENCE_S, eventually
from shardwell.threads import pool

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_tasks_may_wait_for_one_another(count: int) -> None:
    together = threading.Barrier(count + 1)
    for _ in range(count):
        pool.begin("shardwell-test", lambda: together.wait(PATIENCE_S))
    together.wait(PATIENCE_S)


def test_a_task_may_give_another_and_wait_for_it() -> None:
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def give(depth: int) -> None:
        if depth:
            ended = threading.Event()
            pool.begin("shardwell-test", lambda: (give(depth - 1), ended.set()))
            assert ended.wait(PATIENCE_S)
        told.put(depth)

    pool.begin("shardwell-test", lambda: give(20))
    assert [told.get(timeout=PATIENCE_S) for _ in range(21)] == list(range(21))


def test_the_thread_that_worked_last_has_the_next_task_under_its_name() -> None:
    told: queue.SimpleQueue[tuple[threading.Thread, str]] = queue.SimpleQueue()

    def tell() -> None:
        thread = threading.current_thread()
        told.put((thread, thread.name))

    def has_the_next() -> bool:
        pool.begin("shardwell-one", tell)
        first, name = told.get(timeout=PATIENCE_S)
        assert name == "shardwell-one"
        eventually("it is idle", lambda: first.name == pool.IDLE_NAME)
        pool.begin("shardwell-two", tell)
        second, name = told.get(timeout=PATIENCE_S)
        assert name == "shardwell-two"
        return second is first

    # A thread of another test may end its task in between.
    eventually("the last has the next", has_the_next)


def test_an_idle_thread_holds_nothing_of_its_tasks() -> None:
    class Held:
        def __call__(self) -> None:
            done.put(threading.current_thread())

    done: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    first = Held()
    gone = weakref.ref(first)
    pool.begin("shardwell-one", first)
    del first
    thread = done.get(timeout=PATIENCE_S)
    eventually("it is idle", lambda: thread.name == pool.IDLE_NAME)
    eventually("its task is gone", lambda: gone() is None)


def test_the_timer_goes_on_behind_an_act_that_fails_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system has no further thread for the act, nor has it for what the act begins."""
    come = threading.Event()
    own = pool._Pool()
    monkeypatch.setattr(own, "begin", refuse := _Refusing(own.begin))
    own.after(pool.Later(0.0, "shardwell-test", refuse.fail))
    eventually("it has failed", lambda: refuse.failed)
    own.after(pool.Later(0.0, "shardwell-test", come.set))
    assert come.wait(PATIENCE_S)


class _Refusing:
    def __init__(self, begin) -> None:
        self._begin = begin
        self.failed = False

    def __call__(self, name: str, body) -> None:
        if name != pool.TIMER_NAME:
            raise RuntimeError("can't start new thread")
        self._begin(name, body)

    def fail(self) -> None:
        self.failed = True
        raise RuntimeError("can't start new thread")


def test_no_task_is_lost_to_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_IDLE_S", 0.0005)
    before = set(threading.enumerate())
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(2000):
        pool.begin("shardwell-test", lambda number=number: done.put(number))
        if number % 3 == 0:
            done_count = number // 2
            eventually("some are done", lambda count=done_count: done.qsize() >= count)
    assert {done.get(timeout=PATIENCE_S) for _ in range(2000)} == set(range(2000))
    names = {"shardwell-test", pool.IDLE_NAME}
    eventually(
        "all have ended",
        lambda: not [t for t in set(threading.enumerate()) - before if t.name in names],
    )


def test_acts_come_in_the_order_in_which_they_are_due() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    pool.after(0.2, "shardwell-test", lambda: told.put("second"))
    cancelled = pool.after(0.1, "shardwell-test", lambda: told.put("never"))
    pool.after(0.0, "shardwell-test", lambda: told.put("first"))
    cancelled.cancel()
    assert [told.get(timeout=PATIENCE_S) for _ in range(2)] == ["first", "second"]
    assert told.empty()


def test_an_act_that_takes_long_holds_up_no_other() -> None:
    end, told = threading.Event(), threading.Event()
    pool.after(0.0, "shardwell-test", lambda: end.wait(PATIENCE_S))
    pool.after(0.01, "shardwell-test", told.set)
    assert told.wait(PATIENCE_S)
    end.set()


def test_the_timer_ends_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_IDLE_S", 0.0005)
    for _ in range(200):
        told = threading.Event()
        pool.after(0.0, "shardwell-test", told.set)
        assert told.wait(PATIENCE_S)


def test_where_no_thread_can_be_had_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("shardwell.threads.pool._pool._idle", deque())
    monkeypatch.setattr("shardwell.threads.pool._pool._has_timer", False)
    monkeypatch.setattr(threading.Thread, "start", refused)
    done: list[threading.Thread] = []
    pool.together("shardwell-test", lambda: done.append(threading.current_thread()), 7)
    assert done == [threading.current_thread()]
    with pytest.raises(RuntimeError, match="new thread"):
        pool.after(0.0, "shardwell-test", lambda: None)


def test_a_fork_begins_with_no_threads() -> None:
    program = """
import os, threading
from shardwell.threads import pool
def is_done():
    told = [threading.Event(), threading.Event()]
    pool.begin("shardwell-test", told[0].set)
    pool.after(0.01, "shardwell-test", told[1].set)
    return all(each.wait(60) for each in told)
assert is_done()
child = os.fork()
if child == 0:
    os._exit(0 if is_done() else 1)
assert os.waitpid(child, 0)[1] == 0
assert is_done()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
