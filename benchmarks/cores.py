"""How a step uses the cores of this machine: one thread a call, and several, in turns.

    python benchmarks/cores.py [--megabytes 256] [--steps 7] [--threads N] [--limit-s 300]

Workers and shards are processes. A line is a number of workers, of shards, a codec, and whether
they share memory or use gRPC; its two clusters, one with SHARDWELL_THREADS=1 and one with N (by
default what `connect` and `serve` take), live at the same time and take turns step by step. `GB/s`
is what a worker sends of float32, and gets back, in the time of a step. `worker` and `shards` are
processor time of a step, in ms, with one thread and with several: of one worker at the mean, and of
all shards. A ratio is that of the same turn: the median of all, and the quartiles.

Above the table are copies of as many bytes by 1, 4 and all threads: what this machine's memory
gives. `peers.py exchange all_reduce` has bare gRPC, gloo and Open MPI beside.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from peers.turns import Crew, cpu_s, worker_command
from shardwell.threads.spread import THREADS_VARIABLE, core_count, thread_count
from shardwell.transport.arena import SAME_HOST_VARIABLE
from shardwell_server import LocalCluster
from shardwell_server.processes import signals

WARM_UP_COUNT = 2


class Case(NamedTuple):
    """A line of the table."""

    workers: int
    shards: int
    same_host: bool = True
    codec: str = "fp16"

    def __str__(self) -> str:
        where = "same host" if self.same_host else "gRPC"
        return f"{self.workers} x {self.shards}, {where}, {self.codec}"


CASES = (
    Case(1, 1),
    Case(1, 4),
    Case(1, 4, codec="fp32"),
    Case(1, 4, same_host=False),
    Case(2, 2),
    Case(4, 4),
    Case(4, 4, same_host=False),
    Case(8, 8),
)


class Taken(NamedTuple):
    """What a step took."""

    s: float
    worker_cpu_s: float
    shards_cpu_s: float


class Side:
    """A cluster with its workers. A context manager that leaves none behind."""

    def __init__(self, case: Case, megabytes: int, threads: int) -> None:
        self._stack = contextlib.ExitStack()
        environment = {THREADS_VARIABLE: str(threads)}
        if not case.same_host:
            environment[SAME_HOST_VARIABLE] = "off"
        try:
            before = dict(os.environ)
            os.environ.update(environment)  # which shards' processes begin with
            try:
                cluster = self._stack.enter_context(LocalCluster(case.shards, processes=True))
            finally:
                os.environ.clear()
                os.environ.update(before)
            self._shards = [child.pid for child in cluster.children]
            words = (f"--shards={cluster.target}", f"--codec={case.codec}")
            command = worker_command("shardwell_exchange.py", *words, "--megabytes", str(megabytes))
            crew = Crew([command] * case.workers, case.workers, environment)
            self._crew = self._stack.enter_context(contextlib.closing(crew))
        except BaseException:
            self._stack.close()
            raise

    def step(self) -> Taken:
        """One step of all workers."""
        before = cpu_s(self._shards)
        step = self._crew.step()
        return Taken(step.seconds, step.cpu_s, cpu_s(self._shards) - before)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def copy_gb_s(megabytes: int, threads: int) -> float:
    """Bytes read and written by copies on so many threads, the best of five."""
    source = np.ones(megabytes * 10**6 // 4, np.float32)
    target = np.zeros_like(source)
    bounds = np.linspace(0, source.size, threads + 1).astype(int)
    parts = [slice(*bounds[i : i + 2]) for i in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        found = []
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))
            found.append(time.perf_counter() - start)
    return 2 * source.nbytes / 1e9 / min(found)


def taken(case: Case, megabytes: int, threads: int, steps: int) -> list[tuple[Taken, Taken]]:
    """Steps with one thread and with several, in turns."""
    found = []
    with Side(case, megabytes, 1) as one, Side(case, megabytes, threads) as several:
        for number in range(WARM_UP_COUNT + steps):
            signals.check()
            turn = (one.step(), several.step())
            if number >= WARM_UP_COUNT:
                found.append(turn)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, help="default: as connect and serve take them")
    parser.add_argument("--limit-s", type=float, default=300.0, help="after which no line begins")
    args = parser.parse_args()
    threads, console, began_s = thread_count(args.threads), Console(width=110), time.monotonic()
    console.print(f"{core_count()} cores; {args.megabytes} MB; 1 thread and {threads}")
    for count in sorted({1, min(4, core_count()), core_count()}):
        console.print(f"copy by {count:3} threads: {copy_gb_s(args.megabytes, count):6.1f} GB/s")
    titles = ("", "ms, 1", f"ms, {threads}", "ratio", "GB/s", "worker", "shards")
    table = Table(*titles, box=box.SIMPLE_HEAD)
    for case in CASES:
        if time.monotonic() - began_s > args.limit_s:
            table.add_row(str(case), "no time left")
            continue
        turns = taken(case, args.megabytes, threads, args.steps)
        one, several = (statistics.median(turn[i].s for turn in turns) for i in range(2))
        low, middle, high = np.percentile([b.s / a.s for a, b in turns], [25, 50, 75])
        table.add_row(
            str(case),
            f"{1e3 * one:.1f}",
            f"{1e3 * several:.1f}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{args.megabytes / 1e3 / several:.2f}",
            *(
                " / ".join(
                    f"{1e3 * statistics.median(turn[side][place] for turn in turns):.0f}"
                    for side in range(2)
                )
                for place in (1, 2)
            ),
        )
    console.print(table)


if __name__ == "__main__":
    main()
