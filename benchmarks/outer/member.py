"""A learner that says what of its inner steps counted; it may be killed.

Run as `python member.py --worker OPTIONS`, OPTIONS being JSON: target, worker_id, step_s, and what
`shardwell.Outer` takes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import shardwell

LAYER_COUNT = 8


class Counted:
    """Inner steps of a learner that outer steps have, by what its fragments look like.

    Args:
        fragment_count: How many.
    """

    def __init__(self, fragment_count: int) -> None:
        self._since = [0] * fragment_count
        """Inner steps since each fragment was taken."""
        self._offered: dict[int, int] = {}
        """By fragment: inner steps that its open offer has."""

    def step(self, offered: Sequence[bool], kept: bool) -> float:
        """Notes an inner step.

        Args:
            offered: Whether each fragment is offered after the step.
            kept: Whether work of a fragment that was taken did not count.

        Returns:
            How many inner steps have come to count by it; a fragment's are a part of the model's.
        """
        counted = 0.0
        for index, is_offered in enumerate(offered):
            self._since[index] += 1
            steps = self._offered.get(index)
            if is_offered and steps is None:
                self._offered[index] = self._since[index]
            elif not is_offered and steps is not None:
                del self._offered[index]
                if not kept:
                    counted += steps / len(offered)
                    self._since[index] = 0
        return counted


def say(**fields: Any) -> None:
    """Prints a line, with the time on a clock that all processes of a machine share."""
    print(json.dumps({"at_s": time.monotonic(), **fields}), flush=True)


def work(options: dict[str, Any]) -> None:
    """Trains until it is ended."""
    shape = (options["size"] // LAYER_COUNT,)
    weights: dict[str, Any] = {
        f"layers.{layer}": np.zeros(shape, np.float32) for layer in range(LAYER_COUNT)
    }
    members = shardwell.Elastic(min_count=1, max_count=64)
    with (
        shardwell.connect(
            options["target"],
            worker_id=options["worker_id"],
            timeout_s=60.0,
            same_host=options["same_host"],
        ) as client,
        shardwell.Outer(
            client, "net", tensors=weights, members=members, **options["outer"]
        ) as outer,
    ):
        weights = outer.init(weights)
        say(kind="opened")
        counted, kept_count = Counted(len(outer.fragments)), 0
        random = np.random.default_rng()
        moves = [np.float32(1e-3) * random.standard_normal(shape, np.float32) for _ in range(2)]
        while True:
            began_s = time.perf_counter()
            for number, tensor in enumerate(weights.values()):
                tensor += moves[(outer.inner_step + number) % 2]
            time.sleep(max(options["step_s"] - (time.perf_counter() - began_s), 0.0))
            weights.update(outer.after_step(weights))
            offered = [each.is_offered for each in outer.fragments]
            steps = counted.step(offered, outer.kept_count > kept_count)
            kept_count = outer.kept_count
            if steps:
                say(
                    kind="step",
                    counted=steps,
                    step=outer.next_step,
                    kept=kept_count,
                    waited_s=round(outer.waited_s, 3),
                    sent=client.traffic.sent_bytes,
                )


if __name__ == "__main__":
    work(json.loads(sys.argv[2]))
