"""The reason why no shard answers at an address: an unknown host, no listener, or another server.

gRPC says of all of these that it could not connect, or that the deadline passed.
"""

from __future__ import annotations

import contextlib
import queue
import socket

from shardwell.threads.pool import begin

BUSY = "a server listens there, and did not answer in time; check the shard's load and log"
"""The words of `why_absent` for a server that may well be the shard."""
_LOOK_S = 1.0
"""The longest look; a name server that is away takes longer to give up."""
_FRAME_HEADER_BYTES = 9
_SETTINGS_FRAME = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0))
"""The beginning of a gRPC client; a server answers with its settings."""


def why_absent(address: str, timeout_s: float = _LOOK_S, *, speaks_tls: bool = False) -> str:
    """Says what a plain connection to an address finds, and what to do: for errors and logs.

    Blocks up to `timeout_s`. Where calls use TLS, what listens is not looked at any closer.
    """
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    look_s = min(timeout_s, _LOOK_S)
    host, _, port = address.rpartition(":")

    def look() -> None:
        found.put(_look(host.strip("[]"), int(port), look_s, speaks_tls=speaks_tls))

    with contextlib.suppress(queue.Empty, RuntimeError):  # no thread is to be had
        # On one that may be left behind: the system's resolver can't be interrupted.
        begin("shardwell-absence", look)
        return found.get(timeout=look_s)
    return "no answer came from there; check that the shard runs and can be reached from here"


def _look(host: str, port: int, timeout_s: float, *, speaks_tls: bool) -> str:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        return (
            f"this machine knows no host {host!r} ({getattr(error, 'strerror', error)}); check the "
            "name, or give an IP address"
        )
    try:
        with socket.create_connection((host, port), timeout_s / 2) as connection:
            connection.settimeout(timeout_s / 4)
            return BUSY if speaks_tls else _listener(connection)
    except ConnectionRefusedError:
        return (
            f"nothing listens on port {port} of {host}; start the shard, or check the port: that "
            "of `shardwell cluster` is another one each time"
        )
    except TimeoutError:
        return (
            f"no answer came from {host}; check that the machine runs, and that no firewall is in "
            "the way"
        )
    except OSError as error:
        return f"{host} can't be reached from here ({error.strerror}); check the network"


def _listener(connection: socket.socket) -> str:
    said = b""
    with contextlib.suppress(OSError):
        connection.sendall(_PREFACE)
        while len(said) < _FRAME_HEADER_BYTES and (more := connection.recv(4096)):
            said += more
    if len(said) >= _FRAME_HEADER_BYTES and said[3] == _SETTINGS_FRAME:
        return BUSY
    spoken = "HTTP/1" if said.startswith(b"HTTP/1") else "another protocol"
    found = f"and speaks {spoken}" if said else "or a shard whose process was stopped"
    return (
        f"something listens there that is no shard, {found}; check the port (the admin port and "
        "the port of a group are others)"
    )
