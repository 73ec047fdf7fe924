"""A call over a Unix socket, to a shard on this machine: see unix_stream.proto.

Same interface as a gRPC call, without a thread: the reader of an answer waits for all calls of a
set, so that each of them that ends is noticed at once, and sends short messages itself. A thread
sends long ones, beside the reading.

States: open -> ended, by the shard's last frame, by the end of the connection, or by `cancel`. An
ended call has let go of its connection as far as the shard is concerned; the descriptor is closed
with the object, as no other thread can wait for it then.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shardwell.connection.error_codes import ERROR_DETAIL_KEY
from shardwell.errors import CorruptChunkError
from shardwell.process.connected import OwnerProcess
from shardwell.threads.pool import begin
from shardwell.v1 import unix_stream_pb2
from shardwell.wire.checksum import WIRE_VERSION
from shardwell.wire.frames import FrameKind, FrameReader, head

_READ_BYTES = 256 * 1024
_JOINED_BYTES_MAX = 32 * 1024
"""A message up to this size is copied behind its head, which costs less than naming both."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_ANSWER_COUNT_MAX = 8
"""Answers, of a megabyte at most, that wait for their reader, and those that came with the last."""
_ENDING = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
ENDED = "it ended the stream"
"""The word for a shard that ends a stream without an error; to the caller it went away."""
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class CallEndedError(grpc.RpcError):
    """The end of a call, in gRPC's words."""

    def __init__(self, code: grpc.StatusCode, details: str, error: bytes = b"") -> None:
        super().__init__(details)
        self._code = code
        self._details = details
        self._error = error

    @classmethod
    def cancelled(cls) -> CallEndedError:
        """A call was cancelled on this side."""
        return cls(grpc.StatusCode.CANCELLED, "the call was given up")

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._code

    def details(self) -> str:
        """The reason, for people."""
        return self._details

    def trailing_metadata(self) -> Any:
        """The shard's error, if it sent one."""
        return ((ERROR_DETAIL_KEY, self._error),) if self._error else ()


class UnixCalls:
    """The calls of one set, whose answers one thread at a time reads."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._calls: weakref.WeakValueDictionary[int, UnixCall] = weakref.WeakValueDictionary()

    def add(self, file: int, call: UnixCall) -> None:
        """Adds a call to those for which `wait` waits."""
        self._calls[file] = call
        self._poll.register(file, select.POLLIN)

    @property
    def has_news(self) -> bool:
        """True if a message has come, or a call has ended unnoticed; does not wait."""
        return bool(self._poll.poll(0))

    def wait(self) -> None:
        """Blocks until something has come, or a call has ended, and takes what there is."""
        for file, events in self._poll.poll():
            call = self._calls.get(file)
            # A full call wakes this thread only by its end, which is reported after its messages.
            if call is None or not call.receive(all_=bool(events & _ENDING)):
                self._poll.unregister(file)
            elif call.is_full:
                self._poll.modify(file, _ENDING)

    def resume(self, file: int) -> None:
        """Waits again for what comes of a call that was full."""
        self._poll.modify(file, select.POLLIN)


def opening_frame(method: str, authorization: str) -> bytes:
    """The first frame of a call."""
    opening = unix_stream_pb2.UnixStreamOpen(
        method=method, authorization=authorization, wire_version=WIRE_VERSION
    ).SerializeToString()
    return head(FrameKind.OPEN, len(opening)) + opening


def write_frame(connection: socket.socket, kind: FrameKind, contents: bytes) -> bool:
    """Sends a frame over a non-blocking socket; blocks for room. False: none is taken now."""
    start = head(kind, len(contents))
    joined = len(contents) <= _JOINED_BYTES_MAX
    return write_all(connection, [start + contents] if joined else [start, contents])


def write_all(connection: socket.socket, written: Sequence[bytes]) -> bool:
    """Sends all bytes as `write_frame` does."""
    parts = [memoryview(each) for each in written]
    room: select.poll | None = None
    while parts:
        try:
            sent = connection.sendmsg(parts)
        except BlockingIOError:
            if room is None:
                room = select.poll()
                room.register(connection, select.POLLOUT)
            if any(events & _GONE for _, events in room.poll()):
                return False
            continue
        except OSError:  # the reader gets the reason
            return False
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]
    return True


class UnixCall:
    """One call. `send` and `read` are for one thread at a time; any may cancel."""

    def __init__(
        self,
        connection: socket.socket,
        method: str,
        calls: UnixCalls,
        authorization: str = "",
    ) -> None:
        connection.setblocking(False)
        self.file = connection.fileno()
        self._connection = connection
        self._close = weakref.finalize(self, connection.close)
        self._owner = OwnerProcess("call")
        self._frames = FrameReader()
        self._answers: deque[bytes] = deque()
        self._calls = calls
        self._lock = threading.Lock()
        self._ended: CallEndedError | None = None
        self.failure: BaseException | None = None
        self.is_full = False
        self._callbacks: list[Callable[[], None]] = []
        self._writer: queue.SimpleQueue[Callable[[], None] | None] | None = None
        connection.send(opening_frame(method, authorization))  # a new one has room for it
        calls.add(connection.fileno(), self)

    def send(self, messages: Iterator[bytes], *, is_short: bool = False) -> None:
        """Sends messages, made one by one as they leave; when one can't be, the call is cancelled.

        With `is_short`, this thread sends them: they and their answers are less than a socket's
        buffer and are made in less time than a thread needs to be woken.
        """
        if is_short:
            self._write(messages)
            return
        with self._lock:
            if self._ended is not None:
                return
            if self._writer is None:
                self._writer = _started_writer()
                weakref.finalize(self, self._writer.put, None).atexit = False
            self._writer.put(partial(self._write, messages))

    def _write(self, messages: Iterator[bytes]) -> None:
        try:
            for message in messages:
                if not write_frame(self._connection, FrameKind.MESSAGE, message):
                    return
        except Exception as error:
            self.failure = error
            self.cancel()

    def read(self) -> bytes:
        """The next answer; blocks. grpc.RpcError: the call has ended."""
        while not self._answers:
            if self._ended is not None:
                raise self._ended
            self._calls.wait()
        answer = self._answers.popleft()
        if self.is_full and len(self._answers) < _ANSWER_COUNT_MAX:
            self.is_full = False
            if self._ended is None:
                self._calls.resume(self.file)
        return answer

    @property
    def has_come(self) -> bool:
        """True if `read` would not wait."""
        return bool(self._answers) or self._ended is not None

    def receive(self, *, all_: bool = False) -> bool:
        """Takes what has come, without waiting; False: nothing more will come."""
        try:
            while self._ended is None and (all_ or not self.is_full):
                piece = self._connection.recv(_READ_BYTES)
                for kind, contents in self._frames.feed(piece):
                    if kind == FrameKind.MESSAGE:
                        self._answers.append(contents)
                        self.is_full = len(self._answers) >= _ANSWER_COUNT_MAX
                    else:
                        self._end(ending_of(contents))
                if not piece:
                    self._end(CallEndedError(grpc.StatusCode.UNAVAILABLE, "it closed the stream"))
                elif len(piece) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        except (OSError, DecodeError, CorruptChunkError) as error:
            self._end(CallEndedError(grpc.StatusCode.UNAVAILABLE, str(error)))
        return self._ended is None

    # As gRPC's calls.

    def add_callback(self, act: Callable[[], None]) -> bool:
        """Has `act` called when the call has ended; False: it has."""
        with self._lock:
            if self._ended is not None:
                return False
            self._callbacks.append(act)
            return True

    def is_active(self) -> bool:
        """True if no read has found its end yet."""
        return self._ended is None

    def code(self) -> grpc.StatusCode | None:
        """The status; None: it has not ended."""
        return None if self._ended is None else self._ended.code()

    def details(self) -> str:
        """The reason why it ended."""
        return "" if self._ended is None else self._ended.details()

    def trailing_metadata(self) -> Any:
        """The shard's error, if it sent one."""
        return () if self._ended is None else self._ended.trailing_metadata()

    def cancel(self) -> None:
        """Ends it at once. Safe to repeat, from any thread."""
        self._end(CallEndedError.cancelled())

    def _end(self, ended: CallEndedError) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = ended
            callbacks, self._callbacks = self._callbacks, []
            if self._writer is not None:
                self._writer.put(None)
        if self._owner.is_here:  # else it is its parent's connection
            with contextlib.suppress(OSError):  # it is broken
                self._connection.shutdown(socket.SHUT_RDWR)
        for act in callbacks:
            act()


def _started_writer() -> queue.SimpleQueue[Callable[[], None] | None]:
    """A queue of what a new thread does, one after another; None ends it."""
    work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    begin("shardwell-writer", partial(_work, work))
    return work


def _work(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (act := work.get()) is not None:
        act()
        del act  # while it waits, it holds no call


def ending_of(contents: bytes) -> CallEndedError:
    """The end of a call, from the shard's frame."""
    end = unix_stream_pb2.UnixStreamEnd.FromString(contents)
    code = _CODES.get(end.code, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        return CallEndedError(grpc.StatusCode.UNAVAILABLE, ENDED)
    return CallEndedError(code, end.details, end.error)
