"""What many small parameters or tables cost: open, set, step, save, start after SIGKILL, restore.

    python benchmarks/many.py [--count 100] [--durability process] [--kind parameters]

Two shards (processes) with a data directory, one client, 10 elements each, one after another as a
program opens them; a first step, which takes a seat, and a later one. More than 1,024 need
SHARDWELL_PARAMETER_COUNT_MAX. Beside it, `plain`: as many empty calls of a shard, and for each
shard as many files of 4 KiB that are written and synced one after another. Processor time is that
of the client and the shards.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import shardwell
from peers.turns import cpu_s
from shardwell_server import LocalCluster

SGD = shardwell.SGD(learning_rate=1.0)
SHARD_COUNT = 2
TIMEOUT_S = 600.0
START_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--durability", default="process", help="process, step or seconds")
    parser.add_argument("--kind", choices=("parameters", "tables"), default="parameters")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run(arguments.count, arguments.durability, arguments.kind, Path(directory))


def run(count: int, durability: str, kind: str, directory: Path) -> None:
    def report(what: str, act: Callable[[], object], *, restarts: bool = False) -> None:
        children = () if restarts else cluster.children  # those that end take their time with them
        pids = [os.getpid(), *(child.pid for child in children)]
        start_s, start_cpu_s = time.perf_counter(), cpu_s(pids)
        act()
        took_s, took_cpu_s = time.perf_counter() - start_s, cpu_s(pids) - start_cpu_s
        cpu = "" if restarts else f", {1000 * took_cpu_s / count:6.2f} ms of processor time"
        print(f"{what:26}{took_s:8.2f} s, {1000 * took_s / count:7.2f} ms each{cpu}", flush=True)

    def open_all(client: shardwell.Client) -> Sequence[shardwell.Parameter | shardwell.Table]:
        if kind == "parameters":
            return [client.parameter(f"n{n}", size=10, optimizer=SGD) for n in range(count)]
        return [client.table(f"n{n}", row_count=1000, dim=8, optimizer=SGD) for n in range(count)]

    def set_all(opened: list[shardwell.Parameter | shardwell.Table]) -> None:
        for each in opened:
            if isinstance(each, shardwell.Parameter):
                each.init(np.zeros(10, np.float32))
            else:
                each.put_row_gradients(np.arange(10), np.ones((10, 8), np.float32))

    def step_all(opened: list[shardwell.Parameter | shardwell.Table]) -> None:
        for each in opened:
            if isinstance(each, shardwell.Parameter):
                each.exchange(np.ones(10, np.float32))
            else:
                each.exchange_rows(np.arange(10), np.ones((10, 8), np.float32))

    with LocalCluster(
        SHARD_COUNT, directory / "first", processes=True, durability=durability
    ) as cluster:
        with shardwell.connect(cluster.target, worker_id="w0", timeout_s=TIMEOUT_S) as client:
            report("plain calls", lambda: [client.status() for _ in range(count)])
            report("plain synced files", lambda: _write(directory / "plain", count))
            opened: list[shardwell.Parameter | shardwell.Table] = []
            report("opened", lambda: opened.extend(open_all(client)))
            report("set", lambda: set_all(opened))
            report("first step", lambda: step_all(opened))
            report("later step", lambda: step_all(opened))
            report("saved", lambda: client.save_checkpoint(directory / "checkpoint"))
        report("started after SIGKILL", lambda: _kill_and_start(cluster), restarts=True)
    with (
        LocalCluster(
            SHARD_COUNT, directory / "second", processes=True, durability=durability
        ) as cluster,
        shardwell.connect(cluster.target, worker_id="w0", timeout_s=TIMEOUT_S) as client,
    ):
        report("restored", lambda: client.restore_checkpoint(directory / "checkpoint"))
        report("opened again", lambda: open_all(client))


def _write(directory: Path, count: int) -> None:
    directory.mkdir()
    for number in range(SHARD_COUNT * count):
        with (directory / str(number)).open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())


def _kill_and_start(cluster: LocalCluster) -> None:
    for child in cluster.children:
        child.kill()
        child.wait(START_TIMEOUT_S)
    for index in range(SHARD_COUNT):
        cluster.begin_start(index)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    for index in range(SHARD_COUNT):
        while not cluster.begins_to_serve(index):
            if time.monotonic() > deadline_s:
                raise TimeoutError("a shard did not start")
            time.sleep(0.01)


if __name__ == "__main__":
    main()
