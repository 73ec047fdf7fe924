"""A table in plain Python: rows in float64, by id (table.proto, docs/adr/0010-tables.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float64]


class ModelTable:
    """One shard's part of a table, or all of it.

    Args:
        initial: A row before its first gradient.
        update: New weights and state of a row: (weights, gradient, state, count, rate), in place.
        worker_count: 0: asynchronous.
    """

    def __init__(
        self,
        initial: Callable[[int], Iterable[float]],
        update: Callable[[Row, Row, dict[str, Row], int, float], None],
        worker_count: int,
        rate: float,
    ) -> None:
        self.worker_count = worker_count
        self.version = 0
        self.rows: dict[int, Row] = {}
        self.state: dict[int, dict[str, Row]] = {}
        self.counts: dict[int, int] = {}
        self.last_steps: dict[int, int] = {}
        self.sums: dict[int, Row] = {}
        self.samples: dict[str, int] = {}
        self.positions: dict[str, tuple[int, int]] = {}
        self.ended: set[str] = set()
        self.rates = {0: rate}
        self._initial = initial
        self._update = update

    def rate(self) -> float:
        return self.rates[max(step for step in self.rates if step <= self.version)]

    def next_part(self, worker: str) -> tuple[int, int]:
        """The worker's open step, and the parts of it that are counted."""
        if self.worker_count:
            return max(self.positions.get(worker, (self.version, 0)), (self.version, 0))
        return self.positions.get(worker, (0, 0))

    def waits(self, worker: str) -> bool:
        """Whether its next part has to wait for others."""
        return worker in self.ended

    def is_full(self, worker: str) -> bool:
        """Whether all seats are others'."""
        seated = self.positions.keys()
        return bool(self.worker_count) and worker not in seated and len(seated) >= self.worker_count

    def value(self, row_id: int) -> Row:
        found = self.rows.get(row_id)
        return np.array(list(self._initial(row_id)), np.float64) if found is None else found

    def take(
        self, worker: str, gradients: dict[int, Row], *, samples: int, ends: bool, first: bool
    ) -> None:
        """Counts the worker's next part."""
        step, count = self.next_part(worker)
        if self.worker_count and first:
            self.samples[worker] = samples
        weighs = samples > 0 or not self.worker_count
        for row_id, gradient in gradients.items() if weighs else ():
            if row_id not in self.rows:
                self.rows[row_id], self.state[row_id] = self.value(row_id), {}
                self.counts[row_id] = 0
                self.last_steps[row_id] = self.version
            if self.worker_count > 1:
                old = self.sums.get(row_id, np.zeros(gradient.size))
                self.sums[row_id] = old + samples * gradient
            else:
                self._apply(row_id, gradient)
        self.positions[worker] = (step + 1, 0) if ends else (step, count + 1)
        if ends:
            self.ended.add(worker)
            if not self.worker_count or len(self.ended) == self.worker_count:
                self._close()

    def _close(self) -> None:
        total = sum(self.samples.values())
        for row_id, value in self.sums.items():
            self._apply(row_id, value / total)
        self.sums, self.samples, self.ended = {}, {}, set()
        self.version += 1

    def _apply(self, row_id: int, gradient: Row) -> None:
        self.counts[row_id] += 1
        self.last_steps[row_id] = self.version
        row, state = self.rows[row_id], self.state[row_id]
        self._update(row, gradient, state, self.counts[row_id], self.rate())

    def evict(self, older_than_step: int) -> int:
        if self.worker_count:  # rows of the open step stay
            older_than_step = min(older_than_step, self.version)
        old = [
            row_id
            for row_id, step in self.last_steps.items()
            if step < older_than_step and row_id not in self.sums
        ]
        for row_id in old:
            for kept in (self.rows, self.state, self.counts, self.last_steps):
                del kept[row_id]  # type: ignore[attr-defined]
        return len(old)


def sgd(row: Row, gradient: Row, state: dict[str, Row], count: int, rate: float) -> None:
    """types.proto's Sgd without momentum."""
    row -= rate * gradient


def adam(row: Row, gradient: Row, state: dict[str, Row], count: int, rate: float) -> None:
    """types.proto's Adam with its usual numbers; the count is the row's."""
    m, v = (state.setdefault(name, np.zeros(row.size)) for name in "mv")
    m += 0.1 * (gradient - m)
    v += 0.001 * (gradient * gradient - v)
    row -= rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
