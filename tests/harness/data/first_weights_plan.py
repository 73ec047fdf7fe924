"""Workers that set first weights, each its own: one of them is to win, as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import shardwell
from harness.data.training_plan import CALL_TIMEOUT_S, SGD


@dataclass(frozen=True, kw_only=True)
class FirstWeightsPlan:
    """A parameter a round, which every worker opens and sets."""

    size: int = 100_000
    worker_count: int = 3

    def set_all(self, target: str, worker_index: int, name: str) -> None:
        """A worker's process: prints "step opened", and "step set" once weights stand."""
        with shardwell.connect(
            target,
            worker_id=f"w{worker_index}",
            timeout_s=CALL_TIMEOUT_S,
            connect_timeout_s=CALL_TIMEOUT_S,
        ) as client:
            model = client.parameter(
                name,
                size=self.size,
                optimizer=SGD,
                worker_count=self.worker_count,
                codec="fp32",
            )
            print("step opened", flush=True)
            model.init(self.weights(worker_index, name))
            print("step set", flush=True)
            seen = model.get_weights()
            won = [self.weights(index, name)[0] for index in range(self.worker_count)]
            winner = won.index(seen[0])
            np.testing.assert_array_equal(seen, self.weights(winner, name))

    def weights(self, worker_index: int, name: str) -> npt.NDArray[np.float32]:
        """What this worker would have them."""
        number = int(name.rpartition("-")[2])
        start = 1 + worker_index + self.worker_count * (number % 1000)
        return np.arange(start, start + self.size, dtype=np.float32)
