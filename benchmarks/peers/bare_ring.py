"""A rank of the floor: a ring of bare gRPC streams that move an all-reduce's bytes, no more.

Each rank has a server, whose stream the next rank reads. A message that came is followed by one
that goes, as in a ring where each rank forwards; malloc is tuned as Shardwell tunes it.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

import shardwell
from turns import Bench, Order, work, worker_parser

METHOD = "/bare.Ring/Receive"
OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.so_reuseport", 0),
)
MESSAGE_BYTES = 2**20
AHEAD_COUNT_MAX = 8
"""Messages that a rank sends before the first has come: what Shardwell's window is at the most."""
ITEM_SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}


class BareRing(Bench):
    """The ring's part of one rank."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self._rank = rank
        self._size = size
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._times: list[float] = []

        def receive(request: bytes, context: grpc.ServicerContext) -> Any:
            yield from iter(self._outgoing.get, None)

        self._server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
        handler = grpc.unary_stream_rpc_method_handler(receive)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bare.Ring", {"Receive": handler}),)
        )
        self._address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        self._server.start()

    def contact(self) -> str:
        return self._address

    def meet(self, contacts: list[str]) -> None:
        self._channel = grpc.insecure_channel(contacts[self._rank - 1], options=OPTIONS)
        self._call = self._channel.unary_stream(METHOD)(b"")

        def read() -> None:
            try:
                for message in self._call:
                    self._incoming.put(len(message))
            except grpc.RpcError:
                return  # at the end

        threading.Thread(target=read, daemon=True).start()

    def prepare(self, order: Order) -> None:
        self._order = order
        if order["do"] == "latency":
            self._chunk_count, self._message = 1, bytes(100)
            return
        segment_bytes = order["megabytes"] * 10**6 // 4 * ITEM_SIZES[order["codec"]] / self._size
        self._chunk_count = math.ceil(segment_bytes / MESSAGE_BYTES)
        self._message = os.urandom(round(segment_bytes / self._chunk_count))

    def act(self) -> None:
        self._times = []
        for _ in range(self._order.get("calls", 1)):
            start = time.perf_counter()
            self._go_around()
            self._times.append(time.perf_counter() - start)

    def finish(self) -> dict[str, Any]:
        return {"times": self._times}

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()
        self._server.stop(1.0).wait()

    def _go_around(self) -> None:
        count = 2 * (self._size - 1) * self._chunk_count
        sent_count = min(self._chunk_count, AHEAD_COUNT_MAX)
        for _ in range(sent_count):
            self._outgoing.put(self._message)
        for _ in range(count):
            self._incoming.get()
            if sent_count < count:
                self._outgoing.put(self._message)
                sent_count += 1


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--host", default="127.0.0.1")
    args = parser.parse_args()
    shardwell.tune_malloc()
    work(args.socket, args.rank, BareRing(args.rank, args.size, args.host))


if __name__ == "__main__":
    main()
