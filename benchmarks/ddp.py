"""DDP on the process group "shardwell", and ServerOptimizer, beside DDP on gloo, in one run.

    python benchmarks/ddp.py [--megabytes 64] [--batch 32] [--steps 15] [--mbit 1000]
                             [--limit-s 300] [--json FILE]

Two processes train the same layers, N MB of float32: forward and backward, in which DDP averages.
First on this machine; then, as root on Linux, each in a network namespace, over a link of a known
rate (link.py), with a shard beside it. Rows: what is computed without averaging; an all-reduce of
as many bytes, alone; DDP on gloo, without and with its fp16 hook, and on ours, fp32 and fp16; and
ServerOptimizer in fp16, whose step includes the update. All take turns step by step. Overlap: how
much of the shorter of computing and averaging is hidden behind the other. Needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from link import INSECURE, PORT, Network, serve, stop, why_not
from peers.turns import Crew, worker_command
from shardwell_server import LocalCluster

WARM_UP_COUNT = 3
CHUNK_KIB = 1024
MODELS = {
    "gloo_fp32": "gloo fp32",
    "gloo_fp16": "gloo fp16 hook",
    "shardwell_fp32": "shardwell fp32",
    "shardwell_fp16": "shardwell fp16",
    "server_apart": "ServerOptimizer, overlap=False",
    "server_overlap": "ServerOptimizer",
}
REDUCED = ("gloo_fp32", "shardwell_fp32", "shardwell_fp16")
"""Whose all-reduce is measured alone; a hook is none."""


def measure(crew: Crew, step_count: int) -> dict[str, float]:
    """Median milliseconds of each row."""
    orders = [("compute", "gloo_fp32"), *(("reduce", model) for model in REDUCED)]
    orders += [("step", model) for model in MODELS]
    took: dict[str, list[float]] = {f"{do} {model}": [] for do, model in orders}
    for number in range(step_count + WARM_UP_COUNT):
        for do, model in orders:
            step = crew.step(do=do, model=model)
            if number >= WARM_UP_COUNT:
                took[f"{do} {model}"].append(step.seconds * 1e3)
    return {row: statistics.median(each) for row, each in took.items()}


def show(console: Console, where: str, args: argparse.Namespace, found: dict[str, float]) -> None:
    """Prints one table."""
    table = Table(
        title=f"DDP of {args.megabytes} MB, 2 processes, {where}; {os.cpu_count()} cores, "
        f"{platform.machine()}",
        title_justify="left",
        box=box.SIMPLE,
    )
    for title in ("", "ms", "/ gloo", "/ its hook", "alone", "overlap"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    compute = found["compute gloo_fp32"]
    table.add_row("computing alone", f"{compute:.0f}", "", "", "", "")
    for model, label in MODELS.items():
        own = found[f"step {model}"]
        ratios = [f"{own / found[f'step {other}']:.2f}" for other in ("gloo_fp32", "gloo_fp16")]
        alone = found.get(f"reduce {model}")
        if model == "server_overlap":
            alone = found["step server_apart"] - compute
        hidden = ""
        if alone is not None:
            hidden = f"{(compute + alone - own) / min(compute, alone):.0%}"
        table.add_row(label, f"{own:.0f}", *ratios, f"{alone:.0f}" if alone else "", hidden)
    console.print(table)
    console.print(
        "ms: median; / gloo, / its hook: over gloo fp32, and with its hook; alone: an all-reduce "
        "of as many bytes; overlap: how much of the shorter is hidden"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--limit-s", type=int, default=300, help="stops itself after so long")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, stop)
    signal.alarm(args.limit_s)
    flags = ("--megabytes", str(args.megabytes), "--batch", str(args.batch))
    command = worker_command("ddp_rank.py", *flags)
    results = {}
    with LocalCluster(2, processes=True) as cluster:
        local = [*command, "--shards", cluster.target]
        with Crew([local, local], 2) as crew:
            results["local"] = measure(crew, args.steps)
    show(console, "one machine", args, results["local"])
    reason = why_not()
    if reason is not None:
        console.print(f"over a link: skipped: {reason}", soft_wrap=True)
    else:
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(Network(2, args.mbit, "cubic"))
            for index in range(2):
                serve(network, index, 2, CHUNK_KIB, stack)
            target = ",".join(f"{network.address(index)}:{PORT}" for index in range(2))
            words = [*command, "--shards", target, "--host", network.address(0)]
            words += ["--interface", "eth0"]
            commands = [network.command(index, words) for index in range(2)]
            crew = stack.enter_context(Crew(commands, 2, INSECURE))
            results["link"] = measure(crew, args.steps)
        show(console, f"{args.mbit} Mbit/s", args, results["link"])
    print(json.dumps({"megabytes": args.megabytes, "mbit": args.mbit, "median_ms": results}))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
