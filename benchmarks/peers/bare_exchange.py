"""A worker of the floor: bare gRPC streams that carry an exchange's bytes, encoded, and no more.

Servers return what they get (bare_grpc.py). In this process glibc's malloc is as installed, or,
with --tuned, as Shardwell tunes it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import shardwell
from bare_grpc import BareWorker, payload
from turns import Bench, Order, work, worker_parser


class BareExchange(Bench):
    """See Bench.

    Orders: nothing, for a step of all bytes; or `bytes`, for `calls` of one message of so many to
    each server and back.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._bare = BareWorker(args.ports)
        per_server = args.bytes / len(args.ports)
        self._message_count = max(round(per_server / args.message_bytes), 1)
        self._large = payload(round(per_server / self._message_count))
        self._times: list[float] = []

    def prepare(self, order: Order) -> None:
        self._order = order
        self._message = payload(order["bytes"]) if "bytes" in order else self._large

    def act(self) -> None:
        self._times = []
        if "bytes" not in self._order:
            self._bare.step(self._message, self._message_count)
            return
        for _ in range(self._order["calls"]):
            start = time.perf_counter()
            self._bare.ping(self._message)
            self._times.append(time.perf_counter() - start)

    def finish(self) -> dict[str, Any]:
        return {"times": self._times}

    def close(self) -> None:
        self._bare.close()


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--bytes", type=int, default=0, help="of a step, to all servers")
    parser.add_argument("--message-bytes", type=int, default=2**20)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()
    if args.tuned:
        shardwell.tune_malloc()
    work(args.socket, args.rank, BareExchange(args))


if __name__ == "__main__":
    main()
