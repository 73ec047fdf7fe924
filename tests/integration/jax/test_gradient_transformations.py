"""Goal: optax takes both transformations, and what they train is what optax alone trains.

Method: optax alone with all samples against two workers with half of them each, inside jit and
outside. Skipped where JAX or optax is not installed (`make test-jax`).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import BRIEF_S
from harness.threads import together

jax = pytest.importorskip("jax", reason="JAX is not installed; it is not a dependency")
optax = pytest.importorskip("optax", reason="optax is not installed; it is not a dependency")
import jax.numpy as jnp  # noqa: E402

import shardwell.jax  # noqa: E402

STEPS = 100
TOGETHER_S = 240.0
RATE = optax.cosine_decay_schedule(0.1, STEPS)


def first_weights() -> Any:
    return {"kernel": jax.random.normal(jax.random.key(0), (20, 3)) / 4, "bias": jnp.zeros(3)}


def batches() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(7)
    inputs = rng.standard_normal((STEPS, 16, 20), np.float32)
    return [(each, each[:, :3] * 2 + 1) for each in inputs]


def loss_of(weights: Any, inputs: Any, targets: Any) -> Any:
    return jnp.mean(jnp.square(inputs @ weights["kernel"] + weights["bias"] - targets))


gradient_of = jax.grad(loss_of)


def train(optimizer: Any, rows: slice = slice(None), *, is_compiled: bool = True) -> Any:
    weights = first_weights()
    state = optimizer.init(weights)

    def step(weights: Any, state: Any, inputs: Any, targets: Any) -> Any:
        gradient = gradient_of(weights, inputs, targets)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    step = jax.jit(step) if is_compiled else step
    for inputs, targets in batches():
        weights, state = step(weights, state, inputs[rows], targets[rows])
    return jax.block_until_ready(weights)


def assert_close(found: Any, expected: Any) -> None:
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_server_updates_in_a_chain(cluster, connect, is_compiled) -> None:
    running = cluster(2)

    def work(rank: int) -> Any:
        net = shardwell.jax.TreeParameter(
            connect(running, f"w{rank}"),
            "net",
            first_weights(),
            optimizer=shardwell.SGD(learning_rate=0.1, momentum=0.9),
            worker_count=2,
            codec="fp32",
        )
        updates = shardwell.jax.server_updates(net, learning_rate=RATE, sample_count=8)
        rows = slice(0, 8) if rank == 0 else slice(8, 16)
        found = train(optax.chain(optax.scale(1.0), updates), rows, is_compiled=is_compiled)
        shards = net.get_weights()
        for name in shards:  # not the same bits: what is added is a difference
            np.testing.assert_allclose(found[name], shards[name], rtol=1e-6, atol=1e-7)
        return found

    first, second = together([lambda: work(0), lambda: work(1)], timeout_s=TOGETHER_S)
    expected = train(optax.sgd(RATE, momentum=0.9))
    assert_close(first, expected)
    assert_close(second, expected)


def test_a_schedule_goes_on_where_the_cluster_is(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    rule = shardwell.SGD(learning_rate=1.0)
    net = shardwell.jax.TreeParameter(client, "net", jnp.zeros(3), optimizer=rule, codec="fp32")
    updates = shardwell.jax.server_updates(net, learning_rate=lambda step: 10.0**step)
    state = updates.init(None)
    change, state = updates.update(jnp.ones(3), state, jnp.zeros(3))
    np.testing.assert_allclose(change, -1.0)
    assert int(state.step) == 1
    change, _ = updates.update(jnp.ones(3), updates.init(None), jnp.zeros(3))
    np.testing.assert_allclose(change, -11.0)


def test_updates_of_halves_give_the_shards_weights(cluster, connect) -> None:
    client, first = connect(cluster(2), "w0"), jnp.linspace(-3, 3, 100).astype(jnp.bfloat16)
    rule = shardwell.SGD(learning_rate=0.37)
    net = shardwell.jax.TreeParameter(client, "net", first, optimizer=rule, codec="fp32")
    transformation = shardwell.jax.server_updates(net)
    updates, _ = transformation.update(jnp.sin(first), transformation.init(first), first)
    weights = optax.apply_updates(first, updates)
    assert weights.dtype == jnp.bfloat16
    assert np.asarray(weights).tobytes() == np.asarray(net.get_weights()).tobytes()


def test_server_updates_say_what_they_need(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    rule = shardwell.SGD(learning_rate=1.0)
    net = shardwell.jax.TreeParameter(client, "net", jnp.zeros(3), optimizer=rule)
    updates = shardwell.jax.server_updates(net)
    with pytest.raises(shardwell.ArgumentError, match="needs the weights, too"):
        updates.update(jnp.ones(3), updates.init(None))
    mean = shardwell.jax.TreeParameter(client, "mean", jnp.zeros(3), optimizer=shardwell.Average())
    np.testing.assert_allclose(mean.exchange(jnp.full(3, 2.0)), 2.0)
    with pytest.raises(shardwell.ArgumentError, match="Average, whose weights are the mean"):
        shardwell.jax.server_updates(mean)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_mean_gradients_before_adamw(cluster, is_compiled) -> None:
    rendezvous = cluster(1).target

    def work(rank: int) -> Any:
        with shardwell.join_group("g", rank=rank, size=2, rendezvous=rendezvous) as group:
            mean = shardwell.jax.mean_gradients(group, sample_count=8, codec="fp32")
            rows = slice(0, 8) if rank == 0 else slice(8, 16)
            return train(optax.chain(mean, optax.adamw(1e-2)), rows, is_compiled=is_compiled)

    first, second = together([lambda: work(0), lambda: work(1)], timeout_s=TOGETHER_S)
    expected = train(optax.adamw(1e-2))
    assert_close(first, expected)
    for name in first:
        assert np.asarray(first[name]).tobytes() == np.asarray(second[name]).tobytes()


def test_means_of_any_tree(cluster) -> None:
    rendezvous = cluster(1).target
    trees = [
        {"a": [jnp.full(3, rank, jnp.bfloat16)], "b": (np.float32(rank), jnp.zeros((2, 0)))}
        for rank in (1.0, 3.0)
    ]

    def work(rank: int) -> Any:
        with shardwell.join_group("g", rank=rank, size=2, rendezvous=rendezvous) as group:
            mean = shardwell.jax.mean_gradients(group)
            found = [jax.jit(mean.update)(trees[rank], ()), mean.update(trees[rank], ())]
            with pytest.raises(shardwell.ArgumentError, match="leaf 'n' is int32"):
                mean.update({"n": jnp.arange(3)}, ())
            return jax.block_until_ready([tree for tree, _ in found])

    for found in together([lambda: work(0), lambda: work(1)], timeout_s=TOGETHER_S):
        for tree in found:
            assert jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(trees[0])
            assert tree["a"][0].dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(tree["a"][0], np.float32), 2.0)
            assert float(tree["b"][0]) == 2.0


def test_a_rank_that_does_not_call_is_named_and_the_group_goes_on(cluster) -> None:
    rendezvous = cluster(1).target

    def work(rank: int) -> Any:
        with shardwell.join_group("g", rank=rank, size=2, rendezvous=rendezvous) as group:
            if rank == 1:
                missed.wait(TOGETHER_S)
            brief = jax.jit(shardwell.jax.mean_gradients(group, timeout_s=BRIEF_S).update)
            with pytest.raises(shardwell.WorkersMissingError) as caught:  # noqa: SIM117
                with shardwell.jax.named_errors():
                    brief(jnp.ones(3), ())
            assert caught.value.missing_ranks == (1,)
            if rank == 0:
                missed.wait(TOGETHER_S)
            update = jax.jit(shardwell.jax.mean_gradients(group).update)
            with shardwell.jax.named_errors():
                return update(jnp.full(3, float(rank)), ())[0]

    missed = threading.Barrier(2)
    for found in together([lambda: work(0), lambda: work(1)], timeout_s=TOGETHER_S):
        np.testing.assert_array_equal(found, 0.5)
