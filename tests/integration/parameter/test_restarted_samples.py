"""Goal: workers that all start again with another batch size go on with the samples that are left.

Method: weights count visits; all workers are connected before the first of them is dealt a batch.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.inside import vanish
from harness.threads import together

LENGTH = 50


def connected(connect: Any, target: Any) -> list[Any]:
    return [connect(target, f"w{number}") for number in range(2)]


def opened(clients: list[Any]) -> list[Any]:
    found = []
    for client in clients:
        net = client.parameter(
            "visits", size=LENGTH, optimizer=shardwell.SGD(lr=1.0), codec="fp32", worker_count=2
        )
        net.init(np.zeros(LENGTH))
        found.append(net)
    return found


def train(net: Any, size: int, most: int | None) -> None:
    for batch in itertools.islice(net.batches(shardwell.Samples(LENGTH, size), epochs=2), most):
        gradient = np.zeros(LENGTH, np.float32)
        gradient[batch.indices] = -2.0
        net.exchange(gradient, batch=batch)


def test_all_start_again_with_another_batch_size(cluster: Any, connect: Any) -> None:
    running = cluster(2)
    lost = connected(connect, running)
    together([partial(train, net, 4, 3) for net in opened(lost)])
    for client in lost:
        vanish(client)
    nets = opened(connected(connect, running))
    together([partial(train, net, 3, None) for net in nets])
    assert nets[0].get_weights().tolist() == [2.0] * LENGTH


def test_one_that_has_another_batch_size_is_named(cluster: Any, connect: Any) -> None:
    first, second = opened(connected(connect, cluster(1)))
    samples = shardwell.Samples(LENGTH, 4)
    next(first.batches(samples))
    with pytest.raises(shardwell.SpecMismatchError, match="batches of 3 for each of 2 workers"):
        next(second.batches(shardwell.Samples(LENGTH, 3)))
    assert len(next(second.batches(samples))) == 4
