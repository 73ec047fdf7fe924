"""Predicted beside measured: `shardwell plan`'s step times and those of real runs on limited links.

    python benchmarks/plan.py [--mbit 1000] [--megabytes 64] [--workers 2 4] [--steps 5]
                              [--layouts co-located dedicated ring tree] [--codecs fp16 fp32]
                              [--limit-s 400] [--json FILE]

Needs Linux and root; see link.py, whose network it uses: hosts that are network namespaces, each
with a cable that lets `mbit` Mbit/s pass in either direction. Co-located: a worker on each of n
hosts, and a shard on each, or on half of them. Dedicated: n hosts with a worker and n, or n / 2,
with a shard. Ring, tree: the all-reduce of n hosts' workers. Codecs of one network take turns; the
first two steps do not count.

The prediction is made from the arguments alone; one constant of it, step_time.LAG, was once fitted
to such runs. cores: busy, of this whole machine; where that is all of them, the hosts wait for
cores, and not for links, as machines of their own would not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from link import INSECURE, PORT, WARM_UP_COUNT, Network, busy_s, serve, stop, why_not
from peers.turns import Crew, worker_command
from shardwell.group.schedule.strategies import Tree
from shardwell_server.operations.step_time import Job, StepTime, co_located, dedicated, ring, tree

LATENCY_S = 0.5e-3
"""A message and back between two namespaces of a machine that is not idle."""


def measured(
    args: argparse.Namespace, layout: str, worker_count: int, shard_count: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of a step, and how many of this machine's cores were busy, by codec."""
    is_apart = layout == "dedicated"
    host_count = worker_count + shard_count * is_apart
    with Network(host_count, args.mbit, "cubic") as network, contextlib.ExitStack() as stack:
        hosts = [index + worker_count * is_apart for index in range(shard_count)]
        for index, host in enumerate(hosts):
            serve(network, index, shard_count, 1024, stack, host=host)
        target = ",".join(f"{network.address(host)}:{PORT}" for host in hosts)

        def crew(worker: str, *flags: str) -> Crew:
            words = worker_command(worker, *flags)
            commands = [network.command(index, words) for index in range(worker_count)]
            return stack.enter_context(Crew(commands, worker_count, INSECURE))

        crews: dict[str, tuple[Crew, dict[str, Any]]] = {}
        if layout in ("ring", "tree"):
            group = crew("shardwell_group.py", "--rendezvous", target, "--strategies", layout)
            for codec in args.codecs:
                crews[codec] = (group, {"strategy": layout, "codec": codec})
        else:
            for codec in args.codecs:
                flags = ("--shards", target, "--megabytes", str(args.megabytes), "--codec", codec)
                name = ("--parameter", f"model-{codec}")
                crews[codec] = (crew("shardwell_exchange.py", *flags, *name), {})
        seconds: dict[str, list[float]] = {codec: [] for codec in crews}
        cores: dict[str, list[float]] = {codec: [] for codec in crews}
        for number in range(args.steps + WARM_UP_COUNT):
            for codec, (one, order) in crews.items():
                worked_s = busy_s()
                step = one.step(do="step", megabytes=args.megabytes, **order)
                if number >= WARM_UP_COUNT:
                    seconds[codec].append(step.seconds)
                    cores[codec].append((busy_s() - worked_s) / step.seconds)
        return {
            codec: (statistics.median(seconds[codec]), statistics.median(cores[codec]))
            for codec in crews
        }


def predicted(
    args: argparse.Namespace, layout: str, worker_count: int, shard_count: int, codec: str
) -> StepTime:
    """What `shardwell plan` says."""
    job = Job(
        element_count=args.megabytes * 10**6 // 4,
        worker_count=worker_count,
        shard_count=shard_count,
        codec=codec,
        link_bytes_per_s=args.mbit * 1e6 / 8,
        latency_s=LATENCY_S,
    )
    if layout in ("ring", "tree"):
        return ring(job) if layout == "ring" else tree(job, Tree().arity)
    return dedicated(job) if layout == "dedicated" else co_located(job)


def cases(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Layout, workers, shards."""
    found = []
    for layout in args.layouts:
        for count in args.workers:
            is_server = layout in ("co-located", "dedicated")
            shard_counts = {count, max(count // 2, 1)} if is_server else {count}
            found += [(layout, count, shards) for shards in sorted(shard_counts)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    layouts = ["co-located", "dedicated", "ring", "tree"]
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=layouts)
    parser.add_argument("--codecs", nargs="+", choices=["fp16", "fp32"], default=["fp16", "fp32"])
    parser.add_argument("--limit-s", type=int, default=400, help="stops itself after so long")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(args.limit_s)
    reason = why_not()
    if reason is not None:
        console.print(f"skipped: {reason}", soft_wrap=True)
        return
    table = Table(
        title=f"{args.mbit} Mbit/s, {args.megabytes} MB of float32, {args.steps} steps",
        title_justify="left",
        box=box.SIMPLE,
    )
    for title in (
        "layout",
        "workers",
        "shards",
        "codec",
        "measured ms",
        "predicted",
        "ratio",
        "cores",
    ):
        table.add_column(title, justify="left" if title in ("layout", "codec") else "right")
    rows = []
    for layout, workers, shards in cases(args):
        for codec, (seconds, cores) in measured(args, layout, workers, shards).items():
            expected = predicted(args, layout, workers, shards, codec)
            rows.append(
                {
                    "layout": layout,
                    "workers": workers,
                    "shards": shards if layout in ("co-located", "dedicated") else 0,
                    "codec": codec,
                    "measured_ms": round(seconds * 1e3, 1),
                    "predicted_ms": round(expected.communication_s * 1e3, 1),
                    "ratio": round(expected.communication_s / seconds, 3),
                    "cores": round(cores, 2),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            table.add_row(*(str(value) for value in rows[-1].values()))
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"mbit": args.mbit, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
