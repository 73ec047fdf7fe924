"""What the workers of a test train of a table: gradients that depend on the rows that they read."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

import shardwell
from harness.data.training_plan import CALL_TIMEOUT_S, SGD

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """A synchronous table named "rows", and what each worker does with it.

    A worker that goes on with rows of two versions, or in the middle of a step with others than its
    first process had, sends other gradients. They are whole numbers, so that any order adds up
    alike.
    """

    row_count: int = 450
    dim: int = 2048
    batch_row_count: int = 300
    """Rows of a worker's step: of two shards, two parts each."""
    worker_count: int = 2
    optimizer: shardwell.Optimizer = SGD
    verb: str = "exchange"
    """Or "put_get": put_row_gradients, then get_rows of that step."""

    def train(
        self,
        target: str,
        worker_index: int,
        last_step: int,
        say: Callable[[str], None] = partial(print, flush=True),  # noqa: B008
    ) -> None:
        """A worker: goes on where it was, and says "step N" after each."""
        with self.opened(target, f"w{worker_index}") as table:
            step = table.next_step
            say(f"from {step}")
            if step <= last_step:
                rows = table.get_rows(self.ids(worker_index, step), min_version=step)
            while step <= last_step:
                ids, wanted = self.ids(worker_index, step), self.ids(worker_index, step + 1)
                gradients = self.gradients(worker_index, step, rows)
                if self.verb == "exchange":
                    rows = table.exchange_rows(ids, gradients, wanted)
                else:
                    assert table.put_row_gradients(ids, gradients) == step
                    rows = table.get_rows(wanted, min_version=step + 1)
                say(f"step {step}")
                step = table.next_step

    @contextlib.contextmanager
    def opened(self, target: str, worker_id: str) -> Iterator[shardwell.Table]:
        """The table, as a worker has it."""
        with shardwell.connect(
            target,
            worker_id=worker_id,
            timeout_s=CALL_TIMEOUT_S,
            connect_timeout_s=CALL_TIMEOUT_S,
        ) as client:
            yield client.table(
                "rows",
                row_count=self.row_count,
                dim=self.dim,
                optimizer=self.optimizer,
                initializer=shardwell.Zeros(),
                worker_count=self.worker_count,
                codec="fp32",
            )

    def stored(self, target: str) -> Float32:
        """All rows, as the shards have them."""
        with self.opened(target, "reader") as table:
            return table.get_rows(np.arange(self.row_count))

    def ids(self, worker_index: int, step: int) -> Int64:
        """Others in each step, and some that other workers have, too."""
        generator = np.random.default_rng([worker_index, step])
        return generator.permutation(self.row_count)[: self.batch_row_count]

    def gradients(self, worker_index: int, step: int, rows: Float32) -> Float32:
        """Small whole numbers, others for any other rows."""
        generator = np.random.default_rng([worker_index, step, zlib.crc32(rows)])
        numbers = generator.integers(-4, 5, (rows.shape[0], 1)) + generator.integers(
            -4, 5, self.dim
        )
        return numbers.astype(np.float32)
