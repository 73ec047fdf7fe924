"""Small tables and random batches for them."""

from __future__ import annotations

from typing import Any

import numpy as np

import shardwell
from harness.oracles.rows import OPTIMIZERS

DIM = 5


def random_ids(generator: np.random.Generator, row_count: int | None, size: int) -> np.ndarray:
    """Some again and again, some once."""
    if row_count is None:
        some = generator.integers(-(2**63), 2**63 - 1, 20)
        return generator.choice(np.concatenate((some, np.arange(-5, 5))), size)
    return np.minimum(generator.integers(0, row_count, size), generator.integers(0, 40, size) ** 2)


def whole_numbers(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Small ones, as float32."""
    return generator.integers(-8, 9, shape).astype(np.float32)


def open_table(client: shardwell.Client, **options: Any) -> shardwell.Table:
    """Opens "rows": of zeros, in fp32, with plain SGD, unless the options say otherwise."""
    return client.table(
        "rows",
        **{
            "row_count": 1000,
            "dim": DIM,
            "optimizer": OPTIMIZERS["sgd"],
            "initializer": shardwell.Zeros(),
            "codec": "fp32",
            **options,
        },
    )
