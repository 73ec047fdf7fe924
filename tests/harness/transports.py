"""Training by two workers over each transport, and what of a shard's transports is in use."""

from __future__ import annotations

from typing import Any

import numpy as np

import shardwell
from harness.inside import channels_of, endpoint_of, unix_connections
from harness.threads import together
from shardwell_server import LocalCluster

RULE = shardwell.SGD(0.1, momentum=0.5)


def mapped_bytes(running: LocalCluster) -> list[int]:
    """Bytes of memory that each shard shares with workers."""
    return [endpoint_of(server).arenas.mapped_bytes for server in running.servers]


def unix_calls(client: shardwell.Client) -> list[Any]:
    """The client's streams on this machine."""
    return [call for channel in channels_of(client) for call in channel._unix_calls]


def stream_counts(running: LocalCluster) -> list[int]:
    """Connections by which each shard serves a call now."""
    return [
        sum(connection.task is not None for connection in unix_connections(server))
        for server in running.servers
    ]


def trained(
    running: LocalCluster,
    connect: Any,
    name: str = "net",
    *,
    size: int = 500_000,
    same_host: bool = True,
    verb: str = "exchange",
    shares: bool | None = None,
    streams: bool | None = None,
    **options: Any,
) -> np.ndarray:
    """What two workers have after three steps.

    Args:
        running: The shards.
        connect: Makes clients.
        name: The parameter's.
        size: Elements.
        same_host: Argument of `connect`.
        verb: "exchange", or "put and get".
        shares: Whether both must share memory with shards; None: they may.
        streams: Whether both must have streams over Unix sockets; None: they may.
        options: Options of the parameter.
    """
    given = {"optimizer": RULE, "worker_count": 2, **options}
    clients = [connect(running, f"w{rank}", same_host=same_host) for rank in range(2)]

    def work(rank: int) -> np.ndarray:
        net = clients[rank].parameter(name, size=size, **given)
        net.init(np.zeros(size, np.float32))
        for step in range(3):
            values = np.random.default_rng([rank, step]).standard_normal(size, np.float32)
            if verb == "exchange":
                weights = net.exchange(values, sample_count=rank + 1)
            else:
                net.put_gradient(values, sample_count=rank + 1)
                weights = net.get_weights(min_version=step + 1)
        traffic = clients[rank].traffic
        assert traffic.sent_bytes + traffic.received_bytes >= traffic.shared_bytes
        assert same_host or not traffic.shared_bytes
        assert shares is None or bool(traffic.shared_bytes) == shares
        return np.array(weights)

    one, other = together([lambda: work(0), lambda: work(1)])
    np.testing.assert_array_equal(one, other)
    for client in clients:
        assert same_host or not unix_calls(client)
        assert streams is None or bool(unix_calls(client)) == streams
    return one
