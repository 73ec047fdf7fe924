"""All-reduce beside gloo, Open MPI and a bare gRPC ring, in one run.

    python benchmarks/allreduce.py [--megabytes 4 64 256] [--processes 2 4]
                                   [--strategies ring tree centralized] [--codecs fp16 fp32]
                                   [--steps 5] [--torch-python PYTHON] [--mpi-python PYTHON]
                                   [--json FILE]

N processes on this machine each have M megabytes of float32, and end with the sum. gloo is
torch.distributed's, on the CPU; Open MPI is measured as installed (shared memory) and over TCP, as
the others are. The floor is a ring of bare grpcio streams that move the bytes that Shardwell's ring
must move, encoded, and add nothing. All live at the same time and take turns step by step, so that
the machine's moods hit all alike; a system that waits for its turn sleeps. Ratios are of medians;
CPU time is a process's; "sent" is what a worker sends, over 2 (n - 1) / n of the encoded array.
Peers that are not installed are skipped, and named; they may be in other interpreters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from peers.installed import Installed, add_flags
from peers.turns import Crew, Step, worker_command
from shardwell.numerics.codec import SUMMED_CODECS
from shardwell_server import LocalCluster

WARM_UP_COUNT = 2
LATENCY_ROUNDS = 6
LATENCY_CALLS = 50
TCP_FLAGS = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo")


@dataclass(kw_only=True)
class Row:
    """One line of the tables."""

    name: str
    """In JSON."""
    label: str
    """In the table."""
    crew: Crew
    """Who does it."""
    order: dict[str, Any] = field(default_factory=dict)
    """The order for the crew."""
    floor: str = ""
    """Name of the row of bare gRPC that moves the same bytes."""
    in_latency: bool = True
    """Whether it is also asked for 10 elements."""


def crews(
    args: argparse.Namespace,
    installed: Installed,
    count: int,
    rendezvous: str,
    stack: contextlib.ExitStack,
) -> list[Row]:
    """Starts the workers of all that can be measured with so many processes."""
    rows = []
    if "gloo" not in installed.missing:
        crew = stack.enter_context(installed.gloo(count, "gloo.py"))
        rows.append(Row(name="gloo", label="gloo", crew=crew))
    if "Open MPI" not in installed.missing:
        for name, label, flags in (
            ("mpi", "Open MPI, shared memory", ()),
            ("mpi_tcp", "Open MPI, TCP", TCP_FLAGS),
        ):
            crew = installed.open_mpi(count, "open_mpi.py", mpirun_flags=flags)
            rows.append(Row(name=name, label=label, crew=stack.enter_context(crew)))
    crew = stack.enter_context(Crew([worker_command("bare_ring.py")] * count, count))
    for codec in args.codecs:
        rows.append(
            Row(
                name=f"bare_{codec}",
                label=f"bare gRPC ring, {codec}",
                crew=crew,
                order={"codec": codec},
                in_latency=codec == args.codecs[0],
            )
        )
    flags = ("--rendezvous", rendezvous, "--strategies", *args.strategies)
    crew = stack.enter_context(Crew([worker_command("shardwell_group.py", *flags)] * count, count))
    for strategy in args.strategies:
        for codec in args.codecs:
            rows.append(
                Row(
                    name=f"{strategy}_{codec}",
                    label=f"Shardwell {strategy}, {codec}",
                    crew=crew,
                    order={"strategy": strategy, "codec": codec},
                    floor=f"bare_{codec}",
                    in_latency=codec == args.codecs[0],
                )
            )
    return rows


def measure(rows: list[Row], megabytes: int, count: int, step_count: int) -> dict[str, Any]:
    """Figures by row, and by column of the table; rows take turns."""
    steps: dict[str, list[Step]] = {row.name: [] for row in rows}
    for number in range(step_count + WARM_UP_COUNT):
        for row in rows:
            step = row.crew.step(do="step", megabytes=megabytes, **row.order)
            if number >= WARM_UP_COUNT:  # the first steps open streams and touch memory
                steps[row.name].append(step)
    medians = {
        name: statistics.median(step.seconds for step in taken) * 1e3
        for name, taken in steps.items()
    }
    found: dict[str, Any] = {}
    for row in rows:
        taken = steps[row.name]
        figures = found[row.name] = {
            "median_ms": round(medians[row.name], 2),
            "fastest_ms": round(min(step.seconds for step in taken) * 1e3, 2),
            "cpu_ms": round(statistics.median(step.cpu_s for step in taken) * 1e3, 2),
        }
        if "gloo" in medians:
            figures["over_gloo"] = round(medians[row.name] / medians["gloo"], 3)
        if row.floor:
            figures["over_bare"] = round(medians[row.name] / medians[row.floor], 3)
            encoded_bytes = megabytes * 10**6 // 4 * SUMMED_CODECS[row.order["codec"]].item_size
            least_bytes = 2 * (count - 1) / count * encoded_bytes
            sent_bytes = max(report["sent_bytes"] for step in taken for report in step.reports)
            figures["sent_over_least"] = round(sent_bytes / least_bytes, 5)
    return found


def latency(rows: list[Row]) -> dict[str, Any]:
    """Milliseconds of all-reducing 10 elements, on rank 0."""
    rows = [row for row in rows if row.in_latency]
    times: dict[str, list[float]] = {row.name: [] for row in rows}
    for number in range(LATENCY_ROUNDS + 1):
        for row in rows:
            step = row.crew.step(do="latency", calls=LATENCY_CALLS, **row.order)
            if number:
                times[row.name] += step.reports[0]["times"]
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    found: dict[str, Any] = {}
    for name, median in medians.items():
        found[name] = {"median_ms": round(median, 4)}
        if "gloo" in medians:
            found[name]["over_gloo"] = round(median / medians["gloo"], 3)
        found[name]["over_bare"] = round(
            median / next(medians[other] for other in medians if other.startswith("bare_")), 3
        )
    return found


COLUMNS = {
    "median_ms": ("ms", "{:.4g}"),
    "fastest_ms": ("fastest", "{:.4g}"),
    "over_gloo": ("/ gloo", "{:.3g}"),
    "over_bare": ("/ bare", "{:.3g}"),
    "cpu_ms": ("CPU ms", "{:.4g}"),
    "sent_over_least": ("sent", "{:.3f}"),
}


def show(console: Console, title: str, rows: list[Row], found: dict[str, Any]) -> None:
    """Prints one table."""
    columns = [name for name in COLUMNS if any(name in figures for figures in found.values())]
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(COLUMNS[name][0], justify="right")
    for row in rows:
        if row.name in found:
            figures = found[row.name]
            table.add_row(
                row.label,
                *(
                    COLUMNS[name][1].format(figures[name]) if name in figures else ""
                    for name in columns
                ),
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    strategies = ["ring", "tree", "centralized"]
    parser.add_argument("--strategies", nargs="+", choices=strategies, default=strategies)
    codecs = ["fp16", "fp32"]
    parser.add_argument("--codecs", nargs="+", choices=list(SUMMED_CODECS), default=codecs)
    parser.add_argument("--steps", type=int, default=5)
    add_flags(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )
    installed = Installed(args)
    reasons = [f"{peer}: {why}" for peer, why in installed.missing.items()]
    for reason in reasons:
        console.print(f"skipped: {reason}", soft_wrap=True)
    results = []
    for count in args.processes:
        with LocalCluster(1) as cluster, contextlib.ExitStack() as stack:
            rows = crews(args, installed, count, cluster.target, stack)
            for megabytes in args.megabytes:
                found = measure(rows, megabytes, count, args.steps)
                title = f"{count} processes, {megabytes} MB of float32, {args.steps} steps"
                show(console, title, rows, found)
                results.append({"processes": count, "megabytes": megabytes, "rows": found})
            found = latency(rows)
            calls = LATENCY_ROUNDS * LATENCY_CALLS
            show(console, f"{count} processes, 10 elements, {calls} calls", rows, found)
            results.append({"processes": count, "elements": 10, "rows": found})
    result = {"steps": args.steps, "skipped": reasons, "results": results}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
