"""Goal: tensors by name become one vector and back, uncopied where they are one already."""

from __future__ import annotations

import array
import collections
import copy
import types
from typing import Any

import numpy as np
import pytest

from shardwell import SGD, ArgumentError, ParameterSpec, TensorLayout
from shardwell.parameter.values import TensorValues, Values, values_of

LAYOUT = TensorLayout.of({"w": (2, 3), "none": (0,), "b": (4,), "scale": ()})
VECTOR = np.arange(11, dtype=np.float32)


def values(layout: TensorLayout | None = LAYOUT) -> Values[Any]:
    return values_of(
        ParameterSpec(name="net", size=11, optimizer=SGD(0.1), worker_count=1, layout=layout)
    )


def views(vector: np.ndarray) -> dict[str, np.ndarray]:
    return {t.name: vector[t.offset : t.stop].reshape(t.shape) for t in LAYOUT}


def apart(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {name: each.astype(dtype) for name, each in views(VECTOR).items()}


def test_views_of_one_buffer_are_that_buffer() -> None:
    vector = VECTOR.copy()
    pieces = values().pieces("gradient", views(vector))
    assert pieces.whole().tolist() == vector.tolist()
    assert np.shares_memory(pieces.whole(), vector)
    room, _ = values().room(views(vector))
    assert np.shares_memory(room.whole(), vector)
    vector.flags.writeable = False
    assert not values().pieces("gradient", views(vector)).whole().flags.writeable


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_a_window_into_a_larger_vector_is_used_where_it_lies(
    layout: TensorLayout | None, in_place: bool
) -> None:
    larger = np.arange(30, dtype=np.float32)
    window = larger[5:16]
    given = window if layout is None else views(window)
    pieces = values(layout).pieces("gradient", given, in_place=in_place)
    for used in (pieces, values(layout).room(given)[0]):
        flat = used.whole()
        assert flat.__array_interface__["data"] == window.__array_interface__["data"]
        assert flat.tolist() == window.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4"])
def test_others_are_read_in_the_order_of_the_layout(dtype: str) -> None:
    given = dict(reversed(apart(dtype).items()))
    given["w"] = np.asfortranarray(given["w"])
    pieces = values().pieces("gradient", given)
    assert not np.shares_memory(pieces.whole(), given["b"])
    assert pieces.whole().tolist() == VECTOR.tolist()


def test_large_ones_are_read_where_they_lie() -> None:
    layout = TensorLayout.of({"a": (3,), "w": (512, 512), "b": (3,), "c": (5,)})
    given = {t.name: np.full(t.shape, i, np.float32) for i, t in enumerate(layout)}
    of = values_of(
        ParameterSpec(
            name="net", size=layout.size, optimizer=SGD(0.1), worker_count=1, layout=layout
        )
    )
    pieces = of.pieces("gradient", given)
    assert np.shares_memory(pieces.read(3, 262147), given["w"])
    assert np.shares_memory(pieces.read(500, 600), given["w"])
    assert pieces.read(262145, 262155).tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 3, 3]
    assert pieces.overlaps(of.room(given)[0])
    small = {**given, "w": np.zeros((512, 512), np.float32)}
    assert not pieces.overlaps(of.room(small)[0])


def test_a_vector_that_is_cut_otherwise_is_not_taken_for_one() -> None:
    vector = np.zeros(12, np.float32)
    shifted = views(vector[:11]) | {"b": vector[7:11].copy()}
    assert not np.shares_memory(values().pieces("gradient", shifted).whole(), vector)
    backwards = views(vector[:11])
    backwards["scale"] = vector[0:1].reshape(())
    assert not np.shares_memory(values().pieces("gradient", backwards).whole(), vector)


def test_buffers_and_dlpack_are_taken() -> None:
    class Exporter:
        def __init__(self, of: np.ndarray) -> None:
            self._of = of

        def __dlpack__(self, **options: Any) -> Any:
            return self._of.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._of.__dlpack_device__()

    given: dict[str, Any] = apart()
    given["b"] = array.array("f", given["b"].tolist())
    given["w"] = Exporter(given["w"])
    assert values().pieces("gradient", given).whole().tolist() == VECTOR.tolist()


def test_weights_come_as_views_of_one_buffer() -> None:
    room, result = values().room(None)
    room.whole()[:] = VECTOR
    filled = result
    assert {name: each.shape for name, each in filled.items()} == {
        "w": (2, 3),
        "none": (0,),
        "b": (4,),
        "scale": (),
    }
    assert np.shares_memory(values().pieces("gradient", filled).whole(), room.whole())
    assert values().pieces("gradient", filled).whole().tolist() == VECTOR.tolist()


def test_weights_are_put_where_the_caller_wants_them() -> None:
    out = {name: np.zeros_like(each) for name, each in apart().items()}
    memory = out["b"]
    room, result = values().room(out)
    with room.writing(0, 11) as filled:
        filled[:] = VECTOR
    assert result is out
    assert memory.tolist() == [6, 7, 8, 9]
    assert out["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert float(out["scale"]) == 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": None}, r"net: tensor 'w' must be a NumPy array.*got NoneType"),
        ({"w": np.zeros((3, 2), np.float32)}, r"tensor 'w' must have shape \(2, 3\); got \(3, 2\)"),
        ({"scale": np.zeros(1, np.float32)}, r"tensor 'scale' must have shape \(\); got \(1,\)"),
        ({"b": np.zeros(4, np.int32)}, "tensor 'b' must be float32.*got int32"),
        ({"x": np.zeros(1), "y": np.zeros(1)}, "has 'x', 'y', which the parameter does not"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        values().pieces("gradient of net", apart() | change).whole()


def test_missing_tensors_are_named() -> None:
    with pytest.raises(ArgumentError, match="gradient lacks 'w', 'none', 'scale' of the param"):
        values().pieces("gradient", {"b": apart()["b"], "c": 1}).whole()
    many = values_of(
        ParameterSpec(
            name="net",
            size=9,
            optimizer=SGD(0.1),
            worker_count=1,
            layout=TensorLayout.of({str(i): () for i in range(9)}),
        )
    )
    with pytest.raises(ArgumentError, match="lacks '0', '1', '2', '3', '4' and 4 more of"):
        many.pieces("gradient", {}).whole()


def test_one_kind_is_not_taken_for_the_other() -> None:
    with pytest.raises(ArgumentError, match="must map the names of the parameter's 4 tensors"):
        values().pieces("gradient", VECTOR).whole()
    with pytest.raises(ArgumentError, match=r"array of 11 elements.*got a mapping of 'w', 'none'"):
        values(None).pieces("gradient", apart()).whole()
    with pytest.raises(ArgumentError, match="must map the names"):
        values().room(VECTOR)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": np.zeros(4)}, "out: tensor 'b' must be a writable C-contiguous float32 NumPy array"),
        ({"b": np.zeros(3, np.float32)}, r"out: tensor 'b' must have shape \(4,\); got \(3,\)"),
        ({"b": [0.0] * 4}, "out: tensor 'b' must be a writable.*got list"),
        ({"w": np.zeros((3, 2), np.float32).T}, "out: tensor 'w' must be a writable"),
        ({"w": np.frombuffer(bytes(24), np.float32).reshape(2, 3)}, "'w' .*writeable=False"),
        ({"b": np.zeros(17, np.uint8)[1:].view(np.float32)}, "tensor 'b' must be a writable"),
        ({"b": np.zeros(4, ">f4")}, "tensor 'b' must be a writable.*got >f4"),
        ({"x": np.zeros(4, np.float32)}, "out has 'x', which the parameter does not"),
        # The error names the first one in the order of the layout, whatever else there is.
        ({"b": None, "w": np.zeros((3, 2), np.float32)}, "tensor 'w' must have shape"),
    ],
)
def test_an_out_that_can_not_be_filled(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        values().room(apart() | change)


def test_a_name_that_is_missing_is_not_made() -> None:
    made = collections.defaultdict(lambda: np.zeros(4, np.float32), apart())
    del made["b"]
    for call in (values().room, lambda given: values().pieces("gradient", given)):
        with pytest.raises(ArgumentError, match="lacks 'b' of the parameter's tensors"):
            call(made)
    assert "b" not in made


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, types.MappingProxyType])
@pytest.mark.parametrize("layout", [LAYOUT, TensorLayout.of({"w": (2, 3)})])
def test_mappings_of_any_kind_are_taken(kind: Any, layout: TensorLayout) -> None:
    of = TensorValues(layout)
    given = {tensor.name: apart()[tensor.name] for tensor in reversed(layout.tensors)}
    found = of.pieces("gradient", kind(given)).whole()
    assert found.tolist() == VECTOR[: layout.size].tolist()
    with of.room(kind(given))[0].writing(0, layout.size) as filled:
        filled[:] = 7
    assert all((array == 7).all() for array in given.values())


def test_what_is_masked_is_refused_and_what_is_not_is_taken() -> None:
    """A subclass is looked at as itself: its buffer has no mask."""
    given: dict[str, Any] = apart()
    given["b"] = np.ma.masked_array(given["b"], [False] * 4)
    assert values().pieces("gradient", given).whole().tolist() == VECTOR.tolist()
    given["b"][2] = np.ma.masked
    with pytest.raises(ArgumentError, match="tensor 'b' has masked elements"):
        values().pieces("gradient", given)


def test_one_array_may_be_several_tensors() -> None:
    layout = TensorLayout.of({"a": (3,), "b": (3,), "c": (2,)})
    memory = np.arange(3, dtype=np.float32)
    given = {"a": memory, "b": memory, "c": memory[1:]}
    of = TensorValues(layout)
    assert of.pieces("gradient", given).whole().tolist() == [0, 1, 2, 0, 1, 2, 1, 2]
    with of.room(given)[0].writing(0, 8) as filled:
        filled[:] = np.arange(8)
    assert memory.tolist() == [3, 6, 7]


def test_a_gradient_is_copied_when_it_is_taken() -> None:
    given = apart()
    pieces = values().pieces("gradient", given)
    given["w"][...] = 99
    del given["b"]
    assert pieces.whole().tolist() == VECTOR.tolist()


def test_neighbours_by_chance_are_not_one_buffer() -> None:
    """They have owners of their own, one of which would not be kept."""
    memory = np.arange(44, dtype=np.uint8).repeat(1)
    parts = {}
    for tensor in LAYOUT:
        piece = memoryview(memory)[4 * tensor.offset : 4 * tensor.stop]
        parts[tensor.name] = np.frombuffer(piece, np.float32).reshape(tensor.shape)
    assert not np.shares_memory(values().pieces("gradient", parts).whole(), memory)
    assert not np.shares_memory(values().room(parts)[0].whole(), memory)


def test_views_that_were_moved_are_not_taken_for_what_they_were() -> None:
    made, result = values().room(None)
    tensors = result
    made.whole()[:] = VECTOR
    tensors["w"] = tensors["w"] + 1
    moved = values().pieces("gradient", tensors).whole()
    assert moved.tolist() == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]
    renamed = values().room(None)[1]
    renamed["c"] = renamed.pop("b")
    with pytest.raises(ArgumentError, match="lacks 'b'"):
        values().pieces("gradient", renamed).whole()
    copied = copy.deepcopy(values().room(None)[1])
    copied["b"][...] = 7
    assert values().pieces("gradient", copied).whole()[6:10].tolist() == [7] * 4
