"""Options of a parameter for frameworks' wrappers, in pairs, and what one worker has of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import shardwell
from harness.data.covering import Row, covering

SHAPES = {"weight": (3, 3), "bias": (3,)}
STEPS = 3
CREWS: dict[str, dict[str, Any]] = {
    "one": {"worker_count": 1},
    "async": {"mode": "async"},
    "quorum": {"worker_count": 2, "min_contributors": 1},
    "grace": {"worker_count": 2, "min_contributors": 1, "grace_s": 0.05},
    "elastic": {"members": shardwell.Elastic(reference_count=2)},
    "elastic quorum": {"members": shardwell.Elastic(), "min_contributors": 1, "grace_s": 0.05},
    "elastic of one": {"members": shardwell.Elastic(max_count=1)},
}
RULES: dict[str, Any] = {
    "sgd": partial(shardwell.SGD, 0.125, weight_decay=0.25),
    "momentum": partial(shardwell.SGD, 0.125, momentum=0.5),
    "adagrad": partial(shardwell.Adagrad, 0.125),
    "rmsprop": partial(shardwell.RMSProp, 0.125, momentum=0.5),
    "adam": partial(shardwell.Adam, 0.125),
    "adamw": partial(shardwell.AdamW, 0.125),
}
ROWS = covering(
    {
        "crew": tuple(CREWS),
        "late": ("drop", "carry"),
        "clip_value": (0.0, 0.375),
        "clip_norm": (0.0, 0.5),
        "codec": ("fp32", "fp16", "bf16", "int8", "fp32+lz4", "fp16+lz4", "bf16+lz4"),
        "rule": tuple(RULES),
        "is_grouped": (False, True),
        "overlap": (False, True, "auto"),
    },
    lambda row: True,
)


def rule_of(row: Row) -> Any:
    """The update rule."""
    return RULES[row["rule"]](clip_value=row["clip_value"], clip_norm=row["clip_norm"])


def options_of(row: Row) -> dict[str, Any]:
    """What wrappers and `Client.parameter` both take, without the rule."""
    return {**CREWS[row["crew"]], "late": row["late"], "codec": row["codec"]}


def groups_of(row: Row) -> list[shardwell.TensorGroup]:
    """Half the rate, and another decay, of the weight."""
    group = shardwell.TensorGroup("weight", learning_rate_factor=0.5, weight_decay=0.125)
    return [group] if row["is_grouped"] else []


def tensors(seed: int) -> dict[str, Any]:
    """First weights or gradients, quarters of whole numbers."""
    draw = np.random.default_rng(seed)
    return {n: draw.integers(-4, 5, s).astype(np.float32) / 4 for n, s in SHAPES.items()}


def of_a_parameter(client: shardwell.Client, row: Row) -> list[dict[str, Any]]:
    """The weights after each step of a plain parameter."""
    net = client.parameter(
        "plain", tensors=SHAPES, groups=groups_of(row), optimizer=rule_of(row), **options_of(row)
    )
    net.init(tensors(99))
    return [net.exchange(tensors(step)) for step in range(STEPS)]
