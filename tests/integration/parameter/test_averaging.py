"""Several workers on several shards: every step is the mean that the float64 model says.

Goal: sums, weights of samples, the order of arrival and the cut among shards make no difference.
Method: integer gradients whose means and products are exact, workers on threads that race.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import shardwell
from harness.oracles.parameter import ModelParameter, integer_gradient
from harness.polling import eventually
from harness.threads import together
from shardwell_server import LocalCluster

SGD = shardwell.SGD(learning_rate=0.5)
STEP_COUNT = 6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", ["fp32", "fp16"])
@pytest.mark.parametrize(("worker_count", "shard_count"), [(1, 3), (2, 1), (2, 3), (4, 2), (8, 3)])
def test_the_same_bits_as_the_model(cluster, connect, codec, worker_count, shard_count) -> None:
    """Powers of two of workers divide exactly; weights stay below 2^11 in quarters of 2^-3."""
    running = cluster(shard_count, chunk_size_bytes=64)
    size = 347
    oracle = ModelParameter(np.zeros(size), SGD, worker_count=worker_count)
    for step in range(STEP_COUNT):
        for index in range(worker_count):
            oracle.put(f"w{index}", integer_gradient(index, step, size))

    def work(index: int) -> np.ndarray:
        model = connect(running, f"w{index}").parameter(
            "model", size=size, optimizer=SGD, worker_count=worker_count, codec=codec
        )
        model.init(np.zeros(size, np.float32))
        chance = random.Random(index)
        for step in range(STEP_COUNT):
            gradient = integer_gradient(index, step, size)
            if chance.random() < 0.5:
                weights = model.exchange(gradient)
            else:
                assert model.put_gradient(gradient) == step
                weights = model.get_weights(min_version=step + 1)
        return weights

    for weights in together([lambda i=i: work(i) for i in range(worker_count)]):
        np.testing.assert_array_equal(weights, oracle.weights)


@pytest.mark.parametrize("divisor", [1, 2, 12])
def test_a_divisor_of_the_caller_s_choice(cluster, connect, divisor) -> None:
    """As docs/parameters.md has it: the sum over a number, by gradients that were multiplied."""
    running = cluster(2, chunk_size_bytes=64)
    size, worker_count = 61, 3
    gradients = [4.0 * integer_gradient(index, 0, size) for index in range(worker_count)]

    def work(index: int) -> np.ndarray:
        total = connect(running, f"w{index}").parameter(
            "total",
            size=size,
            optimizer=shardwell.Average(),
            worker_count=worker_count,
            codec="fp32",
        )
        return total.exchange(gradients[index] * (worker_count / divisor))

    for total in together([lambda i=i: work(i) for i in range(worker_count)]):
        expected = np.sum(gradients, axis=0, dtype=np.float64) / divisor
        np.testing.assert_array_equal(total, expected.astype(np.float32))


def test_five_workers_average_within_rounding(cluster, connect) -> None:
    """A fifth has no exact float; a step is one division, so one rounding."""
    running = cluster(3, chunk_size_bytes=64)
    size, worker_count = 203, 5
    oracle = ModelParameter(np.zeros(size), SGD, worker_count=worker_count)
    for step in range(STEP_COUNT):
        for index in range(worker_count):
            oracle.put(f"w{index}", integer_gradient(index, step, size))

    def work(index: int) -> np.ndarray:
        model = connect(running, f"w{index}").parameter(
            "model", size=size, optimizer=SGD, worker_count=worker_count, codec="fp32"
        )
        model.init(np.zeros(size, np.float32))
        for step in range(STEP_COUNT):
            weights = model.exchange(integer_gradient(index, step, size))
        return weights

    results = together([lambda i=i: work(i) for i in range(worker_count)])
    for weights in results:
        np.testing.assert_array_equal(weights, results[0])
        np.testing.assert_allclose(weights, oracle.weights, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "sample_counts", [(1, 3), (0, 8), (24, 40), (2**24, 0), (0, 0), (2**23, 2**23)]
)
def test_means_are_weighted_by_samples(cluster, connect, sample_counts) -> None:
    running = cluster(2, chunk_size_bytes=64)
    size = 90
    oracle = ModelParameter(np.zeros(size), SGD, worker_count=2)
    for step in range(3):
        for index in (0, 1):
            oracle.put(f"w{index}", integer_gradient(index, step, size), sample_counts[index])

    def work(index: int) -> np.ndarray:
        model = connect(running, f"w{index}").parameter(
            "model", size=size, optimizer=SGD, worker_count=2, codec="fp32"
        )
        model.init(np.zeros(size, np.float32))
        for step in range(3):
            weights = model.exchange(
                integer_gradient(index, step, size), sample_count=sample_counts[index]
            )
        return weights

    for weights in together([lambda: work(0), lambda: work(1)]):
        np.testing.assert_array_equal(weights, oracle.weights)


def test_a_lone_worker_is_its_own_mean_whatever_its_samples(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=70, optimizer=SGD)
    model.init(np.zeros(70, np.float32))
    np.testing.assert_array_equal(model.exchange(np.ones(70, np.float32), sample_count=7), -0.5)
    np.testing.assert_array_equal(model.exchange(np.ones(70, np.float32), sample_count=0), -0.5)


def test_one_gradient_ahead_is_taken_and_waits_its_turn(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    one, two = (
        connect(running, name).parameter("model", size=90, optimizer=SGD, worker_count=2)
        for name in ("one", "two")
    )
    one.init(np.zeros(90, np.float32))
    assert one.put_gradient(np.full(90, 2, np.float32)) == 0
    np.testing.assert_array_equal(one.get_weights(), 0)
    assert two.put_gradient(np.full(90, 4, np.float32)) == 0
    np.testing.assert_array_equal(one.get_weights(min_version=1), -1.5)
    assert (one.next_step, two.next_step) == (1, 1)


def test_asynchronous_gradients_are_applied_as_they_come(cluster, connect) -> None:
    """SGD is a sum, so any order gives the same weights, once all are in."""
    running = cluster(3, chunk_size_bytes=64)
    size, worker_count = 217, 4

    def work(index: int) -> None:
        model = connect(running, f"w{index}").parameter(
            "model", size=size, optimizer=SGD, mode="async"
        )
        model.init(np.zeros(size, np.float32))
        for step in range(STEP_COUNT):
            gradient = integer_gradient(index, step, size)
            if (index + step) % 2:
                model.exchange(gradient, sample_count=1 + index)
            else:
                assert model.put_gradient(gradient) == step

    together([lambda i=i: work(i) for i in range(worker_count)])
    reader = connect(running, "reader").parameter("model", size=size, optimizer=SGD, mode="async")
    total = sum(
        integer_gradient(index, step, size)
        for index in range(worker_count)
        for step in range(STEP_COUNT)
    )
    version = worker_count * STEP_COUNT
    np.testing.assert_array_equal(reader.get_weights(min_version=version), -0.5 * total)
    assert reader.version == version


def test_an_asynchronous_exchange_sees_its_own_gradient(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=90, optimizer=SGD, mode="async")
    model.init(np.zeros(90, np.float32))
    for step in range(4):
        np.testing.assert_array_equal(model.exchange(np.ones(90, np.float32)), -0.5 * (step + 1))


def test_average_is_an_all_reduce(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    size, worker_count = 131, 4

    def work(index: int) -> list[np.ndarray]:
        model = connect(running, f"w{index}").parameter(
            "sum", size=size, optimizer=shardwell.Average(), worker_count=worker_count
        )
        return [model.exchange(integer_gradient(index, step, size)) for step in range(3)]

    results = together([lambda i=i: work(i) for i in range(worker_count)])
    for step in range(3):
        mean = sum(integer_gradient(i, step, size) for i in range(worker_count)) / worker_count
        for result in results:
            np.testing.assert_array_equal(result[step], mean)


@pytest.mark.parametrize("clip_value", [0.5, 2.0])
def test_the_mean_is_clipped(cluster, connect, clip_value) -> None:
    optimizer = shardwell.SGD(learning_rate=1.0, clip_value=clip_value)
    model = connect(cluster(), "w0").parameter("model", size=90, optimizer=optimizer)
    oracle = ModelParameter(np.zeros(90), optimizer)
    model.init(np.zeros(90, np.float32))
    oracle.put("w0", integer_gradient(0, 0, 90))
    np.testing.assert_array_equal(model.exchange(integer_gradient(0, 0, 90)), oracle.weights)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_an_exchange_without_a_gradient(cluster, connect, clip_norm) -> None:
    rule = shardwell.AdamW(learning_rate=0.1, weight_decay=0.1, clip_norm=clip_norm)
    options = {"size": 1000, "optimizer": rule, "worker_count": 2, "codec": "fp32"}
    running = cluster(2, chunk_size_bytes=256)
    nets = [connect(running, f"w{rank}").parameter("net", **options) for rank in range(2)]
    first = np.linspace(-1, 1, 1000, dtype=np.float32)
    together([lambda net=net: net.init(first) for net in nets])
    gradient = np.linspace(1, 2, 1000, dtype=np.float32)
    skipped = together([lambda net=net: net.exchange(None) for net in nets])
    for found in skipped:
        np.testing.assert_array_equal(found, first)  # no worker had a gradient
    mine, its = together([lambda: nets[0].exchange(gradient), lambda: nets[1].exchange(None)])
    np.testing.assert_array_equal(mine, its)

    alone = connect(running, "w2").parameter("alone", **{**options, "worker_count": 1})
    alone.init(first)
    alone.exchange(None)
    np.testing.assert_array_equal(mine, alone.exchange(gradient))
    assert (nets[0].next_step, nets[0].outcome.counted) == (2, "all")


@pytest.mark.parametrize("clip_norm", [0.0, 1e9])
@pytest.mark.parametrize(
    "crew",
    [
        {"worker_count": 4},
        {"members": shardwell.Elastic(min_count=4)},
        {"worker_count": 5, "min_contributors": 4},
    ],
    ids=["fixed", "elastic", "quorum"],
)
def test_a_mean_of_one_is_that_one_in_any_order(cluster, connect, crew, clip_norm) -> None:
    """Bit for bit, though 3 of 4 workers have no samples and may come last."""
    rule = shardwell.SGD(learning_rate=1.0, clip_norm=clip_norm)
    options = {"size": 1000, "optimizer": rule, "codec": "fp32", **crew}
    running = cluster(2, chunk_size_bytes=256)
    nets = [connect(running, f"w{rank}").parameter("net", **options) for rank in range(4)]
    want = np.zeros(1000, np.float32)
    together([lambda net=net: net.init(want) for net in nets])
    for step, place in enumerate((0, 1, 3)):
        gradient = np.random.default_rng(step).standard_normal(1000).astype(np.float32)
        for rank, net in enumerate(nets):
            weight = 7 if rank == place else 0
            net.put_gradient(gradient if weight else gradient * 5.0, sample_count=weight)
        want -= gradient
        found = nets[place].get_weights(min_version=step + 1)
        assert found.tobytes() == want.tobytes()


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize(
    "rule",
    [shardwell.SGD(0.5, momentum=0.5), shardwell.AdamW(0.125), shardwell.Average()],
    ids=lambda rule: type(rule).__name__,
)
def test_what_is_abandoned_changes_nothing_in_asynchronous_mode(
    tmp_path, connect, rule, codec
) -> None:
    """Before any gradient, too, and with a shard that is killed behind it."""
    given = np.where(np.arange(9000) % 2, np.float32(127), np.float32(-127))  # exact in int8
    options = {"size": 9000, "optimizer": rule, "mode": "async", "codec": codec}
    with LocalCluster(2, tmp_path, processes=True, chunk_size_bytes=4096) as running:
        net = connect(running, "w0").parameter("net", **options)
        if not isinstance(rule, shardwell.Average):
            net.init(np.zeros(9000, np.float32))
        assert net.abandon_step() == 0
        oracle = ModelParameter(np.zeros(9000), rule, mode="async")
        for step in (1, 3):
            oracle.put("w0", given)
            found = net.exchange(given)
            np.testing.assert_allclose(found, oracle.weights, rtol=0.01)
            assert net.abandon_step() == step + 1
            running.children[1].kill()
            eventually("it is dead", lambda: running.children[1].poll() is not None)
            running.start_again(1)
            np.testing.assert_array_equal(net.get_weights(), found)
            assert (net.next_step, net.version) == (step + 2, (step + 1) // 2)


def test_the_rest_of_a_refused_gradient_is_abandoned(cluster, connect) -> None:
    """In asynchronous mode, too, nothing changes but by what was counted of it."""
    rule = shardwell.SGD(1e-38, momentum=0.9)
    running = cluster(2, chunk_size_bytes=64)
    net = connect(running, "w0").parameter(
        "net", size=96, optimizer=rule, mode="async", codec="fp32"
    )
    net.init(np.zeros(96, np.float32))
    net.exchange(np.ones(96, np.float32))
    largest = np.full(96, 2.0**127, np.float32)
    largest[:90] = 0.0  # the momentum of the last chunk alone overflows in the end
    for _ in range(2):
        net.exchange(largest)
    with pytest.raises(shardwell.NonFiniteError):
        net.exchange(largest)
    before = net.get_weights()
    assert net.abandon_step() == 3
    np.testing.assert_array_equal(net.get_weights()[80:], before[80:])


def test_without_a_gradient_nothing_counts_in_asynchronous_mode(cluster, connect) -> None:
    rule = shardwell.SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.1)
    net = connect(cluster(2), "w0").parameter("net", size=100, optimizer=rule, mode="async")
    net.init(np.ones(100, np.float32))
    weights = net.exchange(np.ones(100, np.float32))
    np.testing.assert_array_equal(net.exchange(None), weights)
    np.testing.assert_array_equal(net.get_weights(), weights)
    assert (net.next_step, net.version) == (1, 1)
