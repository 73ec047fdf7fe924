"""Goal: what is owed of earlier gradients is added until it has counted, and never after that.

Method: one element a case of the module's table, with a codec that rounds to multiples of ten, so
that the digits of a sum show its terms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwell.parameter.feedback import Ended, Feedback
from shardwell.parameter.values import Pieces
from shardwell.placement.slices import Slice

CARRIED, RESIDUAL, OWN = 4000.0, 3.0, 201.0
CHUNK = Slice(0, 1)
BESIDE = Slice(1, 1)
"""An element that always counts."""


class Tens:
    """The part of a block codec that is needed, exact for small integers."""

    def residual(self, values: np.ndarray) -> np.ndarray:
        return (values - np.floor(values / 10) * 10).astype(np.float32)


def vector(value: float) -> np.ndarray:
    return np.full(2, value, np.float32)


class Worker:
    """Sends gradients as a parameter does."""

    def __init__(self, *, carries: bool) -> None:
        codec: Any = Tens()
        self.feedback = Feedback(2, codec)
        self.feedback.set_carries(carries)
        self.feedback.residual = vector(RESIDUAL)
        if carries:
            self.feedback.carried = vector(CARRIED)

    def sent(self, own: float) -> Pieces:
        return Pieces(self.feedback.added(vector(own)))

    def fail(self, own: float, step: int = 0) -> None:
        self.feedback.tried(step, self.sent(own))

    def end(self, own: float | None, step: int = 0, **ended: Any) -> None:
        sent = None if own is None else self.sent(own)
        alone = None if own is None else Pieces(vector(own))
        self.feedback.end(step, sent, alone, Ended(**ended))

    @property
    def owed(self) -> tuple[float, float]:
        """Carried and residual of the element that a case is about."""
        carried, residual = self.feedback.carried, self.feedback.residual
        return (
            0.0 if carried is None else float(carried[0]),
            0.0 if residual is None else float(residual[0]),
        )


@pytest.mark.parametrize("carries", [False, True])
def test_a_gradient_that_counts_takes_all_with_it_and_leaves_its_rounding(carries: bool) -> None:
    worker = Worker(carries=carries)
    worker.end(OWN)
    assert worker.owed == (0.0, 4.0)


def test_a_late_gradient_is_carried_with_all_that_it_had() -> None:
    worker = Worker(carries=True)
    worker.end(OWN, late={CHUNK})
    assert worker.owed == (CARRIED + OWN + RESIDUAL, 0.0)
    worker.end(OWN, step=1)
    assert worker.owed == (0.0, float((CARRIED + 2 * OWN + RESIDUAL) % 10))


def test_a_late_gradient_that_is_dropped_leaves_the_residual() -> None:
    worker = Worker(carries=False)
    worker.end(OWN, late={CHUNK})
    assert worker.owed == (0.0, RESIDUAL)


@pytest.mark.parametrize(("carries", "owed"), [(True, OWN), (False, 0.0)])
def test_a_failed_call_that_counted_has_taken_what_was_owed(carries: bool, owed: float) -> None:
    worker = Worker(carries=carries)
    worker.fail(5.0)
    worker.end(OWN, superseded={CHUNK})
    assert worker.owed == (owed, float((carries * CARRIED + 5.0 + RESIDUAL) % 10))


def test_of_several_failed_calls_none_is_known_to_have_counted() -> None:
    worker = Worker(carries=True)
    worker.fail(5.0)
    worker.fail(6.0)
    worker.end(OWN, superseded={CHUNK})
    assert worker.owed == (OWN, 0.0)


def test_a_failed_call_with_the_same_gradient_has_superseded_nothing() -> None:
    worker = Worker(carries=True)
    worker.fail(OWN)
    worker.end(OWN, superseded={CHUNK})
    assert worker.owed == (CARRIED + OWN, 0.0)


@pytest.mark.parametrize(("carries", "carried"), [(True, CARRIED + OWN), (False, 0.0)])
def test_an_earlier_process_has_not_had_what_this_one_carries(
    carries: bool, carried: float
) -> None:
    """It may have had the residual, which is saved with a worker's state."""
    worker = Worker(carries=carries)
    worker.end(OWN, superseded={CHUNK})
    assert worker.owed == (carried, 0.0)


@pytest.mark.parametrize("carries", [False, True])
def test_what_an_outcome_said_to_be_counted_supersedes_a_second_gradient(carries: bool) -> None:
    """As after a tenure that was over: the step is given again, for what was late in it."""
    worker = Worker(carries=carries)
    worker.end(OWN, late={BESIDE})
    left = worker.owed
    assert left[0] == 0.0
    worker.end(7.0, superseded={CHUNK})
    assert sum(worker.owed) == left[1] + 7.0 * carries
    worker.end(8.0, superseded={CHUNK})  # and a third one
    assert sum(worker.owed) == left[1] + 15.0 * carries


@pytest.mark.parametrize("own", [None, OWN])
def test_what_may_have_counted_is_owed_no_more(own: float | None) -> None:
    worker = Worker(carries=True)
    worker.end(own, unknown={CHUNK})
    assert worker.owed == (0.0, 0.0)


def test_a_contribution_without_values_leaves_all_as_it_was() -> None:
    worker = Worker(carries=True)
    for ended in ({}, {"late": {CHUNK}}):
        worker.end(None, **ended)
        assert worker.owed == (CARRIED, RESIDUAL)
    worker.end(None, superseded={CHUNK})
    assert worker.owed == (CARRIED, 0.0)


def test_a_contribution_without_values_asks_what_a_failed_call_took() -> None:
    worker = Worker(carries=True)
    worker.fail(5.0, step=2)
    assert worker.feedback.is_open(3)
    assert not worker.feedback.is_open(2)
    worker.end(None, step=2, superseded={CHUNK})
    assert worker.owed == (0.0, float((CARRIED + 5.0 + RESIDUAL) % 10))
    carried = worker.feedback.carried
    assert carried is not None
    assert float(carried[1]) == CARRIED
    assert not worker.feedback.is_open(3)


def test_reopened_behind_the_step_it_was_one_of_those_that_were_tried() -> None:
    worker = Worker(carries=False)
    worker.fail(5.0, step=2)
    worker.feedback.reopened(3)
    assert worker.owed == (0.0, 8.0)
