"""One synchronous step beside bare gRPC, in one run.

    python benchmarks/step.py [--workers 2] [--shard-count 2] [--megabytes 64] [--codec fp16]
                              [--chunk-kib 1024] [--steps 15] [--json FILE]
                              [--data-dir DIR] [--durability process|step|SECONDS]

W workers each push an N MB float32 gradient and get N MB of weights back from S shards, SGD. Beside
it, the floor: the same encoded bytes, in messages of the same size, both ways between as many
processes, through bare grpcio streams that return what they get. "Over gRPC" is a cluster that
shares no memory with its workers, as if they were on other machines; the last rows are one whose
shards keep everything in mapped files, in a directory made in DIR. All rows
take turns step by step, so that the machine's moods hit all alike; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import shardwell
from bare_grpc import BareWorker, payload, serve
from shardwell.numerics.codec import CODECS
from shardwell_server import LocalCluster

LATENCY_STEPS = 300
ROWS = {
    "bare": "bare gRPC, as installed",
    "bare_tuned": "bare gRPC, malloc tuned",
    "exchange": "exchange",
    "exchange_network": "exchange, over gRPC",
    "put_get": "put_gradient, get_weights",
    "exchange_mmap": "exchange, mmap store",
    "put_get_mmap": "put, get, mmap store",
}


class Bench:
    """What one worker process can be asked to do, one step at a time."""

    def __init__(self, index: int, ports: list[int], target: str, args: argparse.Namespace) -> None:
        self._bare = BareWorker(ports)
        self._args = args
        item_size = CODECS[args.codec.removesuffix("+lz4")].item_size
        per_shard = args.megabytes * 10**6 // 4 * item_size / args.shard_count
        self._message_count = max(round(per_shard / (args.chunk_kib * 1024)), 1)
        self._message = payload(round(per_shard / self._message_count))
        self._client: shardwell.Client | None = None
        if not target:
            return
        size = args.megabytes * 10**6 // 4
        self._client = shardwell.connect(target, worker_id=f"w{index}")
        self._model = self._client.parameter(
            "model",
            size=size,
            optimizer=shardwell.SGD(learning_rate=0.01),
            worker_count=args.workers,
            codec=args.codec,
        )
        self._gradient = np.random.default_rng(index).standard_normal(size, np.float32) * 0.01
        self._out = np.zeros(size, np.float32)
        self._model.init(self._out)
        if index == 0:
            self._tiny = self._client.parameter(
                "tiny", size=10, optimizer=shardwell.SGD(learning_rate=0.01), codec=args.codec
            )
            self._tiny.init(np.zeros(10, np.float32))

    def bare(self) -> None:
        """The floor."""
        self._bare.step(self._message, self._message_count)

    def exchange(self) -> None:
        """Both at once."""
        self._model.exchange(self._gradient, sample_count=32, out=self._out)

    def put_get(self) -> None:
        """One after the other."""
        step = self._model.put_gradient(self._gradient, sample_count=32)
        self._model.get_weights(out=self._out, min_version=step + 1)

    def latency(self) -> dict[str, float]:
        """Medians of a tiny step and of bare messages of its size, in turns."""
        tiny, gradient, message = self._tiny, np.ones(10, np.float32), payload(100)
        times: dict[str, list[float]] = {"tiny exchange": [], "tiny bare": []}
        for _ in range(LATENCY_STEPS):
            start = time.perf_counter()
            tiny.exchange(gradient)
            middle = time.perf_counter()
            self._bare.ping(message)
            times["tiny exchange"].append(middle - start)
            times["tiny bare"].append(time.perf_counter() - middle)
        return {name: statistics.median(values) for name, values in times.items()}

    def close(self) -> None:
        """Ends everything."""
        self._bare.close()
        if self._client is not None:
            self._client.close()


def work(
    index: int, ports: list[int], target: str, args: argparse.Namespace, barrier: Any, pipe: Any
) -> None:
    """A worker process: does what the pipe says, all workers at the same moment."""
    bench = Bench(index, ports, target, args)
    pipe.send("ready")
    while (order := pipe.recv()) != "stop":
        if order == "latency":
            pipe.send(bench.latency())
            continue
        barrier.wait()
        start = time.perf_counter()
        getattr(bench, order)()
        barrier.wait()
        pipe.send(time.perf_counter() - start)
    bench.close()


class Crew:
    """The workers of one kind, and the echo servers that they use."""

    def __init__(self, args: argparse.Namespace, target: str) -> None:
        context = multiprocessing.get_context("spawn")
        ports: Any = context.Queue()
        self._servers = [
            context.Process(target=serve, args=(ports, bool(target)), daemon=True)
            for _ in range(args.shard_count)
        ]
        for server in self._servers:
            server.start()
        addresses = [ports.get(timeout=60) for _ in self._servers]
        barrier = context.Barrier(args.workers)
        self._pipes, self._workers = [], []
        for index in range(args.workers):
            mine, theirs = context.Pipe()
            worker = context.Process(
                target=work, args=(index, addresses, target, args, barrier, theirs), daemon=True
            )
            worker.start()
            self._pipes.append(mine)
            self._workers.append(worker)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def step(self, order: str) -> float:
        """One step of all; seconds."""
        for pipe in self._pipes:
            pipe.send(order)
        return max(pipe.recv() for pipe in self._pipes)

    def latency(self) -> dict[str, float]:
        """See Bench.latency; the other workers rest."""
        self._pipes[0].send("latency")
        result: dict[str, float] = self._pipes[0].recv()
        return result

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.send("stop")
        for worker in self._workers:
            worker.join(10)
        for process in (*self._servers, *self._workers):
            process.terminate()
            process.join()


def resident_mb(pid: int, field: str) -> float:
    """VmRSS or VmHWM (peak) of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(field)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-count", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--codec", default="fp16")
    parser.add_argument("--chunk-kib", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--data-dir", type=Path, help="default: the directory for temporary files")
    parser.add_argument("--durability", default="process", help="of the mapped files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times: dict[str, list[float]] = {row: [] for row in ROWS}
    chunk_size_bytes = args.chunk_kib * 1024
    with (
        tempfile.TemporaryDirectory(dir=args.data_dir) as data_dir,
        LocalCluster(
            args.shard_count, processes=True, chunk_size_bytes=chunk_size_bytes
        ) as cluster,
        LocalCluster(
            args.shard_count, processes=True, chunk_size_bytes=chunk_size_bytes, same_host="off"
        ) as apart,
        LocalCluster(
            args.shard_count,
            data_dir,
            processes=True,
            chunk_size_bytes=chunk_size_bytes,
            durability=args.durability,
        ) as kept,
    ):
        pid = cluster.children[0].pid
        empty_mb = resident_mb(pid, "VmRSS")
        plain, tuned = Crew(args, ""), Crew(args, cluster.target)
        network, mapped = Crew(args, apart.target), Crew(args, kept.target)
        try:
            for number in range(args.steps + 2):
                for row, crew, order in (
                    ("bare", plain, "bare"),
                    ("bare_tuned", tuned, "bare"),
                    ("exchange", tuned, "exchange"),
                    ("exchange_network", network, "exchange"),
                    ("put_get", tuned, "put_get"),
                    ("exchange_mmap", mapped, "exchange"),
                    ("put_get_mmap", mapped, "put_get"),
                ):
                    seconds = crew.step(order)
                    if number >= 2:  # the first steps open streams and touch memory
                        times[row].append(seconds)
            latency, mapped_latency = tuned.latency(), mapped.latency()
            latency["tiny mmap"] = mapped_latency["tiny exchange"]
            peak_mb = resident_mb(pid, "VmHWM")
        finally:
            plain.close()
            tuned.close()
            network.close()
            mapped.close()
    medians = {row: statistics.median(values) * 1e3 for row, values in times.items()}
    report(args, times, medians, latency, empty_mb, peak_mb)


def report(
    args: argparse.Namespace,
    times: dict[str, list[float]],
    medians: dict[str, float],
    latency: dict[str, float],
    empty_mb: float,
    peak_mb: float,
) -> None:
    """Prints the table, and writes JSON if asked to."""
    console = Console()
    console.print(
        f"{args.workers} workers, {args.shard_count} shards, {args.megabytes} MB of float32, "
        f"{args.codec}; {os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}"
    )
    table = Table()
    for column in ("a step", "median ms", "fastest ms", "/ bare", "/ bare tuned", "worker GB/s"):
        table.add_column(column, justify="left" if column == "a step" else "right")
    for row, label in ROWS.items():
        table.add_row(
            label,
            f"{medians[row]:.1f}",
            f"{min(times[row]) * 1e3:.1f}",
            f"{medians[row] / medians['bare']:.2f}",
            f"{medians[row] / medians['bare_tuned']:.2f}",
            f"{2 * args.megabytes / medians[row]:.2f}",
        )
    tiny, bare = latency["tiny exchange"] * 1e3, latency["tiny bare"] * 1e3
    table.add_row("10 elements, 1 worker", f"{tiny:.3f}", "", f"{tiny / bare:.2f}", "", "")
    tiny_mmap = latency["tiny mmap"] * 1e3
    table.add_row("  ..., mmap store", f"{tiny_mmap:.3f}", "", f"{tiny_mmap / bare:.2f}", "", "")
    table.add_row("  a bare message, as large", f"{bare:.3f}", "", "1.00", "", "")
    console.print(table)
    slice_mb = args.megabytes / args.shard_count
    held_mb = slice_mb * (2 if args.workers > 1 else 1)
    console.print(
        f"shard 0: {empty_mb:.0f} MB resident when empty, {peak_mb:.0f} MB at its peak: "
        f"{peak_mb - empty_mb:.0f} MB for {held_mb:.0f} MB of float32 weights and sums"
    )
    result = {
        "workers": args.workers,
        "shards": args.shard_count,
        "megabytes": args.megabytes,
        "codec": args.codec,
        "chunk_kib": args.chunk_kib,
        "median_ms": {row: round(value, 2) for row, value in medians.items()},
        "exchange_over_bare": round(medians["exchange"] / medians["bare"], 3),
        "exchange_over_bare_tuned": round(medians["exchange"] / medians["bare_tuned"], 3),
        "exchange_network_over_bare_tuned": round(
            medians["exchange_network"] / medians["bare_tuned"], 3
        ),
        "exchange_over_network": round(medians["exchange"] / medians["exchange_network"], 3),
        "put_get_over_bare": round(medians["put_get"] / medians["bare"], 3),
        "put_get_over_bare_tuned": round(medians["put_get"] / medians["bare_tuned"], 3),
        "exchange_mmap_over_memory": round(medians["exchange_mmap"] / medians["exchange"], 3),
        "put_get_mmap_over_memory": round(medians["put_get_mmap"] / medians["put_get"], 3),
        "tiny_mmap_over_memory": round(tiny_mmap / tiny, 3),
        "tiny_exchange_ms": round(tiny, 4),
        "tiny_exchange_over_bare": round(tiny / bare, 3),
        "shard_empty_mb": round(empty_mb, 1),
        "shard_peak_mb": round(peak_mb, 1),
    }
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
