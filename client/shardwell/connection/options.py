"""The behaviour of all connections: when a dead one is noticed, and a new one is tried."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import socket
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from shardwell.errors import ForkedError
from shardwell.process.connected import OwnerProcess
from shardwell.process.environment import is_on
from shardwell.wire import checksum
from shardwell.wire.messages import MESSAGE_SIZE_MAX_BYTES

if TYPE_CHECKING:
    from shardwell.connection.tls import TlsFiles

# gRPC and codecs import these at their first use, on a thread of a call. There an import waits
# for good if Ctrl-C has broken off one in the main thread, which keeps Python's lock of imports.
for _module in ("_channel", "_interceptor", "_server", "_utilities", "experimental"):
    importlib.import_module(f"grpc.{_module}")
importlib.import_module("encodings.ascii")

KEEPALIVE_PING_MS = 5_000
"""After so long without a word of a server its client pings, and gives it as long to answer."""
_PING_INTERVAL_MS_MIN = 2_000
"""Clients that ping more often are sent away."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_SIZE_MAX_BYTES),
    ("grpc.max_send_message_length", MESSAGE_SIZE_MAX_BYTES),
    # A server whose machine vanished, or whose connection a relay forgot, is noticed within 10 s,
    # although no call ends; within 5 s where bytes are on their way, as the second is
    # TCP_USER_TIMEOUT, too. Servers answer pings however busy they are.
    ("grpc.keepalive_time_ms", KEEPALIVE_PING_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_PING_MS),
    # While a ping of gRPC's own is unanswered it sends no other; its default is a minute.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_PING_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that comes back is noticed within about half a second, however long it was away; a
    # refused connection costs well under a millisecond.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # How long one try to connect may take: a machine that vanished answers nothing at all.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A server may come back under its name with another address.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A cluster is on the network of its workers: $http_proxy and the like are for others, and what
    # they name would read all that TLS does not hide, the token too.
    ("grpc.enable_http_proxy", 0),
    # Each client its own connection, so that several in one process do not share one TCP stream.
    ("grpc.use_local_subchannel_pool", 1),
)

PROXY_VARIABLE = "SHARDWELL_USE_PROXY"
"""1: connections with TLS go through what $https_proxy or $grpc_proxy names."""
_FORK_SUPPORT_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_HANDSHAKE_S = 10.0
_CONNECTION_END_S = 30.0
"""The time for which calls go on over a connection that has reached its age."""
KEEPALIVE_S = 30.0
"""The default time in which a server notices that a client vanished."""


def server_options(
    keepalive_s: float = KEEPALIVE_S, connection_age_s: float | None = None
) -> tuple[tuple[str, int], ...]:
    """The options of a gRPC server, which notices a vanished client's machine within `keepalive_s`.

    After `connection_age_s` a connection takes no more calls, so that its client makes another.
    """
    half_ms = int(keepalive_s * 500)
    age: tuple[tuple[str, int], ...] = ()
    if connection_age_s is not None:
        age = (
            ("grpc.max_connection_age_ms", int(connection_age_s * 1000)),
            ("grpc.max_connection_age_grace_ms", int(_CONNECTION_END_S * 1000)),
        )
    return (
        *age,
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_S * 1000)),
        ("grpc.max_receive_message_length", MESSAGE_SIZE_MAX_BYTES),
        ("grpc.max_send_message_length", MESSAGE_SIZE_MAX_BYTES),
        ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a lottery
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        # While a ping of gRPC's own is unanswered it sends no keepalive.
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS_MIN),
        ("grpc.keepalive_permit_without_calls", 1),
    )


def check_fork() -> None:
    """Refuses gRPC where it would crash or hang: in a child of a process that has used it."""
    if is_on(_FORK_SUPPORT_VARIABLE):
        return
    first = _first_user_of_grpc()
    if not first.is_here:
        raise ForkedError(
            f"this process, {os.getpid()}, was forked from process {first.process_id}, which has "
            "used gRPC, so that no connection can be made here; start it by another way, such as "
            'multiprocessing.get_context("spawn"), or set '
            f"{_FORK_SUPPORT_VARIABLE}=1 before process {first.process_id} starts"
        )


@functools.cache
def _first_user_of_grpc() -> OwnerProcess:
    return OwnerProcess("first connection")


def listen_on(
    server: grpc.Server | grpc.aio.Server, address: str, tls: TlsFiles | None = None
) -> int:
    """Listens, and returns the port, also for port 0.

    It is tried before gRPC does, which would print lines of its own about a failure to stderr.
    """
    host, _, port = address.rpartition(":")
    refused: OSError | None = None
    for family, kind, protocol, _, found in socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    ):
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(found)
        except OSError as error:
            refused = error
        else:
            break
    else:
        if refused is not None:
            raise refused
    credentials = None if tls is None else tls.server_credentials()
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise OSError(errno.EADDRNOTAVAIL, str(error)) from None


def unary_stub(channel: grpc.Channel, method: str, response_type: type[Message]) -> Any:
    """Returns the stub of `method`, "/package.Service/Name": one message each way.

    The CRC of the request is made to fit; that of the response is for its reader to check.
    """
    return channel.unary_unary(
        method,
        request_serializer=checksum.sealed,
        response_deserializer=response_type.FromString,
    )
