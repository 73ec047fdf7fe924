"""Goal: every update uses the rate that clients asked for last, and old changes are forgotten.

Method: hypothesis makes calls; the model is a plain list of them, read from its end.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwell_server.shard.learning_rates import LearningRates


def rate_of(calls: list[tuple[int, float]], version: int) -> float:
    """The last call that holds at `version`; "from a step on" overrides what was set for later."""
    return next(rate for start, rate in reversed(calls) if start <= version)


@given(
    moves=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 8), st.floats(0, 1)), min_size=1, max_size=30
    )
)
def test_the_last_call_that_holds_decides(moves: list[tuple[int, int, float]]) -> None:
    rates, calls = LearningRates(0.5), [(0, 0.5)]
    version_min = 0
    for advance, ahead, rate in moves:
        version_min += advance
        rates.prune(version_min)
        rates.change(version_min + ahead, rate)
        calls.append((version_min + ahead, rate))
        for version in range(version_min, version_min + 20):
            assert rates.at(version) == rate_of(calls, version)


def test_a_schedule_is_followed_and_then_forgotten() -> None:
    rates = LearningRates(1.0)
    for start in range(10, 100, 10):
        rates.prune(0)
        rates.change(start, 1.0 / start)
    assert len(rates) == 10
    assert [rates.at(version) for version in (0, 9, 10, 19, 20, 10**9)] == [
        1.0,
        1.0,
        1 / 10,
        1 / 10,
        1 / 20,
        1 / 90,
    ]
    rates.prune(85)
    rates.change(100, 0.0)
    assert len(rates) == 3
    assert (rates.at(85), rates.at(90), rates.at(100)) == (1 / 80, 1 / 90, 0.0)
    rates.prune(90)
    rates.change(110, 0.5)
    assert len(rates) == 3
    assert (rates.at(90), rates.at(100), rates.at(110)) == (1 / 90, 0.0, 0.5)


def test_repeating_a_change_changes_nothing() -> None:
    rates = LearningRates(1.0)
    for _ in range(5):
        rates.prune(3)
        rates.change(7, 0.25)
        assert len(rates) == 2
        assert (rates.at(6), rates.at(7)) == (1.0, 0.25)


def test_changes_of_the_open_step_replace_one_another() -> None:
    rates = LearningRates(1.0)
    for version in range(200):
        rates.prune(version)
        rates.change(version, version / 256)
        assert rates.at(version) == version / 256
        assert len(rates) <= 2
