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
import contextlib
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bare_grpc import serving
from peers.turns import Crew, worker_command
from shardwell.numerics.codec import CODECS
from shardwell_server import LocalCluster

WARM_UP_COUNT = 2
LATENCY_ROUNDS = 6
LATENCY_CALLS = 50
TINY_MESSAGE_BYTES = 100
"""About what an exchange of 10 elements sends to a shard."""
ROWS = {
    "bare": "bare gRPC, as installed",
    "bare_tuned": "bare gRPC, malloc tuned",
    "exchange": "exchange",
    "exchange_network": "exchange, over gRPC",
    "put_get": "put_gradient, get_weights",
    "exchange_mmap": "exchange, mmap store",
    "put_get_mmap": "put, get, mmap store",
}


def resident_mb(pid: int, field: str) -> float:
    """VmRSS or VmHWM (peak) of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(field)


def start(
    args: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[dict[str, Crew], int, float]:
    """Starts everything; all workers, and a shard's process id and its MB when it was empty."""
    crews = {}
    codec = CODECS[args.codec.removesuffix("+lz4")]
    for name, tuned in (("bare", False), ("bare_tuned", True)):
        ports, _ = stack.enter_context(serving(args.shard_count, tuned=tuned))
        flags = [
            "--ports",
            *map(str, ports),
            "--bytes",
            str(codec.encoded_bytes(args.megabytes * 10**6 // 4)),
        ]
        flags += ["--message-bytes", str(args.chunk_kib * 1024), *(["--tuned"] if tuned else [])]
        command = worker_command("bare_exchange.py", *flags)
        crews[name] = stack.enter_context(Crew([command] * args.workers, args.workers))
    crews["tiny bare"] = stack.enter_context(Crew([command], 1))
    directory = stack.enter_context(tempfile.TemporaryDirectory(dir=args.data_dir))
    kinds: dict[str, dict[str, Any]] = {
        "memory": {},
        "network": {"same_host": "off"},
        "mmap": {"data_dir": directory, "durability": args.durability},
    }
    shards = []
    for name, options in kinds.items():
        cluster = stack.enter_context(
            LocalCluster(
                args.shard_count, processes=True, chunk_size_bytes=args.chunk_kib * 1024, **options
            )
        )
        pid = cluster.children[0].pid
        shards.append((pid, resident_mb(pid, "VmRSS")))
        flags = ["--shards", cluster.target, "--megabytes", str(args.megabytes)]
        flags += ["--codec", args.codec]
        command = worker_command("shardwell_exchange.py", *flags)
        crews[name] = stack.enter_context(Crew([command] * args.workers, args.workers))
        if name != "network":
            command = worker_command(
                "shardwell_exchange.py", *flags[:2], "--small", "10-elements", "--codec", args.codec
            )
            crews[f"tiny {name}"] = stack.enter_context(Crew([command], 1))
    return crews, *shards[0]


def latencies(crews: dict[str, Crew]) -> dict[str, float]:
    """Median seconds of a tiny step of one worker, and of bare messages of its size."""
    times: dict[str, list[float]] = {}
    for number in range(LATENCY_ROUNDS + 1):
        for name, crew, order in (
            ("tiny exchange", "tiny memory", {"do": "10-elements"}),
            ("tiny mmap", "tiny mmap", {"do": "10-elements"}),
            ("tiny bare", "tiny bare", {"bytes": TINY_MESSAGE_BYTES}),
        ):
            step = crews[crew].step(calls=LATENCY_CALLS, **order)
            if number:
                times.setdefault(name, []).extend(step.reports[0]["times"])
    return {name: statistics.median(values) for name, values in times.items()}


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
    with contextlib.ExitStack() as stack:
        crews, pid, empty_mb = start(args, stack)
        for number in range(args.steps + WARM_UP_COUNT):
            for row, crew, order in (
                ("bare", "bare", {}),
                ("bare_tuned", "bare_tuned", {}),
                ("exchange", "memory", {"do": "exchange"}),
                ("exchange_network", "network", {"do": "exchange"}),
                ("put_get", "memory", {"do": "put_get"}),
                ("exchange_mmap", "mmap", {"do": "exchange"}),
                ("put_get_mmap", "mmap", {"do": "put_get"}),
            ):
                seconds = crews[crew].step(**order).seconds
                if number >= WARM_UP_COUNT:  # the first steps open streams and touch memory
                    times[row].append(seconds)
        peak_mb = resident_mb(pid, "VmHWM")
        latency = latencies(crews)
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
