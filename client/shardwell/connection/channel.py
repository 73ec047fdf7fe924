"""A gRPC channel to one address, made anew where its certificates have changed."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import grpc

from shardwell.connection.credentials import NO_CREDENTIALS, AuthorizedChannel, Credentials
from shardwell.connection.options import CHANNEL_OPTIONS, PROXY_VARIABLE, check_fork
from shardwell.connection.tls import Contents
from shardwell.process.ending import has_main_ended
from shardwell.process.environment import is_on


class Channel:
    """The connection to one server. Any thread may use it.

    A channel of gRPC's keeps the certificates that it was made with. Calls that are under way on
    one that was replaced go on there, and it ends with the last of them.
    """

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._address = address
        self._tls = tls = credentials.tls
        self._token = credentials.token
        self._lock = threading.Lock()
        self._closed = False
        self._contents: Contents | None = None if tls is None else tls.contents()
        self.current: Any = self._opened()
        self._previous: Any = None

    def renew(self) -> bool:
        """Makes another one if the certificates have changed; returns whether it has."""
        if self._tls is None:
            return False
        contents = self._tls.contents()
        with self._lock:
            if self._closed or contents is self._contents:
                return False
            self._contents = contents
            self._previous, self.current = self.current, self._opened()
            return True

    def close(self) -> None:
        """Ends it, and every call on it. Safe to repeat.

        Not once the main thread has ended: where gRPC could start no thread for a call, its
        `close`, which its `__del__` calls too, waits for ever. So the channel is kept for good, and
        its connections end with the process.
        """
        with self._lock:
            self._closed = True
            for channel in (self.current, self._previous):
                if channel is None:
                    continue
                if has_main_ended():
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))
                else:
                    channel.close()

    def _opened(self) -> Any:
        channel = self._connected()
        return channel if self._token is None else AuthorizedChannel(channel, self._token)

    def _connected(self) -> grpc.Channel:
        check_fork()
        if self._tls is None or self._contents is None:
            return grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        name = self._tls.tls.server_name
        options: dict[str, Any] = dict(CHANNEL_OPTIONS)
        if name:
            options["grpc.ssl_target_name_override"] = name
        if is_on(PROXY_VARIABLE):
            options["grpc.enable_http_proxy"] = 1
        return grpc.secure_channel(
            self._address,
            self._tls.channel_credentials(self._contents),
            options=tuple(options.items()),
        )
