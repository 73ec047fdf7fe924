"""Goal: a vector in several pieces is read and written as if it were in one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwell.numerics.tensors import Tensors
from shardwell.parameter.values import Pieces

sizes = st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any)


def apart(vector: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    return [part.copy() for part in np.split(vector, np.cumsum(cuts)[:-1])]


def to_write(arrays: list[np.ndarray]) -> Pieces:
    tensors = Tensors([array.shape for array in arrays])
    found = tensors.look_over(arrays)
    assert found is not None
    return Pieces.to_write(arrays, tensors, found)


def a_range(data: st.DataObject, size: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, size - 1))
    return start, data.draw(st.integers(start + 1, size))


@given(sizes, st.data())
def test_any_range_is_read(cuts: list[int], data: st.DataObject) -> None:
    vector = np.arange(sum(cuts), dtype=np.float32)
    arrays = apart(vector, cuts)
    pieces = Pieces(*arrays)
    assert pieces.whole().tolist() == vector.tolist()
    for _ in range(3):
        start, stop = a_range(data, vector.size)
        found = pieces.read(start, stop)
        assert found.tolist() == vector[start:stop].tolist()
        is_view = any(np.shares_memory(found, array) for array in arrays)
        bounds = np.cumsum([0, *cuts])
        ends = itertools.pairwise(bounds)
        assert is_view == any(low <= start and stop <= high for low, high in ends)


@given(sizes, st.data())
def test_any_range_is_written_and_nothing_else(cuts: list[int], data: st.DataObject) -> None:
    expected = np.arange(sum(cuts), dtype=np.float32)
    arrays = apart(expected, cuts)
    pieces = to_write(arrays)
    for value in (-1, -2, -3):
        start, stop = a_range(data, expected.size)
        with pieces.writing(start, stop) as memory:
            assert memory.shape == (stop - start,)
            memory[:] = value
        expected[start:stop] = value
        assert np.concatenate(arrays).tolist() == expected.tolist()


def test_a_copy_is_the_same_whenever_it_is_read() -> None:
    """A gradient that is sent again has the same values, even if the caller writes to it."""
    arrays = [np.zeros(3, np.float32), np.zeros(3)]
    pieces = Pieces(*arrays)
    assert not pieces.read(2, 4).any()
    arrays[0][:], arrays[1][:] = 1, 2
    assert not pieces.read(2, 4).any()
    assert pieces.read(0, 3).tolist() == [1, 1, 1]


def test_what_overflows_float32_is_infinite() -> None:
    found = Pieces(np.array([1e300]), np.array([-1e300])).whole()
    assert found.tolist() == [np.inf, -np.inf]


@given(st.data())
def test_overlaps_are_found(data: st.DataObject) -> None:
    memory = np.zeros(60, np.float32)

    def drawn() -> tuple[list[np.ndarray], set[int]]:
        arrays, elements = [], set()
        for _ in range(data.draw(st.integers(1, 3))):
            start, stop = a_range(data, memory.size)
            step = data.draw(st.sampled_from([1, 2, -1]))
            arrays.append(memory[start:stop][::step])
            elements |= set(range(start, stop))
        return arrays, elements

    (mine, own), (others, their) = drawn(), drawn()
    found = Pieces(*mine).overlaps(Pieces(*others))
    if any(np.shares_memory(a, b) for a in mine for b in others):
        assert found
    if not own & their:
        assert not found
    assert not Pieces(*mine).overlaps(Pieces(np.zeros(60), np.zeros(0)))
    if all(array.flags.c_contiguous for array in mine):
        outputs = [*mine, np.zeros((0, 2), np.float32)]
        assert to_write(outputs).overlaps(Pieces(*others)) == found
        assert Pieces(*others).overlaps(to_write(outputs)) == found
