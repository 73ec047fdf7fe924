"""A parameter in int8 that workers train, and its replay (harness.oracles.int8) beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import shardwell
from harness.oracles.int8 import BLOCK, Int8Weights, Int8Worker, sgd

Float32 = npt.NDArray[np.float32]
SIZE = 5 * BLOCK + 100
"""Six blocks, of which the last is short: 1 shard has all, each of 3 has two."""
RATE = 0.5


def gradient_of(worker: int, step: int) -> Float32:
    return np.random.default_rng([worker, step]).standard_normal(SIZE).astype(np.float32)


def opened(client: shardwell.Client, name: str = "net", **options: Any) -> Any:
    """Of zeros, with plain SGD unless the options say otherwise."""
    options.setdefault("optimizer", shardwell.SGD(learning_rate=RATE))
    net = client.parameter(name, size=SIZE, codec="int8", **options)
    if not isinstance(options["optimizer"], shardwell.Average):
        net.init(np.zeros(SIZE, np.float32))
    return net


def assert_bits(found: Float32, expected: Float32) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


class Replay:
    """The right weights, of one worker."""

    def __init__(self) -> None:
        self.worker, self.weights = Int8Worker(SIZE), Int8Weights(np.zeros(SIZE, np.float32))

    def step(self, gradient: Float32) -> Float32:
        return self.weights.update(sgd(RATE)(self.weights.weights, self.worker.sent(gradient)))

    def check(self, net: Any) -> None:
        assert_bits(net.get_weights(min_version=net.next_step), self.weights.image)
        assert_bits(net.residual, self.worker.residual)

    def step_of(self, net: Any) -> None:
        """One of the net, and of this."""
        gradient = gradient_of(0, net.next_step)
        assert_bits(net.exchange(gradient), self.step(gradient))
        assert_bits(net.residual, self.worker.residual)
