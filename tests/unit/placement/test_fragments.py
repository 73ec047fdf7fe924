"""Goal: every tensor is in one fragment, by rules that all learners apply alike.

Method: small models spelled out, and properties of drawn ones.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell import ArgumentError
from shardwell.placement.fragments import assignment_name, deal_fragments

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
