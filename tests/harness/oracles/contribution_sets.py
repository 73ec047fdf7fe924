"""Weights that the sets of a contribution log lead to, by NumPy: an oracle of elastic members."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from harness.programs.elastic_worker import inexact_gradient


def sets_of(directory: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    """The lines that count, by shard, chunk and step."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for path in directory.glob("shard-*.jsonl"):
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # a kill has cut it off
            key = line["shard"], line["chunk"], line["step"]
            if not line.get("restored") or key not in found:
                found[key] = line
    return found


def replayed(sets: dict[tuple[int, int, int], dict[str, Any]], size: int) -> np.ndarray:
    """The weights that the recorded sets lead to, in float32."""
    weights = np.zeros(size, np.float32)
    gradients: dict[tuple[str, int], np.ndarray] = {}
    versions: dict[tuple[int, int], int] = {}
    for (shard, chunk, step), line in sorted(sets.items()):
        assert step == versions.get((shard, chunk), 0), f"a step is missing before {line}"
        versions[shard, chunk] = step + 1
        where = slice(line["offset"], line["offset"] + line["size"])
        total = np.zeros(line["size"], np.float32)
        for worker_id in line["contributors"]:
            key = worker_id, step
            if key not in gradients:
                gradients[key] = inexact_gradient(worker_id, step, size)
            total += gradients[key][where]
        weights[where] -= total / np.float32(len(line["contributors"]))
    return weights
