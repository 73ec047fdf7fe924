"""The floor: bare grpcio streams that return the bytes they get, and do nothing else with them."""

from __future__ import annotations

import os
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

METHOD = "/bare.Echo/Exchange"
OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
)


def serve(ports: Any, tuned: bool) -> None:
    """Runs an echo server in this process until its standard input ends."""
    if tuned:
        from shardwell import tune_malloc

        tune_malloc()

    def echo(messages: Any, context: grpc.ServicerContext) -> Any:
        yield from messages

    server = grpc.server(ThreadPoolExecutor(32), options=(*OPTIONS, ("grpc.so_reuseport", 0)))
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bare.Echo", {"Exchange": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ports.put(port)
    server.wait_for_termination()


class BareWorker:
    """Streams to every echo server, kept open from step to step, as the SDK's are."""

    def __init__(self, ports: list[int]) -> None:
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{p}", options=OPTIONS) for p in ports]
        self._queues: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in ports]
        self._calls = [
            channel.stream_stream(METHOD)(iter(messages.get, None))
            for channel, messages in zip(self._channels, self._queues, strict=True)
        ]

    def step(self, message: bytes, count: int) -> None:
        """Sends `count` messages to every server and takes them back."""
        for _ in range(count):
            for messages in self._queues:
                messages.put(message)
        threads = [
            threading.Thread(target=self._take, args=(call, count)) for call in self._calls[1:]
        ]
        for thread in threads:
            thread.start()
        self._take(self._calls[0], count)
        for thread in threads:
            thread.join()

    def ping(self, message: bytes) -> None:
        """One message to every server and back, without threads."""
        for messages in self._queues:
            messages.put(message)
        for call in self._calls:
            next(call)

    def close(self) -> None:
        """Ends the streams."""
        for messages in self._queues:
            messages.put(None)
        for channel in self._channels:
            channel.close()

    @staticmethod
    def _take(call: Any, count: int) -> None:
        for _ in range(count):
            next(call)


def payload(size: int) -> bytes:
    """Bytes that do not compress."""
    return os.urandom(size)


if __name__ == "__main__":
    sys.exit("this is a part of benchmarks/step.py")
