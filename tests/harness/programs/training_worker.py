"""A worker process that trains until a step, printing each; started again, it goes on.

python training_worker.py TARGET WORKER_INDEX WORKER_COUNT SIZE LAST_STEP
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import shardwell

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.oracles.parameter import integer_gradient


def main() -> None:
    """Prints "step N" when step N of this worker is done."""
    target = sys.argv[1]
    worker_index, worker_count, size, last_step = (int(argument) for argument in sys.argv[2:])
    with shardwell.connect(target, worker_id=f"w{worker_index}", timeout_s=60.0) as client:
        model = client.parameter(
            "model",
            size=size,
            optimizer=shardwell.SGD(learning_rate=0.5),
            worker_count=worker_count,
        )
        model.init(np.zeros(size, np.float32))
        print(f"from {model.next_step}", flush=True)
        while model.next_step <= last_step:
            step = model.next_step
            model.exchange(integer_gradient(worker_index, step, size))
            print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()
