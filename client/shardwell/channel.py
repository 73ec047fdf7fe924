"""Connections to the shards of a cluster: addresses, who answers there, calls with deadlines.

Every call ends in a result or a ShardwellError.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import grpc

from shardwell.errors import ArgumentError, ClosedError, ShardUnavailableError, WrongShardError
from shardwell.framing import MESSAGE_SIZE_MAX_BYTES
from shardwell.status import from_rpc_error
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2

ANSWER_MARGIN_S = 2.0
"""How much longer than the shard may wait the client waits for its answer, which names who is
missing."""
SHARD_COUNT_MAX = 4096

_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_SIZE_MAX_BYTES),
    ("grpc.max_send_message_length", MESSAGE_SIZE_MAX_BYTES),
    # A shard whose machine vanished is noticed within half a minute, although no call ends.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Shards come back quickly, so look often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Each client its own connection, so that several in one process do not share one TCP stream.
    ("grpc.use_local_subchannel_pool", 1),
)

ResponseT = TypeVar("ResponseT")


def parse_target(target: str) -> list[str]:
    """The addresses in "host:port,host:port", in the order of the shards.

    Raises:
        ArgumentError: it is empty, or an entry is no HOST:PORT, or one is there twice.
    """
    addresses = [part.strip() for part in target.split(",")] if isinstance(target, str) else []
    for address in addresses:
        host, _, port = address.rpartition(":")
        plain = re.fullmatch(r"[^\s:;/\[\]]+|\[[^\s\[\]]+\]", host)  # or an IPv6 one in brackets
        if not plain or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ArgumentError(
                f"a cluster's target is HOST:PORT[,HOST:PORT...] in the order of the shards; got "
                f"{address!r} in {target!r:.200}; set $SHARDWELL_SHARDS or pass target"
            )
    if not addresses or len(addresses) > SHARD_COUNT_MAX:
        raise ArgumentError(f"a target has 1 to {SHARD_COUNT_MAX} addresses; got {target!r:.200}")
    if len(set(addresses)) != len(addresses):
        raise ArgumentError(f"an address is there twice in {target!r:.200}")
    return addresses


class ShardChannel:
    """One shard, as a client sees it. Any thread may call it."""

    def __init__(self, shard_index: int, address: str) -> None:
        self.shard_index = shard_index
        self.address = address
        self.identity = types_pb2.ShardIdentity()
        self._closed = False
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        channel = self._channel
        self.put_gradient: Any = channel.stream_unary(
            f"/{_SERVICE}/PutGradient",
            response_deserializer=pb.PutGradientResponse.FromString,
        )
        self.init_weights: Any = channel.stream_unary(
            f"/{_SERVICE}/InitWeights",
            response_deserializer=pb.InitWeightsResponse.FromString,
        )
        self.get_weights: Any = channel.unary_stream(
            f"/{_SERVICE}/GetWeights",
            request_serializer=pb.GetWeightsRequest.SerializeToString,
        )
        self.snapshot: Any = channel.unary_stream(
            f"/{_SERVICE}/Snapshot",
            request_serializer=pb.SnapshotRequest.SerializeToString,
        )
        self.exchange: Any = channel.stream_stream(f"/{_SERVICE}/Exchange")

    def call(
        self,
        method: str,
        request: Any,
        response_type: type[ResponseT],
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        parameter: str | None = None,
    ) -> ResponseT:
        """A unary call; blocks up to `timeout_s`."""
        stub: Any = self._channel.unary_unary(
            f"/{_SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_type.FromString,  # type: ignore[attr-defined]
        )
        with self.translated(parameter):
            response: ResponseT = stub(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
            return response

    @contextlib.contextmanager
    def translated(self, parameter: str | None = None) -> Iterator[None]:
        """Turns gRPC's errors in the block into Shardwell's."""
        try:
            yield
        except grpc.RpcError as error:
            raise self.translate(error, parameter) from None
        except ValueError as error:  # what gRPC raises for a closed channel
            if not self._closed:
                raise
            raise ClosedError(f"the client was closed ({error}); connect again") from None

    def translate(self, error: grpc.RpcError, parameter: str | None = None) -> Exception:
        """The Shardwell error that a failed call of this shard stands for."""
        return from_rpc_error(
            error, shard_index=self.shard_index, address=self.address, parameter=parameter
        )

    def close(self) -> None:
        """Ends the connection and every call on it."""
        self._closed = True
        self._channel.close()


def connect_shards(target: str, *, cluster_id: str | None, timeout_s: float) -> list[ShardChannel]:
    """Connects to all shards and checks who answers.

    Args:
        target: See `parse_target`.
        cluster_id: What the cluster must be called; None takes what the shards agree on.
        timeout_s: How long shards that are not there yet are waited for, all together.

    Raises:
        ShardUnavailableError: a shard did not answer in time; it is named.
        WrongShardError: an address leads to another shard, count or cluster.
    """
    channels = [ShardChannel(i, address) for i, address in enumerate(parse_target(target))]
    try:
        deadline_s = time.monotonic() + timeout_s
        for channel in channels:
            _check(channel, channels, cluster_id, deadline_s, timeout_s)
    except BaseException:
        for channel in channels:
            channel.close()
        raise
    return channels


def _check(
    channel: ShardChannel,
    channels: list[ShardChannel],
    cluster_id: str | None,
    deadline_s: float,
    timeout_s: float,
) -> None:
    """Asks a shard who it is; the first one's cluster id stands where none is expected."""
    try:
        status = channel.call(
            "GetStatus",
            pb.GetStatusRequest(identity_only=True),
            pb.GetStatusResponse,
            timeout_s=max(deadline_s - time.monotonic(), 0.05),
            wait_for_ready=True,
        )
    except TimeoutError:
        raise ShardUnavailableError(
            f"shard {channel.shard_index} of {len(channels)} at {channel.address} did not answer "
            f"within {timeout_s:g} s; check that it runs and can be reached from here",
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
