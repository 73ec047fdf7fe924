"""Goal: with a pytree each sample counts once an epoch, though programs run after the loop goes on.

Method: a leaf's element counts the visits of its sample: the gradient is -1 there, the rate 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell
from harness.inside import vanish

jax = pytest.importorskip("jax", reason="JAX is not installed; it is not a dependency")
optax = pytest.importorskip("optax", reason="optax is not installed; it is not a dependency")
import jax.numpy as jnp  # noqa: E402

import shardwell.jax  # noqa: E402

LENGTH = 60
SAMPLES = shardwell.Samples(LENGTH, 4)


def tree(client: shardwell.Client) -> Any:
    weights = {"count": jnp.zeros(LENGTH)}
    rule = shardwell.SGD(lr=1.0)
    return shardwell.jax.TreeParameter(client, "visits", weights, optimizer=rule, codec="fp32")


def train(net: Any, *, epochs: int, every: int = 1, most: int | None = None) -> None:
    """A jitted step, whose calls are not waited for."""
    optimizer = shardwell.jax.server_updates(net)
    if every > 1:
        optimizer = shardwell.jax.accumulate(optimizer, every)

    @jax.jit
    def step(weights: Any, state: Any, indices: Any) -> Any:
        gradient = {"count": jnp.zeros(LENGTH).at[indices].add(-float(every))}
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    weights = net.get_weights()
    state = optimizer.init(weights)
    for number, batch in enumerate(net.batches(SAMPLES, epochs=epochs, per_step=every), 1):
        weights, state = step(weights, state, batch.indices)
        if number == most:
            break
    jax.block_until_ready(weights)


def visits(net: Any) -> list[float]:
    found: list[float] = np.unique(np.asarray(net.get_weights()["count"])).tolist()
    return found


@pytest.mark.parametrize(("every", "most"), [(1, 7), (3, 6), (3, 7)])
def test_each_sample_counts_once_an_epoch_though_a_worker_is_lost(
    cluster: Any, connect: Any, every: int, most: int
) -> None:
    target = cluster(2)
    lost = connect(target, "w0")
    train(tree(lost), epochs=2, every=every, most=most)
    vanish(lost)
    again = tree(connect(target, "w0"))
    train(again, epochs=2, every=every)
    assert visits(again) == [2.0]


def test_a_batch_that_is_given_back_is_dealt_again(cluster: Any, connect: Any) -> None:
    net = tree(connect(cluster(1), "w0"))
    dealt = net.batches(SAMPLES, epochs=1)
    net.give_back([next(dealt)])
    for batch in dealt:
        net.exchange({"count": jnp.zeros(LENGTH).at[batch.indices].add(-1.0)})
    train(net, epochs=1)
    assert visits(net) == [1.0]


def test_a_key_of_random_numbers_is_kept_with_its_step(cluster: Any, connect: Any) -> None:
    """A program that is lost behind a step, or before one, draws what an undisturbed one draws."""

    def drawn(target: Any, *stops: tuple[int, str]) -> list[float]:
        found: dict[int, float] = {}
        for stop in [*stops, (-1, "")]:
            client = connect(target, "w0")
            net, facts = tree(client), {"key": jax.random.PRNGKey(1)}
            net.parameter.keep_state({"facts": facts})
            for batch in net.batches(SAMPLES, epochs=1):
                step = net.parameter.next_step
                facts["key"], key = jax.random.split(facts["key"])
                value = float(jax.random.uniform(key))
                assert found.setdefault(step, value) == value
                if stop == (step, "drawn"):
                    break
                net.exchange({"count": jnp.zeros(LENGTH).at[batch.indices].add(-value)})
                if stop == (step, "given"):
                    break
                facts["steps"] = facts.get("steps", 0) + 1
            if stop[0] >= 0:
                vanish(client)
        return [*found.values(), facts["steps"]]

    expected = drawn(cluster(2))
    assert drawn(cluster(2), (2, "drawn"), (5, "given"), (6, "given"), (9, "drawn")) == expected
