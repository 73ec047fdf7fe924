"""Goal: shards are upgraded one after the other while workers train, and no call fails.

Method: three real shards with files, two workers that train all the while; each shard gets SIGTERM,
ends in order, and is started again, twice in all. Weights are those of an undisturbed run, bit for
bit; how long the longest step took is printed.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background

SIZE = 30_000
SGD = shardwell.SGD(learning_rate=0.5, momentum=0.5)


def gradient(rank: int, step: int) -> np.ndarray:
    """Of small integers, whose sums are exact."""
    return np.random.default_rng([rank, step]).integers(-4, 5, SIZE).astype(np.float32)


def reference(step_count: int) -> np.ndarray:
    """The weights of an undisturbed run."""
    weights = np.zeros(SIZE, np.float32)
    momentum = np.zeros(SIZE, np.float32)
    for step in range(step_count):
        mean = (gradient(0, step) + gradient(1, step)) / np.float32(2)
        momentum = np.float32(0.5) * momentum + mean
        weights = weights - np.float32(0.5) * momentum
    return weights


@pytest.mark.parametrize("verb", ["exchange", "put and get"])
@pytest.mark.parametrize("same_host", [True, False])
def test_one_after_the_other_under_training(
    cluster: Any, connect: Any, tmp_path: Path, verb: str, same_host: bool
) -> None:
    running = cluster(3, processes=True, data_dir=tmp_path, chunk_size_bytes=2**12)
    is_over, longest_s, agreed = threading.Event(), [0.0, 0.0], threading.Barrier(2)
    counts = [0, 0]

    def train(rank: int) -> np.ndarray:
        client = connect(running, f"w{rank}", same_host=same_host, timeout_s=PATIENCE_S)
        net = client.parameter("net", size=SIZE, optimizer=SGD, worker_count=2, codec="fp32")
        net.init(np.zeros(SIZE, np.float32))
        weights = np.empty(SIZE, np.float32)
        stop = [False]
        while not stop[0]:
            start_s = time.monotonic()
            values = gradient(rank, net.next_step)
            if verb == "exchange":
                net.exchange(values, out=weights)
            else:
                step = net.put_gradient(values)
                net.get_weights(out=weights, min_version=step + 1)
            counts[rank] = net.next_step
            longest_s[rank] = max(longest_s[rank], time.monotonic() - start_s)
            if agreed.wait(PATIENCE_S) == 0:  # both end at one step
                decision[0] = is_over.is_set()
            agreed.wait(PATIENCE_S)
            stop[0] = decision[0]
        return weights

    decision = [False]
    workers = [in_background(lambda rank=rank: train(rank)) for rank in range(2)]
    try:
        for _ in range(2):
            for index in range(3):
                before = counts[0]
                child = running.children[index]
                child.ask_to_stop()
                assert child.wait(PATIENCE_S) == 0
                running.start_again(index)
                eventually("they go on", lambda since=before: counts[0] > since + 3)
    finally:
        is_over.set()
    found = [worker.result(PATIENCE_S) for worker in workers]
    print(f"{counts[0]} steps, the longest {max(longest_s):.2f} s")
    assert counts[0] > 20
    for weights in found:
        np.testing.assert_array_equal(weights, reference(counts[0]))
