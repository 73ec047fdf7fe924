"""What a checkpoint costs: its own time, that of steps meanwhile, and the shards' memory.

    python benchmarks/checkpoint.py [--megabytes 64] [--data-dir DIR]

Two workers train on two shards (processes), Adam, fp16; a third client saves again and again, then
restores into three shards. Beside it, `plain`: writing and fsyncing as many bytes to the same disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import shardwell
from shardwell_server import LocalCluster

OPTIMIZER = shardwell.Adam(learning_rate=1e-3)
ROUND_COUNT = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="of float32 weights")
    parser.add_argument("--data-dir", help="of the shards; default: they keep all in memory")
    parser.add_argument("--steps", type=int, default=12, help="before and after, for comparison")
    arguments = parser.parse_args()
    size = arguments.megabytes * 2**20 // 4
    with tempfile.TemporaryDirectory() as directory:
        run(size, arguments.steps, arguments.data_dir, Path(directory))


def run(size: int, step_count: int, data_dir: str | None, directory: Path) -> None:
    with LocalCluster(2, data_dir, processes=True) as cluster:
        clients = [shardwell.connect(cluster.target, worker_id=f"w{i}") for i in range(3)]
        models = [
            client.parameter("model", size=size, optimizer=OPTIMIZER, worker_count=2)
            for client in clients[:2]
        ]
        models[0].init(np.zeros(size, np.float32))
        steps = Steps(models)
        steps.wait_for(step_count)
        alone_ms = steps.median_ms(2)
        before = [_memory_mb(child.pid) for child in cluster.children]
        saves = []
        for number in range(ROUND_COUNT):
            first = len(steps.times_s)
            start_s = time.perf_counter()
            made = clients[2].save_checkpoint(directory / str(number))
            saves.append((time.perf_counter() - start_s, steps.median_ms(first)))
        after = [_memory_mb(child.pid) for child in cluster.children]
        steps.stop()
        for client in clients:
            client.close()
    save_s = statistics.median(seconds for seconds, _ in saves)
    during_ms = statistics.median(ms for _, ms in saves)
    plain_s = plain(made.size_bytes, directory / "plain")
    with (
        LocalCluster(3, processes=True) as cluster,
        shardwell.connect(cluster.target, worker_id="restorer") as client,
    ):
        start_s = time.perf_counter()
        client.restore_checkpoint(directory / "0")
        restore_s = time.perf_counter() - start_s
    megabytes = made.size_bytes / 1e6
    print(f"checkpoint       {megabytes:.0f} MB: weights and two arrays of state")
    print(f"plain write      {plain_s:.2f} s, {megabytes / plain_s:.0f} MB/s")
    print(f"save             {save_s:.2f} s, {save_s / plain_s:.1f} times plain, while training")
    print(f"restore          {restore_s:.2f} s, verified, into 3 shards")
    print(
        f"a step           {alone_ms:.0f} ms alone, {during_ms / alone_ms:.2f} times that meanwhile"
    )
    print(f"peak of shards   {before} MB before, {after} MB after")


class Steps:
    """Workers that exchange on threads until they are stopped; times of the first one's steps."""

    def __init__(self, models: list[shardwell.Parameter]) -> None:
        self.times_s: list[float] = []
        self._stop_at = 2**62
        self._threads = [
            threading.Thread(target=self._run, args=(model, index == 0))
            for index, model in enumerate(models)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, model: shardwell.Parameter, is_first: bool) -> None:
        gradient, out = np.ones(model.size, np.float32), np.empty(model.size, np.float32)
        while model.next_step < self._stop_at:
            start_s = time.perf_counter()
            model.exchange(gradient, out=out)
            if is_first:
                self.times_s.append(time.perf_counter() - start_s)

    def wait_for(self, count: int) -> None:
        """Blocks until so many steps are done."""
        while len(self.times_s) < count:
            time.sleep(0.01)

    def median_ms(self, first: int) -> float:
        """Of the steps from `first` on."""
        return 1e3 * statistics.median(self.times_s[first:] or self.times_s[-1:])

    def stop(self) -> None:
        """Ends all workers after the same step."""
        self._stop_at = len(self.times_s) + 3
        for thread in self._threads:
            thread.join()


def plain(size_bytes: int, path: Path) -> float:
    block = bytes(2**20)
    start_s = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start_s


def _memory_mb(pid: int) -> int:
    """Most memory of its own that a process has had; pages of files count apart."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["VmHWM"].split()[0]) // 1000


if __name__ == "__main__":
    main()
