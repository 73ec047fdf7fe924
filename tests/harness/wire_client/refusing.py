"""When a shard that stops takes no new calls any more."""

from __future__ import annotations

import grpc

from harness.polling import BRIEF_S, eventually
from harness.wire_client.crc import seal_message
from shardwell.v1 import parameter_server_pb2 as pb


def wait_until_refusing(target: str) -> None:
    """Until new calls are refused, which is when the grace has begun: give it 4 BRIEF_S.

    Or not answered: a connection that comes as gRPC begins to stop may be left until it ends.
    """

    def is_refusing() -> bool:
        with grpc.insecure_channel(target) as channel:
            call = channel.unary_unary("/shardwell.v1.ParameterServerService/GetStatus")
            try:
                call(seal_message(pb.GetStatusRequest()).SerializeToString(), timeout=BRIEF_S)
            except grpc.RpcError:
                return True
            return False

    eventually("new calls are refused", is_refusing)
