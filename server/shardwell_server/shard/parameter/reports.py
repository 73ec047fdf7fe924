"""Figures that workers report with their steps, such as a loss: for who looks, not for training."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from shardwell.errors import ArgumentError, LimitError
from shardwell.specs.names import check_name

FIGURE_COUNT_MAX = 16
"""Figures of one parameter."""
STEP_COUNT_MAX = 512
"""Steps that are kept, the last ones: what a curve on a screen shows."""


class Reports:
    """Of one parameter, in memory. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, dict[int, tuple[float, int]]] = {}
        """By figure and step: the sum of what was reported, and how many did."""

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds what one worker reports of a step.

        Raises:
            ArgumentError: there is none, or a name is none.
            LimitError: the parameter would have too many.
        """
        if not figures:
            raise ArgumentError("a report has a figure at least; got none")
        for name in figures:
            check_name("figure", name)
        with self._lock:
            if len(self._sums.keys() | figures.keys()) > FIGURE_COUNT_MAX:
                raise LimitError(
                    f"a parameter has {FIGURE_COUNT_MAX} figures at the most; there are "
                    f"{', '.join(self._sums)}; report fewer names"
                )
            for name, value in figures.items():
                kept = self._sums.setdefault(name, {})
                total, count = kept.get(step, (0.0, 0))
                kept[step] = (total + value, count + 1)
                while len(kept) > STEP_COUNT_MAX:
                    del kept[min(kept)]

    def means(self) -> dict[str, list[tuple[int, float]]]:
        """By figure: steps, in order, with the mean of what was reported of each."""
        with self._lock:
            return {
                name: [(step, total / count) for step, (total, count) in sorted(kept.items())]
                for name, kept in self._sums.items()
            }
