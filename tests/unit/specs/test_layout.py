"""Goal: a layout holds what a model's tensors are, refuses by name what can't be, travels whole."""

from __future__ import annotations

import random
import re
from typing import Any

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell import (
    SGD,
    ArgumentError,
    Average,
    ParameterSpec,
    TensorGroup,
    TensorLayout,
    TensorOptions,
    TensorSpec,
)
from shardwell.specs.layout import LAYOUT_SIZE_MAX_BYTES
from shardwell.v1 import types_pb2

SHAPES = {"w": (20, 64), "b": (64,), "scale": (), "nothing": (0, 3), "ω.0": (1, 1, 2)}
LAYOUT = TensorLayout.of(SHAPES)


def random_name(seed: int) -> str:
    return random.Random(seed).randbytes(128).hex()


def experts(count: int) -> dict[str, tuple[int, ...]]:
    """As of a mixture of experts."""
    return {
        f"model.layers.{i // 384}.block_sparse_moe.experts.{i // 3 % 128}.w{i % 3}.weight": (
            i % 7,
            2,
        )
        for i in range(count)
    }


def spec_with(layout: TensorLayout | None, **changes: Any) -> ParameterSpec:
    size = 10 if layout is None else layout.size
    given = {"name": "net", "size": size, "optimizer": SGD(0.1), "worker_count": 1, **changes}
    return ParameterSpec(layout=layout, **given)


def test_tensors_lie_one_behind_the_other_in_the_given_order() -> None:
    assert [(tensor.name, tensor.offset) for tensor in LAYOUT] == [
        ("w", 0),
        ("b", 1280),
        ("scale", 1344),
        ("nothing", 1345),
        ("ω.0", 1345),
    ]
    assert (len(LAYOUT), LAYOUT.size) == (5, 1347)
    assert LAYOUT.by_name["b"] == TensorSpec("b", (64,), 1280)
    assert TensorLayout.of(dict(reversed(SHAPES.items()))) != LAYOUT


def test_objects_with_a_shape_count_as_their_shape() -> None:
    arrays = {name: np.empty(shape, np.float64) for name, shape in SHAPES.items()}
    assert TensorLayout.of(arrays) == LAYOUT
    assert TensorLayout.of({"w": [np.int64(20), 64]}).tensors[0].shape == (20, 64)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "it is empty"),
        ([("w", (2,))], "must map names to shapes"),
        (None, "must map names to shapes"),
        ({"": (2,)}, "1 to 256 printable characters.*got ''"),
        ({"x" * 257: (2,)}, "1 to 256"),
        ({"a\nb": (2,)}, r"got 'a\\nb'"),
        ({7: (2,)}, "got 7"),
        ({"__metadata__": (2,)}, "__metadata__"),
        ({"w": 5}, "tensor 'w' must have a shape.*got 5"),
        ({"w": (2.0,)}, "tensor 'w' must have a shape"),
        ({"w": "ab"}, "tensor 'w' must have a shape"),
        ({"w": (-1,)}, "shape of tensor 'w'.*got -1"),
        ({"w": (1,) * 33}, "tensor 'w' has 33 dimensions"),
        ({"w": (0,)}, r"size \(of all tensors\).*got 0"),
        ({"w": (2**24, 2**24, 2)}, r"size \(of all tensors\)"),
        ({random_name(i): (1,) for i in range(3000)}, "LZ4 packs into .* make several parameters"),
        ({f"{i:0256}": (1,) for i in range(17_000)}, "at most 4194304 bytes, not"),
        ({f"{i}": (1,) for i in range(2**16 + 1)}, "65537 tensors .* at most 65536"),
    ],
)
def test_impossible_layouts_are_refused_by_name(tensors: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        TensorLayout.of(tensors)


def test_a_layout_by_hand_is_checked_too() -> None:
    with pytest.raises(ArgumentError, match="begins at element 3; expected 2"):
        TensorLayout((TensorSpec("a", (2,), 0), TensorSpec("b", (2,), 3)))
    with pytest.raises(ArgumentError, match="tensor 'a' occurs twice"):
        TensorLayout((TensorSpec("a", (2,), 0), TensorSpec("a", (2,), 2)))


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=9).filter(
            lambda name: name.isprintable()
        ),
        st.lists(st.integers(1, 9), max_size=4),
        min_size=1,
        max_size=9,
    )
)
def test_it_travels_whole(shapes: dict[str, list[int]]) -> None:
    spec = spec_with(TensorLayout.of(shapes))
    assert ParameterSpec.from_proto(spec.to_proto()) == spec


def test_a_vector_has_none() -> None:
    assert not spec_with(None).to_proto().HasField("layout")
    assert ParameterSpec.from_proto(spec_with(None).to_proto()).layout is None


def test_the_size_is_that_of_the_tensors() -> None:
    with pytest.raises(ArgumentError, match="that of all tensors, 1347; got 5"):
        spec_with(LAYOUT, size=5)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": (20, 64), "c": (64,)}, "tensor 1 is 'b'; 'c' was asked for in its place"),
        ({"w": (64, 20), "b": (64,)}, "tensor 'w' has shape (20, 64); (64, 20) was asked for"),
        ({"w": (20, 64)}, "there is a tensor 'b', which was not asked for"),
        ({"w": (20, 64), "b": (64,), "x": (1,)}, "there is no tensor 'x', which was asked for"),
        (None, "2 tensors exist, a flat vector was asked for"),
    ],
)
def test_differences_name_the_first_tensor(other: Any, words: str) -> None:
    mine = spec_with(TensorLayout.of({"w": (20, 64), "b": (64,)}))
    theirs = spec_with(other and TensorLayout.of(other), worker_count=2)
    first, *rest = mine.differences(theirs)
    assert first == words
    assert len(rest) == 1
    assert rest[0].startswith("worker_count")


def test_errors_name_an_element_s_tensor() -> None:
    spec = spec_with(LAYOUT)
    for index, expected in {
        0: "element 0 of tensor 'w'",
        1279: "element 1279 of tensor 'w'",
        1280: "element 0 of tensor 'b'",
        1344: "element 0 of tensor 'scale'",
        1346: "element 1 of tensor 'ω.0'",
    }.items():
        assert spec.element(index) == expected
    assert spec_with(None).element(3) == "element 3"
    assert re.fullmatch(r"TensorLayout\(5 tensors, size=1347\)", repr(LAYOUT))


def test_the_first_group_that_fits_a_tensor_counts() -> None:
    layout = TensorLayout.of({"a.bias": (2,), "a.weight": (2, 2), "b[0]": (1,), "c": (1,)})
    grouped = layout.with_groups(
        [
            TensorGroup("*.bias", weight_decay=0.0),
            TensorGroup(["a.*", "b[0]"], learning_rate_factor=0.5, frozen=True),
        ]
    )
    half = TensorOptions(learning_rate_factor=0.5, frozen=True)
    assert [tensor.options for tensor in grouped] == [
        TensorOptions(weight_decay=0.0),
        half,
        half,
        TensorOptions(),
    ]
    assert grouped.has_options
    assert not layout.has_options
    assert layout.with_groups([]) == layout
    assert TensorLayout.from_proto(grouped.to_proto()) == grouped
    assert grouped.difference(layout) == (
        "tensor 'a.bias'.weight_decay: 0.0 exists, None was asked for"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: TensorGroup("w", learning_rate_factor=-1),
            "learning_rate_factor must be a finite",
        ),
        (lambda: TensorGroup("w", weight_decay=float("nan")), "weight_decay must be a finite"),
        (lambda: TensorGroup("w", frozen=1), "frozen must be a bool"),
        (lambda: TensorGroup(7), "must be names or patterns"),
        (lambda: TensorGroup([7]), "must be names or patterns"),
        (lambda: LAYOUT.with_groups("w"), r"must be a list of shardwell\.TensorGroup"),
        (lambda: LAYOUT.with_groups([{"w": 1}]), r"must be a list of shardwell\.TensorGroup"),
        (
            lambda: LAYOUT.with_groups([TensorGroup("v*")]),
            r"'v\*' of a group fits none of .* 5 ten",
        ),
    ],
)
def test_groups_that_can_not_be(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_average_has_no_options() -> None:
    grouped = LAYOUT.with_groups([TensorGroup("w", frozen=True)])
    with pytest.raises(ArgumentError, match="Average updates nothing"):
        spec_with(grouped, optimizer=Average())


def test_names_from_the_wire_are_looked_at_once_each() -> None:
    """Of very many, the last of which occurs twice; and no more than there is room for."""
    names = [f"{number:x}" for number in range(25_000)]
    message = types_pb2.TensorLayout(tensors=[types_pb2.Tensor(name=name) for name in names])
    message.tensors.add(name=names[-1])
    with pytest.raises(ArgumentError, match=f"tensor '{names[-1]}' occurs twice"):
        TensorLayout.from_proto(message)
    message.tensors.extend(types_pb2.Tensor(name="x" * 250) for _ in range(900))
    with pytest.raises(ArgumentError, match=r"25901 tensors .* make several parameters"):
        TensorLayout.from_proto(message)


def test_a_layout_of_many_tensors_is_packed() -> None:
    layout = TensorLayout.of(experts(18_867)).with_groups([TensorGroup("*.w1.*", rate_group=2)])
    message = layout.to_proto()
    assert not message.tensors
    assert message.ByteSize() < LAYOUT_SIZE_MAX_BYTES
    assert TensorLayout.from_proto(message) == layout
    assert not LAYOUT.to_proto().HasField("packed")


def packed(plain: bytes, size: int | None = None, **fields: Any) -> types_pb2.TensorLayout:
    found = lz4.block.compress(plain, store_size=False)
    size_bytes = len(plain) if size is None else size
    return types_pb2.TensorLayout(
        packed=types_pb2.PackedTensors(lz4=found, size_bytes=size_bytes), **fields
    )


PLAIN = LAYOUT.to_proto().SerializeToString()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (packed(PLAIN, len(PLAIN) - 1), "can't be read|must hold"),
        (packed(PLAIN, len(PLAIN) + 1), "can't be read|must hold"),
        (packed(b"\xff" * 100), "can't be read"),
        (packed(b""), "empty"),
        (packed(bytes(2**23)), "4194304 unpacked; got .* and 8388608"),
        (packed(bytes(2**22), 100), "can't be read"),
        (packed(packed(PLAIN).SerializeToString()), "must hold tensors alone"),
        (packed(PLAIN, tensors=[types_pb2.Tensor(name="w")]), "1 tensors beside it"),
        (packed(b"\x0a\x00" * 70_000), "70000 tensors .* at most 65536"),
        (types_pb2.TensorLayout(packed=types_pb2.PackedTensors(lz4=bytes(300_000))), "of LZ4"),
    ],
)
def test_what_is_packed_is_checked(message: types_pb2.TensorLayout, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        TensorLayout.from_proto(message)
