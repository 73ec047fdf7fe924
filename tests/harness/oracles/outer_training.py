"""Golden runs of DiLoCo by torchft (BSD-3), and outer training by hand in float64.

A run has two replicas, each of two layers of one weight, 1.0 at the start. Every inner step takes
2.0 from each weight. Both layers are fragments, of which one is due every three inner steps; the
outer optimizer is plain SGD of rate 2. In `failure_recovery_0` the second replica is killed when it
has two outer steps, and comes back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_DIRECTORY = Path(__file__).resolve().parents[2] / "data" / "torchft_diloco"
LAYERS = ("layers.0.weight", "layers.1.weight")
SYNC_EVERY, OUTER_RATE, INNER_MOVE = 6, 2.0, 2.0
RUNS = {
    f"updates_{number}": (delay, alpha)
    for number, (delay, alpha) in enumerate(
        (delay, alpha) for delay in (0, 1) for alpha in (0.0, 0.5, 1.0)
    )
}
"""Inner steps from an offer to its take, and the part of the local weights that stays, by run."""
RECOVERY = "failure_recovery_0"


@dataclass(frozen=True)
class Golden:
    """One replica of a run."""

    local: dict[int, dict[str, float]]
    """Local weights before each inner step, from 0."""
    shared: dict[int, dict[str, float]]
    """The weights of all, before the inner step at which they were seen first."""


def golden(run: str) -> list[Golden]:
    """Each replica of a run."""
    found = json.loads((_DIRECTORY / f"{run}.json").read_text())
    replicas = [each[0] if isinstance(each, list) else each for each in found]
    return [
        Golden(_numbers(each["history"]), _numbers(each["global_parameter_history"]))
        for each in replicas
    ]


def _numbers(history: dict[str, dict[str, list]]) -> dict[int, dict[str, float]]:
    return {
        int(step): {name: float(np.asarray(values).item()) for name, values in weights.items()}
        for step, weights in history.items()
    }
