"""A learner of outer training in a process of its own, whose outer gradients are known beforehand.

python outer_worker.py TARGET WORKER_ID OPTIONS as JSON

OPTIONS: `crew`, a worker_count, or 0 for elastic members; `overlap`; `overdue`; `codec`; `pause_s`
between two inner steps; `stop_version`: outer steps of each fragment after which it ends, else
never.

What it offers of a fragment is `outer_gradient` of its id, the fragment and the outer step, with
the weight 1: whole numbers, whose means over up to four learners are whole, too, so float32 is
exact. It prints a line of JSON an inner step at which it took something: the versions.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

import shardwell

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.programs.commands import Program
from shardwell.outer.fragment import LearnerFragment

PATH = Path(__file__)
NAME = "net"
SHAPES = {f"layers.{n}.w": (5, 100) for n in range(3)}
SIZE = 500
FRAGMENT_COUNT = len(SHAPES)
INTERVAL = 3
LARGEST = 36.0
"""Of what is offered."""
BOUNDS = {"min_count": 1, "max_count": 4, "member_return_s": 0.2, "member_lease_s": 0.6}


def outer_gradient(worker_id: str, fragment: int, step: int) -> np.ndarray:
    """What a learner offers of a fragment in an outer step, (SIZE,): multiples of 12."""
    seed = sum(worker_id.encode()) + 7 * fragment + 3 * step
    found: np.ndarray = 12.0 * ((np.arange(SIZE) + seed) % 5 - 1)
    return found.astype(np.float32)


class KnownOuter(shardwell.Outer):
    """Offers what was said above."""

    worker_id = ""

    @override
    def _offer(
        self,
        fragment: LearnerFragment,
        weights: Mapping[str, Any],
        sample_count: int | None = None,
        **options: Any,
    ) -> None:
        (name,) = fragment.layout.by_name
        moved = outer_gradient(self.worker_id, fragment.index, fragment.step).reshape(SHAPES[name])
        super()._offer(fragment, {name: self.image()[name] - moved}, 1, **options)


class OuterWorker(Program):
    """Such a process, started."""

    def __init__(self, target: str, worker_id: str, **options: Any) -> None:
        given = json.dumps(options)
        super().__init__(str(PATH), target, worker_id, given, is_forked=True)
        self.worker_id = worker_id

    @property
    def versions(self) -> list[int]:
        """Those that it has printed last."""
        while not self._unread.empty():
            self.read_line()
        return json.loads(self.lines[-1]) if self.lines else []


def main() -> None:
    """Trains."""
    target, worker_id = sys.argv[1:3]
    options: dict[str, Any] = json.loads(sys.argv[3])
    crew: dict[str, Any] = {"members": shardwell.Elastic(**BOUNDS)}
    if options["crew"]:
        crew = {"worker_count": options["crew"]}
    with shardwell.connect(target, worker_id=worker_id, timeout_s=40.0) as client:
        outer = KnownOuter(
            client,
            NAME,
            tensors=SHAPES,
            outer=shardwell.SGD(1.0),
            sync_every=INTERVAL * FRAGMENT_COUNT,
            fragments=FRAGMENT_COUNT,
            overlap=options.get("overlap", 0),
            overdue=options.get("overdue", "wait"),
            codec=options.get("codec", "fp32"),
            **crew,
        )
        outer.worker_id = worker_id
        weights = outer.init({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        versions = [each.version for each in outer.fragments]
        print(json.dumps(versions), flush=True)
        stop_version = options.get("stop_version", 2**60)
        while min(versions) < stop_version:
            changed = outer.after_step(weights)
            weights.update(changed)
            versions = [each.version for each in outer.fragments]
            if changed:
                print(json.dumps(versions), flush=True)
            time.sleep(options.get("pause_s", 0.0))
        outer.leave()


if __name__ == "__main__":
    main()
