"""A TCP proxy that cuts, stalls, slows and corrupts what passes between a client and a shard.

    with Proxy(cluster.target) as proxy:
        client = shardwell.connect(proxy.address, ...)
        proxy.cut()

One thread accepts; each connection has one thread per direction.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Callable

_READ_SIZE_BYTES = 16 * 1024
_CONNECT_TIMEOUT_S = 5.0


class Direction(enum.Enum):
    """Which way bytes go."""

    TO_SHARD = enum.auto()
    TO_CLIENT = enum.auto()


PROXY_ADDRESSES: set[str] = set()
"""Clients that connect to one of them are to send all they have to say through it.

Of proxies that are there: a port that one has given back may be a shard's next.
"""


class Proxy:
    """Listens on a free port of 127.0.0.1. A context manager that leaves no thread behind."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        """What a client connects to."""
        PROXY_ADDRESSES.add(self.address)
        self.connection_count = 0
        """Connections that were forwarded so far."""
        self.refused_count = 0
        """Connections that were refused so far."""
        self.cut_count = 0
        """Times that `cut_after` has cut."""
        self.corrupted_count = 0
        """Bytes that were changed."""
        self.passed_bytes = dict.fromkeys(Direction, 0)
        """Bytes that went each way."""
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._forgotten: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._refusing = False
        self._closed = False
        self._ended = threading.Event()
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._flowing = threading.Event()
        self._flowing.set()
        self._mark: tuple[Direction, bytes] | None = None
        self._corruption_count_left = 0
        self._corrupt_at: tuple[Direction, int, int] | None = None
        self._cut_after: tuple[Direction, int] | None = None
        self._cut_interval_bytes = 0
        self._cut_count_left = 0
        self._refuses_after_cut = False
        self._start(self._accept)

    def cut(self, *, refuse: bool = False) -> None:
        """Resets all connections; with `refuse`, and every new one until `accept`."""
        with self._lock:
            self._refusing = self._refusing or refuse
            sockets = list(self._sockets)
        for each in sockets:
            _reset(each)

    def accept(self) -> None:
        """Lets new connections through again."""
        self._refusing = False

    def stall(self) -> None:
        """Holds all bytes back, both ways; connections stay open and are still accepted."""
        self._flowing.clear()

    def resume(self) -> None:
        """Lets bytes go on, from where they were held."""
        self._flowing.set()

    def forget(self) -> None:
        """Passes nothing more of the connections that are open, nor their ends, as a relay does
        that was started anew; new ones are passed."""
        with self._lock:
            self._forgotten |= self._sockets

    def slow_down(self, *, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Holds every read back for `delay_s`, and passes no more than so many bytes a second."""
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def corrupt_after(self, direction: Direction, mark: bytes, *, count: int = 1) -> None:
        """Flips a bit of the byte that follows the next `mark`, so many times.

        `mark` must lie with its successor in one read: choose it short and its place early.
        """
        self._corruption_count_left = count
        self._mark = (direction, mark)

    def corrupt_at(self, direction: Direction, byte_count: int, bits: int = 0x40) -> None:
        """Flips bits of the byte that passes that way after so many more."""
        with self._lock:
            self._corrupt_at = (direction, self.passed_bytes[direction] + byte_count, bits)

    def cut_after(
        self, direction: Direction, byte_count: int, *, refuse: bool = True, count: int = 1
    ) -> None:
        """Cuts all connections after so many more bytes that way, then refuses new ones.

        Without `refuse`, it lets new ones through, and does the same again, `count` times in all.
        """
        with self._lock:
            self._cut_interval_bytes, self._cut_count_left = byte_count, count
            self._refuses_after_cut = refuse
            self._cut_after = (direction, self.passed_bytes[direction] + byte_count)

    def close(self) -> None:
        """Ends everything and waits for the threads."""
        PROXY_ADDRESSES.discard(self.address)
        self._closed = True
        self._ended.set()
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                shard = socket.create_connection(self._upstream, _CONNECT_TIMEOUT_S)
            except OSError:
                _reset(client)
                client.close()
                continue
            shard.settimeout(None)
            for each in (client, shard):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                refused = self._refusing or self._closed
                if not refused:
                    self._sockets |= {client, shard}
                    self.connection_count += 1
            if refused:
                self.refused_count += 1
                _reset(client)
                client.close()
                shard.close()
                continue
            left = [2]  # directions that still use the two sockets
            self._start(lambda c=client, s=shard, n=left: self._pump(c, s, Direction.TO_SHARD, n))
            self._start(lambda c=client, s=shard, n=left: self._pump(s, c, Direction.TO_CLIENT, n))

    def _pump(
        self, source: socket.socket, sink: socket.socket, direction: Direction, left: list[int]
    ) -> None:
        try:
            while data := source.recv(_READ_SIZE_BYTES):
                self._flowing.wait()
                if source in self._forgotten:
                    continue
                if self._delay_s or self._bytes_per_s:
                    rate = self._bytes_per_s
                    self._ended.wait(self._delay_s + (len(data) / rate if rate else 0.0))
                passed, is_over = self._admitted(data, direction)
                sink.sendall(self._tampered(passed, direction))
                if is_over:
                    self.cut(refuse=self._refuses_after_cut)
            if source not in self._forgotten:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
        except OSError:
            if source not in self._forgotten:
                _reset(sink)
        finally:
            with self._lock:
                left[0] -= 1
                if not left[0]:
                    self._sockets -= {source, sink}
                    self._forgotten -= {source, sink}
                    source.close()
                    sink.close()

    def _tampered(self, data: bytes, direction: Direction) -> bytes:
        with self._lock:
            if self._corrupt_at is not None and self._corrupt_at[0] is direction:
                _, mark, bits = self._corrupt_at
                place = mark - (self.passed_bytes[direction] - len(data))
                if place < len(data):
                    self._corrupt_at = None
                    self.corrupted_count += 1
                    data = data[:place] + bytes((data[place] ^ bits,)) + data[place + 1 :]
            if self._mark is None or self._mark[0] is not direction:
                return data
            place = data.find(self._mark[1])
            place += len(self._mark[1])
            if place < len(self._mark[1]) or place >= len(data):
                return data
            self._corruption_count_left -= 1
            if not self._corruption_count_left:
                self._mark = None
            self.corrupted_count += 1
        return data[:place] + bytes((data[place] ^ 0x40,)) + data[place + 1 :]

    def _admitted(self, data: bytes, direction: Direction) -> tuple[bytes, bool]:
        """What may still pass, and whether the wire is to be cut behind it."""
        with self._lock:
            limit = self._cut_after
            room = len(data)
            if limit is not None and limit[0] is direction:
                room = limit[1] - self.passed_bytes[direction]
            is_over = room < len(data)
            passed = data[:room]
            self.passed_bytes[direction] += len(passed)
            if is_over:
                self.cut_count += 1
                self._cut_count_left -= 1
                mark = self.passed_bytes[direction] + self._cut_interval_bytes
                self._cut_after = (direction, mark) if self._cut_count_left else None
        return passed, is_over


def _reset(connection: socket.socket) -> None:
    """Ends a connection at once, and wakes its reader; a reset instead of an orderly end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
