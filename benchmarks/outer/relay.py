"""A delay between a client and servers: what passes waits, in either direction, on its way.

    python benchmarks/outer/relay.py DELAY_MS MBIT [LISTEN_PORT=HOST:PORT ...]

Listens on 127.0.0.1; needs no netem in the kernel. MBIT is the links' rate: no more is on its way
than fits such links, or what is small would queue here behind what is large. Ends when its standard
input does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque

PIECE_BYTES_MIN, PIECE_BYTES_MAX = 16 * 1024, 256 * 1024
ROOM_BYTES_MIN = 2 * PIECE_BYTES_MIN


def room_bytes(delay_s: float, mbit: float) -> int:
    """How much may be on its way in one direction of a connection: what passes in two delays."""
    return max(int(2 * delay_s * mbit * 1e6 / 8), ROOM_BYTES_MIN)


class Flow:
    """One direction of a connection."""

    def __init__(
        self, source: socket.socket, target: socket.socket, delay_s: float, room: int
    ) -> None:
        self._source, self._target, self._delay_s, self._room = source, target, delay_s, room
        self._piece_bytes = min(max(room // 8, PIECE_BYTES_MIN), PIECE_BYTES_MAX)
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._byte_count = 0
        """On their way."""
        self._changed = threading.Condition()
        for act in (self._read, self._write):
            threading.Thread(target=act, daemon=True).start()

    def _read(self) -> None:
        piece = b"?"
        while piece:
            with self._changed:
                while self._byte_count >= self._room:
                    self._changed.wait()
            try:
                piece = self._source.recv(self._piece_bytes)
            except OSError:
                piece = b""
            with self._changed:
                self._pieces.append((time.monotonic() + self._delay_s, piece))
                self._byte_count += len(piece)
                self._changed.notify_all()

    def _write(self) -> None:
        is_open = True
        while True:
            with self._changed:
                while not self._pieces:
                    self._changed.wait()
                due_s, piece = self._pieces.popleft()
            if not piece:
                break
            time.sleep(max(due_s - time.monotonic(), 0.0))
            if is_open:
                try:
                    self._target.sendall(piece)
                except OSError:
                    is_open = False
                    self._end()
            with self._changed:
                self._byte_count -= len(piece)
                self._changed.notify_all()
        self._end()

    def _end(self) -> None:
        """Ends both directions: what has ended one way is of no use the other way."""
        for end in (self._source, self._target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def serve(listener: socket.socket, target: tuple[str, int], delay_s: float, room: int) -> None:
    """Takes connections, and makes one to the target for each."""
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(target, timeout=10)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Not more, for the same reason: a loopback's buffers are those of a fast link.
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        Flow(near, far, delay_s, room)
        Flow(far, near, delay_s, room)


def main() -> None:
    delay_s = float(sys.argv[1]) / 1e3
    room = room_bytes(delay_s, float(sys.argv[2]))
    for word in sys.argv[3:]:
        port, _, target = word.partition("=")
        host, _, target_port = target.rpartition(":")
        listener = socket.create_server(("127.0.0.1", int(port)), backlog=64)
        arguments = (listener, (host, int(target_port)), delay_s, room)
        threading.Thread(target=serve, args=arguments, daemon=True).start()
    print("relaying", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
