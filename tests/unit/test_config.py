"""Goal: a shard is never started with a limit or a place that makes no sense.

Method: every field at its limits and beyond them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from shardwell.errors import ArgumentError
from shardwell_server.config import Limits, ShardConfig


def config(**changes: Any) -> ShardConfig:
    return ShardConfig(**{"shard_index": 0, "shard_count": 1, **changes})


def test_defaults_are_good() -> None:
    assert config().limits == Limits()
    assert config().listen == "127.0.0.1:0"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize(
    "bad", [0, -1, 0.0, math.nan, math.inf, -math.inf, 2.0**80, None, "1", True, [1]], ids=repr
)
def test_every_limit_is_above_0_and_named(name: str, bad: Any) -> None:
    assert getattr(Limits(**{name: 1}), name) == 1
    with pytest.raises(ArgumentError, match=f"limit {name} must be"):
        Limits(**{name: bad})


@pytest.mark.parametrize(
    ("shard_index", "shard_count"), [(-1, 1), (1, 1), (4, 4), (0, 0), (0, -1), (-1, 0)]
)
def test_a_place_is_in_the_cluster(shard_index: int, shard_count: int) -> None:
    with pytest.raises(
        ArgumentError, match=f"shard_index={shard_index}, shard_count={shard_count}"
    ):
        config(shard_index=shard_index, shard_count=shard_count)


@pytest.mark.parametrize("size", [64, 128, 2**20 - 64, 2**20])
def test_aligned_chunk_sizes_are_taken(size: int) -> None:
    assert config(chunk_size_bytes=size).chunk_size_bytes == size


@pytest.mark.parametrize("size", [-64, 0, 1, 63, 65, 100, 2**20 - 1, 2**20 + 64, 2**31])
def test_other_chunk_sizes_are_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match=f"chunk_size_bytes must be .*got {size}"):
        config(chunk_size_bytes=size)


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "0.0.0.0:7070", "[::1]:65535", "shard-0.shards:1", "localhost:80"]
)
def test_addresses_to_listen_at_are_taken(listen: str) -> None:
    assert config(listen=listen, insecure=True).listen == listen


@pytest.mark.parametrize(
    "listen",
    ["", ":", ":7070", "localhost", "localhost:", "host:-1", "host:65536", "host:a", "7070"],
)
def test_other_addresses_are_refused(listen: str) -> None:
    with pytest.raises(ArgumentError, match="listen must be HOST:PORT"):
        config(listen=listen)


@pytest.mark.parametrize("cluster_id", ["", "a b", "a/b", "-a", "é", "a" * 129])
def test_the_cluster_has_a_name(cluster_id: str) -> None:
    with pytest.raises(ArgumentError, match="cluster_id must be"):
        config(cluster_id=cluster_id)


@pytest.mark.parametrize("grace_s", [-0.1, -math.inf, math.inf, math.nan, 1e9, "1", True, None])
def test_the_grace_is_a_time(grace_s: float) -> None:
    assert config(grace_s=0).grace_s == 0
    with pytest.raises(ArgumentError, match="grace_s must be"):
        config(grace_s=grace_s)


def test_configs_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().shard_index = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().wait_max_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Limits(7)  # type: ignore[misc]
