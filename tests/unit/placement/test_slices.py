"""Goal: no element of a parameter is lost, owned twice or placed elsewhere than the .proto says.

Method: every size from 0 to 200 on every cluster of 1 to 17 shards, against the elements
themselves: a plain list that is dealt out and put together again.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell import ArgumentError
from shardwell.placement.fragments import assignment_name, deal_fragments
from shardwell.placement.rows import RowPlacement
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


# Where rows are, against table.proto's words in plain Python integers.


_WORD = 2**64


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WORD
    return x ^ (x >> 31)


@given(
    st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=30),
    st.sampled_from([1, 2, 3, 7, 4096]),
)
def test_ids_are_where_the_proto_says(ids, shard_count) -> None:
    placement = RowPlacement(2**62, shard_count)
    before = np.array(ids)
    found = placement.shards_of(before)
    assert found.tolist() == [(i + _mix(i // shard_count) % shard_count) % shard_count for i in ids]
    assert before.tolist() == ids
    assert placement.local_rows(before).tolist() == [i // shard_count for i in ids]


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
    st.sampled_from([1, 2, 3, 7, 4096]),
)
def test_keys_are_where_the_proto_says(keys, shard_count) -> None:
    before = np.array(keys)
    found = RowPlacement(None, shard_count).shards_of(before)
    assert found.tolist() == [_mix(key % _WORD) % shard_count for key in keys]
    assert before.tolist() == keys


@pytest.mark.parametrize("shard_count", [1, 2, 3, 5])
def test_every_row_of_every_shard_has_its_number(shard_count) -> None:
    """No gaps: (shard, local row) is one to one, and below local_row_count."""
    placement = RowPlacement(1000, shard_count)
    ids = np.arange(1000)
    pairs = set(
        zip(placement.shards_of(ids).tolist(), placement.local_rows(ids).tolist(), strict=True)
    )
    assert len(pairs) == 1000
    assert max(row for _, row in pairs) < placement.local_row_count()


# Every tensor is in one fragment, by rules that all learners apply alike.


BLOCKS = {
    "embed.weight": 100,
    **{f"blocks.{n}.{part}": 10 for n in range(5) for part in ("attn.weight", "mlp.w")},
    "norm.weight": 5,
    "norm.bias": 5,
    "head.weight": 100,
}


def test_strided_deals_layers_in_turn() -> None:
    dealt = deal_fragments(BLOCKS, 4)
    assert dealt[3] == ["blocks.3.attn.weight", "blocks.3.mlp.w", "head.weight"]
    assert dealt[0] == [
        *("blocks.0.attn.weight", "blocks.0.mlp.w", "blocks.4.attn.weight", "blocks.4.mlp.w")
    ]
    assert dealt[1] == ["embed.weight", "blocks.1.attn.weight", "blocks.1.mlp.w"]
    assert dealt[2][-2:] == ["norm.weight", "norm.bias"]  # one module, one layer


def test_gaps_between_layer_numbers_leave_no_fragment_empty() -> None:
    sequential = {"0.weight": 4, "0.bias": 1, "2.weight": 4, "2.bias": 1}
    assert deal_fragments(sequential, 2) == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


def test_names_without_modules_are_layers_of_their_own() -> None:
    assert deal_fragments({"w1": 1, "b1": 1, "w2": 1}, 2) == [["w1", "w2"], ["b1"]]
    paths = {"params/Dense_0/kernel": 1, "params/Dense_0/bias": 1, "params/Dense_1/kernel": 1}
    assert [len(own) for own in deal_fragments(paths, 2)] == [2, 1]


def test_balanced_gives_the_largest_first_to_the_one_with_least() -> None:
    sizes = {"a": 5, "b": 9, "c": 5, "d": 1, "e": 3}
    assert deal_fragments(sizes, 2, "balanced") == [["b", "e"], ["a", "c", "d"]]
    equal = {"z": 2, "y": 2, "x": 2}
    assert deal_fragments(equal, 3, "balanced") == [["x"], ["y"], ["z"]]


def test_patterns_decide_by_the_first_that_is_found() -> None:
    patterns = [["embed", "head"], r"blocks\.[0-2]\.", ".*"]
    dealt = deal_fragments(BLOCKS, patterns)
    assert dealt[0] == ["embed.weight", "head.weight"]
    assert len(dealt[1]) == 6
    assert dealt[2][-1] == "norm.bias"


def test_assignments_have_names() -> None:
    assert assignment_name(4) == "strided"
    assert assignment_name(4, "balanced") == "balanced"
    named = assignment_name(["a", "b"])
    assert named.startswith("patterns:")
    assert len(named) == len("patterns:") + 16
    assert named == assignment_name([["a"], ("b",)])
    assert named != assignment_name([["a", "b"]])


@pytest.mark.parametrize(
    ("fragments", "assignment", "text"),
    [
        (9, "strided", r"fragments=9: the tensors are of 8 layers.*fragments=8 or fewer"),
        (20, "balanced", r"fragments=20: got 14 tensors.*fragments=14 or fewer"),
        (0, "strided", r"from 1 to 128"),
        (129, "balanced", r"from 1 to 128"),
        (True, "strided", r"from 1 to 128"),
        (2, "by size", r"assignment must be one of.*'by size'"),
        (["embed", "blocks"], "strided", r"no pattern matches tensor 'norm.weight'"),
        ([".*", "head"], "strided", r"fragments\[1\]: no tensor is left for \['head'\]"),
        (["("], "strided", r"fragments\[0\]: '\(' is no regular expression"),
        ([[3]], "strided", r"fragments\[0\]: 3 is no regular expression"),
        ([], "strided", r"got 0 patterns"),
        ("head", "strided", r"fragments must be a number, or a list"),
        (2.0, "strided", r"fragments must be a number, or a list"),
    ],
)
def test_what_can_not_be_dealt_is_refused_by_name(fragments, assignment: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        deal_fragments(BLOCKS, fragments, assignment)


@given(
    st.dictionaries(
        st.from_regex(r"[ab](\.[0-9]{1,2})?(\.[xy])?", fullmatch=True),
        st.integers(1, 50),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 12),
    st.sampled_from(["strided", "balanced"]),
)
def test_every_tensor_is_in_one_fragment(sizes, count: int, assignment: str) -> None:
    try:
        dealt = deal_fragments(sizes, count, assignment)
    except ArgumentError:
        assert count > 1
        assert count > len(sizes) or assignment == "strided"
        return
    assert len(dealt) == count
    assert all(dealt)
    assert sorted(name for own in dealt for name in own) == sorted(sizes)
    totals = [sum(sizes[name] for name in own) for own in dealt]
    if assignment == "balanced":
        assert max(totals) - min(totals) <= max(sizes.values())
        shuffled = dict(sorted(sizes.items(), reverse=True))
        again = deal_fragments(shuffled, count, assignment)
        assert [set(own) for own in again] == [set(own) for own in dealt]
