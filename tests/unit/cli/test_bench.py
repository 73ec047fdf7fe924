"""What `shardwell bench` makes of what it measured: times whose answer is known by hand."""

from __future__ import annotations

import io
import sys
import time
import zlib
from collections.abc import Callable

import pytest
from rich.console import Console

from shardwell_server.cli.bench import LockSamples, ShardFigures, _shard_table, _step
from shardwell_server.operations.step_time import HEADER_FACTOR

SIZE = 1_000_000
CODEC_RATES = (8e9, 8e9)


def _shard(index: int, transport: str, rate: float | None, work_s: float = 0.01) -> ShardFigures:
    """A shard behind a link that carries `rate` bytes a second; None: bytes take no time."""
    per_byte_s = 0.0 if rate is None else HEADER_FACTOR / rate
    seconds = {
        "fp16": work_s + 2 * SIZE * per_byte_s,
        "fp32": work_s + 4 * SIZE * per_byte_s,
    }
    return ShardFigures(
        shard_index=index,
        address=f"127.0.0.1:{54321 + index}",
        transport=transport,
        round_trip_s=0.001 * (index + 1),
        out_s=seconds,
        in_s=seconds,
        slice_size=SIZE,
    )


@pytest.mark.parametrize("rate", [1e6, 125e6, 250e6])
def test_a_link_is_found_whatever_elements_cost(rate) -> None:
    for work_s in (0.0, 0.01):
        shard = _shard(0, "gRPC", rate, work_s)
        assert shard.link_out_bytes_per_s == pytest.approx(rate)
        assert shard.link_in_bytes_per_s == pytest.approx(rate)


def test_where_bytes_cost_nothing_no_link_is_seen() -> None:
    assert _shard(0, "gRPC", None).link_out_bytes_per_s is None


def test_one_link_carries_what_goes_to_all_shards() -> None:
    shards = [_shard(index, "gRPC", 125e6) for index in range(2)]
    needed_s = 2 * 2 * SIZE * HEADER_FACTOR / 125e6
    step = _step(shards, 2 * needed_s, CODEC_RATES, None)
    assert step.link_s == pytest.approx(needed_s)
    assert step.codec_s == pytest.approx(2 * 4 * SIZE / 8e9 * 2)
    assert step.latency_s == 0.002
    assert step.fill_s == pytest.approx(needed_s * 2**20 / (2 * SIZE))  # chunks of 1 MiB
    rest_s = needed_s - step.fill_s - step.codec_s - 0.002
    assert step.shard_s == pytest.approx(rest_s)
    assert step.limit == "link"


def test_a_shard_behind_a_narrow_link_is_the_bound() -> None:
    shards = [_shard(0, "gRPC", 125e6), _shard(1, "gRPC", 12.5e6)]
    step = _step(shards, 1.0, CODEC_RATES, None)
    assert step.link_s == pytest.approx(2 * SIZE * HEADER_FACTOR / 12.5e6)


def test_shards_that_share_memory_use_no_link() -> None:
    step = _step([_shard(0, "memory", 125e6)], 0.5, CODEC_RATES, 125e6)
    assert step.link_s == 0.0
    assert step.limit == "shards"


@pytest.mark.parametrize("rate", [None, 1e3, 125e6, 1.25e11])
def test_bench_of_shards_at_local_addresses_fits_80_columns(rate) -> None:
    screen = Console(width=80, file=io.StringIO(), record=True)
    screen.print(_shard_table([_shard(index, "gRPC", rate) for index in range(12)]))
    lines = [line for line in screen.export_text().splitlines() if line.strip()]
    assert len(lines) == 2 + 12  # none is folded


def _sampled(work: Callable[[], object], seconds: float) -> float:
    with LockSamples() as samples, samples.taken():
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            work()
    return samples.share


def test_python_holds_the_lock_and_native_code_lets_go_of_it() -> None:
    megabytes, interval_s = bytes(8 << 20), sys.getswitchinterval()
    sys.setswitchinterval(0.25)  # far above what a busy machine makes most threads late
    try:
        # A machine that stalls while the process is at rest hides what Python holds: then again.
        tries = (_sampled(lambda: sum(range(1000)), 2.5) for _ in range(5))
        held = next((share for share in tries if share > 0.5), 0.0)
    finally:
        sys.setswitchinterval(interval_s)
    assert held > 0.5
    assert _sampled(lambda: zlib.crc32(megabytes), 0.5) < held
