"""A worker of the floor: bare gRPC streams that move the bytes of rows, encoded, and no more.

Requests and answers have the sizes that Shardwell's distinct rows have, in messages
of 1 MiB at the most; servers do nothing with them (bare_grpc.py).
"""

from __future__ import annotations

import argparse
import math
import os

import numpy as np

import shardwell
from bare_grpc import ANSWER_METHOD, BareWorker, asking
from row_bench import Ids, RowBench, Rows, row_parser
from turns import work

ITEM_SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}
ID_BYTES = 8
CONFIRMATION_BYTES = 16
MESSAGE_BYTES = 2**20


class BareRows(RowBench):
    """See RowBench. Orders also have `codec`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._shard_count = len(args.ports)
        self._bare = BareWorker(args.ports, ANSWER_METHOD)
        self._bytes = os.urandom(2 * MESSAGE_BYTES)
        self._messages: list[tuple[bytes, int]] = []

    def begin(self, batches: list[Ids]) -> None:
        self._messages = [self._message(batch) for batch in batches[:-1]]
        self._messages.reverse()

    def get(self, ids: Ids, out: Rows) -> None:
        self._move()

    def put(self, ids: Ids, gradients: Rows) -> None:
        self._move()

    def exchange(self, ids: Ids, gradients: Rows, next_ids: Ids, out: Rows) -> None:
        self._move()

    def check(self, ids: Ids, rows: Rows) -> None:
        """There are none."""

    def close(self) -> None:
        self._bare.close()

    def _move(self) -> None:
        message, count = self._messages.pop()
        if count == 1:
            self._bare.ping(message)
        else:
            self._bare.step(message, count)

    def _message(self, ids: Ids) -> tuple[bytes, int]:
        """The message to each shard, and how often it is sent."""
        rows_bytes = self.dim * ITEM_SIZES[self.order["codec"]]
        row_count = np.unique(ids).size / self._shard_count
        count = math.ceil(row_count * (ID_BYTES + rows_bytes) / MESSAGE_BYTES)
        each = math.ceil(row_count / count)
        asked, answered = {
            "get": (ID_BYTES, rows_bytes),
            "put": (ID_BYTES + rows_bytes, 0),
            "exchange": (ID_BYTES + rows_bytes + ID_BYTES, rows_bytes),
        }[self.order["do"]]
        answer_bytes = each * answered or CONFIRMATION_BYTES
        return asking(self._bytes[: each * asked], answer_bytes), count


def main() -> None:
    parser = row_parser()
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    args = parser.parse_args()
    shardwell.tune_malloc()
    work(args.socket, args.rank, BareRows(args))


if __name__ == "__main__":
    main()
