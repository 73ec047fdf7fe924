"""A rank of DDP on several process groups: gloo's, without and with its fp16 hook, and ours.

And a worker of ServerOptimizer, with overlap and without.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import shardwell
import shardwell.torch  # and the backend
from turns import Bench, Order, work, worker_parser

WIDTH = 1024
"""Of each layer, 4 MiB of weights."""


class DdpBench(Bench):
    """One rank of DistributedDataParallel."""

    def __init__(self, megabytes: int, batch: int, target: str, worker_id: str) -> None:
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(max(megabytes // 4, 1))]
        model = torch.nn.Sequential(*layers)
        self._inputs = torch.randn(batch, WIDTH)
        self._models = {
            name: DistributedDataParallel(copy.deepcopy(model), process_group=group)
            for name, group in self._groups().items()
        }
        hooked = self._models["gloo_fp16"]
        hooked.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        self._client = shardwell.connect(target, worker_id=worker_id)
        self._optimizers: dict[str, shardwell.torch.ServerOptimizer] = {}
        for name, overlap in (("server_overlap", True), ("server_apart", False)):
            self._models[name] = copy.deepcopy(model)
            self._optimizers[name] = shardwell.torch.ServerOptimizer(
                self._models[name],
                self._client,
                shardwell.SGD(0.01),
                worker_count=2,
                name=name,
                overlap=overlap,
            )
        self._flat = torch.randn(sum(p.numel() for p in model.parameters()))

    def _groups(self) -> dict[str, Any]:
        groups = {"gloo_fp32": dist.group.WORLD, "gloo_fp16": dist.group.WORLD}
        for codec in ("fp32", "fp16"):
            os.environ["SHARDWELL_CODEC"] = codec  # of the next group
            groups[f"shardwell_{codec}"] = dist.new_group(backend="shardwell")
        return groups

    def prepare(self, order: Order) -> None:
        model = self._models[order["model"]]
        model.zero_grad()
        self._act: Callable[[], object] = lambda: self._step(order["model"])
        if order["do"] == "compute":
            self._act = lambda: self._alone(model)
        elif order["do"] == "reduce":
            self._act = lambda: dist.all_reduce(self._flat, group=model.process_group)
            self._flat.mul_(0.1)

    def _step(self, model: str) -> None:
        self._backward(self._models[model])
        if model in self._optimizers:
            self._optimizers[model].step()

    def _backward(self, model: Any) -> None:
        model(self._inputs).square().mean().backward()

    def _alone(self, model: Any) -> None:
        with model.no_sync():
            self._backward(model)

    def act(self) -> None:
        self._act()

    def close(self) -> None:
        dist.destroy_process_group()
        self._client.close()


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--shards", required=True)
    parser.add_argument("--host", default="127.0.0.1", help="of rank 0")
    parser.add_argument("--interface", default="lo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=args.host, GLOO_SOCKET_IFNAME=args.interface)
    meeting = Path(args.socket).with_name("meeting")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=args.rank, world_size=args.size
    )
    bench = DdpBench(args.megabytes, args.batch, args.shards, f"w{args.rank}")
    work(args.socket, args.rank, bench)


if __name__ == "__main__":
    main()
