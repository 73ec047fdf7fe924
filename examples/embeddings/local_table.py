"""A table in one process: rows in NumPy arrays, with the verbs of `shardwell.Table` for training.

The same first rows and the same update rule as a table on shards has, without shards, messages and
half precision: what the cluster is compared with.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from embeddings.knowledge_graph import Ids
from shardwell.numerics.codec import Float32
from shardwell.numerics.initial_rows import initial_rows
from shardwell.numerics.row_update_rules import RowUpdateRule
from shardwell.specs.table import TableSpec


class RowTable(Protocol):
    """What training needs of a table, wherever its rows are."""

    @property
    def next_step(self) -> int:
        """The step that the next gradient joins."""

    @property
    def version(self) -> int:
        """Steps of all workers that the rows fetched last have seen."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Changes the optimizer's learning rate, at once and for all workers."""

    def get_rows(self, ids: Ids) -> Float32:
        """The rows, (n, dim), in the order of the ids."""

    def exchange_rows(self, ids: Ids, gradients: Float32, next_ids: Ids) -> Float32:
        """Updates rows, then gets those of `next_ids`.

        Gradients of an id that occurs more than once add up.
        """


class LocalTable:
    """A RowTable of this process. For one thread."""

    def __init__(self, spec: TableSpec) -> None:
        assert spec.row_count is not None
        self._rows = initial_rows(
            spec.initializer, np.arange(spec.row_count, dtype=np.int64), spec.dim
        )
        self._rule = RowUpdateRule(spec.optimizer)
        self._slots = tuple(
            np.full((spec.row_count, width), value, np.float32)
            for width, value in zip(spec.slot_widths, self._rule.initial_slots, strict=True)
        )
        self._learning_rate = self._rule.learning_rate
        self._update_counts = np.zeros(spec.row_count, np.int64)
        self._step = 0

    @property
    def next_step(self) -> int:
        """Steps so far, as of `shardwell.Table`."""
        return self._step

    @property
    def version(self) -> int:
        """Steps so far, as of `shardwell.Table`."""
        return self._step

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the rate of later updates."""
        self._learning_rate = learning_rate

    def get_rows(self, ids: Ids) -> Float32:
        """Returns rows by id, as `shardwell.Table` does."""
        return np.take(self._rows, ids, axis=0)

    def exchange_rows(self, ids: Ids, gradients: Float32, next_ids: Ids) -> Float32:
        """See `shardwell.Table`. As in asynchronous mode, an update is with one gradient."""
        distinct, sums = _sum_by_id(ids, gradients)
        self._update_counts[distinct] += 1
        rows, slots = self._rows[distinct], tuple(slot[distinct] for slot in self._slots)
        self._rule.apply(rows, sums, slots, self._update_counts[distinct], self._learning_rate)
        self._rows[distinct] = rows
        for kept, slot in zip(self._slots, slots, strict=True):
            kept[distinct] = slot
        self._step += 1
        return self.get_rows(next_ids)


def _sum_by_id(ids: Ids, gradients: Float32) -> tuple[Ids, Float32]:
    """Distinct ids, ascending, and the sum of each one's gradients."""
    order = np.argsort(ids, kind="stable")
    distinct, starts = np.unique(ids[order], return_index=True)
    return distinct, np.add.reduceat(gradients[order], starts, axis=0)
