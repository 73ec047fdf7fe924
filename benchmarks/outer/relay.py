"""A delay between a client and servers: what passes waits, in either direction, on its way.

    python benchmarks/outer/relay.py DELAY_MS [LISTEN_PORT=HOST:PORT ...]

Listens on 127.0.0.1; needs no netem in the kernel. Ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time

PIECE_BYTES = 256 * 1024
PIECE_COUNT_MAX = 64
"""On their way in one direction of a connection; 10 ms of a Gbit/s are 1.25 MB."""


class Flow:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        self._source, self._target, self._delay_s = source, target, delay_s
        self._pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(PIECE_COUNT_MAX)
        for act in (self._read, self._write):
            threading.Thread(target=act, daemon=True).start()

    def _read(self) -> None:
        piece = b"?"
        while piece:
            try:
                piece = self._source.recv(PIECE_BYTES)
            except OSError:
                piece = b""
            self._pieces.put((time.monotonic() + self._delay_s, piece))

    def _write(self) -> None:
        is_open = True
        while True:
            due_s, piece = self._pieces.get()
            if not piece:
                break
            time.sleep(max(due_s - time.monotonic(), 0.0))
            if not is_open:
                continue
            try:
                self._target.sendall(piece)
            except OSError:
                is_open = False
                self._end()
        self._end()

    def _end(self) -> None:
        """Ends both directions: what has ended one way is of no use the other way."""
        for end in (self._source, self._target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def serve(listener: socket.socket, target: tuple[str, int], delay_s: float) -> None:
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
        Flow(near, far, delay_s)
        Flow(far, near, delay_s)


def main() -> None:
    delay_s = float(sys.argv[1]) / 1e3
    for word in sys.argv[2:]:
        port, _, target = word.partition("=")
        host, _, target_port = target.rpartition(":")
        listener = socket.create_server(("127.0.0.1", int(port)), backlog=64)
        arguments = (listener, (host, int(target_port)), delay_s)
        threading.Thread(target=serve, args=arguments, daemon=True).start()
    print("relaying", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
