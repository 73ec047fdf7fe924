"""Goal: a client goes on attending, whenever its call ends; one that was refused asks no more.

Method: calls that end when the test says so, also before a callback is set; the real timer.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.polling import eventually
from shardwell.errors import LimitError, ShardUnavailableError, ShardwellError
from shardwell.rpc.held_call import HeldCall


class Call:
    """As gRPC's: it tells who listens that it has ended, and refuses who comes later."""

    def __init__(self, *, has_ended: bool = False) -> None:
        self.error: ShardwellError = ShardUnavailableError("the connection was cut")
        self._has_ended = has_ended
        self._listeners: list[Callable[[], None]] = []

    def add_callback(self, listener: Callable[[], None]) -> bool:
        if not self._has_ended:
            self._listeners.append(listener)
        return not self._has_ended

    def end(self) -> None:
        self._has_ended = True
        for listener in self._listeners:
            listener()

    def cancel(self) -> None:
        self.end()


class Shard:
    """Is attended; the first calls have ended before they can be listened to."""

    def __init__(self, *, dead_count: int = 0) -> None:
        self.calls: list[Call] = []
        self._dead_count = dead_count

    def attend(self) -> Call:
        self.calls.append(Call(has_ended=len(self.calls) < self._dead_count))
        return self.calls[-1]


def attendance_of(shard: Shard) -> HeldCall:
    return HeldCall(shard.attend, lambda call: call.error)


def is_open(shard: Shard) -> bool:
    return not shard.calls[-1]._has_ended


def test_a_call_that_was_cut_is_made_again() -> None:
    shard = Shard()
    attendance = attendance_of(shard)
    attendance.ensure()
    shard.calls[0].end()
    eventually("it attends", lambda: len(shard.calls) == 2 and is_open(shard))
    attendance.close()


def test_a_call_that_ended_before_its_callback_is_made_again() -> None:
    shard = Shard(dead_count=2)
    attendance = attendance_of(shard)
    attendance.ensure()
    assert len(shard.calls) == 1
    eventually("it attends", lambda: len(shard.calls) == 3 and is_open(shard))
    attendance.close()


def test_after_close_no_call_is_made() -> None:
    shard = Shard(dead_count=1)
    attendance = attendance_of(shard)
    attendance.ensure()
    timer = attendance._timer
    assert timer is not None
    attendance.close()
    assert timer.act is None
    attendance.ensure()
    assert len(shard.calls) == 1


def test_a_refusal_is_raised_once_and_the_call_made_when_needed() -> None:
    shard = Shard()
    attendance = attendance_of(shard)
    attendance.ensure()
    shard.calls[0].error = LimitError("limit of sessions")
    shard.calls[0].end()
    assert len(shard.calls) == 1
    with pytest.raises(LimitError, match="limit of sessions"):
        attendance.ensure()
    assert len(shard.calls) == 2
    assert is_open(shard)
    attendance.ensure()
    attendance.close()


def test_ensure_leaves_no_timers() -> None:
    shard = Shard(dead_count=5)
    attendance = attendance_of(shard)
    timers = []
    for _ in range(4):
        attendance.ensure()
        timers.append(attendance._timer)
    attendance.close()
    assert len(set(timers)) == 4
    assert all(timer is not None and timer.act is None for timer in timers)
