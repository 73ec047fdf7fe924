"""A small call beside a large one of another thread, over a link of a known rate.

    python benchmarks/beside.py [--mbit 200] [--megabytes 16] [--calls 60]

Needs Linux and root. A shard and a worker on two hosts of link.py's. One thread of the worker
exchanges a large parameter again and again; another one 10 elements, 10 ms apart. Printed is how
long the small call takes alone; beside the large one; and beside it over the same connection, where
it queues behind what the large one has sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

import shardwell
from link import PORT, Network, serve, why_not
from shardwell.transport import stream_pool

SGD = shardwell.SGD(learning_rate=0.1)


def latencies_ms(parameter: shardwell.Parameter, count: int) -> list[float]:
    """Of so many exchanges."""
    times, ones = [], np.ones(parameter.size, np.float32)
    for _ in range(count):
        start = time.perf_counter()
        parameter.exchange(ones)
        times.append((time.perf_counter() - start) * 1e3)
        time.sleep(0.01)
    return times


def work(target: str, megabytes: int, count: int) -> dict[str, list[float]]:
    """All figures of a worker, by name."""
    with shardwell.connect(target, worker_id="w0", same_host=False) as client:
        size = megabytes * 10**6 // 4
        large, small = (
            client.parameter(name, size=elements, optimizer=SGD)
            for name, elements in (("large", size), ("small", 10))
        )
        for parameter in (large, small):
            parameter.init(np.zeros(parameter.size, np.float32))
        latencies_ms(small, 10)
        found = {"alone": latencies_ms(small, count), "large": []}
        is_over, gradient = threading.Event(), np.ones(size, np.float32)

        def exchange() -> None:
            while not is_over.is_set():
                start = time.perf_counter()
                large.exchange(gradient)
                found["large"].append((time.perf_counter() - start) * 1e3)

        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            time.sleep(0.5)
            found["beside"] = latencies_ms(small, count)
        finally:
            is_over.set()
            thread.join()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--one-connection", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        if args.one_connection:
            stream_pool.CONNECTION_COUNT_MAX = 1
        print(json.dumps(work(args.target, args.megabytes, args.calls)))
        return
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    with Network(2, args.mbit, "") as network, contextlib.ExitStack() as stack:
        serve(network, 0, 1, 1024, stack)
        for flags in ([], ["--one-connection"]):
            command = [sys.executable, __file__, "--target", f"{network.address(0)}:{PORT}"]
            command += ["--megabytes", str(args.megabytes), "--calls", str(args.calls), *flags]
            done = subprocess.run(
                network.command(1, command), stdout=subprocess.PIPE, check=True, timeout=300
            )
            found = json.loads(done.stdout)
            medians = {name: statistics.median(times) for name, times in found.items()}
            print(
                f"{'one connection' if flags else 'as it is'}: 10 elements alone "
                f"{medians['alone']:.1f} ms, beside {args.megabytes} MB of "
                f"{medians['large']:.0f} ms {medians['beside']:.1f} ms"
            )


if __name__ == "__main__":
    main()
