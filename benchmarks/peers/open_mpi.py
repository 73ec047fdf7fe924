"""A rank of MPI's all-reduce: mpi4py, float32. Between steps it sleeps, where MPI would spin."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mpi4py import MPI

from turns import Bench, Order, work, worker_parser

BLOCK = 2**16


class MpiBench(Bench):
    """One rank of Open MPI's all-reduce."""

    def __init__(self) -> None:
        self._rank = MPI.COMM_WORLD.Get_rank()
        self._size = MPI.COMM_WORLD.Get_size()
        rng = np.random.default_rng(0)
        self._pattern = rng.standard_normal(BLOCK, np.float32) * np.float32(0.01)
        self._array = np.empty(0, np.float32)
        self._tiny = np.ones(10, np.float32)
        self._times: list[float] = []

    def prepare(self, order: Order) -> None:
        self._order = order
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
        if self._order["do"] == "step":
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self._array)
            return
        self._times = []
        for _ in range(self._order["calls"]):
            start = time.perf_counter()
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self._tiny)
            self._times.append(time.perf_counter() - start)

    def finish(self) -> dict[str, Any]:
        if self._order["do"] == "latency":
            self._tiny.fill(1.0)
            return {"times": self._times}
        expected = self._pattern * np.float32(self._size * (self._size + 1) / 2)
        found = self._array[:BLOCK]
        assert np.allclose(found, expected[: found.size], rtol=1e-5, atol=1e-6)
        return {}


def main() -> None:
    args = worker_parser().parse_args()
    work(args.socket, MPI.COMM_WORLD.Get_rank(), MpiBench())


if __name__ == "__main__":
    main()
