"""Sockets between processes of one machine, which only processes of one user may use."""

from __future__ import annotations

import os
import socket
import stat
import struct

_BACKLOG = 64
_MODE = 0o600
"""Of a socket in a directory; whose the peers are is looked at besides."""
_CREDENTIALS = struct.Struct("3i")


def socket_path(address: str) -> str:
    """What a Unix socket is bound to: "@name" is an abstract one."""
    return "\0" + address[1:] if address.startswith("@") else address


def listening(address: str, kind: socket.SocketKind) -> socket.socket:
    """A socket that listens there, and does not block; what a killed process left there is removed.

    Raises:
        OSError: it can't be, or somebody listens there.
    """
    _forget(address, kind)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(socket_path(address))
        if not address.startswith("@"):
            os.chmod(address, _MODE)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connected(address: str, kind: socket.SocketKind, timeout_s: float) -> socket.socket:
    """A connection to who listens there, with that timeout.

    Raises:
        OSError: nobody does, or a process of another user.
    """
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        connection.settimeout(timeout_s)
        connection.connect(socket_path(address))
        check_same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_same_user(connection: socket.socket) -> None:
    """Refuses a peer of another user.

    Raises:
        PermissionError: it is one.
    """
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user_id, _ = _CREDENTIALS.unpack(given)
    if user_id != os.geteuid():
        raise PermissionError(f"the other end belongs to user {user_id}, not {os.geteuid()}")


def forget(address: str) -> None:
    """Removes what a socket leaves when it is closed. Never fails."""
    if not address.startswith("@"):
        try:
            os.unlink(address)
        except OSError:
            return


def _forget(address: str, kind: socket.SocketKind) -> None:
    """Removes a socket that a killed process left.

    Raises:
        OSError: it can't be removed.
    """
    if address.startswith("@") or not os.path.lexists(address):
        return
    if not stat.S_ISSOCK(os.lstat(address).st_mode):
        raise FileExistsError(f"{address} is no socket")
    with socket.socket(socket.AF_UNIX, kind) as connection:
        connection.setblocking(False)  # one that is taken may have a long queue
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            os.unlink(address)
