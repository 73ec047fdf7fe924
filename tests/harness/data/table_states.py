"""A table of one shard, what it is given, and the rows of its scans, read by NumPy alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shardwell
from harness.data.sessions import contributor, enter
from harness.stories.crash import SameMachine
from harness.wire_client.row_messages import part
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2 as pb
from shardwell_server.config import ShardConfig
from shardwell_server.services import table_service
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

CONFIG = ShardConfig(shard_index=0, shard_count=1)
SPEC = TableSpec(
    name="t",
    row_count=200,
    dim=2,
    optimizer=shardwell.SGD(learning_rate=1.0, momentum=0.5),
    initializer=shardwell.Zeros(),
    worker_count=1,
    codec="fp32",
)
Rows = dict[int, tuple[Any, ...]]


def deadline(timeout_s: float = 0.0) -> RequestDeadline:
    return RequestDeadline(timeout_s)


def shard_of(path: Path | None) -> Shard:
    if path is None:
        return Shard(CONFIG, MemoryStore())
    return Shard(CONFIG, MmapStore(path, boot=SameMachine(path)), path)


def table_of(path: Path | None = None, **fields: Any) -> TableSlice:
    return shard_of(path).tables.open(dataclasses.replace(SPEC, **fields))[0]


def give(table: TableSlice, gradients: dict[int, Any], worker: str = "w0", **options: Any) -> None:
    step = options.pop("step", table.version)
    message = part(step, options.pop("index", 0), gradients, worker=worker, **options)
    payload = np.frombuffer(message.payload, np.uint8)
    enter(table, worker)
    table.contribute(contributor(worker), message.gradient, payload, deadline())


def ones(*ids: int) -> dict[int, Any]:
    return {row_id: [1.0, 2.0] for row_id in sorted(ids)}


def scanned(messages: Iterator[bytes], slot_widths: tuple[int, ...] = (2,)) -> Rows:
    """The rows of a scan, each once, by NumPy alone."""
    rows: Rows = {}
    for message in messages:
        answer = pb.ScanRowsResponse.FromString(message)
        n, payload, at = answer.rows.row_count, answer.payload, 0
        if not answer.HasField("rows"):
            continue
        columns = []
        for kind, width in [("<i8", 1), ("<f4", 2), *(("<f4", w) for w in slot_widths)]:
            size = n * width * np.dtype(kind).itemsize
            columns.append(np.frombuffer(payload[at : at + size], kind).reshape(n, width))
            at += size
        counts, steps = np.frombuffer(payload[at:], "<i8").reshape(2, n)
        for index in range(n):
            (row_id,) = columns[0][index].tolist()
            assert row_id not in rows, "a row came twice"
            values = tuple(tuple(column[index].tolist()) for column in columns[1:])
            rows[row_id] = (*values, int(counts[index]), int(steps[index]))
    return rows


def scan(table: TableSlice, version: int, timeout_s: float = 0.0) -> Iterator[bytes]:
    return table_service.state_messages(
        table, version, deadline(timeout_s), lambda: True, lambda size: None
    )


def whole(table: TableSlice) -> Rows:
    return scanned(scan(table, table.version), table.spec.slot_widths)
