"""What rows were before the step that changed them last, for a worker that was started again.

A synchronous step changes each row once. Rows of the newest step that has changed any are kept, by
id, as a place may be given to another row meanwhile. The caller changes it while no call reads.
"""

from __future__ import annotations

import numpy as np

from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids


class RowsBefore:
    """Rows before the newest step, of one table on one shard."""

    def __init__(self) -> None:
        self.step = -1
        """The step; -1: no row was changed."""
        self._ids: list[Ids] = []
        self._rows: list[Float32] = []
        self._sorted: tuple[Ids, Float32] | None = None

    def add(self, step: int, ids: Ids, rows: Float32) -> None:
        """Keeps rows that a step changes; those of an earlier step are dropped.

        Args:
            step: The step.
            ids: (n,), without repeats; of a change that is made again, once more.
            rows: (n, dim), as they were. Neither is copied.
        """
        if step != self.step:
            self.step, self._ids, self._rows = step, [], []
        self._ids.append(ids)
        self._rows.append(rows)
        self._sorted = None

    def put_back(self, ids: Ids, into: Float32) -> None:
        """Makes rows in `into`, (n, dim), what they were before the step that changed them."""
        if self._sorted is None:
            every, first = np.unique(np.concatenate(self._ids), return_index=True)
            self._sorted = every, np.concatenate(self._rows)[first]
        changed, rows = self._sorted
        places = np.searchsorted(changed, ids)
        places[places == changed.size] = 0
        found = changed[places] == ids if changed.size else np.zeros(ids.size, np.bool_)
        into[found] = rows[places[found]]
