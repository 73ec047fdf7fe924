"""A delay between a client and servers: what passes waits, in either direction, on its way.

    python benchmarks/outer/relay.py DELAY_MS [LISTEN_PORT=HOST:PORT ...]

Listens on 127.0.0.1. For kernels without netem. Bytes go from socket to socket through pipes, so
they are not copied here. Ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import socket
import sys
import threading
import time

PIPE_BYTES = 8 * 1024 * 1024
"""What may be on its way in one direction: 10 ms of a Gbit/s are 1.25 MB, in pages that TCP filled
in part."""
PIECE_BYTES = 256 * 1024


class Flow:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        self._source, self._target, self._delay_s = source, target, delay_s
        self._out, self._in = os.pipe()
        fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._pieces: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        for act in (self._read, self._write):
            threading.Thread(target=act, daemon=True).start()

    def _read(self) -> None:
        count = 1
        while count:
            try:
                count = os.splice(self._source.fileno(), self._in, PIECE_BYTES)
            except OSError:
                count = 0
            self._pieces.put((time.monotonic() + self._delay_s, count))

    def _write(self) -> None:
        while True:
            due_s, count = self._pieces.get()
            time.sleep(max(due_s - time.monotonic(), 0.0))
            if not count:
                break
            try:
                while count:
                    count -= os.splice(self._out, self._target.fileno(), count)
            except OSError:
                break
        # Both directions: what has ended one way is of no use the other way.
        for end in (self._source, self._target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        os.close(self._in)
        os.close(self._out)


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
