"""A table of many rows on a disk: how long it takes to open, and what memory and disk it takes.

    python benchmarks/table_file.py [--rows 10000000] [--dim 64] [--percent 1 10]
                                    [--data-dir DIR] [--json FILE]

One shard with files in a directory made in DIR, Adagrad. A worker opens the table, which makes its
files; sends gradients for 1 % of its rows, chosen at random, then for 10 %; then the shard is
killed and started again, the table opened again, and the same rows fetched. `rows` is what those
rows and their optimizer state are in float32, without anything else. Resident memory is the
process's above that of a shard that has no table; pages of files are the kernel's, which takes them
when it needs them. CPU time is the shard's; that of its start is mostly Python's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import shardwell
from peers.row_tables import open_table
from shardwell_server import LocalCluster

BATCH = 2**16
MB = 1e6
PERCENT = (1.0, 10.0)


def resident_mb(pid: int) -> dict[str, float]:
    """Memory that a process has: its own, and pages of files."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        word, _, value = line.partition(":")
        if word in ("RssAnon", "RssFile"):
            found[word] = int(value.split()[0]) * 1024 / MB
    return {"own_mb": found["RssAnon"], "of_files_mb": found["RssFile"]}


def disk_mb(directory: str) -> dict[str, float]:
    """What files are on the disk, as du counts it, and how long they are."""
    stats = [path.stat() for path in Path(directory).rglob("*") if path.is_file()]
    return {
        "disk_mb": sum(stat.st_blocks for stat in stats) * 512 / MB,
        "length_mb": sum(stat.st_size for stat in stats) / MB,
    }


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds, and the result."""
    start = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - start, result


class Story:
    """What happens to the table, and what it takes after each part."""

    def __init__(self, row_count: int, dim: int, directory: str, cluster: LocalCluster) -> None:
        self._row_count = row_count
        self._dim = dim
        self._directory = directory
        self._cluster = cluster
        self._ids = np.random.default_rng(0).permutation(row_count)
        self._empty = resident_mb(cluster.children[0].pid)
        self._cpu_s: dict[int, float] = {}
        self.entries: list[dict[str, Any]] = []

    def note(self, what: str, seconds: float, touched: int) -> None:
        """Notes the state after work that took so long, with so many existing rows."""
        pid = self._cluster.children[0].pid
        resident = resident_mb(pid)
        cpu_s = time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)'s
        before, self._cpu_s[pid] = self._cpu_s.get(pid, 0.0), cpu_s
        entry = {
            "what": what,
            "seconds": round(seconds, 3),
            "cpu_s": round(cpu_s - before, 3),
            "rows_mb": round(touched * self._dim * 4 * 2 / MB, 1),
            **{name: round(value - self._empty[name], 1) for name, value in resident.items()},
            **{name: round(value, 1) for name, value in disk_mb(self._directory).items()},
        }
        self.entries.append(entry)

    def open(self, client: shardwell.Client) -> shardwell.Table:
        """The table."""
        return open_table(client, self._row_count, self._dim, "adagrad", "fp16")

    def touch(self, table: shardwell.Table, start: int, stop: int) -> None:
        """Creates rows."""
        rng = np.random.default_rng(start)
        gradients = rng.standard_normal((BATCH, self._dim), np.float32)
        for first in range(start, stop, BATCH):
            ids = self._ids[first : min(first + BATCH, stop)]
            table.put_row_gradients(ids, gradients[: ids.size])

    def fetch(self, table: shardwell.Table, stop: int) -> None:
        """Reads rows."""
        out = np.empty((BATCH, self._dim), np.float32)
        for first in range(0, stop, BATCH):
            ids = self._ids[first : min(first + BATCH, stop)]
            table.get_rows(ids, out=out[: ids.size])


def measure(
    row_count: int, dim: int, data_dir: Path | None, percent: tuple[float, ...] = PERCENT
) -> dict[str, Any]:
    """All of it."""
    with (
        tempfile.TemporaryDirectory(dir=data_dir) as directory,
        LocalCluster(1, directory, processes=True) as cluster,
    ):
        cluster.children[0].kill()
        cluster.children[0].wait(10.0)
        empty_start_s, _ = timed(cluster.start_again, 0)
        story = Story(row_count, dim, directory, cluster)
        touched = 0
        with shardwell.connect(cluster.target, worker_id="w0") as client:
            story.note("start of the shard, no table", empty_start_s, 0)
            seconds, table = timed(story.open, client)
            story.note("open, new", seconds, 0)
            for share in percent:
                stop = round(row_count * share / 100)
                seconds, _ = timed(story.touch, table, touched, stop)
                touched = stop
                story.note(f"gradients for {share:g} % of the rows", seconds, touched)
        cluster.children[0].kill()
        cluster.children[0].wait(10.0)
        start_s, _ = timed(cluster.start_again, 0)
        story.note("start of the shard", start_s, touched)
        with shardwell.connect(cluster.target, worker_id="w1") as client:
            seconds, table = timed(story.open, client)
            story.note("open again", seconds, touched)
            first = round(row_count * percent[0] / 100)
            seconds, _ = timed(story.fetch, table, first)
            story.note(f"{percent[0]:g} % fetched", seconds, touched)
    return {"row_count": row_count, "dim": dim, "story": story.entries}


def show(console: Console, found: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table(
        title=f"A table of {found['row_count']:,} x {found['dim']} on disk, Adagrad, one shard",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    labels = {
        "seconds": "s",
        "cpu_s": "CPU s",
        "rows_mb": "rows, MB",
        "own_mb": "resident, own, MB",
        "of_files_mb": "resident, of files, MB",
        "disk_mb": "disk, MB",
        "length_mb": "length of files, MB",
    }
    for label in labels.values():
        table.add_column(label, justify="right")
    for entry in found["story"]:
        table.add_row(entry["what"], *(f"{entry[name]:,.4g}" for name in labels))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--percent", type=float, nargs="+", default=list(PERCENT))
    parser.add_argument("--data-dir", type=Path, help="default: the directory for temporary files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.rows, args.dim, args.data_dir, tuple(args.percent))
    show(Console(width=120), found)
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
