"""A worker process that trains a table as an elastic member, printing what became of each step.

python elastic_table_worker.py TARGET WORKER_ID STEP_COUNT [OPTIONS as JSON]

OPTIONS: fields of `Elastic`, `row_count` and `dim`. It gives all rows of the table the gradient
`gradient_of` (elastic_worker.py) its worker and step. Each line is JSON: step, counted,
contributors, version, and the first value of the first row after it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import shardwell

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.programs.commands import Program
from harness.programs.elastic_worker import gradient_of

PATH = Path(__file__)
NAME = "subject"
ROW_COUNT, DIM = 40, 3
IDS = np.arange(ROW_COUNT)


def opened(client: shardwell.Client, options: dict[str, Any]) -> shardwell.Table:
    """The table that all of them train."""
    shape = {"row_count": ROW_COUNT, "dim": DIM}
    elastic = {key: value for key, value in options.items() if key not in shape}
    shape.update((key, options[key]) for key in shape if key in options)
    return client.table(
        NAME,
        **shape,
        optimizer=shardwell.SGD(learning_rate=1.0),
        initializer=shardwell.Zeros(),
        codec="fp32",
        members=shardwell.Elastic(**elastic),
    )


def gradients(value: float) -> np.ndarray:
    """The same for all rows."""
    return np.full((ROW_COUNT, DIM), value, np.float32)


class ElasticTableWorker(Program):
    """Such a process, started."""

    def __init__(self, target: str, worker_id: str, step_count: int, **options: Any) -> None:
        super().__init__(
            str(PATH), target, worker_id, str(step_count), json.dumps(options), is_forked=True
        )
        self.worker_id = worker_id

    def read_outcome(self) -> dict[str, Any]:
        """What became of its next step; blocks."""
        found: dict[str, Any] = json.loads(self.read_line())
        return found


def main() -> None:
    """Trains, and prints a line a step."""
    target, worker_id, step_count = sys.argv[1:4]
    options: dict[str, Any] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    with shardwell.connect(target, worker_id=worker_id, timeout_s=40.0) as client:
        table = opened(client, options)
        table.join()
        assert table.row_count is not None
        ids = np.arange(table.row_count)
        for _ in range(int(step_count)):
            value = gradient_of(worker_id, table.next_step)
            rows = table.exchange_rows(ids, np.full((ids.size, table.dim), value, np.float32))
            outcome = table.outcome
            assert outcome is not None
            found = {
                "step": outcome.step,
                "counted": outcome.counted,
                "contributors": outcome.contributors,
                "version": table.version,
                "value": float(rows[0, 0]),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
