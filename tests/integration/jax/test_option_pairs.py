"""Goal: TreeParameter makes of each two options what a parameter makes of them, bit by bit.

Those of a parameter are held against NumPy in tests/fault/shard/test_option_pairs.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.data.covering import Row
from harness.data.one_worker_options import (
    ROWS,
    STEPS,
    groups_of,
    of_a_parameter,
    options_of,
    rule_of,
    tensors,
)

jax = pytest.importorskip("jax", reason="JAX is not installed; it is not a dependency")
import shardwell.jax  # noqa: E402


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ",".join(map(str, row.values())))
def test_two_options_of_a_tree_together(cluster: Any, connect: Any, row: Row) -> None:
    running = cluster(2, chunk_size_bytes=64)
    expected = of_a_parameter(connect(running, "w0"), row)
    options = {**options_of(row), "optimizer": rule_of(row), "groups": groups_of(row)}
    weights = jax.tree.map(jax.numpy.asarray, tensors(99))
    net = shardwell.jax.TreeParameter(connect(running, "w1"), "tree", weights, **options)
    for step in range(STEPS):
        found = net.exchange(jax.tree.map(jax.numpy.asarray, tensors(step)))
        for name, values in found.items():
            np.testing.assert_array_equal(np.asarray(values), expected[step][name])
