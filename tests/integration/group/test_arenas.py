"""Goal: memory that ranks of one machine share changes how fast results come, and nothing else.

Method: real groups, the same calls with it and without, bit for bit; a rank that reads late,
so that there is no room; offers that are refused, and unknown tokens.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.group.ranks import joined, on_ranks
from harness.polling import eventually
from shardwell.errors import ShardwellError
from shardwell.group.transport import peers
from shardwell.process.shared_memory import IS_SUPPORTED, SharedMemory
from shardwell.transport import arena
from shardwell.transport.arena_offers import ArenaOffers

pytestmark = [
    pytest.mark.same_host,
    pytest.mark.skipif(not IS_SUPPORTED, reason="no memory can be sealed on this system"),
]
SIZE = 3_000_000
"""6 MB of fp16: a few chunks of 1 MiB for each rank."""


@pytest.fixture(autouse=True)
def _usual_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of the suite shares all."""
    monkeypatch.setattr(arena, "SHARED_BYTES_MIN", 64 * 1024)


def values(rank: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(size, np.float32)


def reduced(place: str, size: int, **options: Any) -> tuple[np.ndarray, list[Any]]:
    """The mean of all ranks' values after two calls, and what each rank has moved."""

    def work(group: shardwell.Group) -> tuple[np.ndarray, Any]:
        array = values(group.rank)
        for _ in range(2):
            group.all_reduce(array, op="mean", sample_count=group.rank + 1)
        return array, group.traffic

    found = on_ranks(size, place, work, **options)
    for array, _ in found[1:]:
        np.testing.assert_array_equal(array, found[0][0])
    return found[0][0], [traffic for _, traffic in found]


def mapped_count() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:shardwell")


@pytest.fixture
def place(cluster) -> str:
    return str(cluster(1).target)


@pytest.mark.parametrize("strategy", ["ring", "tree(arity=2)", "centralized"])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "fp32"])
def test_results_are_those_of_the_network(place, strategy, codec) -> None:
    options = {"strategy": strategy, "codec": codec}
    inline, traffic = reduced(place, 3, same_host=False, **options)
    assert not any(each.shared_bytes for each in traffic)
    shared, traffic = reduced(place, 3, **options)
    np.testing.assert_array_equal(shared, inline)
    for each in traffic:
        assert each.shared_bytes > 0.3 * (each.sent_bytes + each.received_bytes)
    eventually("it is unmapped", lambda: gc.collect() >= 0 and mapped_count() == 0)


@pytest.mark.parametrize("place_count", [1, 2])
def test_what_finds_no_place_goes_over_the_network(place, monkeypatch, place_count) -> None:
    expected, _ = reduced(place, 2, same_host=False)
    monkeypatch.setattr(peers, "_PLACE_COUNT", place_count)
    found, _ = reduced(place, 2)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("counts", [0, 2**63, 2**64 - 1], ids=["never", "wild", "below 0"])
def test_a_reader_whose_count_is_wrong(place, monkeypatch, counts) -> None:
    """It suffers for what it wrote, and no other does: results, or an error."""
    expected, _ = reduced(place, 2, same_host=False)
    real = SharedMemory.set_number

    def set_number(memory: SharedMemory, index: int, number: int) -> None:
        real(memory, index, counts if index == peers._COPIED else number)

    monkeypatch.setattr(SharedMemory, "set_number", set_number)
    found, traffic = reduced(place, 2)
    np.testing.assert_array_equal(found, expected)
    assert all(each.shared_bytes <= 2 * 2 * peers._PLACE_COUNT * 2**20 for each in traffic)


def test_payloads_that_change_on_their_way_are_refused(place, monkeypatch) -> None:
    real = arena.payload_of

    def damaging(chunk: Any, payload: Any, memory: Any) -> Any:
        found = real(chunk, payload, memory).copy()
        found[100] ^= 1
        return found

    monkeypatch.setattr(arena, "payload_of", damaging)
    with pytest.raises(ShardwellError, match="CRC32C"):
        reduced(place, 2)


def test_offers_that_are_refused_or_forgotten(place, monkeypatch) -> None:
    expected, _ = reduced(place, 2, same_host=False)
    monkeypatch.setattr(ArenaOffers, "take", lambda offers, token: None)
    found, traffic = reduced(place, 2)
    np.testing.assert_array_equal(found, expected)
    assert not any(each.shared_bytes for each in traffic)
    monkeypatch.undo()

    def refused(offers: ArenaOffers, offer: Any, file: int) -> int:
        raise OSError("no more memory")

    monkeypatch.setattr(ArenaOffers, "_take_in", refused)
    found, traffic = reduced(place, 2)
    np.testing.assert_array_equal(found, expected)
    assert not any(each.shared_bytes for each in traffic)


def test_an_offer_for_another_member_is_refused(place) -> None:
    with joined(place, 0, 1) as group:
        server = group._membership._server  # type: ignore[attr-defined]
        asking = peers.Arenas(
            "it", lambda: peers.arena_pb2.ArenaOffer(member_id="another"), server.arenas.address
        )
        assert asking.arena(10**6) is None
        assert server.arenas.mapped_bytes == 0


@pytest.mark.parametrize("setting", ["off", "directory"])
def test_the_environment_says_where(place, monkeypatch, setting) -> None:
    expected, _ = reduced(place, 2, same_host=False)
    with tempfile.TemporaryDirectory() as directory:  # whose path a socket's has room for
        monkeypatch.setenv("SHARDWELL_SAME_HOST", "off" if setting == "off" else directory)
        found, traffic = reduced(place, 2)
        assert not os.listdir(directory)
    np.testing.assert_array_equal(found, expected)
    assert any(each.shared_bytes for each in traffic) == (setting == "directory")
