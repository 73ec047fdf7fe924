"""Goal: over gRPC a small call does not queue behind what a large one of another thread has sent.

Method: exchanges of several threads of one client, over gRPC, that wait for another worker, so that
all are open at once; their connections are counted at the shard.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.inside import open_calls
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background
from shardwell.transport.stream_pool import CONNECTION_COUNT_MAX

SGD = shardwell.SGD(learning_rate=1.0)
ONES = np.ones(9, np.float32)


def peers(running: Any, method: str = "exchange") -> list[str]:
    """Whence the open calls of a shard came."""
    calls = list(open_calls(running.servers[0]))
    return [call.context.peer() for call in calls if call.rpc.name.lower() == method]


def opened(client: shardwell.Client, name: str, **given: Any) -> shardwell.Parameter:
    net = client.parameter(name, size=9, optimizer=SGD, **given)
    net.init(np.zeros(9, np.float32))
    return net


@pytest.mark.parametrize("count", [2, 6])
def test_calls_at_once_have_connections_of_their_own(cluster, connect, count) -> None:
    running = cluster(1)
    client = connect(running, "w0", same_host=False)
    waiting = []
    for index in range(count):
        net = opened(client, f"p{index}", worker_count=2)
        waiting.append(in_background(lambda net=net: net.exchange(ONES)))
    eventually("all wait", lambda: len(peers(running)) == count)
    assert len(set(peers(running))) == min(count, CONNECTION_COUNT_MAX)
    other = connect(running, "w1", same_host=False)
    for index in range(count):
        assert (opened(other, f"p{index}", worker_count=2).exchange(ONES) == -1).all()
    for each in waiting:
        assert (each.result(PATIENCE_S) == -1).all()


def test_calls_after_each_other_share_that_of_all(cluster, connect) -> None:
    """A worker with one thread has one connection, whatever it calls, and after an error, too."""
    running = cluster(1)
    client = connect(running, "w0", same_host=False)
    table = client.table("rows", row_count=9, dim=2, optimizer=SGD)
    for step in range(3):
        for index in range(3):
            opened(client, f"p{index}").exchange(ONES)
        table.put_row_gradients([1, 2], np.ones((2, 2), np.float32))
        with pytest.raises(shardwell.NonFiniteError):
            opened(client, "p0").exchange(ONES * np.nan)
        found = {*peers(running), *peers(running, "exchangerows"), *peers(running, "attend")}
        assert len(found) == 1, step


def test_all_connections_end_with_the_client(cluster, connect) -> None:
    running = cluster(1)
    client = connect(running, "w0", same_host=False)
    nets = [opened(client, f"p{index}", worker_count=2) for index in range(3)]
    waiting = [in_background(lambda net=net: net.exchange(ONES)) for net in nets]
    eventually("all wait", lambda: len(set(peers(running))) == 3)
    client.close()
    for each in waiting:
        with pytest.raises(shardwell.ClosedError):
            each.result(PATIENCE_S)
    eventually("none is left", lambda: gc.collect() >= 0 and not open_calls(running.servers[0]))
