"""Goal: tensors are looked over, joined and parted, the same in C and in NumPy.

Method: the library as the package's build makes it, and NumPy, each against plain NumPy over all
elements; what does not fit is refused, with nothing touched. test_native.py runs it under
sanitizers.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.native_library import library_of
from shardwell.numerics import native
from shardwell.numerics.tensors import LARGE_ELEMENT_COUNT, Run, Tensors

SHAPES = st.lists(
    st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=9
).filter(lambda shapes: any(math.prod(shape) for shape in shapes))


@pytest.fixture(scope="module", params=["NumPy", "native"], autouse=True)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    library = None
    if request.param == "native":
        library = library_of(tmp_path_factory.mktemp("native"), "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY", library)
        yield request.param


def views(vector: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    stops = np.cumsum([math.prod(shape) for shape in shapes])
    parts = np.split(vector, stops[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def apart(vector: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    return [view.copy() for view in views(vector, shapes)]


def some_bits(shapes: list[tuple[int, ...]]) -> np.ndarray:
    """Of every kind, NaN with bits of its own among them."""
    size = sum(math.prod(shape) for shape in shapes)
    bits = np.random.default_rng(size).integers(0, 2**32, size, np.uint32)
    bits[::7] |= 0x7F800000
    return bits.view(np.float32)


# Looked over.


@given(SHAPES)
def test_it_is_seen_how_arrays_lie(shapes: list[tuple[int, ...]]) -> None:
    vector = some_bits(shapes)
    tensors = Tensors(shapes)
    given_arrays = views(vector, shapes)
    found = tensors.look_over(given_arrays)
    assert found is not None
    assert found.are_adjacent
    assert found.are_writable
    assert found.are_aligned
    one = tensors.as_one(given_arrays, found)
    assert one is not None
    assert one.ctypes.data == vector.ctypes.data
    assert one.tobytes() == vector.tobytes()
    copies = apart(vector, shapes)
    found = tensors.look_over(copies)
    assert found is not None
    assert sorted(tensors.spans(copies, found)) == sorted(
        (array.ctypes.data, array.ctypes.data + array.nbytes) for array in copies if array.size
    )
    one = tensors.as_one(copies, found)
    assert (one is None) == (sum(array.size > 0 for array in copies) > 1)


def test_what_is_read_only_is_seen() -> None:
    vector = np.zeros(6, np.float32)
    shapes = [(3,), (), (2, 1)]
    tensors, arrays = Tensors(shapes), views(vector, shapes)
    arrays[1].flags.writeable = False
    found = tensors.look_over(arrays)
    assert found is not None
    assert not found.are_writable
    one = tensors.as_one(arrays, found)
    assert one is not None
    assert not one.flags.writeable


def test_what_is_not_aligned_is_seen() -> None:
    vector = np.zeros(25, np.uint8)[1:].view(np.float32)
    found = Tensors([(2,), (4,)]).look_over(views(vector, [(2,), (4,)]))
    assert found is not None
    assert found.are_adjacent
    assert not found.are_aligned


def test_float32_is_known_by_all_its_names() -> None:
    """NumPy tells the order of bytes of some dtypes that have this machine's."""
    memory = (ctypes.c_float * 3)()
    for array in (np.ctypeslib.as_array(memory), np.zeros(3, np.dtype("f4", metadata={"a": 1}))):
        assert Tensors([(3,)]).look_over([array]) is not None


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_in_another_order_is_not_adjacent(number: int) -> None:
    vector = np.zeros(9, np.float32)
    tensors = Tensors([(3,), (3,), (3,)])
    arrays = views(vector, [(3,), (3,), (3,)])
    arrays[number], arrays[2] = arrays[2], arrays[number]
    found = tensors.look_over(arrays)
    assert found is not None
    assert tensors.as_one(arrays, found) is None


GOOD = np.zeros((2, 3), np.float32)
MISFITS: dict[str, Any] = {
    "a scalar": np.float32(1),
    "another shape": np.zeros((3, 2), np.float32),
    "another number of dimensions": np.zeros(6, np.float32),
    "more dimensions": np.zeros((2, 3, 1), np.float32),
    "float64": np.zeros((2, 3)),
    "integers of the same size": np.zeros((2, 3), np.int32),
    "the other byte order": np.zeros((2, 3), ">f4"),
    "with gaps": np.zeros((2, 6), np.float32)[:, ::2],
    "in Fortran's order": np.zeros((3, 2), np.float32).T,
    "complex numbers": np.zeros((2, 3), np.complex64),
    "a record": np.zeros((2, 3), [("x", np.float32)]),
    "times, which have no buffer": np.zeros((2, 3), "M8[s]"),
    "objects": np.zeros((2, 3), object),
    "masked": np.ma.masked_array(GOOD, GOOD == 0),
    "of a subclass": GOOD.view(np.recarray),
    "what has a buffer": memoryview(GOOD),
    "nothing": None,
    "a list": [[0.0] * 3] * 2,
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", MISFITS)
def test_what_is_no_such_array_is_not_taken_for_one(name: str, place: int) -> None:
    arrays: list[Any] = [GOOD.copy() for _ in range(3)]
    tensors = Tensors([(2, 3)] * 3)
    assert tensors.look_over(arrays) is not None
    arrays[place] = MISFITS[name]
    assert tensors.look_over(arrays) is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_arrays_is_not_taken(count: int) -> None:
    assert Tensors([(2, 3)] * 2).look_over([GOOD] * count) is None


# Joined and parted.


@given(SHAPES)
def test_runs_are_joined(shapes: list[tuple[int, ...]]) -> None:
    vector, tensors = some_bits(shapes), Tensors(shapes)
    arrays = apart(vector, shapes)
    found = tensors.look_over(arrays)
    for run in [*tensors.runs, *(Run(i, i + 1, False) for i in range(len(shapes)))]:
        expected = b"".join(array.tobytes() for array in arrays[run.first : run.last])
        assert tensors.join(arrays, run, found).tobytes() == expected
        assert tensors.join(arrays, run, None).tobytes() == expected
    assert tensors.runs == [Run(0, len(shapes), False)]


@pytest.mark.parametrize("dtype", ["float64", "float16", ">f4"])
def test_others_are_converted(dtype: str) -> None:
    arrays = [np.array([1e4, 2], dtype).reshape(2, 1)[::-1], np.array(3, dtype)]
    expected = np.array([2, 1e4, 3], np.float32)
    tensors = Tensors([(2, 1), ()])
    np.testing.assert_array_equal(tensors.join(arrays, tensors.runs[0], None), expected)
    assert tensors.join([np.full((2, 1), 1e300), arrays[1]], tensors.runs[0], None)[0] == np.inf


def test_large_ones_are_runs_by_themselves() -> None:
    sizes = [3, LARGE_ELEMENT_COUNT, LARGE_ELEMENT_COUNT + 1, 0, LARGE_ELEMENT_COUNT - 1]
    assert Tensors([(size,) for size in sizes]).runs == [
        Run(0, 1, False),
        Run(1, 2, True),
        Run(2, 3, True),
        Run(3, 5, False),
    ]


@given(SHAPES, st.data())
def test_any_range_is_parted_and_nothing_else(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    vector, tensors = some_bits(shapes), Tensors(shapes)
    arrays = apart(np.zeros_like(vector), shapes)
    start = data.draw(st.integers(0, vector.size))
    stop = data.draw(st.integers(start, vector.size))
    tensors.part(vector[start:stop].copy(), arrays, start)
    expected = np.zeros_like(vector)
    expected[start:stop] = vector[start:stop]
    assert b"".join(array.tobytes() for array in arrays) == expected.tobytes()


def test_of_outputs_that_overlap_the_last_one_wins() -> None:
    memory = np.zeros(4, np.float32)
    arrays = [memory[:3], memory[1:4], memory[:2]]
    Tensors([(3,), (3,), (2,)]).part(np.arange(8, dtype=np.float32), arrays, 0)
    assert memory.tolist() == [6, 7, 4, 5]


def test_values_may_lie_in_an_output() -> None:
    memory = np.arange(4, dtype=np.float32)
    Tensors([(3,), (1,)]).part(memory[:3], [memory[1:], np.zeros(1, np.float32)], 0)
    assert memory.tolist() == [0, 0, 1, 2]


def test_threads_take_turns_while_much_is_copied() -> None:
    """Each has memory of its own, and finds there what it has put there."""
    shapes = [(size,) for size in (1, 100_000, 7, 200_000)]
    tensors, vector = Tensors(shapes), some_bits([(300_008,)])
    results = []

    def copies() -> None:
        for _ in range(20):
            arrays = apart(np.zeros_like(vector), shapes)
            tensors.part(vector, arrays, 0)
            joined = tensors.join(arrays, Run(0, 4, False), tensors.look_over(arrays))
            results.append(joined.tobytes() == vector.tobytes())

    threads = [threading.Thread(target=copies) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 60


# What native code refuses.

_STOPS = np.array([2, 2, 6])
_VALUES = np.arange(6, dtype=np.float32)


def _arrays(**change: Any) -> tuple[Any, ...]:
    arrays: dict[str, Any] = {"a": np.ones(2, np.float32), "b": np.ones((0, 3), np.float32)}
    return tuple((arrays | {"c": np.ones((2, 2), np.float32)} | change).values())


def _read_only(values: np.ndarray) -> np.ndarray:
    copy = values.copy()
    copy.flags.writeable = False
    return copy


MOVES: dict[str, tuple[Any, ...]] = {
    "one that is longer": (_arrays(c=np.ones(5, np.float32)), _STOPS, 0, 6, _VALUES),
    "one that is shorter": (_arrays(c=np.ones(3, np.float32)), _STOPS, 0, 6, _VALUES),
    "one that should be empty": (_arrays(b=np.ones(1, np.float32)), _STOPS, 0, 6, _VALUES),
    "one of another kind": (_arrays(c=np.ones(4, np.int32)), _STOPS, 0, 6, _VALUES),
    "one of half the size": (_arrays(c=np.ones(8, np.float16)), _STOPS, 0, 6, _VALUES),
    "one with gaps": (_arrays(c=np.ones(8, np.float32)[::2]), _STOPS, 0, 6, _VALUES),
    "one that is none": (_arrays(c=None), _STOPS, 0, 6, _VALUES),
    "a buffer": (_arrays(c=memoryview(np.ones(4, np.float32))), _STOPS, 0, 6, _VALUES),
    "fewer": (_arrays()[:2], _STOPS, 0, 6, _VALUES),
    "more": ((*_arrays(), np.ones(1, np.float32)), _STOPS, 0, 6, _VALUES),
    "none at all": ((), np.zeros(0, np.int64), 0, 0, _VALUES[:0]),
    "a list, which others may change": (list(_arrays()), _STOPS, 0, 6, _VALUES),
    "no tuple": (None, _STOPS, 0, 6, _VALUES),
    "stops that descend": (_arrays(), np.array([2, 1, 6]), 0, 6, _VALUES),
    "stops below none": (_arrays(), np.array([-2, 2, 6]), 0, 6, _VALUES),
    "stops too far": (_arrays(), np.array([2, 2, 2**62]), 0, 6, _VALUES),
    "backwards": (_arrays(), _STOPS, 4, 2, _VALUES[:2]),
    "beyond the end": (_arrays(), _STOPS, 2, 7, _VALUES[:5]),
    "further than memory goes": (_arrays(), _STOPS, 2**63, 2**63 + 6, _VALUES),
    "values that are longer": (_arrays(), _STOPS, 0, 5, _VALUES),
    "values that are shorter": (_arrays(), _STOPS, 0, 6, _VALUES[:5]),
    "values with gaps": (_arrays(), _STOPS, 0, 3, _VALUES[::2]),
}


@pytest.mark.parametrize("parts", [0, 1])
@pytest.mark.parametrize("name", MOVES)
def test_what_does_not_fit_is_refused_untouched(name: str, parts: int) -> None:
    arrays, stops, start, stop, values = MOVES[name]
    _check_refused(arrays, (arrays, np.ndarray, stops, start, stop, values, parts))


def test_what_may_not_be_written_is_not() -> None:
    arrays = _arrays(c=_read_only(np.ones(4, np.float32)))
    _check_refused(arrays, (arrays, np.ndarray, _STOPS, 0, 6, _VALUES, 1))
    arrays = _arrays()
    _check_refused(arrays, (arrays, np.ndarray, _STOPS, 0, 6, _read_only(_VALUES), 0))


def _check_refused(arrays: Any, arguments: tuple[Any, ...]) -> None:
    if native.LIBRARY is None:
        return
    values = arguments[5]
    held = [array for array in [*(arrays or ()), values] if array is not None]
    before = [np.asarray(array).tobytes() for array in held]
    try:
        found = native.LIBRARY.move(*arguments)
    except (TypeError, ValueError, BufferError, SystemError):
        found = -1
    assert found == -1
    assert before == [np.asarray(array).tobytes() for array in held]


@pytest.mark.parametrize(
    ("shapes", "room"),
    [
        ([1, 2, 2, 0, 3], 3),
        ([1, 2, 2, 0, 3, 2, 2, 2, 0], 3),
        ([1, 2, 2, 0, 3, 2, 2], 3),
        ([1, 2, 2, 0, 3, -1, 2, 2], 3),
        ([1, 2, 2, 0, 3, 2**62, 2, 2], 3),
        ([], 3),
        ([1, 2, 2, 0, 3, 2, 2, 2], 2),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: list[int], room: int) -> None:
    if native.LIBRARY is None:
        return
    addresses = np.zeros(room, np.int64)
    packed = np.array(shapes, np.int64)
    assert native.LIBRARY.look_over(_arrays(), np.ndarray, packed, addresses) == -1


def test_arguments_that_do_not_fit_raise() -> None:
    if native.LIBRARY is None:
        return
    arrays = [np.zeros(3, np.float32), np.zeros(3, np.float32)]
    tensors = Tensors([(3,), (3,)])
    found = tensors.look_over(arrays)
    arrays[1] = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        tensors.part(np.ones(6, np.float32), arrays, 0)
    assert not arrays[0].any()
    with pytest.raises(ValueError, match="do not fit"):
        tensors.join(arrays, tensors.runs[0], found)
