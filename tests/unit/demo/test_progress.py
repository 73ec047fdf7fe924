"""Where all workers are together, by what each of them has reported."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shardwell_server.demo.progress import Observer
from shardwell_server.demo.reports import Report


@dataclass
class ReportedMember:
    """A worker's reports, without its process."""

    latest: Report | None = None
    loss: float | None = None
    first_loss: float | None = None
    first_step_s: float | None = None
    heard_s: float = 0.0
    is_let_go: bool = False

    @property
    def step(self) -> int:
        return 0 if self.latest is None else self.latest.step


def _trained(loss: float, *, is_let_go: bool = False) -> ReportedMember:
    report = Report(step=3, loss=loss)
    return ReportedMember(report, loss, 2.0, 1.0, 4.0, is_let_go)


def test_the_loss_is_that_of_workers_that_are_left() -> None:
    state = Observer([_trained(0.5), _trained(0.0), _trained(9.0, is_let_go=True)]).look(5.0)  # type: ignore[list-item]
    assert (state.loss, state.first_loss, state.training_s) == (0.25, 2.0, 3.0)


def test_the_loss_of_workers_that_died_where_those_left_made_no_step() -> None:
    """A short run with kills: who is left came when all steps were made."""
    late = ReportedMember(Report(step=3))
    state = Observer([late, _trained(0.0), _trained(1.0, is_let_go=True)]).look(5.0)  # type: ignore[list-item]
    assert state.loss == 0.0
    state = Observer([late, _trained(0.5, is_let_go=True)]).look(5.0)  # type: ignore[list-item]
    assert state.loss == pytest.approx(0.5)
    assert Observer([late]).look(5.0).loss is None  # type: ignore[list-item]
