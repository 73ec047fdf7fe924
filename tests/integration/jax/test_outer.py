"""Goal: a JAX loop trains in outer steps, its tree by names of leaves.

Method: one learner and plain outer SGD of rate 1, which puts weights where they are already.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell

jax = pytest.importorskip("jax", reason="jax is not installed; it is not a dependency")
import jax.numpy as jnp  # noqa: E402


def test_leaves_by_name(cluster, connect) -> None:
    tree = {
        "layers": [{"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, {"w": jnp.ones((2, 1))}],
        "scale": jnp.ones(()),
    }
    leaves, shape = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert names == ["layers/0/b", "layers/0/w", "layers/1/w", "scale"]

    @jax.jit
    def inner_step(weights):
        gradient = jax.grad(
            lambda own: jnp.sum((own["layers"][0]["w"] @ own["layers"][1]["w"]) * own["scale"])
        )(weights)
        return jax.tree_util.tree_map(lambda value, move: value - 0.1 * move, weights, gradient)

    weights = dict(zip(names, [leaf for _, leaf in leaves], strict=True))
    alone = tree
    with shardwell.Outer(
        connect(cluster(2), "w0"),
        "tree",
        tensors=weights,
        outer=shardwell.SGD(1.0),
        sync_every=3,
        fragments=3,
        codec="fp32",
    ) as outer:
        weights = outer.init(weights)
        for _ in range(6):
            tree = jax.tree_util.tree_unflatten(shape, list(weights.values()))
            moved = jax.tree_util.tree_leaves(inner_step(tree))
            weights = dict(zip(names, moved, strict=True))
            weights |= outer.after_step(weights)
            alone = inner_step(alone)
        assert [each.version for each in outer.fragments] == [2, 2, 2]
    for name, expected in zip(names, jax.tree_util.tree_leaves(alone), strict=True):
        np.testing.assert_allclose(np.asarray(weights[name]), expected, 1e-6)
