"""Goal: trees of plain values and arrays come back as they were, and no bytes are believed.

Method: trees that hypothesis makes, and bytes that are cut, changed or made up.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.wire.state_tree import packed, unpacked

KINDS = ["<f4", "<f8", "<i8", "<u1", "|b1", "<c8", "<f2"]
arrays = st.sampled_from(KINDS).flatmap(
    lambda kind: npst.arrays(kind, npst.array_shapes(min_dims=0, min_side=0, max_side=4))
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
leaves = plain | st.binary(max_size=9) | arrays
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))


@given(trees)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(unpacked(packed(tree, "it")), tree)


def test_scalars_and_other_byte_orders_come_back_by_value() -> None:
    found = unpacked(packed({"a": np.float32(1.5), "b": np.arange(3, dtype=">i4")}, "it"))
    assert type(found["a"]) is np.float32
    assert found["a"] == 1.5
    assert found["b"].tolist() == [0, 1, 2]


@given(trees, st.data())
def test_changed_bytes_are_refused_or_another_tree(tree: Any, data: Any) -> None:
    whole = bytearray(packed(tree, "it"))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CorruptChunkError):  # and no other error
        unpacked(bytes(whole))
    for end in range(len(whole)):
        with pytest.raises(CorruptChunkError):
            unpacked(bytes(packed(tree, "it")[:end]))


@pytest.mark.parametrize(
    "node",
    [
        {"a": ["<f4", [2**40]]},
        {"a": ["|O", [1]]},
        {"a": ["<f4", [-1]]},
        {"a": ["(2,)f4", []]},
        {"x": ["torch", "torch.float32", [1]]},
        {"b": -1},
        {"b": True},
        {"f": "1"},
        {"z": 1},
        {"d": [[[], 1]]},
        {"d": 1, "t": []},
        {"c": [["a", []]], "t": 1},
    ],
)
def test_a_head_that_asks_for_too_much_is_refused(node: Any) -> None:
    text = json.dumps(node).encode()
    with pytest.raises(CorruptChunkError):
        unpacked(b"SWST1\n" + len(text).to_bytes(4, "little") + text)


def test_deep_trees_are_refused() -> None:
    tree: Any = 1
    for _ in range(100):
        tree = [tree]
    with pytest.raises(ArgumentError, match="nested deeper"):
        packed(tree, "it")
    text = (b"[" * 5000) + (b"]" * 5000)
    with pytest.raises(CorruptChunkError):
        unpacked(b"SWST1\n" + len(text).to_bytes(4, "little") + text)


def test_what_can_not_be_kept_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"it\['a'\]\[1\] is a builtins.object"):
        packed({"a": [1, object()]}, "it")
    with pytest.raises(ArgumentError, match=r"it is a .*ndarray"):
        packed(np.array([object()]), "it")
