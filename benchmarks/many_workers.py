"""What a step costs with many workers: time a worker, processor time of each side, threads, memory.

    python benchmarks/many_workers.py [--workers 2,8,32,128,256] [--elements 1000,262144]
                                      [--shards 2] [--seconds 4]

Two shards, each a process, without a data directory, and one parameter of which all workers are
members: SGD, fp16. Each worker is a client of its own, with its own connections, on a thread of its
own; 16 of them share a process, as a machine has no room for 256 Pythons. All are on this machine,
so what their own work takes is in the wall time: `shards cpu` and `workers cpu` say what the system
counted for either side, in milliseconds a worker and step, and add up to the wall time times the
cores where those are the bound. `switches` are a shard's context switches a worker and step.
`threads` and `KiB a worker` are of the shard that has most, after the steps; the memory is what it
has more than with no worker.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

import shardwell
from shardwell_server import LocalCluster

WORKERS_PER_PROCESS = 16
WARM_UP_STEPS = 3
TIMEOUT_S = 300.0
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """What the system counts of some processes."""

    cpu_ms: float
    switches: int
    threads_max: int
    resident_kib_max: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="2,8,32,128,256")
    parser.add_argument("--elements", default="1000,262144")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps that are timed, about")
    arguments = parser.parse_args()
    print(
        f"{'elements':>9}{'workers':>8}{'ms a step':>11}{'ms a worker':>12}{'shards cpu':>11}"
        f"{'workers cpu':>12}{'switches':>9}{'threads':>8}{'KiB a worker':>13}"
    )
    for element_count in map(int, arguments.elements.split(",")):
        for worker_count in map(int, arguments.workers.split(",")):
            measure(worker_count, element_count, arguments.shards, arguments.seconds)


def measure(worker_count: int, element_count: int, shard_count: int, seconds: float) -> None:
    """Prints a line."""
    with LocalCluster(shard_count, processes=True) as cluster:
        shards = [child.pid for child in cluster.children]
        alone = usage(shards)
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for first in range(0, worker_count, WORKERS_PER_PROCESS):
            ours, theirs = context.Pipe()
            names = [f"w{n}" for n in range(first, min(first + WORKERS_PER_PROCESS, worker_count))]
            process = context.Process(
                target=work, args=(theirs, cluster.target, names, worker_count, element_count)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        workers = [process.pid for process in processes if process.pid is not None]
        for pipe in pipes:
            pipe.recv()
        first_s = steps(pipes, WARM_UP_STEPS) / WARM_UP_STEPS
        step_count = max(int(seconds / first_s), 3)
        shards_before, workers_before = usage(shards), usage(workers)
        took_s = steps(pipes, step_count)
        shards_after, workers_after = usage(shards), usage(workers)
        for pipe in pipes:
            pipe.send(0)
        for process in processes:
            process.join()
    each = step_count * worker_count
    print(
        f"{element_count:9}{worker_count:8}{1000 * took_s / step_count:11.1f}"
        f"{1000 * took_s / each:12.2f}"
        f"{(shards_after.cpu_ms - shards_before.cpu_ms) / each:11.2f}"
        f"{(workers_after.cpu_ms - workers_before.cpu_ms) / each:12.2f}"
        f"{(shards_after.switches - shards_before.switches) / each / shard_count:9.1f}"
        f"{shards_after.threads_max:8}"
        f"{(shards_after.resident_kib_max - alone.resident_kib_max) / worker_count:13.0f}",
        flush=True,
    )


def steps(pipes: Sequence[Connection], count: int) -> float:
    """Seconds that all workers take for so many steps."""
    start_s = time.perf_counter()
    for pipe in pipes:
        pipe.send(count)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - start_s


def work(
    pipe: Connection, target: str, worker_ids: list[str], worker_count: int, element_count: int
) -> None:
    """A process of workers: exchanges as often as each order says, until one says 0."""
    turn = threading.Barrier(len(worker_ids) + 1)
    count = 0

    def run(worker_id: str) -> None:
        gradient = np.full(element_count, 0.5, np.float32)
        with shardwell.connect(target, worker_id=worker_id, timeout_s=TIMEOUT_S) as client:
            model = client.parameter(
                "model",
                size=element_count,
                optimizer=shardwell.SGD(learning_rate=0.5),
                worker_count=worker_count,
            )
            model.init(np.zeros(element_count, np.float32))
            turn.wait()
            while True:
                turn.wait()
                if not count:
                    return
                for _ in range(count):
                    model.exchange(gradient, sample_count=1)
                turn.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in worker_ids]
    for thread in threads:
        thread.start()
    turn.wait()
    pipe.send(None)
    while True:
        count = pipe.recv()
        turn.wait()
        if not count:
            break
        turn.wait()
        pipe.send(None)
    for thread in threads:
        thread.join()


def usage(process_ids: Sequence[int]) -> Usage:
    """What some processes have used since they began, and have now."""
    cpu_ms, switches, threads, resident = 0.0, 0, [0], [0]
    for process_id in process_ids:
        with open(f"/proc/{process_id}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        cpu_ms += (int(fields[11]) + int(fields[12])) * _TICK_MS
        for task in os.listdir(f"/proc/{process_id}/task"):
            status = _status(f"/proc/{process_id}/task/{task}/status")
            switches += status["voluntary_ctxt_switches"] + status["nonvoluntary_ctxt_switches"]
        status = _status(f"/proc/{process_id}/status")
        threads.append(status["Threads"])
        resident.append(status["VmRSS"])
    return Usage(cpu_ms, switches, max(threads), max(resident))


def _status(path: str) -> dict[str, int]:
    names = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches", "Threads", "VmRSS")
    with open(path) as file:
        pairs = (line.split(":") for line in file)
        return {name: int(rest[0].split()[0]) for name, *rest in pairs if name in names}


if __name__ == "__main__":
    main()
