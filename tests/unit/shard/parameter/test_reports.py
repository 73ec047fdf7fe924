"""Goal: of what workers report the last steps are kept, each with its mean, and no more."""

from __future__ import annotations

import math

import pytest

from shardwell.errors import ArgumentError, LimitError
from shardwell_server.shard.parameter.reports import FIGURE_COUNT_MAX, STEP_COUNT_MAX, Reports


def test_a_step_has_the_mean_of_its_workers() -> None:
    reports = Reports()
    for step, loss in ((1, 3.0), (0, 9.0), (1, 5.0)):
        reports.note(step, {"loss": loss, "lr": 0.1})
    assert reports.means()["loss"] == [(0, 9.0), (1, 4.0)]
    assert [step for step, _ in reports.means()["lr"]] == [0, 1]


def test_the_last_steps_are_kept() -> None:
    reports = Reports()
    for step in range(3 * STEP_COUNT_MAX):
        reports.note(step, {"loss": step})
    reports.note(5, {"loss": 1.0})  # too late to be shown
    (found,) = reports.means().values()
    assert [step for step, _ in found] == list(range(2 * STEP_COUNT_MAX, 3 * STEP_COUNT_MAX))


def test_what_is_not_finite_is_told() -> None:
    reports = Reports()
    reports.note(0, {"loss": math.nan})
    assert math.isnan(reports.means()["loss"][0][1])


@pytest.mark.parametrize("figures", [{}, {"": 1.0}, {"a b": 1.0}, {"x" * 129: 1.0}, {"a\n": 1.0}])
def test_names_that_are_none(figures: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        Reports().note(0, figures)


def test_too_many_figures_are_refused_and_change_nothing() -> None:
    reports = Reports()
    for index in range(FIGURE_COUNT_MAX):
        reports.note(0, {f"f{index}": 1.0})
    with pytest.raises(LimitError, match="16 figures"):
        reports.note(1, {"f0": 2.0, "one-more": 1.0})
    assert reports.means()["f0"] == [(0, 1.0)]
