"""Goal: a seat is taken soon after it is free, and a worker that asks for one that is not asks
seldom.

Method: a world with a clock of its own, in which questions and pauses take next to no time.
"""

from __future__ import annotations

import pytest

from shardwell.errors import WorkerIdInUseError
from shardwell.rpc.retry import Attempts
from shardwell.rpc.take_over import TAKE_OVER_S, CrewSteps, claim_seat, was_cut_off

ANSWER_S = 0.001
LATE_S_MAX = 0.6


class Seat:
    """A seat that is another's until a moment, and the clock by which that is so."""

    def __init__(self, free_at_s: float, *, is_known: bool) -> None:
        self.time_s = 0.0
        self.question_count = 0
        self._free_at_s = free_at_s
        self._is_known = is_known

    def take(self) -> float:
        """When it was taken."""
        self.question_count += 1
        self.time_s += ANSWER_S
        if self.time_s < self._free_at_s:
            free_in_s = self._free_at_s - self.time_s if self._is_known else None
            raise WorkerIdInUseError("in use", free_in_s=free_in_s)
        return self.time_s

    def now_s(self) -> float:
        return self.time_s

    def jitter(self) -> float:
        return 1.0

    def pause(self, duration_s: float) -> None:
        self.time_s += duration_s

    def replace_older(self) -> bool:
        return False

    def await_shard(self, shard_index: int, timeout_s: float) -> bool:
        raise AssertionError("no shard went away")

    def describe(self, shard_index: int) -> str:
        return ""


@pytest.mark.parametrize("free_at_s", [0.0, 0.01, 0.1, 0.4, 1.0, 1.8])
def test_a_seat_that_gets_free_is_taken_soon(free_at_s: float) -> None:
    seat = Seat(free_at_s, is_known=False)
    taken_s = claim_seat(Attempts(20.0, seat), seat.take)
    assert taken_s - free_at_s <= min(max(2 * free_at_s, 0.1), LATE_S_MAX)


@pytest.mark.parametrize("timeout_s", [0.5, 120.0])
def test_a_seat_that_is_not_free_is_asked_for_a_few_times(timeout_s: float) -> None:
    seat = Seat(1e9, is_known=False)
    with pytest.raises(WorkerIdInUseError):
        claim_seat(Attempts(timeout_s, seat), seat.take)
    assert seat.time_s <= min(timeout_s, TAKE_OVER_S) + LATE_S_MAX
    assert seat.question_count <= 10


def test_a_seat_that_will_be_free_is_waited_for_until_the_deadline() -> None:
    seat = Seat(5.0, is_known=True)
    assert claim_seat(Attempts(20.0, seat), seat.take) <= 5.0 + LATE_S_MAX
    assert seat.question_count <= 15
    seat = Seat(5.0, is_known=True)
    with pytest.raises(WorkerIdInUseError):
        claim_seat(Attempts(3.0, seat), seat.take)
    assert seat.time_s <= 3.0 + LATE_S_MAX


def _steps(*next_steps: int, version: int = 0, is_restored: bool = False) -> CrewSteps:
    """Those of workers w0, w1, .. with seats, among three."""
    return CrewSteps(
        next_steps={f"w{index}": step for index, step in enumerate(next_steps)},
        version=version,
        has_room=len(next_steps) < 3,
        is_restored=is_restored,
    )


@pytest.mark.parametrize(
    ("ahead", "behind", "expected"),
    [
        (_steps(6, 6, 6), _steps(5, 6, 6), True),  # the others wait in the one that is behind
        (_steps(6, 5, 6), _steps(5, 5, 5), True),  # another has yet to make both
        (_steps(6, 7, 7), _steps(5, 5, 5), False),  # the others wait in the one that is ahead
        (_steps(6, 7, 6), _steps(5, 5, 5), False),
        (_steps(6, 6, 6), _steps(5, 5, 5), True),  # all between the two
        (_steps(6, 6, 6, is_restored=True), _steps(5, 5, 5), False),  # or they began apart
        (_steps(6, 6, 6), _steps(5, 6, 6, is_restored=True), True),
        (_steps(1, 1, 1), _steps(), True),  # no worker has a seat in the other before step 0
        (_steps(1, 2, 2), _steps(), False),  # no loop makes a step of that
        (_steps(6), _steps(5), True),  # one worker alone
    ],
)
def test_where_a_worker_was_cut_off_follows_from_the_steps_of_the_others(
    ahead, behind, expected
) -> None:
    assert was_cut_off("w0", ahead, behind) is expected
