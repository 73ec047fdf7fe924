"""All shards of a cluster, as a client sees them: connected to, and waited for when away."""

from __future__ import annotations

import random
import threading
import time

from shardwell.channel import ShardChannel, parse_target
from shardwell.errors import ClosedError, ShardUnavailableError, WrongShardError
from shardwell.retry import Attempts
from shardwell.v1 import parameter_server_pb2 as pb


class Shards:
    """The channels in the order of the shards, and waiting for one. Any thread may use it."""

    def __init__(self, addresses: list[str]) -> None:
        self.channels = [ShardChannel(i, address) for i, address in enumerate(addresses)]
        """One a shard, by index."""
        self._closed = threading.Event()

    def attempts(self, timeout_s: float) -> Attempts:
        """Those of a call that begins now and may take so long."""
        return Attempts(timeout_s, self)

    def now_s(self) -> float:
        """See `Surroundings`."""
        return time.monotonic()

    def jitter(self) -> float:
        """See `Surroundings`."""
        return random.random()

    def pause(self, duration_s: float) -> None:
        """See `Surroundings`; `close` ends it at once."""
        if self._closed.wait(duration_s):
            raise ClosedError("the client was closed; connect again")

    def await_shard(self, shard_index: int, timeout_s: float) -> bool:
        """See `Surroundings`; `close` ends it at once."""
        return self.channels[shard_index].answers(timeout_s)

    def describe(self, shard_index: int) -> str:
        """See `Surroundings`."""
        return f"shard {shard_index} at {self.channels[shard_index].address}"

    def close(self) -> None:
        """Ends all connections, the calls on them and all waits. Safe to repeat."""
        self._closed.set()
        for channel in self.channels:
            channel.close()


def connect_shards(target: str, *, cluster_id: str | None, timeout_s: float) -> Shards:
    """Connects to all shards and checks who answers.

    Args:
        target: See `parse_target`.
        cluster_id: What the cluster must be called; None takes what the shards agree on.
        timeout_s: How long shards that are not there yet are waited for, all together.

    Raises:
        ShardUnavailableError: a shard did not answer in time; it is named.
        WrongShardError: an address leads to another shard, count or cluster.
    """
    shards = Shards(parse_target(target))
    try:
        attempts = shards.attempts(timeout_s)
        for channel in shards.channels:
            _check(channel, shards.channels, cluster_id, attempts)
    except BaseException:
        shards.close()
        raise
    return shards


def _check(
    channel: ShardChannel,
    channels: list[ShardChannel],
    cluster_id: str | None,
    attempts: Attempts,
) -> None:
    """Asks a shard who it is; the first one's cluster id stands where none is expected."""
    try:
        status = attempts.run(
            lambda: channel.call(
                "GetStatus",
                pb.GetStatusRequest(identity_only=True),
                pb.GetStatusResponse,
                timeout_s=attempts.rest_s,
                wait_for_ready=True,
            )
        )
    except (TimeoutError, ShardUnavailableError):
        raise ShardUnavailableError(
            f"shard {channel.shard_index} of {len(channels)} at {channel.address} did not answer "
            f"within {attempts.timeout_s:g} s; check that it runs and can be reached from here",
            shard_index=channel.shard_index,
        ) from None
    expected_id = cluster_id or channels[0].identity.cluster_id or status.shard.cluster_id
    expected = (channel.shard_index, len(channels), expected_id)
    found = (status.shard.shard_index, status.shard.shard_count, status.shard.cluster_id)
    if found != expected:
        raise WrongShardError(
            f"{channel.address} should be shard {expected[0]} of {expected[1]} of cluster "
            f"{expected[2]!r}; it is shard {found[0]} of {found[1]} of cluster {found[2]!r}; "
            "give all addresses, in the order of the shards",
            shard_index=channel.shard_index,
        )
    channel.identity.CopyFrom(status.shard)
