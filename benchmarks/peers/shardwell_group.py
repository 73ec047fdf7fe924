"""A rank of Shardwell's all-reduce: a group for each strategy, over the same array."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import shardwell
from turns import Bench, Order, work, worker_parser

BLOCK = 2**16
STRATEGIES: dict[str, shardwell.Strategy] = {
    "ring": shardwell.Ring(),
    "tree": shardwell.Tree(),
    "centralized": shardwell.Centralized(),
}


class GroupBench(Bench):
    """One rank of a group."""

    def __init__(self, rank: int, size: int, rendezvous: str, strategies: list[str]) -> None:
        self._rank = rank
        self._size = size
        self._groups = {
            name: shardwell.join_group(name, rank, size, STRATEGIES[name], rendezvous)
            for name in strategies
        }
        rng = np.random.default_rng(0)
        self._pattern = rng.standard_normal(BLOCK, np.float32) * np.float32(0.01)
        self._array = np.empty(0, np.float32)
        self._tiny = np.ones(10, np.float32)
        self._times: list[float] = []

    def prepare(self, order: Order) -> None:
        self._order = order
        self._group = self._groups[order["strategy"]]
        self._sent_bytes = self._group.traffic.sent_bytes
        if order["do"] == "latency":
            return
        size = order["megabytes"] * 10**6 // 4
        if self._array.size != size:
            self._array = np.empty(0, np.float32)
            self._array = np.empty(size, np.float32)
        own = self._pattern * np.float32(self._rank + 1)
        for start in range(0, size, BLOCK):
            self._array[start : start + BLOCK] = own[: size - start]

    def act(self) -> None:
        codec = self._order["codec"]
        if self._order["do"] == "step":
            self._group.all_reduce(self._array, codec=codec)
            return
        self._times = []
        for _ in range(self._order["calls"]):
            start = time.perf_counter()
            self._group.all_reduce(self._tiny, codec=codec)
            self._times.append(time.perf_counter() - start)

    def finish(self) -> dict[str, Any]:
        self._group.barrier()  # all is received, so all that was sent is counted
        sent_bytes = self._group.traffic.sent_bytes - self._sent_bytes
        if self._order["do"] == "latency":
            self._tiny.fill(1.0)
            return {"times": self._times, "sent_bytes": sent_bytes}
        expected = self._pattern * np.float32(self._size * (self._size + 1) / 2)
        found = self._array[:BLOCK]
        assert np.allclose(found, expected[: found.size], rtol=1e-2, atol=1e-3)
        return {"sent_bytes": sent_bytes}

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--strategies", nargs="+", required=True)
    args = parser.parse_args()
    bench = GroupBench(args.rank, args.size, args.rendezvous, args.strategies)
    work(args.socket, args.rank, bench)


if __name__ == "__main__":
    main()
