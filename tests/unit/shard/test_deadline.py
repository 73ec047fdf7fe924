"""Goal: a request that is too early is woken by the next change, once, and has a last try."""

from __future__ import annotations

import math
import threading

import pytest

from shardwell.errors import ShardUnavailableError
from shardwell_server.shard.deadline import Changes, NotYet, RequestDeadline, until


class Request:
    """Wants `version` of something under `changes`."""

    def __init__(self, timeout_s: float, *, is_stopping: bool = False) -> None:
        self.woken_count = 0
        self.version = 0
        self.changes = Changes(threading.Lock())
        self.deadline = RequestDeadline(timeout_s, wake=self.wake, is_stopping=lambda: is_stopping)

    def wake(self) -> None:
        self.woken_count += 1

    def attempt(self, version: int) -> int | None:
        with self.changes:
            if self.version < version:
                self.deadline.wait(self.changes)
                return None
            return self.version

    def reach(self, version: int) -> None:
        with self.changes:
            self.version = version
            self.changes.notify_all()


def test_what_is_there_is_given_at_once() -> None:
    request = Request(0.0)
    assert request.attempt(0) == 0


def test_a_change_wakes_once() -> None:
    request = Request(60.0)
    with pytest.raises(NotYet):
        request.attempt(2)
    request.reach(1)
    assert request.woken_count == 1
    request.reach(1)
    assert request.woken_count == 1, "it has not asked again"
    with pytest.raises(NotYet):
        request.attempt(2)
    request.reach(2)
    assert request.woken_count == 2
    assert request.attempt(2) == 2


def test_who_has_gone_is_not_woken() -> None:
    request = Request(60.0)
    with pytest.raises(NotYet) as found:
        request.attempt(1)
    found.value.forget()
    found.value.forget()
    request.reach(1)
    assert request.woken_count == 0


def test_asking_twice_wakes_once() -> None:
    request = Request(60.0)
    for _ in range(3):
        with pytest.raises(NotYet):
            request.attempt(1)
    request.reach(1)
    assert request.woken_count == 1


def test_time_is_over() -> None:
    request = Request(0.0)
    assert request.attempt(1) is None, "it goes on, and tells what is missing"
    request.reach(1)
    assert request.woken_count == 0


def test_a_stop_ends_it() -> None:
    request = Request(60.0, is_stopping=True)
    with pytest.raises(ShardUnavailableError, match="stopping"):
        request.attempt(1)


@pytest.mark.parametrize(("look_s", "soonest"), [(math.inf, False), (0.0, True)])
def test_when_to_look_again(look_s: float, soonest: bool) -> None:
    request = Request(60.0)
    with request.changes, pytest.raises(NotYet) as whole:
        request.deadline.wait(request.changes)
    with request.changes, pytest.raises(NotYet) as asked:
        request.deadline.wait(request.changes, look_s=look_s)
    assert (asked.value.deadline_s < whole.value.deadline_s) is soonest


def test_until_goes_on_from_each_attempt() -> None:
    request = Request(60.0)
    going = until(request.attempt, 2)
    assert isinstance(next(going), NotYet)
    request.reach(1)
    assert isinstance(next(going), NotYet)
    request.reach(2)
    with pytest.raises(StopIteration) as end:
        next(going)
    assert end.value.value == 2


def test_until_holds_nothing_of_an_attempt() -> None:
    """Which may have a payload at hand that is not to be kept through a wait."""
    request = Request(60.0)
    assert next(until(request.attempt, 1)).__traceback__ is None


def test_a_lock_may_be_its_own() -> None:
    changes = Changes()
    with changes, changes:
        changes.notify_all()
