"""What bounds a small step on one machine, for docs/performance.md: bare messages, and ours.

    python benchmarks/small_step.py [--turns 15]
    python benchmarks/small_step.py --samples 10         what the account of samples costs

One worker, two servers, each a process; in turns, each turn 100 calls. A message of 60 bytes to
each server and back: over gRPC's open streams; over Unix sockets, whose servers are asyncio's, as a
shard's are; and the same by another thread of the worker, to which its caller hands it over and
which it waits for, as a client's call does, whom no signal may break. Then `exchange` of 10
elements. CPU is the processor time of the worker and of both servers. With --samples: `exchange` of
so many elements with batches of 32 samples, beside one without, on two shards with files; CPU says
the same on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import queue
import select
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import shardwell
from bare_grpc import BareWorker, payload, serving
from peers.turns import cpu_s
from shardwell_server import LocalCluster

CALL_COUNT = 100
"""In a turn."""
MESSAGE_BYTES = 60


class Side(NamedTuple):
    """One of those that take turns."""

    label: str
    call: Callable[[], object]
    pids: list[int]
    """Of its servers."""


class Echo(asyncio.BufferedProtocol):
    """Sends back what comes."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(4096))

    def connection_made(self, transport: Any) -> None:
        """Keeps the transport."""
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer to receive into."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """The same."""
        self._transport.write(bytes(self._buffer[:nbytes]))


def serve_unix(names: Any, tuned: bool) -> None:
    """A server on an abstract socket until the process that started it ends, or ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark
    name = f"shardwell-bench-{os.getpid()}"

    async def run() -> None:
        await asyncio.get_running_loop().create_unix_server(Echo, f"\0{name}")
        names.put(name)
        await asyncio.to_thread(multiprocessing.parent_process().join)

    asyncio.run(run())


class UnixWorker:
    """A connection to every server."""

    def __init__(self, names: list[str]) -> None:
        self._connections = [socket.socket(socket.AF_UNIX) for _ in names]
        self._poll = select.poll()
        for connection, name in zip(self._connections, names, strict=True):
            connection.connect(f"\0{name}")
            self._poll.register(connection, select.POLLIN)
        self._by_file = {each.fileno(): each for each in self._connections}

    def ping(self, message: bytes) -> None:
        """One message to every server and back."""
        for connection in self._connections:
            connection.send(message)
        left = len(self._connections)
        while left:
            ready = self._poll.poll(10_000)
            if not ready:
                raise TimeoutError("a server does not answer")
            for file, _ in ready:
                self._by_file[file].recv(4096)
                left -= 1

    def close(self) -> None:
        """Ends the connections."""
        for connection in self._connections:
            connection.close()


def handed_over(call: Callable[[], object]) -> Callable[[], None]:
    """The call, made by a thread of its own that each caller waits for."""
    asked: queue.SimpleQueue[queue.SimpleQueue[None]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            answered = asked.get()
            call()
            answered.put(None)

    threading.Thread(target=work, daemon=True).start()

    def hand_over() -> None:
        answered: queue.SimpleQueue[None] = queue.SimpleQueue()
        asked.put(answered)
        answered.get(timeout=10)

    return hand_over


def exchange(cluster: LocalCluster, client: shardwell.Client) -> Side:
    """A step of 10 elements."""
    net = client.parameter("net", size=10, optimizer=shardwell.SGD(learning_rate=0.01))
    net.init(np.zeros(10, np.float32))
    gradient, out = np.ones(10, np.float32), np.zeros(10, np.float32)
    pids = [child.pid for child in cluster.children]
    return Side("exchange of 10 elements", lambda: net.exchange(gradient, out=out), pids)


def compare_samples(size: int, turns: int) -> None:
    """Prints the time of a step with samples, in those of one without."""
    call_count = CALL_COUNT if size < 100_000 else 2
    gradient, out = np.ones(size, np.float32), np.zeros(size, np.float32)
    spent: dict[bool, list[list[float]]] = {False: [], True: []}
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(2, processes=True, data_dir=directory) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        nets = [
            client.parameter(f"net{i}", size=size, optimizer=shardwell.SGD(0.01)) for i in (0, 1)
        ]
        for net in nets:
            net.init(np.zeros(size, np.float32))
        batches = nets[1].batches(shardwell.Samples(2**30))
        pids = [os.getpid(), *(child.pid for child in cluster.children)]

        def clocks() -> list[float]:
            return [time.perf_counter(), cpu_s(pids), *(cpu_s([pid]) for pid in pids)]

        for turn in range(turns + 1):
            for has_samples, net in zip(spent, nets, strict=True):
                began = clocks()
                for _ in range(call_count):
                    net.exchange(gradient, batch=next(batches) if has_samples else (), out=out)
                if turn:  # the first one warms up
                    ended = clocks()
                    spent[has_samples].append(
                        [(b - a) / call_count for a, b in zip(began, ended, strict=True)]
                    )
    table = Table(
        title=f"a step of {size} elements, {turns} turns, {os.cpu_count()} cores",
        title_justify="left",
        box=box.SIMPLE,
    )
    for column in ("", "us", "with samples", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    labels = ("time", "CPU", "CPU of the worker", "CPU of shard 0", "CPU of shard 1")
    sides = [zip(*found, strict=True) for found in spent.values()]
    for label, bare, counted in zip(labels, *sides, strict=True):
        ratio = statistics.median(b / a for a, b in zip(bare, counted, strict=True))
        us = (f"{statistics.median(found) * 1e6:.0f}" for found in (bare, counted))
        table.add_row(label, *us, f"{ratio:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--samples", type=int, metavar="ELEMENTS")
    arguments = parser.parse_args()
    turns = arguments.turns
    if arguments.samples:
        compare_samples(arguments.samples, turns)
        return
    message = payload(MESSAGE_BYTES)
    with contextlib.ExitStack() as stack:
        ports, grpc_pids = stack.enter_context(serving(2, tuned=True))
        names, unix_pids = stack.enter_context(serving(2, tuned=False, server=serve_unix))
        cluster = stack.enter_context(LocalCluster(2, processes=True))
        client = stack.enter_context(shardwell.connect(cluster.target, worker_id="w0"))
        bare, unix, other = BareWorker(ports), UnixWorker(names), UnixWorker(names)
        for each in (bare, unix, other):
            stack.callback(each.close)
        sides = [
            Side("bare messages, gRPC", lambda: bare.ping(message), grpc_pids),
            Side("bare messages, Unix sockets", lambda: unix.ping(message), unix_pids),
            Side(
                "the same, by another thread", handed_over(lambda: other.ping(message)), unix_pids
            ),
            exchange(cluster, client),
        ]
        times: dict[str, list[float]] = {side.label: [] for side in sides}
        cpu: dict[str, list[float]] = {side.label: [] for side in sides}
        for turn in range(turns + 1):
            for side in sides:
                began_s, worked_s = time.perf_counter(), cpu_s([os.getpid(), *side.pids])
                for _ in range(CALL_COUNT):
                    side.call()
                if turn:  # the first one warms up
                    times[side.label].append((time.perf_counter() - began_s) / CALL_COUNT)
                    worked_s = cpu_s([os.getpid(), *side.pids]) - worked_s
                    cpu[side.label].append(worked_s / CALL_COUNT)
    table = Table(
        title=f"a step on one machine, {turns} turns, {os.cpu_count()} cores",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("")
    for column in ("us", "of gRPC's", "CPU us"):
        table.add_column(column, justify="right")
    first = times[sides[0].label]
    for label, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, first, strict=True))
        median_us = statistics.median(found) * 1e6
        cpu_us = statistics.median(cpu[label]) * 1e6
        table.add_row(label, f"{median_us:.0f}", f"{ratio:.2f}", f"{cpu_us:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
