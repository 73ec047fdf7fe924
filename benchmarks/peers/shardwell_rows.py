"""A worker of Shardwell's tables: on one or more clusters, many tables."""

from __future__ import annotations

import argparse
import json

import shardwell
from row_bench import Ids, RowBench, Rows, row_parser
from row_tables import open_table
from turns import work


class ShardwellRows(RowBench):
    """See RowBench. Orders also have `store`, `optimizer`, `codec` and `mode`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._clients = {
            store: shardwell.connect(target, worker_id=f"w{self.rank}")
            for store, target in args.targets.items()
        }
        self._tables: dict[tuple[str, int, str, str, str], shardwell.Table] = {}

    def begin(self, batches: list[Ids]) -> None:
        store, *kind = (self.order[name] for name in ("store", "optimizer", "codec", "mode"))
        key = (store, self.order["rows"], *kind)
        if key not in self._tables:
            self._tables[key] = open_table(
                self._clients[store], self.order["rows"], self.dim, *kind, worker_count=self.size
            )
        self._table = self._tables[key]

    def get(self, ids: Ids, out: Rows) -> None:
        self._table.get_rows(ids, out=out)

    def put(self, ids: Ids, gradients: Rows) -> None:
        self._table.put_row_gradients(ids, gradients)

    def exchange(self, ids: Ids, gradients: Rows, next_ids: Ids, out: Rows) -> None:
        self._table.exchange_rows(ids, gradients, next_ids=next_ids, out=out)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def main() -> None:
    parser = row_parser()
    parser.add_argument("--targets", type=json.loads, required=True, help="by store")
    args = parser.parse_args()
    work(args.socket, args.rank, ShardwellRows(args))


if __name__ == "__main__":
    main()
