"""Goal: many are asked at once, and the answers and failures are those of asking one after another.

Method: barriers that only calls under way at once can pass; failures at places that are drawn.
"""

from __future__ import annotations

import threading

import pytest

from harness.polling import PATIENCE_S, eventually
from shardwell.threads.asking import ask_all, batches
from shardwell.threads.calls import Call, CallPart, cancelled_by, current_call
from shardwell.threads.pool import IDLE_NAME

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_answers_come_in_order(count: int) -> None:
    assert ask_all(range(count), lambda number: number * number) == [n * n for n in range(count)]


@pytest.mark.parametrize("count", [2, 8])
def test_all_are_asked_at_once(count: int) -> None:
    together = threading.Barrier(count)
    assert len(ask_all(range(count), lambda _: together.wait(10))) == count


@pytest.mark.parametrize("failing", [0, 1, 5, 19])
def test_a_failure_cancels_the_others_and_is_the_one_that_is_raised(failing: int) -> None:
    begun: list[int] = []

    def ask(number: int) -> None:
        begun.append(number)
        if number == failing:
            raise KeyError(number)
        if number < failing:
            return
        cancelled = threading.Event()
        with cancelled_by(cancelled.set):
            assert cancelled.wait(PATIENCE_S)
        raise ValueError(number)

    with pytest.raises(KeyError, match=str(failing)):
        ask_all(range(20), ask)
    assert len(begun) <= failing + 1 + 8


@pytest.mark.parametrize("is_expired", [False, True])
def test_all_are_cancelled_with_the_call_and_know_why(is_expired: bool) -> None:
    call = Call()
    began = threading.Barrier(9)

    def ask(_: int) -> bool:
        part = current_call()
        assert part is not None
        began.wait(PATIENCE_S)
        assert part.cancelled.wait(PATIENCE_S)
        return part.is_expired

    def cancel() -> None:
        began.wait(PATIENCE_S)
        call.is_expired = is_expired
        call.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    whole = CallPart(call)
    with whole.running():
        assert ask_all(range(8), ask) == [is_expired] * 8
        assert current_call() is whole
    canceller.join()
    assert current_call() is None


def test_a_failure_of_some_does_not_cancel_the_call() -> None:
    whole = CallPart(None)
    with whole.running(), pytest.raises(ZeroDivisionError):
        ask_all([1, 0], lambda number: 1 // number)
    assert not whole.cancelled.is_set()


@pytest.mark.parametrize("sizes", [[], [1, 2, 3], [1, 1 << 30, 2, 3, 1 << 30, 1 << 30]])
def test_large_ones_are_moved_alone_and_none_is_left_out(sizes: list[int]) -> None:
    cut = list(batches(sizes, lambda size: size))
    assert [size for batch in cut for size in batch] == sizes
    assert all(len(batch) == 1 or max(batch) < 1 << 20 for batch in cut)
    assert len(cut) == {0: 0, 3: 1, 6: 5}[len(sizes)]


def test_no_thread_has_work_after_the_call() -> None:
    before = set(threading.enumerate())
    ask_all(range(20), lambda number: number)
    left = set(threading.enumerate()) - before
    eventually("all are idle", lambda: {thread.name for thread in left} <= {IDLE_NAME})
