"""One shard, and the ways to it: gRPC connections, Unix sockets, and memory that is shared.

It knows no request. Where Unix sockets or shared memory fail, gRPC carries everything.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import grpc

from shardwell.connection.absence import why_absent
from shardwell.connection.channel import Channel
from shardwell.connection.credentials import NO_CREDENTIALS, Credentials
from shardwell.connection.error_codes import from_rpc_error
from shardwell.connection.tls import check_trust
from shardwell.errors import (
    AccessDeniedError,
    AuthenticationError,
    ClosedError,
    LimitError,
    ShardwellError,
)
from shardwell.process.unix_sockets import check_descriptors, connected
from shardwell.transport.arena import Arenas
from shardwell.transport.neighbour import Neighbour
from shardwell.transport.unix_call import UnixCall, UnixCalls
from shardwell.transport.unix_questions import UnixQuestions
from shardwell.v1 import arena_pb2, types_pb2

_LOG = logging.getLogger("shardwell")
_DESCRIPTOR_RESERVE = 64
"""Descriptors that streams on this machine leave to the process; further ones go over gRPC."""
_LOOKING = threading.Lock()
"""Held to look whether descriptors are left, which takes them for a moment."""
_CONNECT_S = 2.0
_AWAY_COUNT = 2
"""Calls that fail in a row for want of the shard, before this machine is left alone."""
SAID_S = 60.0
"""The pause between two logs that a token is not believed, or that the shard does not answer."""


class ShardEndpoint:
    """One shard's address and what this process has open to it. Any thread may use it."""

    def __init__(
        self,
        shard_index: int,
        address: str,
        *,
        same_host: bool = True,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.shard_index = shard_index
        self.address = address
        self.name = f"shard {shard_index}"
        self.identity = types_pb2.ShardIdentity()
        self.arenas = Arenas(
            self.name,
            lambda: arena_pb2.ArenaOffer(shard=self.identity),
            is_wanted=same_host,
        )
        self.unix = Neighbour("", is_wanted=same_host)
        self.away_count = 0
        """Calls with streams that failed in a row for want of the shard."""
        self._unix_calls: weakref.WeakSet[UnixCall] = weakref.WeakSet()
        this = weakref.ref(self)  # which the connections are not to keep

        def connection(timeout_s: float) -> socket.socket:
            endpoint = this()
            if endpoint is None:
                raise ConnectionAbortedError("the client was dropped")
            return endpoint._unix_connection(timeout_s)

        self._questions = UnixQuestions(connection)
        self._closed = False
        self._said = ""
        self._said_s = 0.0
        self._tls = credentials.tls
        self._token = credentials.token
        self._credentials = credentials
        self._channel = Channel(address, credentials)
        self._others: dict[int, Channel] = {}
        self._lock = threading.Lock()

    def stream(self, method: str, connection: int = 0) -> Any:
        """Opens streams over gRPC; connection 0 is that of all other calls."""
        return self._channel_of(connection).stream_stream(method)

    def _channel_of(self, connection: int) -> Any:
        if connection == 0:
            return self._channel.current
        with self._lock:
            if self._closed:
                raise ClosedError("the client was closed; connect again")
            if connection not in self._others:
                self._others[connection] = Channel(self.address, self._credentials)
            other = self._others[connection]
        other.renew()
        return other.current

    def unix_call(self, method: str, calls: UnixCalls, timeout_s: float) -> UnixCall:
        """A stream to the shard, on this machine. Blocks mostly not at all."""
        call = UnixCall(self._unix_connection(timeout_s), method, calls, self._authorization())
        self._unix_calls.add(call)
        return call

    def _unix_connection(self, timeout_s: float) -> socket.socket:
        if self._closed:
            raise ConnectionAbortedError("the client was closed")
        timeout_s = max(min(timeout_s, _CONNECT_S), 0.001)
        try:
            with _LOOKING:
                check_descriptors(_DESCRIPTOR_RESERVE, "a stream to a shard on this machine")
        except LimitError as error:
            raise OSError(error.message) from None
        try:
            connection = connected(self.unix.address, socket.SOCK_STREAM, timeout_s)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                self.unix.note_missing()
            elif not isinstance(error, BlockingIOError):  # as many come at once as it lets wait
                self.unix.pause()
            _LOG.debug("shard %d takes no streams here: %s", self.shard_index, error)
            raise
        self.unix.note_reached()
        return connection

    def note_away(self) -> None:
        """Notes a call that has failed for want of the shard.

        When that happens again before another call succeeds, this machine is left alone for a
        while: the shard may be on another one, and its namesake here.
        """
        self.away_count += 1
        if self.away_count >= _AWAY_COUNT:
            self.arenas.server.pause()
            self.unix.pause()

    def _authorization(self) -> str:
        return "" if self._token is None else self._token.authorization()

    def _asked_here(self, method: str, request: bytes, timeout_s: float) -> bytes | None:
        return self._questions.ask(method, request, self._authorization(), timeout_s)

    def why_absent(self, timeout_s: float = 1.0) -> str:
        """Finds out why the shard's address did not answer."""
        return why_absent(self.address, timeout_s, speaks_tls=self._tls is not None)

    def check_trust(self, timeout_s: float) -> None:
        """Raises AuthenticationError if TLS keeps the sides apart. Blocks up to `timeout_s`."""
        try:
            check_trust(f"shard {self.shard_index}", self.address, self._tls, timeout_s)
        except AuthenticationError as error:
            error.shard_index = self.shard_index
            raise

    @contextlib.contextmanager
    def translated(self, **where: Any) -> Iterator[None]:
        """Turns gRPC's errors in the block into Shardwell's, which carry `where`."""
        try:
            yield
        except grpc.RpcError as error:
            raise self.translate(error, **where) from None
        except ValueError as error:  # what gRPC raises for a closed channel
            if not self._closed:
                raise
            raise ClosedError(f"the client was closed ({error}); connect again") from None

    def translate(self, error: grpc.RpcError, **where: Any) -> ShardwellError:
        """Returns the Shardwell error of a failed call to this shard.

        LimitError where this process has no descriptor left, so that it is not the shard's doing.
        """
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            try:
                check_descriptors(1, f"a connection to {self.address}")
            except LimitError as lacking:
                return lacking
        where["shard_index"] = self.shard_index
        found = from_rpc_error(error, f"shard {self.shard_index} at {self.address}", **where)
        if isinstance(found, AuthenticationError | AccessDeniedError):
            return self._refused(found)
        return found

    def _refused(self, error: ShardwellError) -> ShardwellError:
        whose = "" if self._token is None else f" (of {self._token.path})"
        error.message = f"shard {self.shard_index} at {self.address}: {error.message}{whose}"
        error.shard_index = self.shard_index
        # Whom it let in before has had a token that was good: another one may come in its file.
        is_known = bool(self.identity.cluster_id) and self._token is not None
        error.retryable = isinstance(error, AuthenticationError) and is_known
        now_s = time.monotonic()
        if error.retryable and (error.message != self._said or now_s - self._said_s > SAID_S):
            self._said, self._said_s = error.message, now_s
            _LOG.warning(
                "%s; calls wait for another one there, until their deadline", error.message
            )
        return error

    def close(self) -> None:
        """Ends every connection and the calls on it."""
        with self._lock:
            self._closed = True
            others = list(self._others.values())
        for channel in (self._channel, *others):
            channel.close()
        for call in list(self._unix_calls):
            call.cancel()
        self._questions.close()
