"""Goal: two sides of different versions of the wire contract part where they meet, and the error of
each names both versions.

Method: calls by hand to real shards and groups; to clients, a server answers as 0.2.0 did, or as a
version to come. Real clients and shards of both releases were tried against these by hand.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import shardwell
from harness.inside import endpoint_of
from harness.polling import PATIENCE_S
from harness.wire_client.crc import WIRE_VERSION, of_message, seal_message
from harness.wire_client.worker import error_detail
from shardwell.process.unix_sockets import socket_path
from shardwell.v1 import group_pb2, session_pb2, types_pb2, unix_stream_pb2
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire.frames import FrameKind, FrameReader, head
from shardwell_server import LocalCluster

STATUS = "/shardwell.v1.ParameterServerService/GetStatus"
OLD = r"a version before 4 of the wire contract \(shardwell 0\.2\.0( or earlier)?\)"
NOW = rf"4 \(shardwell {shardwell.__version__}\): install one version of shardwell everywhere"
MEETINGS = {
    STATUS: pb.GetStatusRequest(identity_only=True),
    "/shardwell.v1.SessionService/Attend": session_pb2.AttendRequest(worker_id="w0", session=5),
    "/shardwell.v1.GroupService/JoinGroup": group_pb2.JoinGroupRequest(rank=1),
}


def version_word(number: int) -> int:
    return number | (number ^ 0xFFFFFFFF) << 32


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as running:
        yield running


def refusal(target: str, path: str, request: Any) -> tuple[str, str, str]:
    """Status, code and text of the error that ends a call."""
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_stream(path)(request.SerializeToString(), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    code = types_pb2.ErrorCode.Name(error_detail(caught.value).code)
    return caught.value.code().name, code.removeprefix("ERROR_CODE_"), caught.value.details()


def without_version(request: Any) -> Any:
    """A request as 0.2.0 sent it."""
    request.wire_version = 0
    request.crc32c = of_message(request)
    return request


@pytest.mark.parametrize("path", MEETINGS)
def test_a_caller_of_another_version(cluster: LocalCluster, path: str) -> None:
    kind = type(MEETINGS[path])
    request = seal_message(kind.FromString(MEETINGS[path].SerializeToString()))
    for crc in (without_version(request).crc32c, 0):  # 0.1.0 had no CRC
        request.crc32c = crc
        status, code, text = refusal(cluster.target, path, request)
        assert (status, code) == ("FAILED_PRECONDITION", "WRONG_SHARD")
        assert re.fullmatch(f"the client speaks {OLD}, and the server {NOW}", text), text
    for number in (3, 5):  # whatever else its messages have
        request = kind(wire_version=version_word(number), crc32c=7)
        status, code, text = refusal(cluster.target, path, request)
        assert (status, code) == ("FAILED_PRECONDITION", "VERSION_MISMATCH")
        there = rf"{number} of the wire contract \(shardwell another version\)"
        assert re.fullmatch(f"the client speaks {there}, and the server {NOW}", text), text
    for word in (WIRE_VERSION ^ 1, WIRE_VERSION ^ 2**40):
        status, code, text = refusal(cluster.target, path, kind(wire_version=word))
        assert (status, code) == ("DATA_LOSS", "CORRUPT_CHUNK")


def test_a_unix_stream_of_another_version(cluster: LocalCluster) -> None:
    reader, frames = FrameReader(), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(socket_path(endpoint_of(cluster.servers[0]).unix_streams.address))
        opening = unix_stream_pb2.UnixStreamOpen(method=STATUS).SerializeToString()
        connection.sendall(head(FrameKind.OPEN, len(opening)) + opening)
        while piece := connection.recv(2**16):
            frames += reader.feed(piece)
    ((kind, contents),) = frames
    assert kind == FrameKind.END
    end = unix_stream_pb2.UnixStreamEnd.FromString(contents)
    assert end.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert re.fullmatch(f"the client speaks {OLD}, and the server {NOW}", end.details)
    code = types_pb2.ErrorDetail.FromString(end.error).code
    assert code == types_pb2.ERROR_CODE_WRONG_SHARD


class OtherVersion(grpc.GenericRpcHandler):
    """A shard that answers as another version would."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def service(self, details: Any) -> Any:
        is_question = details.method == STATUS
        meets = details.method in MEETINGS

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if not meets:  # it does not know the session
                context.abort(grpc.StatusCode.UNAVAILABLE, "attend, and call again")
            shard = types_pb2.ShardIdentity(cluster_id="other", shard_count=1)
            found: Any = group_pb2.JoinGroupResponse(missing_ranks=[1])
            if is_question:
                found = pb.GetStatusResponse(shard=shard, **self._fields)
            elif "wire_version" in self._fields:
                found.wire_version = self._fields["wire_version"]
            found.crc32c = of_message(found)
            return bytes(found.SerializeToString())

        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.contextmanager
def serving(address: str, **fields: Any) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([OtherVersion(**fields)])
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("fields", "there"),
    [
        ({"software_version": "0.2.0"}, OLD),
        (
            {"software_version": "9.1", "wire_version": version_word(9)},
            r"9 of the wire contract \(shardwell (9\.1|another version)\)",
        ),
    ],
    ids=["before", "to come"],
)
def test_a_shard_of_another_version(fields: dict[str, Any], there: str) -> None:
    said = f"the server speaks {there}, and the client {NOW}$"
    with serving("127.0.0.1:0", **fields) as target:
        with pytest.raises(shardwell.VersionMismatchError, match=f"^shard 0 at {target} .*{said}"):
            shardwell.connect(target, worker_id="w0")
        with pytest.raises(shardwell.VersionMismatchError, match=said):
            shardwell.join_group("g", rank=0, size=2, rendezvous=target)


def test_a_shard_that_comes_back_in_another_version() -> None:
    """The client of a life that goes on looks again at whom it meets."""
    with LocalCluster(1) as running:
        target = running.target
        client = shardwell.connect(target, worker_id="w0")
        net = client.parameter("net", size=4, optimizer=shardwell.SGD(lr=0.5), worker_count=1)
    raised = pytest.raises(shardwell.VersionMismatchError, match=f"the server speaks {OLD}")
    with client, serving(target, software_version="0.2.0"), raised:
        net.get_weights()
