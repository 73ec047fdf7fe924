"""What gRPC itself costs, for docs/adr: message sizes, threads or asyncio, glibc's allocator.

    python benchmarks/transport.py [--steps 12]

Two clients and two echo servers, 16 MB each way between each pair; then one small message and back,
on an open stream and on a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

import shardwell
from bare_grpc import METHOD, OPTIONS, BareWorker, payload, serve, serving

BYTES_PER_PAIR = 16_000_000
SIZES = (64 * 1024, 256 * 1024, 512 * 1024, 1024 * 1024, 2048 * 1024)


def serve_asyncio(ports: Any, tuned: bool) -> None:
    """The echo server on asyncio."""
    if tuned:
        shardwell.tune_malloc()

    async def echo(messages: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async def run() -> None:
        server = grpc.aio.server(options=(*OPTIONS, ("grpc.so_reuseport", 0)))
        handler = grpc.stream_stream_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bare.Echo", {"Exchange": handler}),)
        )
        ports.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


class AsyncioWorker:
    """As BareWorker, on asyncio."""

    def __init__(self, ports: list[int]) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls = self._loop.run_until_complete(self._open(ports))

    async def _open(self, ports: list[int]) -> list[Any]:
        self._channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) for port in ports
        ]
        return [channel.stream_stream(METHOD)() for channel in self._channels]

    def step(self, message: bytes, count: int) -> None:
        """Sends `count` messages to every server and takes them back."""

        async def send(call: Any) -> None:
            for _ in range(count):
                await call.write(message)

        async def take(call: Any) -> None:
            for _ in range(count):
                await call.read()

        async def both() -> None:
            await asyncio.gather(*(act(call) for call in self._calls for act in (send, take)))

        self._loop.run_until_complete(both())

    def close(self) -> None:
        """Ends the streams."""

        async def end() -> None:
            for call in self._calls:
                await call.done_writing()
                await call.read()
            for channel in self._channels:
                await channel.close()

        self._loop.run_until_complete(end())
        self._loop.close()


SERVERS: dict[str, Callable[..., None]] = {"threads": serve, "asyncio": serve_asyncio}
WORKERS: dict[str, Any] = {"threads": BareWorker, "asyncio": AsyncioWorker}


def work(
    kind: str, tuned: bool, ports: list[int], size: int, steps: int, barrier: Any, out: Any
) -> None:
    """One client process."""
    if tuned:
        shardwell.tune_malloc()
    worker, message, times = WORKERS[kind](ports), payload(size), []
    for _ in range(steps + 2):
        barrier.wait()
        start = time.perf_counter()
        worker.step(message, BYTES_PER_PAIR // size)
        barrier.wait()
        times.append(time.perf_counter() - start)
    out.put(times[2:])
    worker.close()


def measure(server: str, worker: str, tuned: bool, size: int, steps: int) -> float:
    """Median milliseconds of a step."""
    context = multiprocessing.get_context("spawn")
    with serving(2, tuned=tuned, server=SERVERS[server]) as (ports, _):
        barrier, out = context.Barrier(2), context.Queue()
        arguments = (worker, tuned, ports, size, steps, barrier, out)
        workers = [context.Process(target=work, args=arguments, daemon=True) for _ in range(2)]
        for process in workers:
            process.start()
        times = [max(pair) for pair in zip(*(out.get(timeout=120) for _ in workers), strict=True)]
        for process in workers:
            process.terminate()
            process.join()
    return statistics.median(times) * 1e3


def small_message(runs: int = 300) -> dict[str, float]:
    """Median milliseconds for 60 bytes and back."""
    times: dict[str, list[float]] = {"open stream": [], "new stream": []}
    with (
        serving(1, tuned=True) as ((port,), _),
        grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel,
    ):
        worker, message = BareWorker([port]), payload(60)
        call = channel.stream_stream(METHOD)
        for _ in range(runs):
            start = time.perf_counter()
            worker.ping(message)
            middle = time.perf_counter()
            list(call(iter([message])))
            times["open stream"].append(middle - start)
            times["new stream"].append(time.perf_counter() - middle)
        worker.close()
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    table = Table(title="ms for 64 MB each way in all, 2 clients, 2 servers")
    for column in ("message", "server", "client", "glibc as installed", "glibc tuned"):
        table.add_column(column)
    for size in SIZES:
        for server in SERVERS:
            for worker in WORKERS:
                plain, tuned = (
                    measure(server, worker, tuned, size, steps) for tuned in (False, True)
                )
                row = (f"{size // 1024} KiB", server, worker, f"{plain:.0f}", f"{tuned:.0f}")
                table.add_row(*row)
    console = Console()
    console.print(table)
    for name, milliseconds in small_message().items():
        console.print(f"60 bytes and back on {name}: {milliseconds:.2f} ms")


if __name__ == "__main__":
    main()
