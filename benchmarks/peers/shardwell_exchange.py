"""A worker of the parameter server: `exchange` of one parameter, cut over all shards."""

from __future__ import annotations

import numpy as np

import shardwell
from turns import Bench, Order, work, worker_parser


class ExchangeBench(Bench):
    """See Bench."""

    def __init__(
        self, rank: int, size: int, target: str, megabytes: int, codec: str, parameter: str
    ) -> None:
        element_count = megabytes * 10**6 // 4
        self._client = shardwell.connect(target, worker_id=f"{parameter}-w{rank}")
        self._model = self._client.parameter(
            parameter,
            size=element_count,
            optimizer=shardwell.SGD(learning_rate=0.01),
            worker_count=size,
            codec=codec,
        )
        rng = np.random.default_rng(rank)
        self._gradient = rng.standard_normal(element_count, np.float32) * np.float32(0.01)
        self._out = np.zeros(element_count, np.float32)
        self._model.init(self._out)

    def prepare(self, order: Order) -> None:
        pass

    def act(self) -> None:
        self._model.exchange(self._gradient, sample_count=32, out=self._out)

    def close(self) -> None:
        self._client.close()


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--shards", required=True)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--codec", required=True)
    parser.add_argument("--parameter", default="model")
    args = parser.parse_args()
    bench = ExchangeBench(
        args.rank, args.size, args.shards, args.megabytes, args.codec, args.parameter
    )
    work(args.socket, args.rank, bench)


if __name__ == "__main__":
    main()
