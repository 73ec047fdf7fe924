"""The weights of an undisturbed training of a plan, step after step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Protocol

import numpy as np

import shardwell
from harness.data.table_plan import TablePlan
from harness.data.training_plan import Float32, TrainingPlan
from harness.threads import together
from shardwell_server import LocalCluster


class ExpectedWeights(Protocol):
    """Goes forwards only."""

    def after(self, last_step: int) -> Float32:
        """The weights after that step of all workers."""

    def close(self) -> None:
        """Releases what it holds."""


def expected_weights(plan: TrainingPlan | TablePlan) -> ExpectedWeights:
    """NumPy's where float32 is exact, else those of an undisturbed cluster."""
    if isinstance(plan, TablePlan):
        return UndisturbedRows(plan)
    optimizer = plan.optimizer
    is_exact = isinstance(optimizer, shardwell.SGD) and not optimizer.momentum
    return ComputedWeights(plan) if is_exact and not plan.depends else UndisturbedWeights(plan)


class ComputedWeights:
    """Plain SGD in float64, from the definition."""

    def __init__(self, plan: TrainingPlan) -> None:
        self._plan = plan
        self._weights = plan.first_weights().astype(np.float64)
        self._next_step = 0

    def after(self, last_step: int) -> Float32:
        plan = self._plan
        workers = range(plan.worker_count)
        counts = [plan.sample_count(index) for index in workers]
        for step in range(self._next_step, last_step + 1):
            gradients = [plan.gradient(index, step) for index in workers]
            if plan.mode == "async":
                self._weights -= plan.rate(step) * np.sum(gradients, axis=0, dtype=np.float64)
            else:
                self._weights -= plan.rate(step) * np.average(gradients, axis=0, weights=counts)
        self._next_step = last_step + 1
        result = self._weights.astype(np.float32)
        assert (result == self._weights).all(), "the plan is not exact in float32"
        return result

    def close(self) -> None:
        """Has nothing to close."""


class Undisturbed(ABC):
    """The same training on one shard in this process, in memory.

    Sums of whole numbers are the same in any order, and the update rule sees the same sums.
    """

    def __init__(self, plan: TrainingPlan | TablePlan) -> None:
        self._plan = plan
        self._cluster = LocalCluster(1)

    def after(self, last_step: int) -> Float32:
        plan, target = self._plan, self._cluster.target
        together(
            [
                partial(plan.train, target, index, last_step, say=lambda line: None)
                for index in range(plan.worker_count)
            ]
        )
        return self._stored()

    @abstractmethod
    def _stored(self) -> Float32:
        """What the shard has."""

    def close(self) -> None:
        self._cluster.close()


class UndisturbedWeights(Undisturbed):
    """Of a parameter."""

    def _stored(self) -> Float32:
        (parameter,) = self._cluster.servers[0].shard.parameters.all()
        return parameter.storage.weights.copy()


class UndisturbedRows(Undisturbed):
    """Of a table, by id."""

    def __init__(self, plan: TablePlan) -> None:
        super().__init__(plan)
        self._rows = partial(plan.stored, self._cluster.target)

    def _stored(self) -> Float32:
        return self._rows()
