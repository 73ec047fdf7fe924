"""The connection to one shard: its address, its calls and their deadlines.

Every call ends in a result or a ShardwellError; whether it is made again is for others to decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from shardwell.connection import CHANNEL_OPTIONS, unary_stub
from shardwell.errors import ArgumentError, ClosedError
from shardwell.names import is_address
from shardwell.status import from_rpc_error
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2, types_pb2

ANSWER_MARGIN_S = 2.0
"""How much longer than the shard may wait the client waits for its answer, which names who is
missing."""
SHARD_COUNT_MAX = 4096

_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name
_TABLE_SERVICE = table_pb2.DESCRIPTOR.services_by_name["TableService"].full_name
_ABSENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

ResponseT = TypeVar("ResponseT", bound=Message)


def parse_target(target: str) -> list[str]:
    """The addresses in "host:port,host:port", in the order of the shards.

    Raises:
        ArgumentError: it is empty, or an entry is no HOST:PORT, or one is there twice.
    """
    addresses = [part.strip() for part in target.split(",")] if isinstance(target, str) else []
    for address in addresses:
        if not is_address(address):
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
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
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
        self.exchange_rows: Any = channel.stream_stream(f"/{_TABLE_SERVICE}/ExchangeRows")
        self.scan_rows: Any = channel.unary_stream(
            f"/{_TABLE_SERVICE}/ScanRows",
            request_serializer=table_pb2.ScanRowsRequest.SerializeToString,
        )
        self.load_rows: Any = channel.stream_unary(
            f"/{_TABLE_SERVICE}/LoadRows",
            response_deserializer=table_pb2.LoadRowsResponse.FromString,
        )

    def call(
        self,
        method: str,
        request: Any,
        response_type: type[ResponseT],
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        parameter: str | None = None,
        table: str | None = None,
    ) -> ResponseT:
        """A unary call, of TableService on behalf of a table; blocks up to `timeout_s`."""
        service = _SERVICE if table is None else _TABLE_SERVICE
        stub = unary_stub(self._channel, f"/{service}/{method}", response_type)
        with self.translated(parameter, table):
            response: ResponseT = stub(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
            return response

    def answers(self, timeout_s: float) -> bool:
        """Waits until the shard answers; False if it has not, or the connection broke again.

        Blocks up to `timeout_s`, sending nothing before there is a connection, which gRPC tries to
        make all the while.

        Raises:
            ClosedError: the channel was closed, before or meanwhile.
        """
        stub: Any = self._channel.unary_unary(
            f"/{_SERVICE}/GetStatus",
            request_serializer=pb.GetStatusRequest.SerializeToString,
        )
        question = pb.GetStatusRequest(identity_only=True)
        with self.translated():
            call = stub.future(question, timeout=timeout_s, wait_for_ready=True)
        try:
            error = call.exception()
        except grpc.FutureCancelledError as cancelled:
            error = cancelled
        finally:
            call.cancel()  # after Ctrl-C, nobody waits for it
        if self._closed:
            raise ClosedError("the client was closed; connect again")
        # Any other status is an answer, and says more when the call itself is made again.
        return error is None or call.code() not in _ABSENT

    @contextlib.contextmanager
    def translated(self, parameter: str | None = None, table: str | None = None) -> Iterator[None]:
        """Turns gRPC's errors in the block into Shardwell's."""
        try:
            yield
        except grpc.RpcError as error:
            raise self.translate(error, parameter, table) from None
        except ValueError as error:  # what gRPC raises for a closed channel
            if not self._closed:
                raise
            raise ClosedError(f"the client was closed ({error}); connect again") from None

    def translate(
        self, error: grpc.RpcError, parameter: str | None = None, table: str | None = None
    ) -> Exception:
        """The Shardwell error that a failed call of this shard stands for."""
        return from_rpc_error(
            error,
            shard_index=self.shard_index,
            address=self.address,
            parameter=parameter,
            table=table,
        )

    def close(self) -> None:
        """Ends the connection and every call on it."""
        self._closed = True
        self._channel.close()
