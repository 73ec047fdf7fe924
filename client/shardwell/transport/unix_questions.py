"""Calls with one answer, to a shard on this machine, over Unix sockets: see unix_stream.proto.

A connection is kept for the next call, so that a call is a message there and one back. Whatever
keeps a call from being answered here leaves it to gRPC: each call of a shard is safe to repeat.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable

import grpc
from google.protobuf.message import DecodeError

from shardwell.errors import CorruptChunkError
from shardwell.process.connected import OwnerProcess
from shardwell.threads.calls import cancelled_by
from shardwell.transport.neighbour import PAUSE_S
from shardwell.transport.unix_call import CallEndedError, ending_of, opening_frame, write_all
from shardwell.wire.frames import FrameKind, FrameReader, head
from shardwell.wire.messages import MESSAGE_SIZE_MAX_BYTES

_READ_BYTES = 64 * 1024
_IDLE_COUNT_MAX = 4
"""Connections that are kept: one for the calls of a thread, others for those beside it."""
_LOOK_S_MAX = 3600.0
_IDLE_S_MAX = 4.0
"""The shard closes a connection after 10 s."""


class UnixQuestions:
    """A client's calls to one shard. Any thread may ask.

    `connect` makes a connection within so many seconds; OSError: there is none now.
    """

    def __init__(self, connect: Callable[[float], socket.socket]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[_Line] = []
        self._lines: weakref.WeakSet[_Line] = weakref.WeakSet()
        self._is_closed = False
        self._next_try_s = 0.0
        """Until then nothing is tried, as a connection broke."""

    def ask(
        self, method: str, request: bytes, authorization: str, timeout_s: float
    ) -> bytes | None:
        """Calls the shard; None: call over gRPC. Blocks up to `timeout_s`.

        grpc.RpcError: the shard refused, the deadline passed, or the call was cancelled.
        """
        until_s = time.monotonic() + timeout_s
        is_here = len(request) <= MESSAGE_SIZE_MAX_BYTES and time.monotonic() >= self._next_try_s
        line = self._line(timeout_s) if is_here else None
        if line is None:
            return None
        try:
            with cancelled_by(line.cancel):
                answer = line.ask(method, request, authorization, until_s)
        except CallEndedError as error:
            line.cancel()
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # of another version, or too large
                return None
            raise
        except BaseException:
            line.cancel()
            raise
        if answer is None:
            line.cancel()
            self._next_try_s = time.monotonic() + PAUSE_S
        else:
            self._keep(line)
        return answer

    def _line(self, timeout_s: float) -> _Line | None:
        while True:
            with self._lock:
                line = self._idle.pop() if self._idle else None
            if line is None:
                break
            if line.is_fresh:
                return line
            line.cancel()
        try:
            line = _Line(self._connect(timeout_s))
        except OSError:
            return None
        with self._lock:
            self._lines.add(line)
            is_closed = self._is_closed
        if is_closed:
            line.cancel()
        return line

    def _keep(self, line: _Line) -> None:
        with self._lock:
            is_kept = not self._is_closed and len(self._idle) < _IDLE_COUNT_MAX
            if is_kept:
                line.used_s = time.monotonic()
                self._idle.append(line)
        if not is_kept:
            line.cancel()

    def close(self) -> None:
        """Ends all connections, and the calls on them. From any thread; safe to repeat."""
        with self._lock:
            self._is_closed = True
            self._idle.clear()
            lines = list(self._lines)
        for line in lines:
            line.cancel()


class _Line:
    """One connection. For one call at a time, except `cancel`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.used_s = time.monotonic()
        self._connection = connection
        weakref.finalize(self, connection.close)
        self._owner = OwnerProcess("call")
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._is_cancelled = False

    @property
    def is_fresh(self) -> bool:
        """True if the shard has it still, as a look shows: it says nothing unasked."""
        is_young = time.monotonic() < self.used_s + _IDLE_S_MAX
        return is_young and not self._is_cancelled and not self._poll.poll(0)

    def ask(self, method: str, request: bytes, authorization: str, until_s: float) -> bytes | None:
        opening = opening_frame(method, authorization)
        sent = write_all(
            self._connection,
            [opening + head(FrameKind.MESSAGE, len(request)), request, head(FrameKind.END, 0)],
        )
        try:
            found = self._answer(until_s) if sent else None
            is_answer = found is not None and found[0] == FrameKind.MESSAGE
            refused = None if found is None or is_answer else ending_of(found[1])
        except (OSError, CorruptChunkError, DecodeError):
            found, refused = None, None
        if self._is_cancelled:
            raise CallEndedError.cancelled()
        if refused is not None:
            raise refused
        return None if found is None else found[1]

    def _answer(self, until_s: float) -> tuple[int, bytes] | None:
        """The next frame; None: the connection ended before. CallEndedError: it is too late."""
        frames = FrameReader()
        while True:
            rest_s = min(until_s - time.monotonic(), _LOOK_S_MAX)
            if rest_s <= 0:
                raise CallEndedError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer came in time")
            if not self._poll.poll(rest_s * 1000):
                continue
            try:
                piece = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                continue
            if not piece:
                return None
            found = list(frames.feed(piece))
            if found:
                return found[0]

    def cancel(self) -> None:
        """Ends it, and what waits for it. Safe to repeat, from any thread."""
        self._is_cancelled = True
        if self._owner.is_here:  # else it is its parent's connection
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
