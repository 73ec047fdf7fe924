"""The bound without a network: torch's EmbeddingBag in one process, with its sparse optimizers.

`get` is the forward pass of bags of one row, `put` the backward pass and the optimizer's step,
`exchange` these two and the forward pass of the next batch. The pages of a table are touched when
its rows are, as with Shardwell.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from row_bench import Ids, RowBench, Rows, row_parser
from turns import work

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, ()),
    "adagrad": (torch.optim.Adagrad, ("sum",)),
    "adam": (torch.optim.SparseAdam, ("exp_avg", "exp_avg_sq")),
}


class BagTable:
    """A table and its optimizer."""

    def __init__(self, row_count: int, dim: int, optimizer: str) -> None:
        kind, slots = OPTIMIZERS[optimizer]
        self._bag = torch.nn.EmbeddingBag(
            row_count, dim, mode="sum", sparse=True, _weight=_untouched(row_count, dim)
        )
        self.optimizer = kind([torch.nn.Parameter(torch.zeros(1, dim))], lr=0.01)
        weight = self._bag.weight
        self.optimizer.param_groups[0]["params"] = [weight]
        self.optimizer.state.clear()
        if slots:
            state: dict[str, Any] = {name: _untouched(row_count, dim) for name in slots}
            state["step"] = 0 if optimizer == "adam" else torch.tensor(0.0)
            self.optimizer.state[weight] = state

    def forward(self, ids: Ids) -> torch.Tensor:
        """(n, dim): the rows, which know where they come from."""
        rows: torch.Tensor = self._bag(torch.from_numpy(ids[:, None]))
        return rows

    def update(self, rows: torch.Tensor, gradients: Rows) -> None:
        """Backward and step."""
        rows.backward(torch.from_numpy(gradients))
        self.optimizer.step()
        self.optimizer.zero_grad()


class TorchRows(RowBench):
    """See RowBench. Orders also have `optimizer`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._tables: dict[tuple[int, str], BagTable] = {}

    def begin(self, batches: list[Ids]) -> None:
        key = self.order["rows"], self.order["optimizer"]
        if key not in self._tables:
            self._tables[key] = BagTable(key[0], self.dim, key[1])
        self._table = self._tables[key]
        first = {"get": 0, "exchange": 1}.get(self.order["do"], len(batches) - 1)
        self._forward = [self._table.forward(batch) for batch in batches[:first]]

    def get(self, ids: Ids, out: Rows) -> None:
        self._rows = self._table.forward(ids)

    def put(self, ids: Ids, gradients: Rows) -> None:
        self._table.update(self._forward.pop(0), gradients)

    def exchange(self, ids: Ids, gradients: Rows, next_ids: Ids, out: Rows) -> None:
        self._table.update(self._forward.pop(0), gradients)
        self._rows = self._table.forward(next_ids)
        self._forward.append(self._rows)

    def check(self, ids: Ids, rows: Rows) -> None:
        super().check(ids, self._rows.detach().numpy())


def _untouched(row_count: int, dim: int) -> torch.Tensor:
    """Zeros, whose memory is taken page by page as it is written."""
    return torch.from_numpy(np.zeros((row_count, dim), np.float32))


def main() -> None:
    args = row_parser().parse_args()
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default; said, it does not warn
    work(args.socket, args.rank, TorchRows(args))


if __name__ == "__main__":
    main()
