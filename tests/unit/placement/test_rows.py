"""Where rows are, against table.proto's words in plain Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.placement.rows import RowPlacement

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
