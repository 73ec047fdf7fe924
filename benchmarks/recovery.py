"""From SIGKILL to the first step that is done again, and how much of it grows with the parameter.

    python benchmarks/recovery.py [--megabytes 64 1000] [--repeats 5] [--codec fp16]
                                  [--data-dir DIR] [--json FILE]

One shard with files in a directory made in DIR, one worker that stays; SGD with momentum, so that
the shard holds twice the megabytes: weights and momentum. The shard is killed, the worker calls
`exchange`, the shard is started again; the clock runs from the kill to the end of that call. Half
the kills are followed by an `exchange` of the whole parameter, half by one of another parameter of
10 elements on the same shard. Beside them: the same calls undisturbed, and the start of a shard
that has nothing. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import shardwell
from shardwell_server import LocalCluster

OPTIMIZER = shardwell.SGD(learning_rate=0.01, momentum=0.9)
UNDISTURBED_STEPS = 5
ROWS = {
    "start": "process start, empty directory",
    "serving": "kill, start again: until it serves",
    "tiny": "kill, start again: until 10 elements are exchanged",
    "tiny_undisturbed": "  undisturbed",
    "big": "kill, start again: until all is exchanged",
    "big_undisturbed": "  undisturbed",
    "tiny_besides_start": "10 elements, besides process start and step",
    "big_besides_start": "all, besides process start and step",
}


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def start_seconds(data_dir: Path) -> float:
    """From nothing until a shard with an empty directory serves."""
    with tempfile.TemporaryDirectory(dir=data_dir) as empty:
        start = time.perf_counter()
        with LocalCluster(1, empty, processes=True):
            return time.perf_counter() - start


def kill_and_step(
    cluster: LocalCluster, exchange: Callable[[], object], pool: ThreadPoolExecutor
) -> tuple[float, float]:
    """Seconds from SIGKILL until it serves, and until an exchange called meanwhile is done."""
    start = time.perf_counter()
    cluster.children[0].kill()
    done = pool.submit(lambda: (exchange(), time.perf_counter())[1])
    cluster.start_again(0)
    serving = time.perf_counter()
    return serving - start, done.result() - start


def measure(megabytes: int, args: argparse.Namespace) -> dict[str, float]:
    """Medians in seconds, by row."""
    size = megabytes * 10**6 // 4
    times: dict[str, list[float]] = {row: [] for row in ROWS}
    with (
        tempfile.TemporaryDirectory(dir=args.data_dir) as data_dir,
        ThreadPoolExecutor(1) as pool,
        LocalCluster(1, data_dir, processes=True) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        big = client.parameter("big", size=size, optimizer=OPTIMIZER, codec=args.codec)
        tiny = client.parameter("tiny", size=10, optimizer=OPTIMIZER, codec=args.codec)
        gradient, out = np.full(size, 0.5, np.float32), np.zeros(size, np.float32)
        big.init(out)
        tiny.init(np.zeros(10, np.float32))

        def big_step() -> object:
            return big.exchange(gradient, out=out)

        def tiny_step() -> object:
            return tiny.exchange(gradient[:10])

        for _ in range(2):  # the first steps open streams and touch memory
            big_step()
            tiny_step()
        for _ in range(args.repeats):
            times["start"].append(start_seconds(args.data_dir))
            for name, step in (("big", big_step), ("tiny", tiny_step)):
                serving, done = kill_and_step(cluster, step, pool)
                times["serving"].append(serving)
                times[name].append(done)
                big_step()
                times[f"{name}_undisturbed"] += [seconds(step) for _ in range(UNDISTURBED_STEPS)]
    result = {row: statistics.median(values) for row, values in times.items() if values}
    for name in ("big", "tiny"):
        result[f"{name}_besides_start"] = (
            result[name] - result["start"] - result[f"{name}_undisturbed"]
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--codec", default="fp16")
    parser.add_argument("--data-dir", type=Path, help="default: the directory for temporary files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {megabytes: measure(megabytes, args) for megabytes in args.megabytes}
    console = Console()
    console.print(
        f"1 worker, 1 shard, {args.codec}, SGD with momentum, {args.repeats} kills each; "
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )
    table = Table()
    table.add_column("seconds")
    for megabytes in results:
        table.add_column(f"{megabytes} MB of weights", justify="right")
    for row, label in ROWS.items():
        table.add_row(label, *(f"{found[row]:.3f}" for found in results.values()))
    console.print(table)
    result = {
        "codec": args.codec,
        "repeats": args.repeats,
        "seconds": {
            str(megabytes): {row: round(value, 4) for row, value in found.items()}
            for megabytes, found in results.items()
        },
    }
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
