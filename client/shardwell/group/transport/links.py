"""Streams of chunks over a Unix socket, for ranks on this machine: the side that sends.

See unix_stream.proto. A link is one call of ReceiveChunks; `Outgoing` uses it in place of gRPC's
context, and beside that it takes short messages from any thread, without a wait or a hand-over.

States of a link:

    new       the caller says what it calls           ends by: 5 s; the caller
    accepted  the caller knows, and names itself      ends by: 5 s; the caller, who then tries gRPC
    called    chunks; the caller says nothing more    ends by: END; the connection's end
    ended     its callbacks have been called; closed when its thread has left it
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from shardwell.connection.error_codes import ERROR_DETAIL_KEY, Status
from shardwell.errors import CorruptChunkError, LimitError
from shardwell.process.connected import OwnerProcess
from shardwell.process.unix_sockets import check_descriptors, check_same_user, listening
from shardwell.transport.unix_call import write_frame
from shardwell.v1 import unix_stream_pb2
from shardwell.wire.frames import FrameKind, FrameReader, head

IS_SUPPORTED = hasattr(select, "epoll") and hasattr(socket, "SO_PEERCRED")
ACCEPTED = b""
"""The first message of a link: nothing, and that it is served."""
SHORT_BYTES_MAX = 4096
"""A message up to this size fits into a socket's buffer or not, but never in part."""
_OPEN_S = 5.0
"""For one wait for what the caller has to say."""
_READ_BYTES = 4096
_DESCRIPTOR_RESERVE = 64
"""Descriptors that links, each of which has one, leave for the rest."""
_PATIENCE_S = 1.0
"""Pause before the next try when no connection can be accepted."""
_ENDS = getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLHUP", 0)


class Link:
    """One connection. `write_now`, `add_callback` and `cancel` are for any thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_OPEN_S)
        self.file = connection.fileno()
        self._connection = connection
        self._owner = OwnerProcess("stream")
        self._frames = FrameReader()
        self._came: deque[tuple[int, bytes]] = deque()
        self._lock = threading.Lock()
        self._is_over = False
        self._is_closed = False
        self._callbacks: list[Callable[[], None]] = []

    def opened(self) -> unix_stream_pb2.UnixStreamOpen:
        """The caller's request for a stream. Blocks."""
        return unix_stream_pb2.UnixStreamOpen.FromString(self._read(FrameKind.OPEN))

    def accept(self) -> bytes:
        """Tells the caller that it is served; returns its request. Blocks."""
        self._connection.sendall(head(FrameKind.MESSAGE, len(ACCEPTED)) + ACCEPTED)
        request = self._read(FrameKind.MESSAGE)
        self._connection.setblocking(False)
        return request

    def _read(self, kind: FrameKind) -> bytes:
        while not self._came:
            piece = self._connection.recv(_READ_BYTES)
            if not piece:
                raise ConnectionResetError("the caller has gone")
            self._came.extend(self._frames.feed(piece))
        found, contents = self._came.popleft()
        if found != kind:
            raise CorruptChunkError(f"a frame of kind {found}; expected {kind}")
        return contents

    def write(self, message: bytes, kind: FrameKind = FrameKind.MESSAGE) -> bool:
        """Sends a message; blocks as long as there is no room. False: the reader takes none now."""
        return write_frame(self._connection, kind, message)

    def write_now(self, message: bytes) -> bool:
        """Sends a short message, if there is room now and no other is being written."""
        frame = head(FrameKind.MESSAGE, len(message)) + message
        with self._lock:  # a closed descriptor may be another's
            if self._is_closed:
                return True
            try:
                sent_bytes = self._connection.send(frame)
            except BlockingIOError:
                return False
            except OSError:  # the watcher notices that it has ended
                return True
        if sent_bytes < len(frame):
            self.cancel()
        return True

    def end(self, status: Status) -> None:
        """Says how the call has ended."""
        end = unix_stream_pb2.UnixStreamEnd(code=status.code.value[0], details=status.details)
        end.error = dict(status.trailing_metadata).get(ERROR_DETAIL_KEY, b"")
        self.write(end.SerializeToString(), FrameKind.END)

    def cancel(self) -> None:
        """Ends it at once. Safe to repeat."""
        with self._lock:
            if not self._is_closed and self._owner.is_here:
                with contextlib.suppress(OSError):  # it has ended
                    self._connection.shutdown(socket.SHUT_RDWR)

    def add_callback(self, act: Callable[[], None]) -> bool:
        """Has `act` called when it has ended; False: it has."""
        with self._lock:
            if not self._is_over:
                self._callbacks.append(act)
            return not self._is_over

    def note_end(self) -> None:
        """Notes that the connection has ended, and calls the callbacks."""
        with self._lock:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, []
        for act in callbacks:
            act()

    def close(self) -> None:
        """Lets go of the connection."""
        with self._lock:
            self._is_closed = True
            self._connection.close()
        self.note_end()


class Links:
    """Listens, and sees when a link ends, on a thread of its own; `serve` has one of `threads`.

    Links beyond `count_max` are closed before they are heard, and call over gRPC.
    """

    def __init__(
        self,
        serve: Callable[[Link], None],
        threads: Executor,
        count_max: int,
        log: logging.Logger,
    ) -> None:
        self.address = ""
        """Empty: it listens nowhere."""
        self._serve = serve
        self._threads = threads
        self._count_max = count_max
        self._log = log
        self._lock = threading.Lock()
        self._open: dict[int, Link] = {}
        self._stack = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run, name="shardwell-links", daemon=True)

    def start(self, same_host: str, name: str) -> None:
        """Begins to listen, if it is wanted and can be: see `ArenaOffers.start`."""
        if same_host == "off" or not IS_SUPPORTED:
            return
        address = f"@{name}" if same_host == "auto" else os.path.join(same_host, f"{name}.sock")
        try:
            self._listener = self._stack.enter_context(listening(address, socket.SOCK_STREAM))
            self._closing = os.eventfd(0, os.EFD_CLOEXEC)
            self._stack.callback(os.close, self._closing)
            self._events = self._stack.enter_context(select.epoll())
            for file in (self._listener.fileno(), self._closing):
                self._events.register(file, select.EPOLLIN)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # no thread
            self._stack.close()
            self._log.warning("other ranks of this machine call over the network: %s", error)
            return
        self.address = address

    def close(self) -> None:
        """Accepts no more connections, and ends all links. Safe to repeat."""
        if not self.address:
            return
        self.address = ""
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        with self._lock:
            for link in self._open.values():
                link.cancel()
                link.note_end()
            self._open.clear()
        self._stack.close()

    def _run(self) -> None:
        while True:
            files = [file for file, _ in self._events.poll()]
            if self._closing in files:
                return
            for file in files:
                if file != self._listener.fileno():
                    self._ended(file)
            # Only now, or a new link might have the descriptor of one that has just ended.
            if self._listener.fileno() in files:
                self._accept()

    def _ended(self, file: int) -> None:
        with self._lock:
            link = self._open.pop(file, None)
            if link is None:  # closed meanwhile
                return
            self._events.unregister(file)
        try:
            link.note_end()
        except Exception:  # others' ends are to be seen nevertheless
            self._log.exception("the end of a stream of this machine could not be handled")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the caller has gone
            return
        except OSError as error:  # no descriptor is left, say
            self._log.warning("a stream of this machine can't be taken: %s", error)
            time.sleep(_PATIENCE_S)
            return
        link = Link(connection)
        try:
            check_same_user(connection)
            check_descriptors(_DESCRIPTOR_RESERVE, "a stream of a rank on this machine")
            with self._lock:
                if len(self._open) >= self._count_max:
                    raise LimitError(f"{self._count_max} streams are open")
                self._open[link.file] = link
                self._events.register(link.file, _ENDS)
            self._threads.submit(self._served, link)
        except (OSError, LimitError, RuntimeError) as error:
            self._log.debug("a stream of this machine is refused: %s", error)
            self._leave(link)

    def _served(self, link: Link) -> None:
        try:
            self._serve(link)
        finally:
            self._leave(link)

    def _leave(self, link: Link) -> None:
        with self._lock:
            if self._open.get(link.file) is link:
                del self._open[link.file]
                self._events.unregister(link.file)
        link.close()
