"""What `shardwell status` prints: within 80 columns, and workers in the order that people count."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import table_pb2
from shardwell_server.cli.status import _shard_table, _size, _Status, _taking_part, _uptime


def _answer(index: int, count: int, uptime_s: float) -> tuple[str, _Status]:
    shard = pb.GetStatusResponse(
        uptime_s=uptime_s,
        stored_bytes=10_480_000_000,
        received_payload_bytes=99_940_000,
        sent_payload_bytes=123_456_789_000,
        open_stream_count=256,
    )
    shard.shard.cluster_id = "local-0123456789ab"
    shard.shard.shard_index, shard.shard.shard_count = index, count
    return f"127.0.0.1:{54321 + index}", _Status(shard, table_pb2.GetTableStatusResponse())


@pytest.mark.parametrize("uptime_s", [1.0, 99.4, 123.0, 12_345.0, 1e6, 86400 * 999])
def test_shards_at_local_addresses_fit_80_columns(uptime_s) -> None:
    screen = Console(width=80, file=io.StringIO(), record=True)
    screen.print(_shard_table([_answer(index, 12, uptime_s) for index in range(12)]))
    lines = [line.split() for line in screen.export_text().splitlines() if line.strip()]
    assert lines[1] == ["shard", "address", "state", "up", "stored", "in", "out", "streams"]
    assert len(lines) == 3 + 12  # none is folded
    assert lines[3][-7:] == ["10.5", "GB", "99.9", "MB", "123", "GB", "256"]


@pytest.mark.parametrize(
    ("uptime_s", "words"),
    [
        (0.0, "0 s"),
        (99.4, "99 s"),
        (100.0, "1 min"),
        (5999.0, "99 min"),
        (6000.0, "1 h"),
        (359_999.0, "99 h"),
        (360_000.0, "4 d"),
    ],
)
def test_uptimes(uptime_s, words) -> None:
    assert _uptime(uptime_s) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0.0 MB"),
        (1_250_000, "1.2 MB"),
        (99_949_999, "99.9 MB"),
        (99_950_000, "100 MB"),
        (999_499_999, "999 MB"),
        (999_500_000, "1.0 GB"),
        (2**40, "1.1 TB"),
        (5 * 10**16, "50000 TB"),
    ],
)
def test_sizes(count, words) -> None:
    assert _size(count) == words


def test_workers_are_named_in_the_order_of_their_numbers() -> None:
    status = pb.ParameterStatus(
        contributed_worker_ids=["w", "worker-10", "worker-9", "worker-2", "7"],
        missing_worker_ids=["b-2-x", "b-10", "a", "b-2"],
    )
    assert _taking_part("3", "sync", status) == (
        "3; in: 7, w, worker-2, worker-9, worker-10; [yellow]missing: a, b-2, b-2-x, b-10[/yellow]"
    )
