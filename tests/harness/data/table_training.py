"""Training of a table whose outcome is known: batches by step and worker, options, and the rows."""

from __future__ import annotations

from typing import Any

import numpy as np

import shardwell
from harness.oracles.rows import OPTIMIZERS, ModelRows

DIM = 512
ID_COUNT = 1600
"""In fp32 two messages a shard."""
EVERY = np.arange(0, 2 * ID_COUNT, 7)
OPTIONS: dict[str, Any] = {
    "row_count": 2 * ID_COUNT,
    "dim": DIM,
    "optimizer": OPTIMIZERS["sgd"],
    "initializer": shardwell.Zeros(),
    "codec": "fp32",
}


def batch(step: int, worker_index: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids, some of them twice, and gradients: whole numbers, alike in all columns."""
    generator = np.random.default_rng([step, worker_index])
    ids = generator.integers(0, 2 * ID_COUNT, ID_COUNT)
    gradients = generator.integers(-8, 9, (ID_COUNT, 1)) * np.ones(DIM, np.float32)
    return ids, gradients.astype(np.float32)


def sent_row_count(step_count: int, worker_count: int = 1) -> int:
    """Rows that are sent: an id once a batch."""
    return sum(
        np.unique(batch(step, index)[0]).size
        for step in range(step_count)
        for index in range(worker_count)
    )


class KnownRows:
    """The rows after so many steps; all columns are alike, so one is enough."""

    def __init__(self, step_count: int, worker_count: int = 1, *, mode: str = "sync") -> None:
        self.model = ModelRows(1, OPTIONS["optimizer"], worker_count=worker_count, mode=mode)
        for step in range(step_count):
            for index in range(worker_count):
                ids, gradients = batch(step, index)
                self.model.put(ids, gradients[:, :1])

    def check(self, rows: np.ndarray, ids: np.ndarray = EVERY) -> None:
        """Asserts that rows are these, bit for bit."""
        expected = np.broadcast_to(self.model.get(ids), rows.shape)
        np.testing.assert_array_equal(rows, expected)
