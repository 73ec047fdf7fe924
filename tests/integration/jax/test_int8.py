"""Goal: a pytree trains in int8 with the bits of a replay; see harness.oracles.int8."""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.oracles.int8 import BLOCK, Int8Weights, Int8Worker, sgd

jax = pytest.importorskip("jax", reason="JAX is not installed; it is not a dependency")
import shardwell.jax  # noqa: E402

RATE = 0.5
SIZE = 2 * BLOCK + 100


def test_a_tree_parameter(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    first = np.linspace(-1, 1, SIZE, dtype=np.float32)
    net = shardwell.jax.TreeParameter(
        client,
        "net",
        {"a": first[:5000], "b": first[5000:]},
        optimizer=shardwell.SGD(learning_rate=RATE),
        codec="int8",
    )
    worker, weights = Int8Worker(SIZE), Int8Weights(first)
    for step in range(4):
        gradient = np.random.default_rng(step).standard_normal(SIZE).astype(np.float32)
        found = jax.block_until_ready(net.exchange({"a": gradient[:5000], "b": gradient[5000:]}))
        expected = weights.update(sgd(RATE)(weights.weights, worker.sent(gradient)))
        together = np.concatenate([np.asarray(found["a"]), np.asarray(found["b"])])
        np.testing.assert_array_equal(together, expected)
