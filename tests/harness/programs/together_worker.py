"""A worker process that makes a step of several parameters and tables in turn, in one loop.

python together_worker.py TARGET WORKER_INDEX KINDS VERB LAST_STEP [KILL_STEP KILL_AFTER]

KINDS is "parameter,table", say; "clipped" is a parameter whose steps close by their norm. VERB is
"exchange", or "put": all gradients go, then it reads. Each gradient depends on the weights of all.
The process kills itself in KILL_STEP, once as many gradients as KILL_AFTER have been given.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import shardwell

SIZE = 40
WORKER_COUNT = 2
_IDS = np.arange(SIZE)
_RULES = {
    "parameter": shardwell.SGD(learning_rate=1.0),
    "clipped": shardwell.SGD(learning_rate=1.0, clip_norm=1e6),
    "table": shardwell.SGD(learning_rate=1.0),
}

Values = npt.NDArray[np.float32]


def gradient(worker_index: int, step: int, number: int, weights: Sequence[Values]) -> Values:
    """Whole numbers below 5 that depend on all weights: what is `number` gets in a step."""
    mixed = sum(np.floor(each) * (place + 1) for place, each in enumerate(weights))
    return np.mod(mixed + _IDS + 7 * step + 3 * worker_index + number, 5).astype(np.float32)


def expected(count: int, last_step: int) -> list[Values]:
    """The weights that an undisturbed training ends with."""
    weights = [np.zeros(SIZE, np.float32) for _ in range(count)]
    for step in range(last_step + 1):
        means = [
            sum(gradient(w, step, number, weights) for w in range(WORKER_COUNT)) / WORKER_COUNT
            for number in range(count)
        ]
        weights = [
            (old - mean).astype(np.float32) for old, mean in zip(weights, means, strict=True)
        ]
    return weights


class Trained:
    """A parameter or a table of which a step touches all rows."""

    def __init__(self, client: shardwell.Client, kind: str, number: int) -> None:
        name, rule = f"{kind}-{number}", _RULES[kind]
        self.handle: shardwell.Parameter[Values] | shardwell.Table
        if kind == "table":
            self.handle = client.table(
                name,
                row_count=SIZE,
                dim=1,
                initializer=shardwell.Zeros(),
                optimizer=rule,
                worker_count=WORKER_COUNT,
            )
        else:
            self.handle = client.parameter(
                name, size=SIZE, optimizer=rule, worker_count=WORKER_COUNT
            )
            self.handle.init(np.zeros(SIZE, np.float32))

    def read(self) -> Values:
        """The weights that its next step begins with."""
        version = self.handle.next_step
        if isinstance(self.handle, shardwell.Table):
            return self.handle.get_rows(_IDS, min_version=version).reshape(-1)
        return self.handle.get_weights(min_version=version)

    def give(self, values: Values, *, verb: str) -> Values | None:
        """Gives a gradient; returns what an exchange does."""
        if isinstance(self.handle, shardwell.Table):
            rows = values.reshape(-1, 1)
            if verb == "put":
                self.handle.put_row_gradients(_IDS, rows)
                return None
            return self.handle.exchange_rows(_IDS, rows).reshape(-1)
        if verb == "put":
            self.handle.put_gradient(values)
            return None
        return self.handle.exchange(values)


def main() -> None:
    """Prints "from N", and "step N" when step N of this worker is done."""
    target, kinds, verb = sys.argv[1], sys.argv[3].split(","), sys.argv[4]
    worker_index, last_step = int(sys.argv[2]), int(sys.argv[5])
    kill_step, kill_after = (int(each) for each in (*sys.argv[6:], "-1", "-1")[:2])
    with shardwell.connect(target, worker_id=f"w{worker_index}", timeout_s=20.0) as client:
        trained = [Trained(client, kind, number) for number, kind in enumerate(kinds)]
        first = trained[0].handle
        print(f"from {[each.handle.next_step for each in trained]}", flush=True)
        weights = [each.read() for each in trained]
        while first.next_step <= last_step:
            step = first.next_step
            gradients = [
                gradient(worker_index, step, number, weights) for number in range(len(trained))
            ]
            for number, each in enumerate(trained):
                if (step, number) == (kill_step, kill_after):
                    os.kill(os.getpid(), signal.SIGKILL)
                found = each.give(gradients[number], verb=verb)
                if found is not None:
                    weights[number] = found
            if verb == "put":
                weights = [each.read() for each in trained]
            print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()
