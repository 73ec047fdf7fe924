"""Goal: sums of rows are those of the gradients, whatever repeats, orders and old values there are.

Method: hypothesis draws rows with few distinct numbers. Oracles: a dict of float64 sums, and
integers, for which float32 sums are exact in any order.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.numerics.row_sums import (
    add_rows,
    first_bad_cell,
    merge_repeats,
    touched_rows,
)

DIM = 3
ROWS = st.lists(
    st.integers(-3, 40) | st.sampled_from([2**62, -(2**62), 2**63 - 1, -(2**63)]), max_size=80
)


@given(rows=ROWS, seed=st.integers(0, 99))
def test_repeats_add_up(rows: list[int], seed: int) -> None:
    gradients = np.random.default_rng(seed).integers(-99, 99, (len(rows), DIM)).astype(np.float32)
    expected: dict[int, np.ndarray] = {}
    for row, gradient in zip(rows, gradients.astype(np.float64), strict=True):
        expected[row] = expected.get(row, 0.0) + gradient
    before = gradients.copy()
    found, sums = merge_repeats(np.array(rows, np.int64), gradients)
    np.testing.assert_array_equal(gradients, before)
    assert found.tolist() == sorted(expected)
    assert sums.dtype == np.float32
    assert sums.shape == (len(expected), DIM)
    for row, total in zip(found.tolist(), sums, strict=True):
        np.testing.assert_array_equal(total, expected[row])


def test_very_many_repeats_lose_little() -> None:
    gradients = np.full((100_000, 1), 0.1, np.float32)
    _, sums = merge_repeats(np.zeros(100_000, np.int64), gradients)
    expected = gradients.astype(np.float64).sum()
    assert abs(sums[0, 0] - expected) <= 42 * 2.0**-24 * expected  # one by one: 2400


def test_of_rows_that_ascend_nothing_is_copied() -> None:
    gradients = np.ones((3, DIM), np.float32)
    rows = np.array([1, 5, 6])
    found, sums = merge_repeats(rows, gradients)
    assert found is rows
    assert sums is gradients
    assert merge_repeats(rows[:0], gradients[:0])[1].shape == (0, DIM)


@given(
    has_sum=st.lists(st.booleans(), max_size=20),
    seed=st.integers(0, 99),
    factor=st.sampled_from([1.0, 0.5, 3.0]),
)
def test_a_sum_is_added_to_or_overwritten(has_sum: list[bool], seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    flags = np.array(has_sum, bool)
    gradients = rng.standard_normal((flags.size, DIM)).astype(np.float32)
    gradients[rng.random(gradients.shape) < 0.2] = -0.0
    sums = rng.standard_normal(gradients.shape).astype(np.float32)
    scaled = np.float32(factor) * gradients
    expected = np.where(flags[:, None], sums + scaled, scaled)
    sums[~flags] = np.nan
    sums.flags.writeable = False
    added = add_rows(sums, flags, gradients.copy(), factor, out=np.empty_like(sums))
    assert added.tobytes() == expected.tobytes()
    in_place = sums.copy()
    assert add_rows(in_place, flags, gradients, factor) is in_place
    assert in_place.tobytes() == expected.tobytes()


@given(seed=st.integers(0, 99), cut=st.integers(0, 50))
def test_a_batch_that_is_cut_has_the_same_bits(seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    flags = rng.random(50) < 0.5
    sums, gradients = rng.standard_normal((2, 50, 7)).astype(np.float32)
    parts = [
        add_rows(sums[part].copy(), flags[part], gradients[part].copy(), 0.375)
        for part in (slice(0, cut), slice(cut, None))
    ]
    whole = add_rows(sums.copy(), flags, gradients.copy(), 0.375)
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_bad_value_is_found(bad: float) -> None:
    values = np.zeros((4, DIM), np.float32)
    assert first_bad_cell(values) is None
    assert first_bad_cell(values[:0]) is None
    values[2, 1] = values[3, 0] = bad
    assert first_bad_cell(values) == (2, 1)


def test_a_sum_beyond_float32_is_seen() -> None:
    largest = np.full((2, 1), np.finfo(np.float32).max)
    added = add_rows(largest.copy(), np.array([False, True]), largest)
    assert first_bad_cell(added) == (1, 0)


def test_rows_with_a_sum_are_the_touched_ones() -> None:
    has_sum = np.array([False, True, True, False, True])
    assert touched_rows(has_sum, 4).tolist() == [1, 2]
    assert touched_rows(has_sum, 5).tolist() == [1, 2, 4]
