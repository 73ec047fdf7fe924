"""Goal: whatever is ready first lies in front of every shard's slice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwell.placement.dealing import dealt
from shardwell.placement.slices import slice_of


def test_equal_tensors_are_dealt_in_turns() -> None:
    sizes = dict.fromkeys("abcdef", 10)
    assert dealt(sizes, 2) == ["a", "c", "e", "b", "d", "f"]
    assert dealt(sizes, 1) == list(sizes)
    assert dealt({"a": 1}, 3) == ["a"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_every_tensor_is_dealt_once(sizes: list[int], shard_count: int) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    order = dealt(named, shard_count)
    assert sorted(order) == sorted(named)
    assert order[0] == "0" or sizes[0] > sum(sizes) // shard_count  # too large for a hand


def test_layers_of_a_network_keep_all_shards_busy() -> None:
    """Of each slice, what is ready last lies behind: half of it, at the end of the network."""
    sizes = {f"{layer}.{part}": n for layer in range(40) for part, n in (("b", 60), ("w", 3600))}
    order, total = dealt(sizes, 3), sum(sizes.values())
    offsets, offset = {}, 0
    for name in order:
        offsets[name], offset = offset, offset + sizes[name]
    early = {name for name in sizes if int(name.split(".")[0]) < 20}
    for index in range(3):
        where = slice_of(total, index, 3)
        late = min(
            max(offsets[name], where.offset) - where.offset
            for name in sizes
            if name not in early and offsets[name] + sizes[name] > where.offset
        )
        assert late > 0.4 * where.size
