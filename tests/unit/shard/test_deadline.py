"""Goal: a request that is too early is woken by the next change, once, and has a last try."""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest

from shardwell.errors import ShardUnavailableError
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.shard.deadline import (
    Changes,
    NotYet,
    RequestDeadline,
    deadline_of,
    until,
    wanted,
)


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
        with self.changes.lock:
            if self.version < version:
                self.deadline.wait(self.changes)
                return None
            return self.version

    def reach(self, version: int) -> None:
        with self.changes.lock:
            self.version = version
            self.changes.notify_all()


def test_existing_things_are_given_at_once() -> None:
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
    with request.changes.lock, pytest.raises(NotYet) as whole:
        request.deadline.wait(request.changes)
    with request.changes.lock, pytest.raises(NotYet) as asked:
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
    with changes.lock, changes.lock:
        changes.notify_all()


@dataclasses.dataclass
class Call:
    """One of a client whose deadline is `remaining_s` away."""

    remaining_s: float | None
    is_active: bool = True

    def wake(self) -> None:
        """Nothing waits here."""


class Shard:
    """A shard where no call waits for longer than 100 s."""

    config = ShardConfig(shard_index=0, shard_count=1, limits=Limits(wait_max_s=100.0))

    def ends_waits(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("asked_s", "remaining_s", "granted_s"),
    [
        (5.0, None, 5.0),
        (5.0, 60.0, 5.0),
        (60.0, 60.0, 59.75),  # an answer that names the missing comes in time
        (0.0, 60.0, 59.75),
        (0.0, 0.4, pytest.approx(0.3)),  # less a quarter, of a short one
        (0.0, -1.0, 0.0),
        (0.0, None, 100.0),
        (500.0, None, 100.0),
        (500.0, 1000.0, 100.0),
    ],
)
def test_how_long_a_request_may_wait(
    asked_s: float, remaining_s: float | None, granted_s: float
) -> None:
    assert deadline_of(Shard(), Call(remaining_s), asked_s).timeout_s == granted_s


@pytest.mark.parametrize("remaining_s", [None, 60.0])
def test_an_answer_is_wanted_while_its_call_is_open(remaining_s: float | None) -> None:
    call = Call(remaining_s)
    is_wanted = wanted(Shard(), call)
    assert is_wanted()
    call.is_active = False
    assert not is_wanted()


def test_an_answer_is_not_wanted_after_the_call_s_deadline() -> None:
    assert not wanted(Shard(), Call(0.0))()
