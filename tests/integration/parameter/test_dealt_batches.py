"""Goal: batches that were dealt before are taken one at a time, by any thread, and once.

Method: one worker, which the shards deal many batches at a time; several of its threads take them,
programs put them back, and clients are closed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shardwell
from shardwell.errors import ArgumentError, ClosedError

LENGTH = 3000
SAMPLES = shardwell.Samples(LENGTH, 2)
THREAD_COUNT = 4
CREWS: dict[str, Any] = {
    "fixed": {},
    "elastic": {"members": shardwell.Elastic(min_count=1, reference_count=1)},
}


def opened(client: shardwell.Client, crew: str = "fixed") -> Any:
    net = client.parameter("net", size=1, optimizer=shardwell.SGD(lr=1.0), **CREWS[crew])
    net.init(np.zeros(1))
    return net


@pytest.mark.parametrize("crew", CREWS)
def test_threads_that_take_batches_at_once_get_each_sample_once(
    cluster: Any, connect: Any, crew: str
) -> None:
    net = opened(connect(cluster(2), "w0"), crew)
    first = net.next_batch(SAMPLES, LENGTH)

    def take(_: int) -> list[Any]:
        found = []
        while (batch := net.next_batch(SAMPLES, LENGTH)) is not None:
            found.append(batch)
        return found

    with ThreadPoolExecutor(THREAD_COUNT) as threads:
        taken = [
            first,
            *(each for found in threads.map(take, range(THREAD_COUNT)) for each in found),
        ]
    assert sorted(np.concatenate([batch.indices for batch in taken])) == list(range(LENGTH))
    for batch in taken[:3]:
        net.exchange(np.ones(1), batch=batch)
    assert net.samples["train"].done_count == 6


def test_a_batch_that_was_put_back_comes_next_and_counts_once(cluster: Any, connect: Any) -> None:
    net = opened(connect(cluster(1), "w0"))
    first, second = (net.next_batch(SAMPLES, LENGTH) for _ in range(2))
    net.put_back([first, second])
    with pytest.raises(ArgumentError, match="give each batch that batches"):
        net.exchange(np.ones(1), batch=first)
    again = [net.next_batch(SAMPLES, LENGTH) for _ in range(2)]
    assert [batch.ranges for batch in again] == [first.ranges, second.ranges]
    for batch in again:
        net.exchange(np.ones(1), batch=batch)
    net.put_back(again)  # they have ended
    third = net.next_batch(SAMPLES, LENGTH)
    assert third.ranges == ((4, 6),)


def test_a_closed_client_gives_none_of_the_batches_that_were_dealt(
    cluster: Any, connect: Any
) -> None:
    client = connect(cluster(1), "w0")
    batches = opened(client).batches(SAMPLES)
    next(batches)
    client.close()
    with pytest.raises(ClosedError):
        next(batches)
