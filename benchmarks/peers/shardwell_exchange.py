"""A worker of the parameter server: parameters of some sizes, cut over all shards."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import shardwell
from turns import Bench, Order, work, worker_parser

SGD = shardwell.SGD(learning_rate=0.01)
SMALL_SIZES = {"10-elements": (1, 10), "160-tensors": (160, 156)}
"""By what is asked for: how many tensors of how many elements; the latter make 100 KB."""


class ExchangeBench(Bench):
    """See Bench.

    Orders: `do` (exchange, the default; put_get; or a name of SMALL_SIZES), `megabytes` (default:
    the last that were named), `calls` of which a step consists.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._client = shardwell.connect(args.shards, worker_id=f"{args.parameter}-w{args.rank}")
        self._models = {megabytes: self._model(megabytes, args) for megabytes in args.megabytes}
        largest = max(args.megabytes, default=0) * 10**6 // 4
        rng = np.random.default_rng(args.rank)
        self._gradient = rng.standard_normal(largest, np.float32)
        self._gradient *= np.float32(0.01)
        self._out = np.zeros(largest, np.float32)
        for model in self._models.values():
            model.init(self._out[: model.size])
        self._small = {name: self._small_model(name) for name in args.small}
        self._times: list[float] = []

    def prepare(self, order: Order) -> None:
        self._call_count = order.get("calls", 1)
        do = order.get("do")
        if do in self._small:
            self._act = self._small[do]
            return
        model = self._models[order.get("megabytes", next(reversed(self._models)))]
        gradient, out = self._gradient[: model.size], self._out[: model.size]
        if do == "put_get":

            def act() -> None:
                step = model.put_gradient(gradient, sample_count=32)
                model.get_weights(out=out, min_version=step + 1)
        else:

            def act() -> None:
                model.exchange(gradient, sample_count=32, out=out)

        self._act = act

    def act(self) -> None:
        self._times = []
        for _ in range(self._call_count):
            start = time.perf_counter()
            self._act()
            self._times.append(time.perf_counter() - start)

    def finish(self) -> dict[str, Any]:
        return {"times": self._times}

    def close(self) -> None:
        self._client.close()

    def _model(self, megabytes: int, args: argparse.Namespace) -> shardwell.Parameter:
        return self._client.parameter(
            f"{args.parameter}-{megabytes}",
            size=megabytes * 10**6 // 4,
            optimizer=SGD,
            worker_count=args.size,
            codec=args.codec,
        )

    def _small_model(self, name: str) -> Any:
        """One exchange of it; of this worker alone."""
        count, size = SMALL_SIZES[name]
        if count == 1:
            one = self._client.parameter(name, size=size, optimizer=SGD)
            one.init(np.zeros(size, np.float32))
            gradient, out = np.ones(size, np.float32), np.zeros(size, np.float32)
            return lambda: one.exchange(gradient, out=out)
        shapes = {f"t{index}": (size,) for index in range(count)}
        many = self._client.parameter(name, tensors=shapes, optimizer=SGD)
        many.init({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
        gradients = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        outs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return lambda: many.exchange(gradients, out=outs)


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--shards", required=True)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[])
    parser.add_argument("--small", nargs="*", choices=list(SMALL_SIZES), default=[])
    parser.add_argument("--codec", default="fp16")
    parser.add_argument("--parameter", default="model", help="what the names begin with")
    args = parser.parse_args()
    work(args.socket, args.rank, ExchangeBench(args))


if __name__ == "__main__":
    main()
