"""Goal: what did not count of a gradient is added to the next one that counts, however it is given.

Method: one member makes steps of zeros, and another comes too late for its first; the sums of what
counted are small integers, and exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.threads import together

SIZE = 1000


def opened(client) -> Any:
    net = client.parameter(
        "net",
        size=SIZE,
        optimizer=shardwell.SGD(learning_rate=1.0),
        codec="fp32",
        members=shardwell.Elastic(max_count=4),
        late="carry",
    )
    net.init(np.zeros(SIZE, np.float32))
    return net


def begun(net: Any, value: float) -> Any:
    gradient = np.full(SIZE, value, np.float32)
    exchange = net.begin_exchange(gradient)
    exchange.ready(0, SIZE)
    return exchange.finish()


def whole(net: Any, value: float) -> Any:
    return net.exchange(np.full(SIZE, value, np.float32))


@pytest.mark.parametrize("give", [begun, whole])
def test_it_is_added_once_and_a_skipped_step_keeps_it(
    cluster, connect, give: Callable[[Any, float], Any]
) -> None:
    running = cluster(2, chunk_size_bytes=256)
    early, late = opened(connect(running, "w0")), opened(connect(running, "w1"))
    early.exchange(np.zeros(SIZE, np.float32))
    ended = threading.Event()

    def others() -> None:
        while not ended.is_set():
            early.exchange(np.zeros(SIZE, np.float32))

    def own() -> None:
        try:
            give(late, 1.0)
            assert late.outcome.counted == "none"
            assert late.next_step == late.version >= 2
            late.exchange(None)
            weights = give(late, 2.0)
            assert late.outcome.counted == "all"
            np.testing.assert_array_equal(weights, np.full(SIZE, -1.5, np.float32))
            weights = give(late, 4.0)
            np.testing.assert_array_equal(weights, np.full(SIZE, -3.5, np.float32))
        finally:
            ended.set()
            late.leave()

    together([others, own])
