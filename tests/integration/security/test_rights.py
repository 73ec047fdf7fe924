"""Goal: no RPC reads or changes anything without the right to it, by any caller and in any way.

Method: a matrix of every RPC that the .proto files have, of every token that there may be, and of
every transport. Rows are written from the .proto comments and docs/security.md; an RPC without a
row fails. Calls are made by the generated stubs, as a stranger makes them, and what the shard holds
is compared before and after all that was refused.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import shardwell
from harness.certificates import authority, of_client, of_server
from harness.inside import endpoint_of
from harness.polling import PATIENCE_S
from harness.tokens import Tokens
from harness.wire_client import crc as wire_crc
from harness.wire_client.crc import WIRE_VERSION
from harness.wire_client.table import table_spec
from harness.wire_client.worker import spec
from shardwell import Tls
from shardwell.process.unix_sockets import socket_path
from shardwell.v1 import (
    group_pb2,
    names_pb2,
    parameter_server_pb2,
    peer_pb2,
    session_pb2,
    table_pb2,
    trace_pb2,
    types_pb2,
    unix_stream_pb2,
)
from shardwell.wire.frames import FrameKind, FrameReader
from shardwell_server import ShardConfig, ShardServer

Code = grpc.StatusCode
REFUSED = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (parameter_server_pb2, "ParameterServerService"),
        (table_pb2, "TableService"),
        (session_pb2, "SessionService"),
        (trace_pb2, "TraceService"),
        (names_pb2, "NameService"),
        (group_pb2, "GroupService"),
    )
]
"""All that a shard serves beside health and reflection."""
PROTOS = Path(__file__).parents[3] / "protos" / "shardwell" / "v1"
LADDER = ["read", "contribute", "create", "admin"]


@dataclass(frozen=True)
class Row:
    """An RPC, and what it needs.

    Args:
        right: The least right; "any": any token; "none": not even a token.
        request: Its fields beside those that all of it have.
        answer: How it ends for a caller that is let in.
    """

    right: str
    request: Callable[[types_pb2.ShardIdentity], dict[str, Any]]
    answer: grpc.StatusCode = Code.OK


def _opening(kind: Any, name: str, **fields: Any) -> Callable[..., dict[str, Any]]:
    of = "parameter" if kind is types_pb2.StreamOpen else "table"
    return lambda shard: {
        "open": kind(shard=shard, worker_id="w", session=1, **{of: name}),
        **fields,
    }


def _named(of: str, name: str, **fields: Any) -> Callable[..., dict[str, Any]]:
    return lambda shard: {"shard": shard, of: name, **fields}


def _group(shard: Any) -> group_pb2.GroupSpec:
    return group_pb2.GroupSpec(name="prod-g", size=1, strategy="ring", codec=types_pb2.CODEC_FP16)


def _member(shard: Any = None) -> group_pb2.Member:
    return group_pb2.Member(member_id="m", address="127.0.0.1:1", description="a test")


def _new_name() -> str:
    return f"prod-{secrets.token_hex(4)}"


def _change(name: str, **fields: Any) -> Callable[..., dict[str, Any]]:
    given = {"name": name, "worker_id": "w", "stage": MARK - 1, "incarnation": 1, **fields}
    return lambda shard: {"shard": shard, **given}


MARK = int(names_pb2.DeleteRequest.STAGE_MARK)
DEAL = int(parameter_server_pb2.DealSamplesRequest.STAGE_DEAL)
LOAD = int(parameter_server_pb2.DealSamplesRequest.STAGE_LOAD)
LOOK = int(parameter_server_pb2.DealSamplesRequest.STAGE_LOOK)
PUT_STATE = int(parameter_server_pb2.KeepStateRequest.STAGE_PUT)
GET_STATE = int(parameter_server_pb2.KeepStateRequest.STAGE_GET)
LOAD_STATE = int(parameter_server_pb2.KeepStateRequest.STAGE_LOAD)
STREAM_OPEN, TABLE_OPEN = types_pb2.StreamOpen, table_pb2.TableOpen
ROWS: dict[str, list[Row]] = {
    "ParameterServerService/CreateParameter": [
        Row("read", lambda shard: {"shard": shard, "spec": spec("prod-p")}),
        Row("create", lambda shard: {"shard": shard, "spec": spec(_new_name())}),
        Row(
            "contribute",
            lambda shard: {
                "shard": shard,
                "spec": spec("prod-p"),
                "worker_id": "w",
                "session": 1,
                "take_seat": True,
            },
            Code.UNAVAILABLE,  # its session does not attend
        ),
    ],
    "ParameterServerService/ClaimInit": [
        Row("contribute", _named("parameter", "prod-p", worker_id="w"))
    ],
    "ParameterServerService/InitWeights": [
        Row("contribute", _opening(STREAM_OPEN, "prod-p", epoch=1), Code.INVALID_ARGUMENT),
        Row("create", _opening(STREAM_OPEN, "prod-p", epoch=1, version=3), Code.INVALID_ARGUMENT),
        Row("create", _opening(STREAM_OPEN, "prod-p", epoch=1, load_id=3), Code.INVALID_ARGUMENT),
        Row(
            "create", _opening(STREAM_OPEN, "prod-p", epoch=1, array_count=2), Code.INVALID_ARGUMENT
        ),
    ],
    "ParameterServerService/ConfirmInit": [
        Row("contribute", _named("parameter", "prod-p", epoch=1), Code.FAILED_PRECONDITION)
    ],
    "ParameterServerService/PutGradient": [
        Row("contribute", _opening(STREAM_OPEN, "prod-p"), Code.UNAVAILABLE)
    ],
    "ParameterServerService/GetWeights": [Row("read", _named("parameter", "prod-p"))],
    "ParameterServerService/Exchange": [
        Row("read", _opening(STREAM_OPEN, "prod-p")),
        Row(
            "contribute",
            _opening(STREAM_OPEN, "prod-p", gradient=types_pb2.GradientChunk(step=0)),
            Code.UNAVAILABLE,
        ),
    ],
    "ParameterServerService/CloseStep": [
        Row("contribute", _named("parameter", "prod-p", step=7), Code.INVALID_ARGUMENT)
    ],
    "ParameterServerService/Snapshot": [
        Row("read", _named("parameter", "prod-p", version=0, wait_timeout_ms=1))
    ],
    "ParameterServerService/SetLearningRate": [
        Row(
            "contribute",
            _named("parameter", "prod-p", learning_rate=-1.0),
            Code.INVALID_ARGUMENT,
        )
    ],
    "ParameterServerService/Report": [
        Row("contribute", _named("parameter", "prod-p", step=1), Code.INVALID_ARGUMENT)
    ],
    "ParameterServerService/DealSamples": [
        Row(
            "contribute",
            _named("parameter", "prod-p", worker_id="w", stage=DEAL),
            Code.INVALID_ARGUMENT,
        ),
        Row("create", _named("parameter", "prod-p", stage=LOAD), Code.INVALID_ARGUMENT),
        Row("read", _named("parameter", "prod-p", stage=LOOK)),
    ],
    "ParameterServerService/KeepState": [
        Row(
            "contribute",
            _named("parameter", "prod-p", worker_id="w", state=b"1", step=99, stage=PUT_STATE),
            Code.INVALID_ARGUMENT,
        ),
        Row(
            "create",
            _named("parameter", "prod-p", worker_id="w", stage=LOAD_STATE),
            Code.INVALID_ARGUMENT,
        ),
        Row("read", _named("parameter", "prod-p", worker_id="w", stage=GET_STATE)),
    ],
    "ParameterServerService/GetContributions": [
        Row("read", _named("parameter", "prod-p"), Code.INVALID_ARGUMENT)
    ],
    "ParameterServerService/GetStatus": [
        Row("any", lambda shard: {}),
        Row("any", lambda shard: {"identity_only": True}),
        Row("read", lambda shard: {"parameter": "prod-p"}),
    ],
    "TableService/OpenTable": [
        Row("read", lambda shard: {"shard": shard, "spec": table_spec("prod-t")}),
        Row("create", lambda shard: {"shard": shard, "spec": table_spec(_new_name())}),
        Row(
            "contribute",
            lambda shard: {
                "shard": shard,
                "spec": table_spec("prod-t"),
                "worker_id": "w",
                "session": 1,
                "take_seat": True,
            },
            Code.UNAVAILABLE,
        ),
    ],
    "TableService/ExchangeRows": [
        Row("read", _opening(TABLE_OPEN, "prod-t")),
        Row(
            "contribute",
            _opening(TABLE_OPEN, "prod-t", gradient=table_pb2.RowGradients(step=0)),
            Code.UNAVAILABLE,
        ),
    ],
    "TableService/ScanRows": [
        Row("read", _named("table", "prod-t", content=table_pb2.ScanRowsRequest.CONTENT_VALUES))
    ],
    "TableService/LoadRows": [Row("create", _opening(TABLE_OPEN, "prod-t"), Code.DATA_LOSS)],
    "TableService/EvictRows": [Row("admin", _named("table", "prod-t", older_than_step=0))],
    "TableService/SetTableLearningRate": [
        Row("contribute", _named("table", "prod-t", learning_rate=-1.0), Code.INVALID_ARGUMENT)
    ],
    "TableService/GetTableStatus": [
        Row("any", lambda shard: {"shard": shard}),
        Row("read", _named("table", "prod-t")),
    ],
    "NameService/Delete": [
        Row("create", _change(_new_name())),
        Row("admin", _change("prod-p")),
        Row("admin", _change("prod-t")),
        Row("admin", _change("prod-p", stage=MARK, kind=1, force=True), Code.FAILED_PRECONDITION),
        Row("admin", _change("prod-t", stage=MARK + 1, kind=2), Code.FAILED_PRECONDITION),
    ],
    "SessionService/Attend": [
        Row(
            "any",
            lambda shard: {"shard": shard, "worker_id": "w", "session": 0, "host": "here"},
            Code.INVALID_ARGUMENT,  # or the call would not end
        )
    ],
    "SessionService/Heartbeat": [
        Row("any", lambda shard: {"shard": shard, "session": 99}),
        Row(
            "contribute",
            lambda shard: {
                "shard": shard,
                "session": 99,
                "ended": [session_pb2.EndedTenure(parameter="prod-p", worker_id="w", tenure=1)],
            },
        ),
    ],
    "SessionService/EndTenure": [
        Row("admin", _named("parameter", "prod-p", worker_id="w"), Code.INVALID_ARGUMENT),
        Row("admin", _named("table", "prod-t", worker_id="w"), Code.INVALID_ARGUMENT),
    ],
    "SessionService/EndSession": [Row("any", lambda shard: {"shard": shard, "session": 99})],
    "TraceService/GetClock": [Row("any", lambda shard: {"shard": shard})],
    "TraceService/AwaitRecording": [
        Row(
            "any",
            lambda shard: {"shard": shard, "session": 99, "worker_id": "w"},  # it does not attend
        )
    ],
    "TraceService/GiveSpans": [
        Row(
            "any",
            lambda shard: {
                "shard": shard,
                "session": 99,
                "process": trace_pb2.ProcessSpans(worker_id="w"),
            },
            Code.UNAVAILABLE,
        )
    ],
    "TraceService/Record": [Row("any", lambda shard: {"shard": shard})],
    "GroupService/JoinGroup": [
        Row(
            "contribute",
            lambda shard: {"spec": _group(shard), "member": _member(), "lease_ms": 100},
        )
    ],
    "GroupService/RenewLease": [
        Row(
            "contribute",
            lambda shard: {"spec": _group(shard), "member": _member(), "lease_ms": 1},
            Code.INVALID_ARGUMENT,
        )
    ],
    "GroupService/LeaveGroup": [
        Row("contribute", lambda shard: {"group": "prod-g", "member_id": "nobody"})
    ],
}
CASES = [
    pytest.param(method, row, id=f"{method.partition('/')[2]}-{row.right}-{number}")
    for method, rows in ROWS.items()
    for number, row in enumerate(rows)
]


def test_every_rpc_has_its_row() -> None:
    served = {f"{service.name}/{method.name}" for service in SERVICES for method in service.methods}
    assert served == ROWS.keys()


def test_a_shard_serves_nothing_else() -> None:
    """So that no service escapes the matrix; that of members of groups is in test_strangers."""
    files = {service.file.name for service in SERVICES}
    pool = descriptor_pool.Default()
    for path in PROTOS.glob("*.proto"):
        found = pool.FindFileByName(f"shardwell/v1/{path.name}")
        if found.services_by_name and found.name not in files:
            assert list(found.services_by_name) == ["PeerService"]
    members = peer_pb2.DESCRIPTOR.services_by_name["PeerService"].methods
    assert [method.name for method in members] == ["Greet", "Agree", "ReceiveChunks"]
    config = ShardConfig(shard_index=0, shard_count=1, reflection=True)
    with ShardServer(config) as server, grpc.insecure_channel(server.address) as channel:
        list_services = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = list_services(iter([asked]), timeout=PATIENCE_S)
    named = {each.name for each in answer.list_services_response.service}
    assert named == {
        *(service.full_name for service in SERVICES),
        health.SERVICE_NAME,
        "grpc.reflection.v1alpha.ServerReflection",
    }


# The callers.


@pytest.fixture
def tokens(tmp_path) -> Tokens:
    made = Tokens(tmp_path)
    for right in LADDER:
        made.add(right, f"{right}:prod-")
    made.add("other", "admin:other-", "admin:prod-px")
    made.add("expired", "admin", expires="2001-01-01T00:00:00Z")
    return made


def held(running: Any, tokens: Tokens) -> list[str]:
    """Everything that the shard has to say to a caller that may do everything."""
    file = tokens.add("oracle", "admin")
    tls = running.servers[0].config.tls and of_client(authority())
    with shardwell.connect(running.target, worker_id="oracle", token_file=file, tls=tls) as client:
        (status,) = client.status()
        found = [
            *sorted(f"{p.spec.name} {p.version_min} {p.version_max}" for p in status.parameters),
            *sorted(f"{t.spec.name} {t.version} {t.row_count}" for t in status.tables),
            str(client.parameter("prod-p").get_weights().tolist()),
            str(client.table("prod-t").get_rows(np.arange(5)).tolist()),
        ]
    tokens.remove("oracle")
    return found


def made(cluster: Any, tokens: Tokens, tls: Tls | None = None, mine: Tls | None = None) -> Any:
    """A shard with a parameter, a table and what is in them."""
    found = cluster(1, tokens=tokens.path, tls=tls)
    file = tokens.add("maker", "create")
    with shardwell.connect(found.target, worker_id="maker", token_file=file, tls=mine) as client:
        net = client.parameter(
            "prod-p", size=10, optimizer=shardwell.SGD(learning_rate=1.0), codec="fp32"
        )
        net.init(np.arange(10, dtype=np.float32))
        rows = client.table(
            "prod-t",
            row_count=100,
            dim=3,
            optimizer=shardwell.SGD(learning_rate=1.0),
            initializer=shardwell.Zeros(),
            codec="fp32",
        )
        rows.put_row_gradients([1, 2], np.ones((2, 3), np.float32))
    return found


@pytest.fixture
def running(cluster, tokens) -> Any:
    return made(cluster, tokens)


def channel_to(running: Any) -> grpc.Channel:
    """As a stranger makes it who has a certificate, where one is needed."""
    if running.servers[0].config.tls is None:
        return grpc.insecure_channel(running.target)
    files = authority()
    credentials = grpc.ssl_channel_credentials(
        files.ca.read_bytes(), files.client_key.read_bytes(), files.client.read_bytes()
    )
    return grpc.secure_channel(running.target, credentials)


def identity(running: Any) -> types_pb2.ShardIdentity:
    return types_pb2.ShardIdentity(cluster_id=running.cluster_id, shard_index=0, shard_count=1)


def outcome(
    channel: grpc.Channel, method: str, request: Any, authorization: str | None
) -> grpc.RpcError | None:
    """How a call of one message ends; None: well."""
    service, _, name = method.partition("/")
    (found,) = [each for each in SERVICES if each.name == service]
    described = found.methods_by_name[name]
    path = f"/{found.full_name}/{name}"
    metadata = [] if authorization is None else [("authorization", authorization)]
    given: dict[str, Any] = {"timeout": PATIENCE_S, "metadata": metadata}
    message = request.SerializeToString()
    try:
        if described.client_streaming and described.server_streaming:
            list(channel.stream_stream(path)(iter([message]), **given))
        elif described.client_streaming:
            channel.stream_unary(path)(iter([message]), **given)
        elif described.server_streaming:
            list(channel.unary_stream(path)(message, **given))
        else:
            channel.unary_unary(path)(message, **given)
    except grpc.RpcError as error:
        return error
    return None


def request_of(method: str, row: Row, shard: types_pb2.ShardIdentity) -> Any:
    service, _, name = method.partition("/")
    (found,) = [each for each in SERVICES if each.name == service]
    kind = message_factory.GetMessageClass(found.methods_by_name[name].input_type)
    return wire_crc.seal_around(wire_crc.seal_message(kind(**row.request(shard))))


def expected(row: Row, who: str) -> grpc.StatusCode:
    """The cell."""
    if who in ("nobody", "wrong", "expired", "no bearer", "empty"):
        return Code.UNAUTHENTICATED
    if row.right == "any":
        return row.answer
    if who == "other" or LADDER.index(who) < LADDER.index(row.right):
        return Code.PERMISSION_DENIED
    return row.answer


def authorizations(tokens: Tokens) -> dict[str, str | None]:
    """What each caller brings."""
    found: dict[str, str | None] = {"nobody": None, "wrong": "Bearer nobody-s", "empty": "Bearer "}
    for name in (*LADDER, "other", "expired"):
        found[name] = f"Bearer {(tokens.directory / f'{name}.token').read_text().strip()}"
    found["no bearer"] = str(found["admin"]).removeprefix("Bearer ")
    return found


@pytest.mark.parametrize("transport", ["plain", "mutual TLS"])
@pytest.mark.parametrize(("method", "row"), CASES)
def test_who_may_call_what(cluster, tokens, method, row, transport) -> None:
    """The rights are those of the token, whatever certificate comes with it."""
    files = authority()
    tls = {} if transport == "plain" else {"tls": of_server(files), "mine": of_client(files)}
    running = made(cluster, tokens, **tls)
    before = held(running, tokens)
    request = lambda: request_of(method, row, identity(running))  # noqa: E731
    callers = authorizations(tokens)
    cells = {who: expected(row, who) for who in callers}
    found = {}
    with channel_to(running) as channel:
        for who in sorted(callers, key=lambda who: cells[who] not in REFUSED):
            if cells[who] not in REFUSED and before:
                assert held(running, tokens) == before  # as all that is refused has been
                before = []
            error = outcome(channel, method, request(), callers[who])
            found[who] = Code.OK if error is None else error.code()
    assert found == cells


@pytest.mark.parametrize(("method", "row"), CASES)
def test_over_a_unix_socket(cluster, tokens, method, row) -> None:
    """Calls with one answer, and streams both ways, of two services; others are refused to all."""
    service, _, name = method.partition("/")
    (of,) = [each for each in SERVICES if each.name == service]
    described = of.methods_by_name[name]
    has_one_answer = not described.server_streaming
    is_there = has_one_answer or described.client_streaming
    is_there &= of.name in ("ParameterServerService", "TableService")
    running = made(cluster, tokens)
    before = held(running, tokens)
    server = running.servers[0]
    address = endpoint_of(server).unix_streams.address
    assert address
    callers = authorizations(tokens)
    cells = {who: expected(row, who) if is_there else Code.UNIMPLEMENTED for who in callers}
    refused = (*REFUSED, Code.UNIMPLEMENTED)
    found = {}
    for who in sorted(callers, key=lambda who: cells[who] not in refused):
        if cells[who] not in refused and before:
            assert held(running, tokens) == before  # as all that is refused has been
            before = []
        found[who] = unix_outcome(
            address,
            f"/{of.full_name}/{name}",
            request_of(method, row, identity(running)),
            callers[who],
            has_one_answer=has_one_answer,
            is_open=lambda: endpoint_of(server).streams.count == 1,
        )
    assert found == cells


def unix_outcome(
    address: str,
    path: str,
    request: Any,
    authorization: str | None,
    *,
    has_one_answer: bool,
    is_open: Callable[[], bool],
) -> grpc.StatusCode:
    """How a call over the socket ends; a stream that goes well is open until its caller ends it."""

    def frame(kind: int, contents: bytes) -> bytes:
        return len(contents).to_bytes(4, "little") + kind.to_bytes(4, "little") + contents

    opening = unix_stream_pb2.UnixStreamOpen(
        method=path, authorization=authorization or "", wire_version=WIRE_VERSION
    )
    codes = {code.value[0]: code for code in Code}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(socket_path(address))
        connection.sendall(frame(FrameKind.OPEN, opening.SerializeToString()))
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(frame(FrameKind.MESSAGE, request.SerializeToString()))
            if has_one_answer:
                connection.sendall(frame(FrameKind.END, b""))
        if not has_one_answer:
            connection.settimeout(0.2)
        reader = FrameReader()
        try:
            while piece := connection.recv(2**16):
                for kind, contents in reader.feed(piece):
                    if kind == FrameKind.END:
                        return codes[unix_stream_pb2.UnixStreamEnd.FromString(contents).code]
                    if has_one_answer:
                        return Code.OK
        except TimeoutError:
            assert not has_one_answer
            assert is_open()
            return Code.OK
    raise AssertionError("it was cut off")


# Other transports.


@pytest.mark.parametrize(
    ("server", "client"),
    [("mutual", "plain"), ("mutual", "another authority"), ("mutual", "none"), ("plain", "tls")],
)
def test_every_rpc_over_what_does_not_fit(cluster, tokens, server, client) -> None:
    """No call comes as far as a handler, whatever token it brings."""
    ours, theirs = authority(), authority("theirs")
    running = cluster(1, tokens=tokens.path, tls=of_server(ours) if server == "mutual" else None)
    believed = ours.ca.read_bytes()
    credentials = {
        "plain": None,
        "another authority": grpc.ssl_channel_credentials(
            believed, theirs.client_key.read_bytes(), theirs.client.read_bytes()
        ),
        "none": grpc.ssl_channel_credentials(believed),
        "tls": grpc.ssl_channel_credentials(
            believed, ours.client_key.read_bytes(), ours.client.read_bytes()
        ),
    }[client]
    admin = authorizations(tokens)["admin"]
    with (
        grpc.insecure_channel(running.target)
        if credentials is None
        else grpc.secure_channel(running.target, credentials)
    ) as channel:
        for method, rows in ROWS.items():
            for row in rows:
                request = request_of(method, row, identity(running))
                error = outcome(channel, method, request, admin)
                assert error is not None, method
                assert error.code() is Code.UNAVAILABLE, (method, error.details())
                assert not error.trailing_metadata(), method  # it is gRPC's own, and no shard's


def test_health_needs_no_token(running) -> None:
    with grpc.insecure_channel(running.target) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# What the answers show.


def test_status_shows_what_may_be_read(running, tokens, connect) -> None:
    maker = connect(running, "other-maker", token_file=tokens.add("second", "create:other-"))
    maker.parameter("other-p", size=3, optimizer=shardwell.SGD(learning_rate=1.0))
    rule = shardwell.SGD(learning_rate=1.0)
    maker.table("other-t", row_count=5, dim=2, optimizer=rule)

    def seen(name: str) -> set[str]:
        client = connect(running, name, token_file=tokens.directory / f"{name}.token")
        (status,) = client.status()
        return {p.spec.name for p in status.parameters} | {t.spec.name for t in status.tables}

    assert seen("read") == {"prod-p", "prod-t"}
    assert seen("other") == {"other-p", "other-t"}
    tokens.add("all", "read")
    assert seen("all") == {"prod-p", "prod-t", "other-p", "other-t"}


@pytest.mark.parametrize(
    ("method", "named", "there"),
    [
        ("ParameterServerService/CreateParameter", lambda n: {"spec": spec(n)}, "prod-p"),
        ("ParameterServerService/GetWeights", lambda n: {"parameter": n}, "prod-p"),
        ("ParameterServerService/GetStatus", lambda n: {"parameter": n}, "prod-p"),
        ("TableService/OpenTable", lambda n: {"spec": table_spec(n)}, "prod-t"),
        ("TableService/ScanRows", lambda n: {"table": n, "content": 1}, "prod-t"),
        ("TableService/GetTableStatus", lambda n: {"table": n}, "prod-t"),
    ],
)
def test_errors_do_not_say_which_names_exist(running, tokens, method, named, there) -> None:
    """Word by word the same for what exists and what does not."""
    answers = []
    with grpc.insecure_channel(running.target) as channel:
        for name in (there, "prod-nothing"):
            fields = named(name)
            if not method.endswith("GetStatus"):
                fields["shard"] = identity(running)
            row = Row("read", lambda _, fields=fields: fields)
            request = request_of(method, row, identity(running))
            error = outcome(channel, method, request, authorizations(tokens)["other"])
            assert error is not None
            assert error.code() is Code.PERMISSION_DENIED
            answers.append(str(error.details()).replace(name, "NAME"))
    assert answers[0] == answers[1]
    assert "token 'other' has no right to" in answers[0]


def test_a_stream_that_goes_on_with_another_name(running, tokens) -> None:
    """Each name is looked at, whatever was granted before."""
    tokens.add("both", "create:prod-p", "read:prod-t")
    bearer = f"Bearer {(tokens.directory / 'both.token').read_text().strip()}"
    opens = [
        wire_crc.seal_around(
            parameter_server_pb2.ExchangeRequest(
                open=STREAM_OPEN(shard=identity(running), worker_id="w", session=7, parameter=name)
            )
        ).SerializeToString()
        for name in ("prod-p", "other-p")
    ]
    rows = [
        wire_crc.seal_around(
            table_pb2.ExchangeRowsRequest(
                open=TABLE_OPEN(shard=identity(running), worker_id="w", session=7, table=name)
            )
        ).SerializeToString()
        for name in ("prod-t", "other-t")
    ]
    with grpc.insecure_channel(running.target) as channel:
        attend = channel.unary_stream("/shardwell.v1.SessionService/Attend")
        request = session_pb2.AttendRequest(
            shard=identity(running), worker_id="w", session=7, host="here"
        )
        metadata = [("authorization", bearer)]
        wire_crc.seal_message(request)
        attending = attend(request.SerializeToString(), metadata=metadata)
        attending.initial_metadata()
        for path, messages in (
            ("/shardwell.v1.ParameterServerService/Exchange", opens),
            ("/shardwell.v1.TableService/ExchangeRows", rows),
        ):
            call = channel.stream_stream(path)
            assert not list(call(iter(messages[:1]), metadata=metadata, timeout=PATIENCE_S))
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter(messages), metadata=metadata, timeout=PATIENCE_S))
            assert caught.value.code() is Code.PERMISSION_DENIED, caught.value.details()
            assert "'other-" in str(caught.value.details())
        attending.cancel()


@pytest.mark.parametrize("kind", ["parameter", "table"])
def test_a_seat_is_taken_by_one_s_own_session_alone(running, tokens, kind) -> None:
    """A caller that knows the number of another token's session has no use of it."""
    tokens.add("thief", "create")
    secret = {
        name: f"Bearer {(tokens.directory / f'{name}.token').read_text().strip()}"
        for name in ("thief", "create")
    }
    seat = {"worker_id": "w", "session": 7, "take_seat": True}
    method, named = {
        "parameter": ("ParameterServerService/CreateParameter", spec("prod-p")),
        "table": ("TableService/OpenTable", table_spec("prod-t")),
    }[kind]
    row = Row("contribute", lambda shard: {"shard": shard, "spec": named, **seat})
    with grpc.insecure_channel(running.target) as channel:
        attend = channel.unary_stream("/shardwell.v1.SessionService/Attend")
        session = session_pb2.AttendRequest(
            shard=identity(running), worker_id="w", session=7, host="here"
        )
        wire_crc.seal_message(session)
        attending = attend(
            session.SerializeToString(), metadata=[("authorization", secret["create"])]
        )
        attending.initial_metadata()
        error = outcome(
            channel, method, request_of(method, row, identity(running)), secret["thief"]
        )
        assert error is not None
        assert "attends by token 'thief'" in str(error.details())
        mine = request_of(method, row, identity(running))
        error = outcome(channel, method, mine, secret["create"])
        # It comes as far as the seats, of which the table's one is the maker's.
        assert error is None or "already: 'maker'" in str(error.details())
        attending.cancel()


def test_who_reads_is_none_that_others_wait_for(running, tokens) -> None:
    """A name that may not contribute does not stand in the status."""
    row = Row("read", lambda shard: {"shard": shard, "spec": spec("prod-p"), "worker_id": "fake"})
    method = "ParameterServerService/CreateParameter"
    with grpc.insecure_channel(running.target) as channel:
        request = request_of(method, row, identity(running))
        assert outcome(channel, method, request, authorizations(tokens)["read"]) is None
    file = tokens.add("all", "read")
    with shardwell.connect(running.target, token_file=file) as client:
        ((parameter,), *_) = [status.parameters for status in client.status()]
    assert "fake" not in (*parameter.missing_worker_ids, *parameter.done_worker_ids)
