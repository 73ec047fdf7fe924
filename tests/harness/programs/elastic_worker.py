"""A worker process that trains as an elastic member, printing what became of each step.

python elastic_worker.py TARGET WORKER_ID STEP_COUNT [PLAN as JSON]

PLAN: `kind`, "parameter" (default) or "table"; fields of `Elastic`; `pause_s` between two steps;
`same_host`; of a parameter `size`, `min_contributors`, `grace_s`, `late`, `clip_norm` and
`is_inexact`; of a table `row_count` and `dim`. A gradient's elements are all `gradient_of` its
worker and step, or it is an `inexact_gradient`. Each line is JSON: step, counted, contributors,
version, and the first value after it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shardwell

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.polling import eventually
from harness.programs.commands import Program

PATH = Path(__file__)
NAME = "subject"
SIZE = 3000
ROW_COUNT, DIM = 40, 3
IDS = np.arange(ROW_COUNT)
MANY = 1_000_000
"""Steps of a worker that is killed before it has made them."""


def gradient_of(worker_id: str, step: int) -> float:
    """The value of each element of a worker's gradient of a step: a small integer."""
    return float(sum(worker_id.encode()) % 7 + step % 5 + 1)


def inexact_gradient(worker_id: str, step: int, size: int) -> np.ndarray:
    """Values whose sum depends on the order."""
    chance = np.random.default_rng([*worker_id.encode(), step])
    return chance.standard_normal(size, np.float32)


def _given(plan: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: plan[name] for name in names if name in plan}


def _elastic(plan: dict[str, Any]) -> shardwell.Elastic:
    bounds = ("min_count", "max_count", "member_return_s", "member_lease_s")
    return shardwell.Elastic(**_given(plan, *bounds))


def opened(client: shardwell.Client, **plan: Any) -> shardwell.Parameter:
    """The parameter that all of them train."""
    model = client.parameter(
        NAME,
        size=plan.get("size", SIZE),
        optimizer=shardwell.SGD(learning_rate=1.0, clip_norm=plan.get("clip_norm", 0.0)),
        codec="fp32",
        members=_elastic(plan),
        **_given(plan, "min_contributors", "grace_s", "late"),
    )
    model.init(np.zeros(model.size, np.float32))
    return model


def opened_table(client: shardwell.Client, **plan: Any) -> shardwell.Table:
    """The table that all of them train."""
    return client.table(
        NAME,
        row_count=plan.get("row_count", ROW_COUNT),
        dim=plan.get("dim", DIM),
        optimizer=shardwell.SGD(learning_rate=1.0),
        initializer=shardwell.Zeros(),
        codec="fp32",
        members=_elastic(plan),
    )


def rows_of(value: float) -> np.ndarray:
    """A gradient of all rows."""
    return np.full((ROW_COUNT, DIM), value, np.float32)


class Member:
    """A member that trains a parameter or a table, of which each step touches all rows."""

    def __init__(self, client: shardwell.Client, kind: str, **plan: Any) -> None:
        self._is_table = kind == "table"
        self.handle: Any = (opened_table if self._is_table else opened)(client, **plan)

    def begin(self) -> None:
        """Becomes a member; blocks until a step awaits it."""
        if self._is_table:
            self.handle.join()
        else:
            self.handle.get_weights()

    def exchange(self, gradient: float | np.ndarray, **options: Any) -> np.ndarray:
        """Makes a step; the values after it, (n,)."""
        if not self._is_table:
            values = np.full(self.handle.size, gradient, np.float32)
            return self.handle.exchange(values, **options)
        ids = np.arange(self.handle.row_count)
        rows = np.full((ids.size, self.handle.dim), gradient, np.float32)
        return self.handle.exchange_rows(ids, rows, **options).reshape(-1)

    @property
    def contributors(self) -> tuple[str, ...]:
        """The workers whose gradients the last step counted."""
        found: tuple[str, ...] = self.handle.outcome.contributors
        return found


class ElasticWorker(Program):
    """Such a process, started."""

    def __init__(self, target: str, worker_id: str, step_count: int = MANY, **plan: Any) -> None:
        given = (target, worker_id, str(step_count), json.dumps(plan))
        super().__init__(str(PATH), *given, is_forked=True)
        self.worker_id = worker_id
        self.seen: list[dict[str, Any]] = []
        """The outcomes that were read."""

    def read_outcome(self) -> dict[str, Any]:
        """What became of its next gradient; blocks."""
        self.seen.append(json.loads(self.read_line()))
        return self.seen[-1]

    def next_such(self, is_such: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Its next outcome of a kind; blocks."""

        def look() -> dict[str, Any] | None:
            found = self.read_outcome()
            return found if is_such(found) else None

        return eventually("such an outcome comes", look)

    def next_with(self, *names: str) -> dict[str, Any]:
        """Its next outcome of a step that counted these workers, and no others; blocks."""
        return self.next_such(lambda found: found["contributors"] == list(names))


def main() -> None:
    """Trains, and prints a line a step."""
    target, worker_id, step_count = sys.argv[1:4]
    plan: dict[str, Any] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    same_host = plan.get("same_host", True)
    with shardwell.connect(
        target, worker_id=worker_id, timeout_s=40.0, same_host=same_host
    ) as client:
        member = Member(client, plan.pop("kind", "parameter"), **plan)
        member.begin()
        for _ in range(int(step_count)):
            step = member.handle.next_step
            if plan.get("is_inexact"):
                values = member.exchange(inexact_gradient(worker_id, step, member.handle.size))
            else:
                values = member.exchange(gradient_of(worker_id, step))
            outcome = member.handle.outcome
            found = {
                "step": outcome.step,
                "counted": outcome.counted,
                "contributors": outcome.contributors,
                "version": member.handle.version,
                "value": float(values[0]),
            }
            print(json.dumps(found), flush=True)
            time.sleep(plan.get("pause_s", 0.0))


if __name__ == "__main__":
    main()
