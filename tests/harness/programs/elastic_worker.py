"""A worker process that trains as an elastic member, printing what became of each gradient.

python elastic_worker.py TARGET WORKER_ID SIZE STEP_COUNT [OPTIONS as JSON]

OPTIONS: `min_count`, `max_count`, `member_return_s`, `member_lease_s`, `min_contributors`,
`grace_s`, `late`, `clip_norm`, `same_host`, `pause_s` between two steps, `is_inexact`. A gradient's
elements are all `gradient_of` its worker and step, or it is an `inexact_gradient`. Each line is
JSON: step, counted, contributors, version.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardwell

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.programs.commands import Program

PATH = Path(__file__)
NAME = "subject"


def gradient_of(worker_id: str, step: int) -> float:
    """The value of each element of a worker's gradient of a step: a small integer."""
    return float(sum(worker_id.encode()) % 7 + step % 5 + 1)


def inexact_gradient(worker_id: str, step: int, size: int) -> np.ndarray:
    """Values whose sum depends on the order."""
    chance = np.random.default_rng([*worker_id.encode(), step])
    return chance.standard_normal(size, np.float32)


def opened(client: shardwell.Client, size: int, options: dict[str, Any]) -> shardwell.Parameter:
    """The parameter that all of them train."""
    elastic = {
        key: options[key]
        for key in ("min_count", "max_count", "member_return_s", "member_lease_s")
        if key in options
    }
    more = {key: options[key] for key in ("min_contributors", "grace_s", "late") if key in options}
    optimizer = shardwell.SGD(learning_rate=1.0, clip_norm=options.get("clip_norm", 0.0))
    model = client.parameter(
        NAME,
        size=size,
        optimizer=optimizer,
        codec="fp32",
        members=shardwell.Elastic(**elastic),
        **more,
    )
    model.init(np.zeros(size, np.float32))
    return model


class ElasticWorker(Program):
    """Such a process, started."""

    def __init__(
        self, target: str, worker_id: str, size: int, step_count: int, **options: Any
    ) -> None:
        super().__init__(
            str(PATH),
            target,
            worker_id,
            str(size),
            str(step_count),
            json.dumps(options),
            is_forked=True,
        )
        self.worker_id = worker_id

    def read_outcome(self) -> dict[str, Any]:
        """What became of its next gradient; blocks."""
        found: dict[str, Any] = json.loads(self.read_line())
        return found


def main() -> None:
    """Trains, and prints a line a step."""
    target, worker_id, size, step_count = sys.argv[1:5]
    options: dict[str, Any] = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    with shardwell.connect(
        target, worker_id=worker_id, timeout_s=40.0, same_host=options.get("same_host", True)
    ) as client:
        model = opened(client, int(size), options)
        model.get_weights()
        for _ in range(int(step_count)):
            if options.get("is_inexact"):
                gradient = inexact_gradient(worker_id, model.next_step, int(size))
            else:
                value = gradient_of(worker_id, model.next_step)
                gradient = np.full(int(size), value, np.float32)
            model.exchange(gradient)
            outcome = model.outcome
            assert outcome is not None
            found = {
                "step": outcome.step,
                "counted": outcome.counted,
                "contributors": outcome.contributors,
                "version": model.version,
            }
            print(json.dumps(found), flush=True)
            time.sleep(options.get("pause_s", 0.0))


if __name__ == "__main__":
    main()
