"""How much Python a batch of rows costs: bytecodes executed, in the worker and in the shards.

    python benchmarks/rows_python.py [--batches 1 256 4096 65536] [--dim 64] [--codec fp16]
                                     [--optimizer adagrad] [--functions] [--print-json]

A cluster and a worker in one process, all threads traced, so that each bytecode is counted exactly
(and times mean nothing). Threads that run the service's code, or gRPC's server's, are the shards';
all others are the worker's. If any Python were run for each row, the count would grow with the
batch; what grows is the number of messages. What C functions do that are called, NumPy's and
gRPC's, is not in it.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import shardwell
from peers.row_tables import OPTIMIZERS, open_table
from shardwell_server import LocalCluster

ROW_COUNT = 10**6
CALL_COUNT = 4
SHARD_COUNT = 2
DOES = ("get", "put", "exchange")
SIDES = ("worker", "shards")
MOST_COUNT = 4
Counted = collections.Counter[CodeType]
_SERVICE = ("/shardwell_server/", "/grpc/_server.py")


class Counter:
    """Counts the bytecodes of all threads that start after it was made, and of its own."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, CodeType], list[int]] = {}
        self._shard_threads: set[int] = set()
        self._thread = threading.get_ident()  # it starts shards, and then is the worker's
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def read(self) -> dict[str, Counted]:
        """Bytecodes so far, by side, and by function."""
        sys.settrace(None)  # this is no part of it
        found: dict[str, Counted] = {side: collections.Counter() for side in SIDES}
        for (thread, code), count in list(self._counts.items()):
            found[SIDES[thread in self._shard_threads]][code] += count[0]
        sys.settrace(self._trace)
        return found

    def stop(self) -> None:
        """Counts no more, in this thread and in new ones."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        thread, code = threading.get_ident(), frame.f_code
        count = self._counts.setdefault((thread, code), [0])
        if thread != self._thread and any(part in code.co_filename for part in _SERVICE):
            self._shard_threads.add(thread)
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                count[0] += 1
            return local

        return local


def count(batches: list[int], dim: int, optimizer: str, codec: str) -> list[dict[str, Any]]:
    """Bytecodes of a batch, by batch and by what is done."""
    found = []
    counter = Counter()
    with (
        LocalCluster(SHARD_COUNT) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        table = open_table(client, ROW_COUNT, dim, optimizer, codec)
        rng = np.random.default_rng(0)
        for batch in batches:
            ids = rng.choice(ROW_COUNT, batch, replace=False)
            gradients = rng.standard_normal((batch, dim), np.float32)
            calls = {
                "get": lambda ids=ids: table.get_rows(ids),
                "put": lambda ids=ids, g=gradients: table.put_row_gradients(ids, g),
                "exchange": lambda ids=ids, g=gradients: table.exchange_rows(ids, g),
            }
            calls["put"]()  # the rows exist
            for do, call in calls.items():
                call()
                before = counter.read()
                for _ in range(CALL_COUNT):
                    call()
                after = counter.read()
                entry: dict[str, Any] = {"batch": batch, "do": do}
                for side in SIDES:
                    executed = after[side] - before[side]
                    entry[side] = round(executed.total() / CALL_COUNT)
                    entry[f"{side}_most"] = [
                        f"{code.co_qualname} {round(times / CALL_COUNT):,}"
                        for code, times in executed.most_common(MOST_COUNT)
                    ]
                found.append(entry)
        counter.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256, 4096, 65536])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--codec", default="fp16")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adagrad")
    parser.add_argument("--functions", action="store_true", help="name those that run the most")
    parser.add_argument("--print-json", action="store_true", help="and no table")
    args = parser.parse_args()
    found = count(args.batches, args.dim, args.optimizer, args.codec)
    if args.print_json:
        print(json.dumps(found))
        return
    table = Table(box=box.SIMPLE)
    for column in ("ids", "bytecodes", *SIDES):
        table.add_column(column, justify="right")
    table.add_column("most of them in")
    for entry in found:
        cells = [f"{entry[side]:,}" for side in SIDES]
        most = "; ".join(f"{side}: {', '.join(entry[f'{side}_most'])}" for side in SIDES)
        table.add_row(f"{entry['batch']:,}", entry["do"], *cells, most if args.functions else "")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
