"""Goal: the samples of a late gradient count with its values, or are free when these are dropped.

Method: one of two workers closes each step before the other's gradient comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell

SIZE = 20
SAMPLES = shardwell.Samples(SIZE, 2, shuffle=False)


def opened(client: shardwell.Client, late: Any) -> Any:
    net = client.parameter(
        "late",
        size=SIZE,
        optimizer=shardwell.SGD(lr=1.0),
        codec="fp32",
        worker_count=2,
        min_contributors=1,
        late=late,
    )
    net.init(np.zeros(SIZE))
    return net


@pytest.mark.parametrize("late", ["carry", "drop"])
def test_a_late_batch_counts_with_its_values_or_is_free(
    cluster: Any, connect: Any, late: Any
) -> None:
    running = cluster(1)
    slow, fast = (opened(connect(running, name), "carry") for name in ("slow", "fast"))
    dealt = {net: net.batches(SAMPLES) for net in (slow, fast)}

    def give(net: Any) -> list[int]:
        batch = next(dealt[net])
        gradient = np.zeros(SIZE)
        gradient[batch.indices] = -1.0
        net.exchange(gradient, batch=batch)
        return [int(each) for each in batch.indices]

    of_fast = give(fast)
    carried = give(slow)
    assert slow.outcome.counted == "none"
    slow.late = late
    after = give(slow)
    account = slow.samples["train"]
    weights = slow.get_weights()
    expected = {*of_fast, *after, *(carried if late == "carry" else ())}
    assert set(np.flatnonzero(weights)) == expected
    assert account.done_count + account.out_count == len(expected)
    assert not account.partial


def test_what_no_step_takes_any_more_is_dealt_again(cluster: Any, connect: Any) -> None:
    """The crew has no batch left when the gradient of the last one is late."""
    running, samples = cluster(1), shardwell.Samples(4, 2, shuffle=False)
    slow, fast = (opened(connect(running, name), "carry") for name in ("slow", "fast"))
    dealt = {net: net.batches(samples, epochs=1) for net in (slow, fast)}
    of_slow = next(dealt[slow])
    for net in (fast, slow):
        for batch in [of_slow] if net is slow else dealt[fast]:
            gradient = np.zeros(SIZE)
            gradient[batch.indices] = -1.0
            net.exchange(gradient, batch=batch)
    assert slow.outcome.counted == "none"
    again = [next(dealt[slow]), next(fast.batches(samples, epochs=1))]
    assert sorted(i for each in again for i in each.indices) == sorted(of_slow.indices)
