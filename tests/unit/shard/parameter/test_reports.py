"""Goal: of what workers report the last steps are kept, each with its mean, and no more.

Of what learners say of themselves the last is kept, of those that spoke last."""

from __future__ import annotations

import math

import pytest

from shardwell.errors import ArgumentError, LimitError
from shardwell.specs.learner import LearnerProgress
from shardwell_server.shard.parameter.reports import (
    FIGURE_COUNT_MAX,
    LEARNER_COUNT_MAX,
    STEP_COUNT_MAX,
    Reports,
)


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


def test_figures_that_are_not_finite_are_reported() -> None:
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


def test_of_a_learner_the_last_is_kept() -> None:
    reports = Reports()
    for steps, worker in ((5, "b"), (1, "a"), (6, "b")):
        reports.note_learner(worker, LearnerProgress(inner_steps=steps))
    found = reports.learners(9)
    assert [(each.worker_id, each.progress.inner_steps) for each in found] == [("a", 1), ("b", 6)]
    assert found[0].ago_s >= found[1].ago_s >= 0


def test_of_very_many_learners_those_stay_that_spoke_last() -> None:
    reports = Reports()
    for number in range(LEARNER_COUNT_MAX):
        reports.note_learner(f"w{number:05}", LearnerProgress())
    reports.note_learner("w00000", LearnerProgress())
    reports.note_learner("new", LearnerProgress())
    found = [each.worker_id for each in reports.learners(2 * LEARNER_COUNT_MAX)]
    assert found == ["new", "w00000", *(f"w{n:05}" for n in range(2, LEARNER_COUNT_MAX))]
    assert [each.worker_id for each in reports.learners(2)] == ["new", "w00000"]
