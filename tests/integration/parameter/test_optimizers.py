"""Every optimizer end to end, on shards and in chunks, against the float64 model.

Tolerances: each update is a few float32 roundings (2^-24 relative each); 1e-5 after ten updates
leaves a margin, and a wrong formula is off by far more.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import shardwell
from harness.inside import session_of
from harness.oracles.parameter import ModelParameter
from harness.polling import PATIENCE_S
from harness.threads import together
from harness.wire_client.worker import WireWorker, spec
from shardwell import SGD, Adagrad, Adam, AdamW, Average, RMSProp
from shardwell.v1 import parameter_server_pb2 as pb

OPTIMIZERS = [
    Average(),
    SGD(learning_rate=0.1),
    SGD(learning_rate=0.1, weight_decay=0.01),
    SGD(learning_rate=0.1, momentum=0.9),
    SGD(learning_rate=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    SGD(learning_rate=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    SGD(learning_rate=0.1, momentum=0.5, clip_value=0.7),
    Adagrad(learning_rate=0.1),
    Adagrad(learning_rate=0.1, initial_accumulator=0.5, epsilon=1e-6, weight_decay=0.01),
    RMSProp(learning_rate=0.01),
    RMSProp(learning_rate=0.01, decay=0.9, momentum=0.8, epsilon=1e-4, weight_decay=0.01),
    Adam(learning_rate=0.01),
    Adam(learning_rate=0.01, beta1=0.8, beta2=0.95, epsilon=1e-4, weight_decay=0.01),
    AdamW(learning_rate=0.01),
    AdamW(learning_rate=0.05, beta1=0.8, beta2=0.95, weight_decay=0.1, clip_value=1.0),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_ten_steps_of_two_workers(cluster, connect, optimizer) -> None:
    size, step_count = 157, 10
    running = cluster(2, chunk_size_bytes=64)
    generator = np.random.default_rng(5)
    first = generator.standard_normal(size).astype(np.float32)
    gradients = generator.standard_normal((step_count, 2, size)).astype(np.float32)
    oracle = ModelParameter(first, optimizer, worker_count=2)
    for step in range(step_count):
        for index in (0, 1):
            oracle.put(f"w{index}", gradients[step, index], 1 + index)

    def work(index: int) -> np.ndarray:
        model = connect(running, f"w{index}").parameter(
            "model", size=size, optimizer=optimizer, worker_count=2, codec="fp32"
        )
        model.init(first)
        for step in range(step_count):
            weights = model.exchange(gradients[step, index], sample_count=1 + index)
        return weights

    one, two = together([lambda: work(0), lambda: work(1)])
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(one, oracle.weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:], ids=str)
def test_one_worker_asynchronously(cluster, connect, optimizer) -> None:
    size = 61
    model = connect(cluster(3, chunk_size_bytes=64), "w0").parameter(
        "model", size=size, optimizer=optimizer, mode="async", codec="fp32"
    )
    generator = np.random.default_rng(6)
    first = generator.standard_normal(size).astype(np.float32)
    oracle = ModelParameter(first, optimizer, mode="async")
    model.init(first)
    for _ in range(5):
        gradient = generator.standard_normal(size).astype(np.float32)
        oracle.put("w0", gradient)
        weights = model.exchange(gradient)
    np.testing.assert_allclose(weights, oracle.weights, rtol=1e-5, atol=1e-5)


class TestLearningRate:
    """A change takes effect at one step, the same on every shard and chunk."""

    @pytest.mark.parametrize("optimizer", [SGD(learning_rate=1.0), Adam(learning_rate=0.01)])
    def test_a_change_mid_training(self, cluster, connect, optimizer) -> None:
        size = 100
        running = cluster(3, chunk_size_bytes=64)
        oracle = ModelParameter(np.zeros(size), optimizer, worker_count=2)
        rates = {2: 0.25, 4: 0.125}
        for step in range(6):
            oracle.learning_rate = rates.get(step, oracle.learning_rate)
            for index in (0, 1):
                oracle.put(f"w{index}", np.full(size, index + step + 1))

        def work(index: int) -> np.ndarray:
            model = connect(running, f"w{index}").parameter(
                "model", size=size, optimizer=optimizer, worker_count=2, codec="fp32"
            )
            model.init(np.zeros(size, np.float32))
            for step in range(6):
                if step in rates:
                    model.set_learning_rate(rates[step])
                weights = model.exchange(np.full(size, index + step + 1, np.float32))
            return weights

        for weights in together([lambda: work(0), lambda: work(1)]):
            np.testing.assert_allclose(weights, oracle.weights, rtol=1e-5, atol=1e-6)

    def test_a_change_by_one_worker_holds_for_all(self, cluster, connect) -> None:
        running = cluster(2, chunk_size_bytes=64)
        one, two = (
            connect(running, name).parameter(
                "model", size=80, optimizer=SGD(learning_rate=1.0), worker_count=2
            )
            for name in ("one", "two")
        )
        one.init(np.zeros(80, np.float32))
        two.put_gradient(np.ones(80, np.float32))  # of the step that is open when the rate changes
        one.set_learning_rate(0.5)
        np.testing.assert_array_equal(one.exchange(np.ones(80, np.float32)), -0.5)

    def test_now_is_the_next_update(self, cluster, connect) -> None:
        running = cluster(2, chunk_size_bytes=64)
        model = connect(running, "w0").parameter("m", size=80, optimizer=SGD(learning_rate=1.0))
        model.init(np.zeros(80, np.float32))
        model.exchange(np.ones(80, np.float32))
        outsider = connect(running, "other").parameter(
            "m", size=80, optimizer=SGD(learning_rate=1.0)
        )
        outsider.set_learning_rate(0.25, now=True)
        np.testing.assert_array_equal(model.exchange(np.ones(80, np.float32)), -1.25)
        rates = [status.parameters[0].learning_rate for status in connect(running, "s").status()]
        assert rates == [0.25, 0.25]

    def test_a_past_step_is_refused(self, cluster, connect) -> None:
        running = cluster(2, chunk_size_bytes=64)
        ahead = connect(running, "w0").parameter("m", size=80, optimizer=SGD(learning_rate=1.0))
        ahead.init(np.zeros(80, np.float32))
        ahead.exchange(np.ones(80, np.float32))
        behind = connect(running, "behind").parameter(
            "m", size=80, optimizer=SGD(learning_rate=1.0)
        )
        for _ in range(2):
            ahead.exchange(np.ones(80, np.float32))
        with pytest.raises(shardwell.StepOrderError, match="step 3"):
            behind.set_learning_rate(0.5)
        np.testing.assert_array_equal(ahead.exchange(np.ones(80, np.float32)), -4)

    @pytest.mark.parametrize("step", [0, 1])
    @pytest.mark.parametrize("shard_ahead", [0, 1])
    def test_a_change_after_an_interrupted_step(self, cluster, connect, step, shard_ahead) -> None:
        """One shard has closed the step that is to be repeated; another has not.

        Whether the change is taken or refused, no step may have two rates.
        """
        size = 40
        running = cluster(2, chunk_size_bytes=64)
        client = connect(running, "w0")
        model = client.parameter("m", size=size, optimizer=SGD(learning_rate=1.0), codec="fp32")
        model.init(np.zeros(size, np.float32))
        for _ in range(step):
            model.exchange(np.ones(size, np.float32))
        with WireWorker(running.target, "w0", attends=False) as worker:
            worker.session = session_of(client).number  # as if the client had sent it
            half = worker.create(spec("m", size))
            messages = half.gradient_messages(pb.PutGradientRequest, shard_ahead, np.ones(size))
            worker.stubs[shard_ahead].PutGradient(iter(messages), timeout=PATIENCE_S)
        with contextlib.suppress(shardwell.StepOrderError):
            model.set_learning_rate(0.25)
        for _ in range(2):
            weights = model.exchange(np.ones(size, np.float32))
            np.testing.assert_array_equal(weights, weights[0])

    @pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "fast", None])
    def test_a_rate_that_is_none(self, cluster, connect, rate) -> None:
        model = connect(cluster(), "w0").parameter("m", size=8, optimizer=SGD(learning_rate=1.0))
        with pytest.raises(shardwell.ArgumentError, match="learning_rate"):
            model.set_learning_rate(rate)

    def test_an_optimizer_without_one(self, cluster, connect) -> None:
        model = connect(cluster(), "w0").parameter("m", size=8, optimizer=Average())
        with pytest.raises(shardwell.ArgumentError, match="no learning rate"):
            model.set_learning_rate(0.5)
