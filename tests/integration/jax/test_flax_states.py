"""Goal: flax's nnx states are trees like others, under the names of the plain model.

Method: a model with dropout and batch statistics, whose states have random keys and counts, is
trained by `nnx.grad` and `nnx.update`; SGD by hand is the oracle. Skipped where flax is not
installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell

jax = pytest.importorskip("jax", reason="JAX is not installed; it is not a dependency")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed; it is not a dependency")
import jax.numpy as jnp  # noqa: E402

import shardwell.jax  # noqa: E402

SGD = shardwell.SGD(learning_rate=0.1)
NAMES = {"dense/bias", "dense/kernel", "norm/bias", "norm/scale"}


class Model(nnx.Module):
    """With what is no weight: statistics, a key and a count."""

    def __init__(self, seed: int) -> None:
        keys = nnx.Rngs(seed)
        self.dense = nnx.Linear(3, 4, rngs=keys)
        self.norm = nnx.BatchNorm(4, rngs=keys)
        self.dropout = nnx.Dropout(0.1, rngs=keys)

    def __call__(self, inputs: Any) -> Any:
        return self.dropout(self.norm(self.dense(inputs)))


def loss_of(model: Any) -> Any:
    return (model(jnp.arange(6.0).reshape(2, 3)) ** 3).sum()


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    return connect(cluster(2, chunk_size_bytes=256), "w0")


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("only", [(), (nnx.Param,)])
def test_a_state_is_trained_by_its_params(client, only: tuple[Any, ...], is_compiled: bool) -> None:
    model = Model(0)
    net = shardwell.jax.TreeParameter(
        client, "net", nnx.state(model, *only), optimizer=SGD, codec="fp32"
    )
    assert set(net.parameter.spec.layout.by_name) == NAMES
    gradient = nnx.grad(loss_of)(model)
    count = int(model.dropout.rngs.count[...])
    expected = jax.tree_util.tree_map(
        lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), gradient
    )
    exchange = jax.jit(net.exchange) if is_compiled else net.exchange
    nnx.update(model, exchange(gradient))
    assert int(model.dropout.rngs.count[...]) == count
    found = nnx.state(model, nnx.Param)
    for mine, its in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5)


def test_states_and_pure_dicts_are_one_model(cluster, connect) -> None:
    running = cluster(1)
    first, second = Model(0), Model(1)
    options: dict[str, Any] = {"optimizer": SGD, "codec": "fp32", "mode": "async"}
    shardwell.jax.TreeParameter(connect(running, "w0"), "net", nnx.state(first), **options)
    pure = nnx.to_pure_dict(nnx.state(second, nnx.Param))
    net = shardwell.jax.TreeParameter(connect(running, "w1"), "net", pure, **options)
    weights = net.get_weights()
    assert set(weights) == {"dense", "norm"}
    np.testing.assert_array_equal(weights["dense"]["kernel"], first.dense.kernel[...])


def test_a_pure_dict_with_a_count_says_what_to_pass(client) -> None:
    with pytest.raises(
        shardwell.ArgumentError, match=r"'dropout/rngs/count' is uint32.*nnx\.Param"
    ):
        shardwell.jax.TreeParameter(
            client, "net", nnx.to_pure_dict(nnx.state(Model(0))), optimizer=SGD
        )


def test_a_users_field_called_value_keeps_its_name(client) -> None:
    made = jax.tree_util.Partial(lambda: None, value={"value": jnp.ones(2)})
    net = shardwell.jax.TreeParameter(client, "net", made, optimizer=SGD)
    assert all(name.endswith("value") for name in net.parameter.spec.layout.by_name)
