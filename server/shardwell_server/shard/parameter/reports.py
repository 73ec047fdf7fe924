"""The figures that workers report of their steps, such as a loss: for people, not for training."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from shardwell.errors import ArgumentError, LimitError
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.names import check_name
from shardwell.v1 import parameter_server_pb2 as pb

FIGURE_COUNT_MAX = 16
"""Figures of one parameter."""
STEP_COUNT_MAX = 512
"""Steps that are kept, the last ones: what a curve on a screen shows."""
LEARNER_COUNT_MAX = 1024
"""Learners whose progress is kept, those that said so last."""


class Reports:
    """Reports of one parameter, in memory. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, dict[int, tuple[float, int]]] = {}
        """By figure and step: the sum of what was reported, and how many did."""
        self._learners: dict[str, tuple[LearnerProgress, float]] = {}
        """By worker, with when it came; the last one last."""

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds the figures that one worker reports of a step."""
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
        """Returns by figure: steps, in order, with the mean of the reports of each."""
        with self._lock:
            return {
                name: [(step, total / count) for step, (total, count) in sorted(kept.items())]
                for name, kept in self._sums.items()
            }

    def newest(self) -> dict[str, float]:
        """Returns by figure the mean of the reports of the last step that has it."""
        with self._lock:
            last = {name: kept[max(kept)] for name, kept in self._sums.items()}
        return {name: total / count for name, (total, count) in last.items()}

    def note_learner(self, worker_id: str, progress: LearnerProgress) -> None:
        """Keeps a learner's progress in outer training, instead of its last one."""
        with self._lock:
            self._learners.pop(worker_id, None)
            self._learners[worker_id] = progress, time.monotonic()
            if len(self._learners) > LEARNER_COUNT_MAX:
                del self._learners[next(iter(self._learners))]

    def learners(self, count_max: int) -> list[pb.LearnerStatus]:
        """Returns the last reports of learners, by worker; of more than `count_max`, the latest."""
        now_s = time.monotonic()
        with self._lock:
            found = list(self._learners.items())[-count_max:]
        return [
            pb.LearnerStatus(
                worker_id=worker_id, progress=progress.to_proto(), ago_s=max(now_s - came_s, 0.0)
            )
            for worker_id, (progress, came_s) in sorted(found)
        ]
