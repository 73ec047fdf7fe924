"""Goal: the reported durations of steps are the time that passed, whatever order parts close in.

Method: a clock that is set by hand.
"""

from __future__ import annotations

from shardwell_server.shard.step_times import BOUNDS_S, Durations, StepTimes


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def count_of(times: Durations) -> int:
    return sum(times.counts)


def test_a_step_is_over_when_its_last_part_is() -> None:
    clock = Clock()
    times = StepTimes(3, clock)
    assert times.open_for_s(0) is None
    times.contributed(0)
    clock.now_s += 2
    times.contributed(0)
    assert times.open_for_s(0) == 2
    times.closed(0)
    times.closed(0)
    assert count_of(times.waits) == 0
    clock.now_s += 1
    times.closed(0)
    assert (count_of(times.waits), times.waits.total_s) == (1, 3)
    assert count_of(times.periods) == 0
    assert times.open_for_s(0) is None


def test_steps_that_overlap() -> None:
    """A worker may be one ahead in some parts."""
    clock = Clock()
    times = StepTimes(2, clock)
    for step in range(5):
        times.contributed(step)
        clock.now_s += 1
        times.closed(step)
        times.contributed(step + 1)
        clock.now_s += 1
        times.closed(step)
    assert (count_of(times.waits), count_of(times.periods)) == (5, 4)
    assert times.periods.total_s == 4 * 2
    assert times.waits.total_s == 2 + 4 * 3
    assert times.open_for_s(5) == 1


def test_steps_that_never_end_are_forgotten() -> None:
    clock = Clock()
    times = StepTimes(2, clock)
    for step in range(1000):
        times.contributed(step)
    assert len(times._begun_s) < 10
    assert times.open_for_s(999) == 0
    times.closed(999)
    times.closed(999)
    assert not times._begun_s
    assert not times._closed_counts


def test_each_duration_is_counted_below_its_bound() -> None:
    found = Durations()
    for bound in BOUNDS_S:
        found.add(bound)
        found.add(bound * 1.01)
    assert found.counts == [1, *([2] * (len(BOUNDS_S) - 1)), 1]
