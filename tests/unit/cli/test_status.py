"""What `shardwell status` prints: within 80 columns, and workers in the order that people count."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import shardwell
from shardwell.rpc.cluster_status import rows_of
from shardwell.rpc.shard_status import MissingWorker
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell_server.cli.status import _arithmetic, _open_step, _shard_table
from shardwell_server.operations.cluster_status import duration, size


def _answer(index: int, count: int, uptime_s: float) -> tuple[str, shardwell.ShardStatus]:
    address = f"127.0.0.1:{54321 + index}"
    shard = shardwell.ShardStatus(
        shard_index=index,
        shard_count=count,
        cluster_id="local-0123456789ab",
        address=address,
        software_version="0.1.0",
        arithmetic="native code (AVX2)" if index else "NumPy (SHARDWELL_NATIVE=off)",
        uptime_s=uptime_s,
        stored_bytes=10_480_000_000,
        received_payload_bytes=99_940_000,
        sent_payload_bytes=123_456_789_000,
        open_stream_count=256,
        parameters=(),
        tables=(),
        troubles=(),
    )
    return address, shard


@pytest.mark.parametrize("uptime_s", [1.0, 99.4, 123.0, 12_345.0, 1e6, 86400 * 999])
def test_shards_at_local_addresses_fit_80_columns(uptime_s) -> None:
    screen = Console(width=80, file=io.StringIO(), record=True)
    screen.print(_shard_table([_answer(index, 12, uptime_s) for index in range(12)]))
    lines = [line.split() for line in screen.export_text().splitlines() if line.strip()]
    assert lines[1] == ["shard", "address", "state", "up", "stored", "in", "out", "streams"]
    assert len(lines) == 3 + 12  # none is folded
    assert lines[3][-7:] == ["10.5", "GB", "99.9", "MB", "123", "GB", "256"]


def test_shards_report_the_variant() -> None:
    answers = [_answer(index, 3, 1.0) for index in range(3)]
    assert _arithmetic(answers) == (
        "computed by NumPy (SHARDWELL_NATIVE=off) on 0; native code (AVX2) on 1, 2"
    )
    assert _arithmetic(answers[1:]) == "computed by native code (AVX2)"


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
def test_uptimes_are_printed_in_words(uptime_s, words) -> None:
    assert duration(uptime_s) == words


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
def test_sizes_are_printed_with_units(count, words) -> None:
    assert size(count) == words


@pytest.mark.parametrize(
    ("version", "workers", "words"),
    [
        (
            7,
            {"missing_worker_ids": ["c"], "done_worker_ids": ["b", "a"]},
            "7; [yellow]missing: c[/yellow]; done: a, b",
        ),
        (
            3,
            {
                "contributed_worker_ids": ["w", "worker-10", "worker-9", "worker-2", "7"],
                "missing_worker_ids": ["b-2-x", "b-10", "a", "b-2"],
            },
            "3; in: 7, w, worker-2, worker-9, worker-10; "
            "[yellow]missing: a, b-2, b-2-x, b-10[/yellow]",
        ),
    ],
    ids=["done", "in the order of their numbers"],
)
def test_workers_of_an_open_step_are_named(version: int, workers: Any, words: str) -> None:
    spec = shardwell.ParameterSpec(
        name="model", size=10, optimizer=shardwell.SGD(learning_rate=0.1), worker_count=9
    )
    numbers = {"version_min": version, "version_max": version}
    message = pb.ParameterStatus(spec=spec.to_proto(), initialized=True, **numbers, **workers)
    (row,) = rows_of([shardwell.ParameterStatus.from_proto(message)])
    assert _open_step(row) == words


@pytest.mark.parametrize(
    ("pid", "connected", "words"),
    [
        (7, True, "'w1' (process 7 on 'gpu-3')"),
        (7, False, "'w1' (process 7 on 'gpu-3', not connected any more)"),
        (0, False, "'w1' (not connected)"),
    ],
)
def test_a_missing_worker_s_connection_is_always_shown(pid, connected, words) -> None:
    worker = MissingWorker(worker_id="w1", host="gpu-3", pid=pid, connected=connected)
    assert str(worker) == words


def test_a_shard_without_an_element_counts_no_steps() -> None:
    """It says version 0 for ever, and is behind no other shard."""
    spec = shardwell.ParameterSpec(
        name="one", size=1, optimizer=shardwell.SGD(learning_rate=0.1), worker_count=1
    )
    parts = [
        shardwell.ParameterStatus.from_proto(
            pb.ParameterStatus(
                spec=spec.to_proto(),
                initialized=True,
                slice_size=size,
                version_min=version,
                version_max=version,
                unknown_worker_count=1 - size,
            )
        )
        for size, version in ((1, 5), (0, 0))
    ]
    (row,) = rows_of(parts)
    assert _open_step(row) == "5"
