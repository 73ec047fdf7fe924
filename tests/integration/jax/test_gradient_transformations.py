"""Goal: optax takes both transformations, and what they train is what optax alone trains.

Method: optax alone with all samples against two workers with half of them each, inside jit and
outside. Skipped where JAX or optax is not installed (`make test-extras`).
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
    change, _ = updates.update(jnp.ones(3), updates.init(None), jnp.full(3, -1.0))
    np.testing.assert_allclose(change, -10.0)


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


def small_tree() -> Any:
    return {"a": jnp.arange(4.0), "b": jnp.ones((2, 3))}


def gradients_of(count: int) -> list[Any]:
    rng = np.random.default_rng(3)
    return [
        jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32), tree)
        for tree in [small_tree()] * count
    ]


def follow(optimizer: Any, gradients: list[Any], first: Any = None) -> Any:
    weights = small_tree() if first is None else first
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    with shardwell.jax.named_errors():
        for gradient in gradients:
            weights, state = step(weights, state, gradient)
    return weights


def served(client: Any, name: str = "net", **options: Any) -> Any:
    rule = shardwell.SGD(learning_rate=0.1, momentum=0.9)
    net = shardwell.jax.TreeParameter(
        client, name, small_tree(), optimizer=rule, codec="fp32", **options
    )
    return net, shardwell.jax.server_updates(net, learning_rate=RATE)


def assert_same_trees(found: Any, expected: Any) -> None:
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


KEPT = {
    "clip": lambda last: optax.chain(optax.clip_by_global_norm(0.5), last),
    "apply_every": lambda last: optax.chain(optax.apply_every(3), last),
    "apply_if_finite": lambda last: optax.apply_if_finite(last, 4),
    "conditionally_mask": lambda last: optax.conditionally_mask(last, lambda step: step % 2 == 1),
    "masked": lambda last: optax.masked(last, {"a": True, "b": True}),
    "identity": lambda last: optax.chain(last, optax.identity()),
    "scan": lambda last: last,
}


@pytest.mark.parametrize("wrapper", KEPT)
def test_a_wrapper_that_keeps_updates_trains_as_optax_does(wrapper, cluster, connect) -> None:
    gradients = gradients_of(8)
    if wrapper == "apply_if_finite":
        gradients[3] = jax.tree.map(lambda leaf: leaf * jnp.nan, gradients[3])
    wrap = KEPT[wrapper]
    expected = follow(wrap(optax.sgd(RATE, momentum=0.9)), gradients)
    net, last = served(connect(cluster(2), "w0"))
    if wrapper == "scan":
        weights = small_tree()

        def step(carried: Any, gradient: Any) -> Any:
            updates, state = last.update(gradient, carried[1], carried[0])
            return (optax.apply_updates(carried[0], updates), state), None

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
        found, _ = jax.lax.scan(step, (weights, last.init(weights)), stacked)[0]
    else:
        found = follow(wrap(last), gradients)
    assert_same_trees(found, expected)
    assert_same_trees(net.get_weights(), expected)


LOOKAHEAD = optax.LookaheadParams(fast=small_tree(), slow=small_tree())
REFUSED = {
    "MultiSteps": (lambda last: optax.MultiSteps(last, 3), None, 0, "accumulate.*every=4"),
    "sam": (
        lambda last: optax.contrib.sam(last, optax.sgd(0.01), sync_period=2),
        None,
        1,
        "has a state of step 0; expected that of step 1",
    ),
    "lookahead": (lambda last: optax.lookahead(last, 3, 0.5), LOOKAHEAD, 3, "undo the change"),
    "decay": (
        lambda last: optax.chain(last, optax.add_decayed_weights(-1e-3)),
        None,
        1,
        "leaf 'a' has a weight of",
    ),
    "conditionally_transform": (
        lambda last: optax.conditionally_transform(last, lambda step: step % 2 == 0),
        None,
        1,
        "undo the change",
    ),
    "masked": (lambda last: optax.masked(last, {"a": True, "b": False}), None, 0, "lacks leaf 'b'"),
}


@pytest.mark.parametrize("wrapper", REFUSED)
def test_a_wrapper_that_does_not_is_refused_before_the_next_step(wrapper, cluster, connect) -> None:
    wrap, first, steps, message = REFUSED[wrapper]
    net, last = served(connect(cluster(2), "w0"))
    with pytest.raises(shardwell.ArgumentError, match=message):
        follow(wrap(last), gradients_of(8), first)
    assert net.parameter.next_step == steps
    gradient = gradients_of(1)[0]
    weights = net.get_weights()  # the way on that the error names
    updates, _ = last.update(gradient, last.init(weights), weights)
    assert_same_trees(optax.apply_updates(weights, updates), net.get_weights())


def test_accumulation_gives_the_numbers_of_multi_steps(cluster, connect) -> None:
    running, gradients = cluster(2), gradients_of(24)
    clip = optax.clip_by_global_norm(0.5)

    def work(rank: int) -> Any:
        net, last = served(connect(running, f"w{rank}"), worker_count=2)
        found = follow(
            shardwell.jax.accumulate(optax.chain(clip, last), every=3), gradients[rank::2]
        )
        assert net.parameter.next_step == 4
        return found

    found = together([lambda: work(0), lambda: work(1)], timeout_s=TOGETHER_S)
    clipped = []
    for of_step in range(4):  # each worker clips its mean, and the shards average
        both = []
        for rank in range(2):
            own = gradients[rank::2][3 * of_step : 3 * of_step + 3]
            mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *own)
            both.append(clip.update(mean, clip.init(None))[0])
        clipped.append(jax.tree.map(lambda x, y: (x + y) / 2, *both))
    expected = follow(optax.sgd(RATE, momentum=0.9), clipped)
    for each in found:
        assert_same_trees(each, expected)
    chain = optax.chain(clip, optax.sgd(RATE, momentum=0.9))
    assert_same_trees(
        follow(shardwell.jax.accumulate(chain, every=5), gradients[:20]),
        follow(optax.MultiSteps(chain, 5), gradients[:20]),
    )
    with pytest.raises(shardwell.ArgumentError, match="every must be an integer"):
        shardwell.jax.accumulate(chain, every=0)


def test_a_state_of_another_step_has_the_rates_of_the_clusters(cluster, connect, caplog) -> None:
    running, gradients = cluster(2), gradients_of(9)
    expected = follow(optax.sgd(RATE, momentum=0.9), gradients)

    def step(last: Any, gradient: Any, state: Any, weights: Any) -> Any:
        with shardwell.jax.named_errors():
            updates, state = jax.jit(last.update)(gradient, state, weights)
        return state, optax.apply_updates(weights, updates)

    net, last = served(connect(running, "w0"))
    weights, states = small_tree(), [last.init(small_tree())]
    for gradient in gradients[:6]:
        state, weights = step(last, gradient, states[-1], weights)
        states.append(state)
    with pytest.raises(shardwell.ArgumentError, match="has a state of step 3; expected that of"):
        step(last, gradients[6], states[3], weights)  # this process has made the steps after it
    net, last = served(connect(running, "w0"))  # as one that was started again
    state, weights = states[3], net.get_weights()
    for gradient in gradients[6:]:
        state, weights = step(last, gradient, state, weights)
    assert int(state.step) == 9
    assert_same_trees(weights, expected)
    assert [each.levelname for each in caplog.records if "state is of step 3" in each.message] == [
        "WARNING"
    ]


def test_a_rate_that_was_computed_of_another_step_is_refused(cluster, connect) -> None:
    running = cluster(2)
    gradient, weights = gradients_of(1)[0], small_tree()

    def injected(net: Any) -> Any:
        return optax.inject_hyperparams(
            lambda learning_rate: shardwell.jax.server_updates(net, learning_rate=learning_rate)
        )(learning_rate=RATE)

    net, _ = served(connect(running, "w0"))
    first = injected(net).init(weights)
    for _ in range(2):
        updates, _ = injected(net).update(gradient, injected(net).init(weights), weights)
        weights = optax.apply_updates(weights, updates)
    plain = follow(optax.sgd(lambda step: RATE(0), momentum=0.9), [gradient] * 2)
    assert_same_trees(weights, plain)  # a new state each time: its schedule begins anew
    net, _ = served(connect(running, "w0"))
    with pytest.raises(shardwell.ArgumentError, match="pass the schedule itself"):
        injected(net).update(gradient, first, weights)
    assert net.parameter.next_step == 2


def test_an_update_that_failed_is_made_again_with_its_state(cluster, connect) -> None:
    running = cluster(2)
    net, last = served(connect(running, "w0", timeout_s=BRIEF_S), worker_count=2)
    weights, gradient = small_tree(), gradients_of(1)[0]
    state = last.init(weights)
    update = jax.jit(last.update)
    with pytest.raises(shardwell.WorkersMissingError), shardwell.jax.named_errors():
        update(gradient, state, weights)
    other, last_of_other = served(connect(running, "w1"), worker_count=2)

    def again() -> Any:
        with shardwell.jax.named_errors():
            return update(gradient, state, weights)

    calls = [again, lambda: last_of_other.update(gradient, last_of_other.init(weights), weights)]
    for updates, after in together(calls, timeout_s=TOGETHER_S):
        assert int(after.step) == 1
        assert_same_trees(
            optax.apply_updates(weights, updates),
            follow(optax.sgd(RATE, momentum=0.9), [gradient]),
        )
    assert other.parameter.next_step == net.parameter.next_step == 1
