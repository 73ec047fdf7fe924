"""A learner of a model of 25 million elements that computes by sleeping: outer training, or not."""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

import shardwell
from peers.turns import Bench, Order, work, worker_parser

LAYER_COUNT = 12
LAYER_SHAPE = (2083, 1000)
SIZE = LAYER_COUNT * (LAYER_SHAPE[0] * LAYER_SHAPE[1] + LAYER_SHAPE[1])
"""Elements: 25.0 million."""
TIMEOUT_S = 300.0


def shapes() -> dict[str, tuple[int, ...]]:
    """Of the model's tensors."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYER_COUNT):
        found[f"layers.{layer}.weight"] = LAYER_SHAPE
        found[f"layers.{layer}.bias"] = LAYER_SHAPE[1:]
    return found


class LearnerBench(Bench, ABC):
    """See Bench.

    Orders: `do` ("train", or "settle": open offers are taken), `steps`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._compute_s = args.compute_ms / 1e3
        self._client = shardwell.connect(
            args.shards,
            worker_id=f"{args.name}-{args.rank}",
            same_host=False,
            timeout_s=TIMEOUT_S,
        )
        self._step_count = 0
        rng = np.random.default_rng(args.rank)
        self._moves = {name: self._small(rng, shape) for name, shape in shapes().items()}

    @staticmethod
    def _small(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return np.float32(1e-3) * rng.standard_normal(shape, np.float32)

    def prepare(self, order: Order) -> None:
        self._order = order

    def act(self) -> None:
        if self._order["do"] == "settle":
            self.settle()
            return
        for _ in range(self._order["steps"]):
            began_s = time.perf_counter()
            self.compute()
            time.sleep(max(self._compute_s - (time.perf_counter() - began_s), 0.0))
            self.exchange()
            self._step_count += 1

    def compute(self) -> None:
        """What an inner step does besides sleeping."""

    @abstractmethod
    def exchange(self) -> None:
        """What it sends."""

    def settle(self) -> None:
        """Takes what is open."""

    def finish(self) -> dict[str, Any]:
        traffic = self._client.traffic
        return {"sent": traffic.sent_bytes, "received": traffic.received_bytes}

    def close(self) -> None:
        self._client.close()


class OuterBench(LearnerBench):
    """Outer training."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._outer = shardwell.Outer(
            self._client,
            args.name,
            tensors=shapes(),
            sync_every=args.sync_every,
            fragments=args.fragments,
            overlap=args.overlap,
            worker_count=args.size,
        )
        zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes().items()}
        self._weights = self._outer.init(zeros)
        self._names = list(self._weights)

    def compute(self) -> None:
        # One tensor a step, so that cores are left for what is measured.
        name = self._names[self._step_count % len(self._names)]
        self._weights[name] += self._moves[name]

    def exchange(self) -> None:
        self._weights.update(self._outer.after_step(self._weights))

    def settle(self) -> None:
        for index, fragment in enumerate(self._outer.fragments):
            if fragment.is_offered:
                self._weights.update(self._outer.take(index, self._weights))

    def finish(self) -> dict[str, Any]:
        outer = self._outer
        more = {"waited_s": outer.waited_s, "hidden_s": outer.hidden_s}
        return {**super().finish(), **more, "offered": outer.offered_count}

    def close(self) -> None:
        self._outer.close()
        super().close()


class ExchangeBench(LearnerBench):
    """Synchronous training: each step sends the gradient, and gets the weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._parameter = self._client.parameter(
            args.name,
            size=SIZE,
            optimizer=shardwell.SGD(learning_rate=0.01),
            worker_count=args.size,
            codec="fp16",
        )
        self._out = np.zeros(SIZE, np.float32)
        self._parameter.init(self._out)
        self._gradient = np.concatenate([move.ravel() for move in self._moves.values()])

    def exchange(self) -> None:
        self._parameter.exchange(self._gradient, out=self._out)


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--mode", choices=("outer", "exchange"), required=True)
    parser.add_argument("--name", required=True, help="of what it trains")
    parser.add_argument("--shards", required=True)
    parser.add_argument("--compute-ms", type=float, required=True)
    for name in ("--sync-every", "--fragments", "--overlap"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    make = OuterBench if args.mode == "outer" else ExchangeBench
    work(args.socket, args.rank, make(args))


if __name__ == "__main__":
    main()
