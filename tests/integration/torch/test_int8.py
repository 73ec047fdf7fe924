"""Goal: a torch model trains in int8 with the bits of a replay; see harness.oracles.int8."""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.oracles.int8 import Int8Weights, Int8Worker, sgd

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

RATE = 0.5


@pytest.mark.parametrize("overlap", [True, False])
def test_a_server_optimizer(cluster, connect, overlap: bool) -> None:
    client = connect(cluster(2), "w0")
    module = torch.nn.Linear(70, 60)

    def flat() -> np.ndarray:
        """As it lies in the parameter, whose blocks are counted from its start."""
        found = torch.cat([module.bias.detach(), module.weight.detach().ravel()])
        return found.numpy().copy()

    first = flat()
    optimizer = shardwell.torch.ServerOptimizer(
        module, client, shardwell.SGD(learning_rate=RATE), codec="int8", overlap=overlap
    )
    worker, weights = Int8Worker(first.size), Int8Weights(first)
    for step in range(4):
        gradient = np.random.default_rng(step).standard_normal(first.size).astype(np.float32)
        given = torch.from_numpy(gradient)
        optimizer.zero_grad()
        loss = (module.bias * given[:60]).sum() + (module.weight.ravel() * given[60:]).sum()
        loss.backward()
        optimizer.step()
        expected = weights.update(sgd(RATE)(weights.weights, worker.sent(gradient)))
        np.testing.assert_array_equal(flat(), expected)
