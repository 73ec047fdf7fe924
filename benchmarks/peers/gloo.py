"""A rank of gloo's all-reduce: torch.distributed on the CPU, float32."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from turns import Bench, Order, work, worker_parser

BLOCK = 2**16


class GlooBench(Bench):
    """One rank of gloo's all-reduce."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._pattern = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * 0.01
        self._array = torch.empty(0)
        self._tiny = torch.ones(10)
        self._times: list[float] = []

    def prepare(self, order: Order) -> None:
        self._order = order
        if order["do"] == "latency":
            return
        size = order["megabytes"] * 10**6 // 4
        if self._array.numel() != size:
            self._array = torch.empty(0)
            self._array = torch.empty(size)
        own = self._pattern * (self._rank + 1)
        for start in range(0, size, BLOCK):
            self._array[start : start + BLOCK] = own[: size - start]

    def act(self) -> None:
        if self._order["do"] == "step":
            dist.all_reduce(self._array)
            return
        self._times = []
        for _ in range(self._order["calls"]):
            start = time.perf_counter()
            dist.all_reduce(self._tiny)
            self._times.append(time.perf_counter() - start)

    def finish(self) -> dict[str, Any]:
        if self._order["do"] == "latency":
            self._tiny.fill_(1.0)
            return {"times": self._times}
        expected = self._pattern * (self._size * (self._size + 1) / 2)
        found = self._array[:BLOCK]
        assert torch.allclose(found, expected[: found.numel()], rtol=1e-5, atol=1e-6)
        return {}

    def close(self) -> None:
        dist.destroy_process_group()


def main() -> None:
    args = worker_parser().parse_args()
    meeting = Path(args.socket).with_name("gloo")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=args.rank, world_size=args.size
    )
    work(args.socket, args.rank, GlooBench(args.rank, args.size))


if __name__ == "__main__":
    main()
