"""The floor: bare grpcio streams that return the bytes they get, and do nothing else with them.

Or as many bytes as they are asked for, where what comes back has another size than what is sent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

METHOD = "/bare.Echo/Exchange"
ANSWER_METHOD = "/bare.Echo/Answer"
OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
)


def serve(ports: Any, tuned: bool) -> None:
    """Runs an echo server in this process until the one that started it ends, or ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark
    if tuned:
        from shardwell import tune_malloc

        tune_malloc()

    def echo(messages: Any, context: grpc.ServicerContext) -> Any:
        yield from messages

    def answer(messages: Any, context: grpc.ServicerContext) -> Any:
        stock = os.urandom(2**21)
        for message in messages:
            yield stock[: int.from_bytes(message[:4], "little")]

    server = grpc.server(ThreadPoolExecutor(32), options=(*OPTIONS, ("grpc.so_reuseport", 0)))
    handlers = {
        "Exchange": grpc.stream_stream_rpc_method_handler(echo),
        "Answer": grpc.stream_stream_rpc_method_handler(answer),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ports.put(port)
    multiprocessing.parent_process().join()
    server.stop(None).wait()


@contextlib.contextmanager
def serving(
    count: int, *, tuned: bool, server: Callable[[Any, bool], None] = serve
) -> Iterator[tuple[list[Any], list[int]]]:
    """What so many servers say, their ports, and their process ids; they end with the block."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        found: Any = context.Queue()
        pids = []
        for _ in range(count):
            process = context.Process(target=server, args=(found, tuned), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            pids.append(process.pid)
        yield [found.get(timeout=60) for _ in range(count)], pids


class BareWorker:
    """Streams to every echo server, kept open from step to step, as the SDK's are."""

    def __init__(self, ports: list[int], method: str = METHOD) -> None:
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{p}", options=OPTIONS) for p in ports]
        self._queues: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in ports]
        self._calls = [
            channel.stream_stream(method)(iter(messages.get, None))
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


def asking(message: bytes, answer_bytes: int) -> bytes:
    """A message for ANSWER_METHOD, which is answered by so many bytes, 2 MiB at the most."""
    return answer_bytes.to_bytes(4, "little") + message


def payload(size: int) -> bytes:
    """Bytes that do not compress."""
    return os.urandom(size)


if __name__ == "__main__":
    print("this is a part of other benchmarks")
