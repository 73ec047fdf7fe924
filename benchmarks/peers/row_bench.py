"""What all workers of rows.py have in common: which ids each batch has, and the calls they make.

In the same turn each system is asked for the same rows, on each rank. NumPy alone, since workers
may run in other interpreters.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from turns import Bench, Order, worker_parser

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
ZIPF_EXPONENT = 1.1
FILL_BATCH = 2**16


class RowLoad:
    """Which rows of a table are used, and how often each.

    The same seed uses the same places of the working set, whatever `row_count` is.

    Args:
        row_count: Ids are below it.
        working_set: How many of them are ever used; scattered over the whole table.
    """

    def __init__(self, row_count: int, working_set: int) -> None:
        rng = np.random.default_rng(row_count)
        count = min(working_set, row_count)
        if count > row_count // 4:
            ids = rng.permutation(row_count)
        else:
            ids = np.unique(rng.integers(0, row_count, count + count // 2))
            rng.shuffle(ids)
        self.row_ids: Ids = ids[:count].astype(np.int64)
        """(working_set,): distinct, the most frequent first."""
        shares = np.arange(1, count + 1, dtype=np.float64) ** -ZIPF_EXPONENT
        self._sums = np.cumsum(shares)
        self._sums /= self._sums[-1]

    def batch(self, distribution: str, size: int, *seed: int) -> Ids:
        """(size,) int64: drawn one by one, so some may repeat."""
        rng = np.random.default_rng(seed)
        count = self.row_ids.size
        if distribution == "uniform":
            return self.row_ids[rng.integers(0, count, size)]
        return self.row_ids[np.minimum(np.searchsorted(self._sums, rng.random(size)), count - 1)]


class RowBench(Bench):
    """A worker that gets and puts rows, batch by batch. See Bench.

    Orders: `do` (get, put, exchange or fill), `rows` of the table, `distribution`, `batch`,
    `calls` of which a step consists, `turn`, and what the kind of worker needs.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank: int = args.rank
        self.size: int = args.size
        self.dim: int = args.dim
        self._working_set: int = args.working_set
        self._loads: dict[int, RowLoad] = {}
        self._batches: list[Ids] = []
        self._gradients = np.empty((0, self.dim), np.float32)
        self._out = np.empty((0, self.dim), np.float32)
        self.order: Order = {}

    def get(self, ids: Ids, out: Rows) -> None:
        """Fetches rows into `out`."""
        raise NotImplementedError

    def put(self, ids: Ids, gradients: Rows) -> None:
        """Sends what changes rows; returns when it has."""
        raise NotImplementedError

    def exchange(self, ids: Ids, gradients: Rows, next_ids: Ids, out: Rows) -> None:
        """Both, the rows of the next batch being fetched."""
        raise NotImplementedError

    def begin(self, batches: list[Ids]) -> None:
        """What the clock does not see, before a step of these batches; the last is only fetched."""

    def gradients(self, count: int) -> Rows:
        """(count, dim) float32: small, random, a view."""
        if len(self._gradients) < count:
            rng = np.random.default_rng(self.rank)
            shape = (max(count, FILL_BATCH), self.dim)
            self._gradients = rng.standard_normal(shape, np.float32) * np.float32(0.01)
        return self._gradients[:count]

    def prepare(self, order: Order) -> None:
        self.order = order
        load = self._loads.get(order["rows"])
        if load is None:
            load = self._loads[order["rows"]] = RowLoad(order["rows"], self._working_set)
        if order["do"] == "fill":
            call_count = -(-load.row_ids.size // (self.size * FILL_BATCH))  # the same on each rank
            self._batches = np.array_split(load.row_ids[self.rank :: self.size], call_count)
            self._batches.append(self._batches[-1])
        else:
            self._batches = [
                load.batch(order["distribution"], order["batch"], order["turn"], self.rank, call)
                for call in range(order["calls"] + 1)
            ]
        largest = max(batch.size for batch in self._batches)
        self.gradients(largest)
        if len(self._out) < largest:
            self._out = np.empty((largest, self.dim), np.float32)
        self._out[:] = np.nan
        self.begin(self._batches)

    def act(self) -> None:
        do = self.order["do"]
        for ids, next_ids in pairwise(self._batches):
            if do == "get":
                self.get(ids, self._out[: ids.size])
            elif do == "exchange":
                gradients = self.gradients(ids.size)
                self.exchange(ids, gradients, next_ids, self._out[: next_ids.size])
            else:
                self.put(ids, self.gradients(ids.size))

    def finish(self) -> dict[str, Any]:
        if self.order["do"] in ("get", "exchange"):
            last = self._batches[-2 if self.order["do"] == "get" else -1]
            self.check(last, self._out[: last.size])
        return {}

    def check(self, ids: Ids, rows: Rows) -> None:
        """Whether rows that were fetched can be what was asked for."""
        assert np.isfinite(rows).all()
        if self.order["do"] != "get":  # another worker may change a row between its repeats
            return
        order = np.argsort(ids, kind="stable")
        same = np.flatnonzero(np.diff(ids[order]) == 0)
        assert np.array_equal(rows[order[same]], rows[order[same + 1]])


def row_parser() -> argparse.ArgumentParser:
    """The flags of every worker here."""
    parser = worker_parser()
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--working-set", type=int, required=True)
    return parser
