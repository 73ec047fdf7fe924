"""Goal: no element of a parameter is lost, owned twice or placed elsewhere than the .proto says.

Method: every size from 0 to 200 on every cluster of 1 to 17 shards, against the elements
themselves: a plain list that is dealt out and put together again.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.placement.slices import Slice, slice_of
from shardwell.specs.parameter import block_size_of

SIZES = range(201)
SHARD_COUNTS = range(1, 18)


def slices(size: int, shard_count: int, block_size: int = 1) -> list[Slice]:
    return [slice_of(size, index, shard_count, block_size) for index in range(shard_count)]


def chunks(where: Slice, chunk_element_count: int) -> list[Slice]:
    count = where.chunk_count(chunk_element_count)
    return [where.chunk(index, chunk_element_count) for index in range(count)]


@pytest.mark.parametrize("shard_count", SHARD_COUNTS)
def test_slices_follow_one_another_and_cover_the_parameter(shard_count: int) -> None:
    for size in SIZES:
        elements = [
            element
            for owned in slices(size, shard_count)
            for element in range(owned.offset, owned.stop)
        ]
        assert elements == list(range(size))


@pytest.mark.parametrize("shard_count", SHARD_COUNTS)
def test_the_first_slices_are_longer_by_at_most_one(shard_count: int) -> None:
    for size in SIZES:
        dealt = [len(range(index, size, shard_count)) for index in range(shard_count)]
        assert [owned.size for owned in slices(size, shard_count)] == dealt


def test_slices_of_the_design_page() -> None:
    assert slices(10, 4) == [Slice(0, 3), Slice(3, 3), Slice(6, 2), Slice(8, 2)]
    assert slices(2, 4) == [Slice(0, 1), Slice(1, 1), Slice(2, 0), Slice(2, 0)]


def test_slices_of_the_proto_s_example() -> None:
    assert slices(3001, 2, 64) == [Slice(0, 1536), Slice(1536, 1465)]


@pytest.mark.parametrize("block_size", [2, 3, 16, 256])
def test_slices_are_blocks_that_are_dealt_as_elements_are(block_size: int) -> None:
    for size, shard_count in itertools.product([*SIZES, 3001, 50_001], SHARD_COUNTS):
        blocks = [range(size)[at : at + block_size] for at in range(0, size, block_size)]
        dealt = slices(len(blocks), shard_count)
        for owned, mine in zip(slices(size, shard_count, block_size), dealt, strict=True):
            elements = [element for block in blocks[mine.offset : mine.stop] for element in block]
            assert elements == list(range(owned.offset, owned.stop))


@given(size=st.integers(1, 2**48))
def test_small_parameters_are_spread_over_shards(size: int) -> None:
    """Thirty-two shards have each a block, or as many as there are elements one each."""
    block_size = block_size_of(size)
    assert block_size in {1, 2, 4, 8, 16, 32, 64, 128, 256}
    owned = slices(size, 32, block_size)
    assert sum(each.size > 0 for each in owned) == min(size, 32)
    assert owned[0].size <= max(-(-size // 32) + block_size, 1)


@given(size=st.integers(0, 2**48), shard_count=st.integers(1, 4096), data=st.data())
def test_large_slices_meet(size: int, shard_count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, shard_count - 1))
    owned = slice_of(size, index, shard_count)
    after = size if index == shard_count - 1 else slice_of(size, index + 1, shard_count).offset
    assert owned.stop == after
    assert size // shard_count <= owned.size <= -(-size // shard_count)


@pytest.mark.parametrize("chunk_element_count", [1, 2, 3, 16, 64, 199, 200, 201, 1000])
def test_chunks_cover_their_slice_and_only_the_last_is_shorter(chunk_element_count: int) -> None:
    for size, offset in itertools.product(SIZES, (0, 1, 77)):
        where = Slice(offset, size)
        pieces = chunks(where, chunk_element_count)
        elements = [element for piece in pieces for element in range(piece.offset, piece.stop)]
        assert elements == list(range(offset, offset + size))
        assert all(piece.size == chunk_element_count for piece in pieces[:-1])
        assert all(0 < piece.size <= chunk_element_count for piece in pieces[-1:])


def test_an_empty_slice_has_no_chunks() -> None:
    empty = slice_of(2, 3, 4)
    assert empty.size == 0
    assert empty.chunk_count(16) == 0
    with pytest.raises(IndexError):
        empty.chunk(0, 16)


@pytest.mark.parametrize("chunk_index", [-1, -7, 3, 4, 1000])
def test_there_is_no_chunk_outside_the_slice(chunk_index: int) -> None:
    with pytest.raises(IndexError):
        Slice(5, 12).chunk(chunk_index, 4)


@pytest.mark.parametrize(
    ("size", "shard_index", "shard_count"),
    [(-1, 0, 1), (10, -1, 4), (10, 4, 4), (10, 5, 4), (10, 0, 0), (10, 0, -1), (10, -1, 0)],
)
def test_impossible_slices_are_refused(size: int, shard_index: int, shard_count: int) -> None:
    with pytest.raises(ValueError, match=f"no slice {shard_index} of {shard_count}"):
        slice_of(size, shard_index, shard_count)


def test_a_slice_is_a_value() -> None:
    assert Slice(1, 2) == Slice(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Slice(1, 2).size = 3  # type: ignore[misc]
