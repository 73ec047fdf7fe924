"""A table in one process: rows in NumPy arrays, with the verbs of `shardwell.Table` for training.

The same first rows and the same update rule as a table on shards has, without shards, messages and
half precision: what the cluster is compared with.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shardwell.codec import Float32
from shardwell.initializers import Initializer, Uniform
from shardwell.optimizers import Optimizer
from shardwell.update_rules import UpdateRule
from shardwell_server.demo.embeddings.knowledge_graph import Ids


class RowTable(Protocol):
    """What training needs of a table, wherever its rows are."""

    @property
    def next_step(self) -> int:
        """The step that the next gradient joins."""

    def get_rows(self, ids: Ids) -> Float32:
        """The rows, (n, dim), in the order of the ids."""

    def put_row_gradients(self, ids: Ids, gradients: Float32) -> int:
        """Updates rows; gradients of an id that is there more than once add up."""

    def exchange_rows(self, ids: Ids, gradients: Float32, next_ids: Ids) -> Float32:
        """`put_row_gradients`, then `get_rows` of `next_ids`."""


class LocalTable:
    """A RowTable of this process. For one thread."""

    def __init__(
        self, *, row_count: int, dim: int, optimizer: Optimizer, initializer: Initializer
    ) -> None:
        assert isinstance(initializer, Uniform)
        random = np.random.default_rng(initializer.seed)
        self._rows = random.uniform(initializer.low, initializer.high, (row_count, dim)).astype(
            np.float32
        )
        self._rule = UpdateRule(optimizer)
        self._slots = tuple(
            np.full((row_count, dim), value, np.float32) for value in self._rule.initial_slots
        )
        self._step = 0

    @property
    def next_step(self) -> int:
        """See `shardwell.Table`."""
        return self._step

    def get_rows(self, ids: Ids) -> Float32:
        """See `shardwell.Table`."""
        return np.take(self._rows, ids, axis=0)

    def put_row_gradients(self, ids: Ids, gradients: Float32) -> int:
        """See `shardwell.Table`; asynchronous mode: the update is done when this returns."""
        distinct, sums = sum_by_id(ids, gradients)
        rows = self._rows[distinct]
        slots = tuple(slot[distinct] for slot in self._slots)
        self._rule.apply(
            rows.reshape(-1),
            sums.reshape(-1),
            tuple(slot.reshape(-1) for slot in slots),
            np.empty(rows.size, np.float32),
            update_count=1,
            learning_rate=self._rule.learning_rate or 0.0,
        )
        self._rows[distinct] = rows
        for kept, slot in zip(self._slots, slots, strict=True):
            kept[distinct] = slot
        self._step += 1
        return self._step - 1

    def exchange_rows(self, ids: Ids, gradients: Float32, next_ids: Ids) -> Float32:
        """See `shardwell.Table`."""
        self.put_row_gradients(ids, gradients)
        return self.get_rows(next_ids)


def sum_by_id(ids: Ids, gradients: Float32) -> tuple[Ids, Float32]:
    """Distinct ids, ascending, and the sum of each one's gradients."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ids)])
    return ordered[starts], np.add.reduceat(gradients[order], starts, axis=0)
