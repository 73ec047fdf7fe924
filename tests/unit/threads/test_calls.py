"""Goal: a call returns by its deadline whatever its thread does, and hands over what comes of it.

Method: bodies that block on events, in place of gRPC; every wait has a deadline.
"""

from __future__ import annotations

import gc
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from harness.faults.interrupts import Interrupt
from harness.polling import Stopwatch, eventually
from harness.threads import together
from shardwell.errors import ClosedError, DeadlineError, LimitError
from shardwell.threads import calls
from shardwell.threads.calls import CALL_COUNT_MAX, CallThreads, cancelled_by, current_call

NAME = "shardwell-test"
PATIENCE_S = 30.0


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[CallThreads]:
    """Ends them, and fails if one is left."""
    monkeypatch.setattr(calls, "ABANDON_S", 0.2)
    made = CallThreads("test")
    yield made
    made.close()
    eventually("its threads end", lambda: _count() == 0)


def _count() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def test_results_and_errors_are_handed_over(threads: CallThreads) -> None:
    assert threads.run(lambda: threading.current_thread().name, PATIENCE_S) == NAME
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda: 1 // 0, PATIENCE_S)
    assert threads.start(lambda: 5, PATIENCE_S).result(PATIENCE_S) == 5
    assert isinstance(
        threads.start(lambda: 1 // 0, PATIENCE_S).exception(PATIENCE_S), ZeroDivisionError
    )


def test_a_body_that_never_ends_is_abandoned(threads: CallThreads) -> None:
    """As a lock of gRPC's that no thread lets go of."""
    stuck = threading.Event()
    watch = Stopwatch()
    with pytest.raises(DeadlineError, match="its connection is stuck"):
        threads.run(lambda: stuck.wait(PATIENCE_S), 0.1)
    assert watch.elapsed_s < PATIENCE_S / 2
    assert threads.run(lambda: "others go on", PATIENCE_S) == "others go on"
    stuck.set()


def test_a_signal_that_does_not_wake_its_wait_breaks_it_off(threads: CallThreads) -> None:
    """As one that comes just before the wait: here another thread receives it."""

    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def body() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        ended.wait(PATIENCE_S)

    ended, before = threading.Event(), signal.signal(signal.SIGUSR1, interrupt)
    try:
        watch = Stopwatch()
        with pytest.raises(Interrupted):
            threads.run(body, PATIENCE_S)
        assert watch.elapsed_s < PATIENCE_S / 2
    finally:
        ended.set()
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_caller_waits_for_no_unstarted_call(
    threads: CallThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at each moment of a call, beside another one that runs."""
    ended = threading.Event()
    other = threads.start(lambda: ended.wait(PATIENCE_S), PATIENCE_S)
    monkeypatch.setattr(calls, "ABANDON_S", PATIENCE_S)
    places = []
    while True:
        interrupt, watch = Interrupt(("threads/calls.py",), len(places)), Stopwatch()
        was_interrupted = interrupt.run(lambda: threads.run(lambda: 1, PATIENCE_S))
        assert watch.elapsed_s < PATIENCE_S / 2, interrupt.place
        if not was_interrupted:
            break
        places.append(interrupt.place)
    assert {"calls.py:run", "calls.py:look", "calls.py:_awaited"} <= {*places}
    assert threads.run(lambda: 1, PATIENCE_S) == 1
    ended.set()
    assert other.result(PATIENCE_S)


def test_what_cancels_may_be_stuck_as_well(threads: CallThreads) -> None:
    stuck = threading.Event()

    def body() -> None:
        with cancelled_by(lambda: stuck.wait(PATIENCE_S)):
            stuck.wait(PATIENCE_S)

    with pytest.raises(DeadlineError):
        threads.run(body, 0.1)
    assert threads.run(lambda: 1, PATIENCE_S) == 1
    stuck.set()


def test_a_late_call_is_cancelled_once_and_says_so(threads: CallThreads) -> None:
    ended, acts = threading.Event(), []

    def act() -> None:
        acts.append(threading.current_thread())
        ended.set()

    def body() -> tuple[bool, bool]:
        with cancelled_by(act):
            assert ended.wait(PATIENCE_S)
        call = current_call()
        assert call is not None
        return call.is_expired, call.cancelled.is_set()

    assert threads.start(body, 0.05).result(PATIENCE_S) == (True, True)
    assert len(acts) == 1
    assert acts[0] is not threading.current_thread()
    assert current_call() is None


def test_each_call_is_cancelled_at_its_own_time(threads: CallThreads) -> None:
    """A shorter one that begins while a longer one runs, and one after the first was late."""
    long_ended = threading.Event()
    long = threads.start(lambda: long_ended.wait(PATIENCE_S), PATIENCE_S)

    def body() -> bool:
        ended = threading.Event()
        with cancelled_by(ended.set):
            return ended.wait(PATIENCE_S)

    for _ in range(2):
        watch = Stopwatch()
        others = [threads.start(body, timeout_s) for timeout_s in (0.15, 0.05, 0.1)]
        assert [other.result(PATIENCE_S) for other in others] == [True] * 3
        assert watch.elapsed_s < PATIENCE_S / 2
    assert not long.done()
    long_ended.set()
    assert long.result(PATIENCE_S)


def test_calls_of_like_timeouts_wake_what_cancels_once(threads: CallThreads) -> None:
    """Many clients that wait would else take the processor from those that work."""
    waits: list[float | None] = []

    class Counted(queue.SimpleQueue[Callable[[], None] | None]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            waits.append(timeout)
            return super().get(block, timeout)

    before, threads._threads.to_cancel = threads._threads.to_cancel, Counted()
    before.put(lambda: None)  # the thread goes on with the other queue
    eventually("it waits there", lambda: waits == [None])
    for _ in range(3):
        assert not threads.run(lambda: threading.Event().wait(0.25), PATIENCE_S)
    eventually("it knows when to look", lambda: len(waits) >= 2)
    first_s, *rest_s = waits
    assert first_s is None
    assert [wait_s for wait_s in rest_s if wait_s is None or wait_s < PATIENCE_S / 2] == []
    assert len(rest_s) == 1


def test_what_holds_after_the_end_is_cancelled_at_once(threads: CallThreads) -> None:
    acts: list[int] = []

    def body() -> None:
        call = current_call()
        assert call is not None
        assert call.cancelled.wait(PATIENCE_S)
        with cancelled_by(lambda: acts.append(1)):
            pass

    threads.start(body, 0.05).result(PATIENCE_S)
    assert acts == [1]


def test_calls_that_wait_hold_up_no_other(threads: CallThreads) -> None:
    ended = threading.Event()
    waiting = [threads.start(lambda: ended.wait(PATIENCE_S), PATIENCE_S) for _ in range(40)]
    assert threads.run(lambda: "at once", PATIENCE_S) == "at once"
    assert not any(future.done() for future in waiting)
    ended.set()
    assert all(future.result(PATIENCE_S) for future in waiting)


def test_calls_one_after_the_other_have_one_thread(threads: CallThreads) -> None:
    """However many calls there were at once before; and no other thread is woken for them."""
    ended = threading.Event()
    waiting = [threads.start(lambda: ended.wait(PATIENCE_S), PATIENCE_S) for _ in range(5)]
    ended.set()
    assert all(future.result(PATIENCE_S) for future in waiting)
    inside = threads._threads
    eventually("all are there again", lambda: inside._one_waits + inside._spare_count >= 6)
    eventually("nobody is woken", inside._woken.empty)
    threads.run(lambda: None, PATIENCE_S)
    eventually("one waits", lambda: inside._one_waits)
    assert len({threads.run(threading.get_ident, PATIENCE_S) for _ in range(200)}) == 1
    assert inside._woken.empty()


@pytest.mark.parametrize("idle_s", [0.001, 10.0])
def test_no_call_is_left_waiting(
    threads: CallThreads, monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """Calls from many threads, each of which starts another and waits for it; threads that come and
    go between them."""
    monkeypatch.setattr(calls, "_IDLE_S", idle_s)

    def outer(number: int) -> int:
        return threads.start(lambda: number, PATIENCE_S).result(PATIENCE_S)

    def caller(seed: int) -> Callable[[], list[int]]:
        def run() -> list[int]:
            found = []
            for number in range(60):
                found.append(threads.run(partial(outer, number), PATIENCE_S))
                if number % 7 == seed:
                    time.sleep(0.003)  # for longer than the shorter idle time
            return found

        return run

    assert together([caller(seed) for seed in range(6)]) == [list(range(60))] * 6


def test_of_idle_threads_one_stays(threads: CallThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_IDLE_S", 0.05)
    ended = threading.Event()
    waiting = [threads.start(lambda: ended.wait(PATIENCE_S), PATIENCE_S) for _ in range(8)]
    ended.set()
    assert all(future.result(PATIENCE_S) for future in waiting)
    threads.run(lambda: None, PATIENCE_S)
    eventually("one waits, beside the thread that cancels", lambda: _count() == 2)
    assert threads.run(lambda: 1, PATIENCE_S) == 1


def test_without_a_further_thread_calls_take_turns(
    threads: CallThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads._threads, "_thread", refuse)
    begun, ended = threading.Event(), threading.Event()

    def body() -> bool:
        begun.set()
        return ended.wait(PATIENCE_S)

    first = threads.start(body, PATIENCE_S)
    assert begun.wait(PATIENCE_S)
    others = [threads.start(lambda: True, PATIENCE_S) for _ in range(5)]
    ended.set()
    assert [call.result(PATIENCE_S) for call in (first, *others)] == [True] * 6


def test_the_limit_is_named(threads: CallThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CALL_COUNT_MAX == 256
    monkeypatch.setattr(calls, "CALL_COUNT_MAX", 2)
    ended, begun = threading.Event(), threading.Semaphore(0)

    def body() -> bool:
        begun.release()
        return ended.wait(PATIENCE_S)

    waiting = [threads.start(body, PATIENCE_S) for _ in range(2)]
    for _ in waiting:
        assert begun.acquire(timeout=PATIENCE_S)
    with pytest.raises(LimitError, match="call_count_max=2"):
        threads.run(lambda: 1, PATIENCE_S)
    ended.set()
    assert all(future.result(PATIENCE_S) for future in waiting)


def test_close_cancels_what_runs_and_refuses_what_comes(threads: CallThreads) -> None:
    ended, begun, finished = threading.Event(), threading.Event(), threading.Event()

    def body() -> bool:
        with cancelled_by(ended.set):
            begun.set()
            return ended.wait(PATIENCE_S)

    waiting = threads.start(body, PATIENCE_S)
    assert begun.wait(PATIENCE_S)
    threads.close(finished.set)
    assert waiting.result(PATIENCE_S)
    assert finished.wait(PATIENCE_S)
    with pytest.raises(ClosedError):
        threads.run(lambda: 1, PATIENCE_S)


def test_a_call_that_comes_as_it_closes_raises(
    threads: CallThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked before, and was queued when no thread was left to take it."""
    monkeypatch.setattr(threads, "_check_room", lambda: None)
    threads.close()
    eventually("its threads end", lambda: _count() == 0)
    watch = Stopwatch()
    with pytest.raises(ClosedError):
        threads.run(lambda: 1, PATIENCE_S)
    with pytest.raises(ClosedError):
        threads.start(lambda: 1, PATIENCE_S).result(PATIENCE_S)
    assert watch.elapsed_s < PATIENCE_S / 2


def test_what_is_queued_as_it_closes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a call that takes no notice, and at whatever moment."""
    for _ in range(100):
        made, may_end = CallThreads("test"), threading.Event()
        monkeypatch.setattr(made, "_check_room", lambda: None)
        stubborn = made.start(partial(may_end.wait, PATIENCE_S), PATIENCE_S)
        made.close()
        queued = [made.start(lambda: 1, PATIENCE_S) for _ in range(3)]
        may_end.set()
        for each in queued:
            assert isinstance(each.exception(PATIENCE_S), ClosedError)
        error = stubborn.exception(PATIENCE_S)  # which may have begun before
        assert error is None or isinstance(error, ClosedError)
    eventually("their threads end", lambda: _count() == 0)


def test_threads_end_with_what_owns_them() -> None:
    made = CallThreads("test")
    assert made.run(lambda: _count(), PATIENCE_S) >= 2
    del made
    gc.collect()
    eventually("its threads end", lambda: _count() == 0)
