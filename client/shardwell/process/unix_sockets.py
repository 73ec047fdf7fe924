"""Sockets between processes of one machine and one user, and the descriptors that are left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import struct

from shardwell.errors import LimitError

_BACKLOG = 64
_MODE = 0o600
"""Mode of a socket in a directory; the peers' user is checked besides."""
_CREDENTIALS = struct.Struct("3i")
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE)


def socket_path(address: str) -> str:
    """The path that a Unix socket is bound to: "@name" is an abstract one."""
    return "\0" + address[1:] if address.startswith("@") else address


class Listener(socket.socket):
    """A socket that listens; when it is closed, its file goes, if the file is still its own."""

    _file: tuple[str, int, int] | None = None

    def listen_at(self, address: str) -> None:
        """Binds it, and listens."""
        self.bind(socket_path(address))
        if not address.startswith("@"):
            found = os.lstat(address)
            self._file = address, found.st_dev, found.st_ino
            os.chmod(address, _MODE)
        self.listen(_BACKLOG)

    def close(self) -> None:
        """Closes it. Safe to repeat."""
        # The file's number is another's only when this socket is closed: so it is looked at before.
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                address, *identity = file
                found = os.lstat(address)
                if [found.st_dev, found.st_ino] == identity:
                    os.unlink(address)
        super().close()


def listening(address: str, kind: socket.SocketKind) -> Listener:
    """A non-blocking socket that listens there; what a killed process left is removed."""
    _forget(address, kind)
    listener = Listener(socket.AF_UNIX, kind)
    try:
        listener.listen_at(address)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connected(address: str, kind: socket.SocketKind, timeout_s: float) -> socket.socket:
    """A connection to an address; OSError: no process listens, or one of another user."""
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
    """Raises PermissionError if the peer is of another user."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user_id, _ = _CREDENTIALS.unpack(given)
    if user_id != os.geteuid():
        raise PermissionError(f"the other end belongs to user {user_id}, not {os.geteuid()}")


def _forget(address: str, kind: socket.SocketKind) -> None:
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


def check_descriptors(count: int, what: str) -> None:
    """Raises LimitError if `count` files, which `what` needs, could not be opened now.

    Without this check gRPC blames the server, or aborts.
    """
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.dup(opened[0]) if opened else os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in _OWN_LIMITS:
            return
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise LimitError(
            f"{what} needs {count} descriptors, and this process has {len(opened)} left of the "
            f"{most} that it may have open; close files, or raise the limit (ulimit -n)"
        ) from None
    finally:
        for file in opened:
            os.close(file)
