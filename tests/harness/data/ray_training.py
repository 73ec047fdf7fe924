"""What the workers of Ray's tests train, and its weights by plain NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import shardwell
from shardwell.ray import RayCluster

Float32 = npt.NDArray[np.float32]
SIZE = 3000
SGD = shardwell.SGD(learning_rate=0.5, momentum=0.5)
CHECKPOINT_STEPS = 20
"""Worker 0 saves a checkpoint after each so many steps, if it has a path."""
_TIMEOUT_S = 5.0
"""Of calls: longer than a shard's process takes to be started again."""
_LIFE_COUNT_MAX = 40
"""How often a worker begins again, before a test fails by its last error."""


def gradient(rank: int, step: int) -> Float32:
    """Of small integers, whose sums are exact."""
    return np.random.default_rng([rank, step]).integers(-4, 5, SIZE).astype(np.float32)


def reference(step_count: int) -> Float32:
    """The weights of an undisturbed run of two workers."""
    weights, momentum = np.zeros((2, SIZE), np.float32)
    for step in range(step_count):
        mean = (gradient(0, step) + gradient(1, step)) / np.float32(2)
        momentum = np.float32(0.5) * momentum + mean
        weights = weights - np.float32(0.5) * momentum
    return weights


def train(
    cluster: RayCluster,
    rank: int,
    step_count: int,
    *,
    checkpoint: str | None = None,
    say: Callable[[int], None] = lambda step: None,
    fail: Callable[[shardwell.ShardwellError], None] = lambda error: None,
) -> Float32:
    """A worker that is started again after each failure, as Ray Train does; the last weights."""
    for life in range(_LIFE_COUNT_MAX):
        try:
            return _train(cluster, rank, step_count, checkpoint, say)
        except shardwell.StorageError:  # what a shard held is lost for good
            raise
        except shardwell.ShardwellError as error:
            fail(error)
            if life == _LIFE_COUNT_MAX - 1:
                raise
    raise AssertionError("unreachable")


def _train(
    cluster: RayCluster,
    rank: int,
    step_count: int,
    checkpoint: str | None,
    say: Callable[[int], None],
) -> Float32:
    with shardwell.connect(
        cluster.target,
        worker_id=f"w{rank}",
        timeout_s=_TIMEOUT_S,
        connect_timeout_s=_TIMEOUT_S,
    ) as client:
        net = client.parameter("net", size=SIZE, optimizer=SGD, worker_count=2, codec="fp32")
        net.init(np.zeros(SIZE, np.float32))
        weights = net.get_weights(min_version=net.next_step)
        while net.next_step < step_count:
            step = net.next_step
            weights = net.exchange(gradient(rank, step))
            if checkpoint is not None and rank == 0 and step % CHECKPOINT_STEPS == 0:
                client.save_checkpoint(checkpoint, keep=2)
            say(step)
        return np.array(weights, np.float32)
