"""A parameter whose files are larger than the memory that its shard may use.

    python benchmarks/larger_than_memory.py [--megabytes 200] [--limit-mb 128] [--steps 5]
                                            [--data-dir DIR] [--json FILE]

One shard with files in a directory made in DIR, one worker; SGD with momentum, so that the files
hold twice the megabytes. The shard runs in a memory cgroup of its own, made for it (needs root,
Linux), which counts the pages of its files too: the kernel writes them out and reads them again.
Where no cgroup can be made, RLIMIT_DATA bounds the shard's own memory alone, and says so. Midway it
is killed, and started again under the same limit. Gradients are whole numbers, and at the end the
weights must be NumPy's, bit for bit. Beside it: the same steps without a limit.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import shardwell
from shardwell_server.processes.child import PARENT_FLAG
from shardwell_server.processes.shard import SERVING_LINE

OPTIMIZER = shardwell.SGD(learning_rate=0.5, momentum=0.5)
_CGROUPS = Path("/sys/fs/cgroup")
_STACK_KIB = 1024
_UNTOUCHED_BYTES = 128 * 10**6
"""RLIMIT_DATA also counts parts of stacks and heaps that are never touched."""
ROWS = {
    "files_mb": "files, MB",
    "own_mb_max": "resident, its own, MB",
    "of_files_mb_max": "resident, pages of files, MB",
    "cgroup_peak_mb": "peak of the cgroup, MB",
    "first_step_s": "first step, s",
    "median_step_s": "median step, s",
    "after_kill_step_s": "first step after a kill, s",
}


class MemoryCgroup:
    """A cgroup with a memory limit, v1 or v2; removed on exit, when its processes have ended.

    Raises:
        OSError: none can be made.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._is_v2 = (_CGROUPS / "cgroup.controllers").exists()
        self.path = (_CGROUPS if self._is_v2 else _CGROUPS / "memory") / f"shardwell-{os.getpid()}"
        self.name = "cgroup v2" if self._is_v2 else "cgroup v1"
        self.path.mkdir()
        limit = "memory.max" if self._is_v2 else "memory.limit_in_bytes"
        try:
            (self.path / limit).write_text(str(limit_bytes))
        except OSError:
            self.path.rmdir()
            raise

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs a command inside, from its first instruction."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", script, str(self.path / "cgroup.procs"), *command]

    def peak_mb(self) -> float | None:
        """The most that it has held; None where the kernel does not say."""
        peak = self.path / ("memory.peak" if self._is_v2 else "memory.max_usage_in_bytes")
        return int(peak.read_text()) / 1e6 if peak.exists() else None

    def __enter__(self) -> MemoryCgroup:
        return self

    def __exit__(self, *reason: object) -> None:
        self.path.rmdir()


class DataLimit:
    """RLIMIT_DATA: bounds what is no file's, and so shows that no array has a second copy."""

    name = "RLIMIT_DATA"

    def __init__(self, limit_bytes: int) -> None:
        self._limit_kib = (limit_bytes + _UNTOUCHED_BYTES) // 1024

    def inside(self, command: Sequence[str]) -> list[str]:
        """Prefixes a command with the limits of a shell."""
        script = f'ulimit -s {_STACK_KIB} && ulimit -d {self._limit_kib} && exec "$0" "$@"'
        return ["sh", "-c", script, *command]

    def peak_mb(self) -> float | None:
        """None: a shell does not measure it."""
        return None


class NoLimit:
    """For comparison."""

    name = "no limit"

    def inside(self, command: Sequence[str]) -> list[str]:
        """Returns the command as it is."""
        return list(command)

    def peak_mb(self) -> float | None:
        """None: it is not measured."""
        return None


Limit = MemoryCgroup | DataLimit | NoLimit


@contextlib.contextmanager
def memory_limit(limit_bytes: int, *, rlimit: bool) -> Iterator[Limit]:
    """The strictest that this machine allows."""
    with contextlib.ExitStack() as stack:
        if not rlimit:
            try:
                yield stack.enter_context(MemoryCgroup(limit_bytes))
                return
            except OSError as error:
                print(f"no memory cgroup can be made here ({error})", file=sys.stderr)
        yield DataLimit(limit_bytes)


class LimitedShard:
    """`shardwell serve` under a limit. A context manager that stops it."""

    def __init__(self, limit: Limit, data_dir: str, listen: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "shardwell_server", "serve", "--shard-index=0"]
        command += ["--shard-count=1", f"--listen={listen}", f"--data-dir={data_dir}"]
        command += ["--log-level=warning", PARENT_FLAG]
        self.process = subprocess.Popen(
            limit.inside(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line.startswith(SERVING_LINE):
            self.kill()
            raise SystemExit(f"the shard did not start: {line!r}")
        self.address = line.removeprefix(SERVING_LINE)

    def resident_mb(self) -> dict[str, float]:
        """Resident memory of its own, and of files."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return {name: int(found[name].split()[0]) * 1024 / 1e6 for name in ("RssAnon", "RssFile")}

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> LimitedShard:
        return self

    def __exit__(self, *reason: object) -> None:
        self.kill()


def train(limit: Limit, args: argparse.Namespace) -> dict[str, Any]:
    """Step times in seconds and sizes in MB; the weights are compared with NumPy's."""
    size = args.megabytes * 10**6 // 4
    steps: list[float] = []
    resident: list[dict[str, float]] = []
    weights, momentum = np.zeros(size, np.float32), np.zeros(size, np.float32)
    out = np.zeros(size, np.float32)
    with (
        tempfile.TemporaryDirectory(dir=args.data_dir) as data_dir,
        contextlib.ExitStack() as stack,
    ):
        shard = stack.enter_context(LimitedShard(limit, data_dir))
        client = stack.enter_context(shardwell.connect(shard.address, worker_id="w0"))
        model = client.parameter("model", size=size, optimizer=OPTIMIZER, codec="fp32")
        model.init(weights)
        for step in range(args.steps):
            if step == args.steps // 2:
                shard.kill()
                shard = stack.enter_context(LimitedShard(limit, data_dir, shard.address))
            gradient = np.resize(np.arange(step, step + 13, dtype=np.float32), size)
            start = time.perf_counter()
            model.exchange(gradient, out=out)
            steps.append(time.perf_counter() - start)
            resident.append(shard.resident_mb())
            momentum = 0.5 * momentum + gradient
            weights -= 0.5 * momentum
        if not np.array_equal(out, weights):
            raise SystemExit("the weights are not those of an undisturbed run")
        files_mb = sum(path.stat().st_size for path in Path(data_dir).rglob("*")) / 1e6
    return {
        "limit": limit.name,
        "files_mb": round(files_mb, 1),
        "first_step_s": round(steps[0], 3),
        "median_step_s": round(statistics.median(steps), 3),
        "after_kill_step_s": round(steps[args.steps // 2], 3),
        "own_mb_max": round(max(each["RssAnon"] for each in resident), 1),
        "of_files_mb_max": round(max(each["RssFile"] for each in resident), 1),
        "cgroup_peak_mb": round(peak, 1) if (peak := limit.peak_mb()) else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--limit-mb", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rlimit", action="store_true", help="RLIMIT_DATA, not a cgroup")
    parser.add_argument("--data-dir", type=Path, help="default: the directory for temporary files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with memory_limit(args.limit_mb * 10**6, rlimit=args.rlimit) as limit:
        results = [train(limit, args), train(NoLimit(), args)]
    console = Console()
    console.print(
        f"1 worker, 1 shard limited to {args.limit_mb} MB, {args.megabytes} MB of weights, fp32, "
        f"SGD with momentum; {os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}; the weights are right"
    )
    table = Table()
    table.add_column("")
    for found in results:
        table.add_column(found["limit"], justify="right")
    for row, label in ROWS.items():
        table.add_row(label, *("" if found[row] is None else str(found[row]) for found in results))
    console.print(table)
    result = {"limit_mb": args.limit_mb, "megabytes": args.megabytes, "results": results}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
