"""Calls of clients on this machine, over a Unix socket: see unix_stream.proto.

The handlers are gRPC's own, as made by `Calls`: to them a connection here is a context of gRPC's
that reads, writes and ends. States of a connection: new, until it has said what it calls; called,
as long as the handler runs; then new again after a call with one answer, else ended. Who closes it
has cancelled the call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from shardwell.connection.credentials import AUTHORIZATION_KEY
from shardwell.connection.error_codes import ERROR_DETAIL_KEY, to_status
from shardwell.errors import CorruptChunkError, LimitError, VersionMismatchError, WrongShardError
from shardwell.process.unix_sockets import check_descriptors, check_same_user, listening
from shardwell.v1 import unix_stream_pb2
from shardwell.wire.checksum import check_version
from shardwell.wire.frames import FrameKind, FrameReader, head
from shardwell.wire.messages import MESSAGE_SIZE_MAX_BYTES
from shardwell_server.services.calls import UNIX_PEER

_LOG = logging.getLogger("shardwell_server")
_OPEN_S = 10.0
_READ_AHEAD_BYTES = 256 * 1024
"""Bytes of messages read ahead of the call; then nothing more is read."""
_JOINED_BYTES_MAX = 32 * 1024
"""An answer up to this size is copied behind its head, which costs less than writing twice."""
_DESCRIPTOR_RESERVE = 64
"""Descriptors that streams here, each of which has one, leave for the rest."""
Serve: TypeAlias = Callable[[Any, Any], Coroutine[Any, Any, Any]]

Pack: TypeAlias = Callable[[Any], bytes]


async def _unimplemented(messages: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such call here")


class UnixStreams:
    """The Unix socket's server of `methods`, for the loop's thread; beyond `count_max`, gRPC's."""

    def __init__(self, methods: Mapping[str, Any], count_max: int) -> None:
        self.address = ""
        self.methods = methods
        self._count_max = count_max
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()

    def listen(self, same_host: str, name: str) -> None:
        if same_host == "off" or not hasattr(socket, "SO_PEERCRED"):
            return
        address = f"@{name}" if same_host == "auto" else os.path.join(same_host, f"{name}.sock")
        try:
            self._listener = listening(address, socket.SOCK_STREAM)
        except OSError as error:
            _LOG.warning("clients on this machine call over the network: %s", error)
            return
        self.address = address

    async def start(self) -> None:
        if self._listener is None:
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Connection(self._serve_of, self._entered, self._open.discard),
            sock=self._listener,
        )

    async def stop(self, grace_s: float) -> None:
        """Accepts no more connections; returns when all calls have ended, within the grace."""
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()
        tasks = [connection.task for connection in self._open if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for connection in list(self._open):
            connection.abandon()

    def _serve_of(self, method: str) -> tuple[Serve, Pack | None]:
        handler = self.methods.get(method)
        if handler is None:
            return _unimplemented, None
        if handler.response_streaming:
            return handler.stream_stream, None
        return handler.stream_unary, handler.response_serializer

    def _entered(self, connection: _Connection) -> None:
        if len(self._open) >= self._count_max:
            self._end_idle()
        if len(self._open) >= self._count_max:
            raise LimitError(f"{self._count_max} streams are open")
        check_descriptors(_DESCRIPTOR_RESERVE, "a stream of a worker on this machine")
        self._open.add(connection)

    def _end_idle(self) -> None:
        idle = [each for each in self._open if each.answered_s is not None]
        if idle:
            longest = min(idle, key=lambda each: each.answered_s or 0.0)
            longest.abandon()
            self._open.discard(longest)


class _Connection(asyncio.Protocol):
    def __init__(
        self,
        serve_of: Callable[[str], tuple[Serve, Pack | None]],
        entered: Callable[[_Connection], None],
        left: Callable[[_Connection], None],
    ) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.answered_s: float | None = None
        self._serve_of = serve_of
        self._entered = entered
        self._left = left
        self._transport: asyncio.Transport
        self._authorization = ""
        self._frames = FrameReader()
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_all = False
        self._has_aborted = False
        self._is_reading = True
        self._reader: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._timer: asyncio.TimerHandle | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        try:
            check_same_user(transport.get_extra_info("socket"))
            self._entered(self)
        except (OSError, LimitError) as error:
            _LOG.debug("a stream of this machine is refused: %s", error)
            transport.abort()
            return
        self._await_call()

    def _await_call(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_OPEN_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, contents in self._frames.feed(data):
                if self.task is None:
                    self._begin(kind, contents)
                elif kind == FrameKind.END and not (contents or self._has_all):
                    self._has_all = True
                elif kind != FrameKind.MESSAGE or self._has_all:
                    raise CorruptChunkError(f"a frame of kind {kind} in a call")
                else:
                    self._messages.append(contents)
                    self._waiting_bytes += len(contents)
        except (CorruptChunkError, DecodeError) as error:
            _LOG.debug("a stream of this machine is broken: %s", error)
            self._transport.abort()
            return
        has_news = self._messages or self._has_all
        if has_news and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self._waiting_bytes > _READ_AHEAD_BYTES and self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._left(self)
        self._room.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    # What handlers call, as of gRPC's context.

    async def read(self) -> Any:
        while not self._messages:
            if self._has_all:
                return grpc.aio.EOF
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._messages.popleft()
        self._waiting_bytes -= len(message)
        if not self._is_reading and self._waiting_bytes <= _READ_AHEAD_BYTES:
            self._is_reading = True
            self._transport.resume_reading()
        return message

    async def write(self, answer: bytes) -> None:
        """Returns when another answer has room; asyncio.CancelledError: the line is lost."""
        if self._transport.is_closing():
            raise asyncio.CancelledError
        start = head(FrameKind.MESSAGE, len(answer))
        if len(answer) <= _JOINED_BYTES_MAX:
            self._transport.write(start + answer)
        else:
            self._transport.write(start)
            self._transport.write(answer)
        if not self._room.is_set():
            await self._room.wait()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((AUTHORIZATION_KEY, self._authorization),) if self._authorization else ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return UNIX_PEER

    def time_remaining(self) -> float | None:
        """Returns None: the caller closes the connection when its time is over."""
        return None

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        self._end(code, details, dict(trailing_metadata).get(ERROR_DETAIL_KEY, b""))

    # Its life.

    def abandon(self) -> None:
        self._transport.abort()

    def _begin(self, kind: int, contents: bytes) -> None:
        if kind != FrameKind.OPEN:
            raise CorruptChunkError(f"a frame of kind {kind} before any call")
        opening = unix_stream_pb2.UnixStreamOpen.FromString(contents)
        self._authorization = opening.authorization
        self.answered_s = None
        if self._timer is not None:
            self._timer.cancel()
        try:
            check_version(opening)
        except (CorruptChunkError, VersionMismatchError, WrongShardError) as error:
            status = to_status(error)
            self._end(status.code, status.details, dict(status.trailing_metadata)[ERROR_DETAIL_KEY])
            self._transport.close()
            return
        serve, pack = self._serve_of(opening.method)
        self.task = asyncio.get_running_loop().create_task(serve(None, self))
        self.task.add_done_callback(partial(self._served, pack))

    def _served(self, pack: Pack | None, task: asyncio.Task[Any]) -> None:
        is_over = True
        try:
            if not task.cancelled() and pack is not None and not self._has_aborted:
                is_over = not self._answered(pack(task.result()))
        finally:
            if is_over:
                self._transport.close()

    def _answered(self, answer: bytes) -> bool:
        """Sends the one answer of a call; False: the connection takes no other call."""
        if len(answer) > MESSAGE_SIZE_MAX_BYTES:
            self._end(grpc.StatusCode.UNIMPLEMENTED, "the answer is too long for a frame")
            return False
        if self._transport.is_closing():
            return False
        self._transport.write(head(FrameKind.MESSAGE, len(answer)) + answer)
        if self._messages or not self._has_all:  # which would be taken for another call
            return False
        # Nothing is waited for from here on: the client may make its next call.
        self.task, self._has_all, self._authorization = None, False, ""
        self.answered_s = asyncio.get_running_loop().time()
        self._await_call()
        return True

    def _end(self, code: grpc.StatusCode, details: str, error: bytes = b"") -> None:
        self._has_aborted = True
        if not self._transport.is_closing():
            end = unix_stream_pb2.UnixStreamEnd(code=code.value[0], details=details, error=error)
            ending = end.SerializeToString()
            self._transport.write(head(FrameKind.END, len(ending)) + ending)
