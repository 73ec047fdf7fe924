"""Goal: parts cover an array once, whatever its length, and blocks are reduced as NumPy does it.

Method: exhaustive over lengths; float64 beside float32.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardwell.numerics.codec import first_non_finite
from shardwell.numerics.reduction import REDUCTIONS, part_of, reduce_block
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT
from shardwell.numerics.weighted_mean import MeanFactors


@pytest.mark.parametrize("part_count", range(1, 9))
def test_parts_follow_one_another_and_cover_everything(part_count: int) -> None:
    for size in [*range(130), 1000, 65537, 2**48]:
        parts = [part_of(size, part_count, index) for index in range(part_count)]
        assert parts[0][0] == 0
        assert parts[-1][1] == size
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
        assert all(start % 16 == 0 for start, stop in parts if stop > start)
        assert max(stop - start for start, stop in parts) <= size / part_count + 32


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("rank_count", [1, 2, 3, 5])
def test_a_block_is_reduced_as_numpy_reduces(op: str, rank_count: int) -> None:
    values = np.random.default_rng(7).standard_normal((rank_count, 77)).astype(np.float32)
    buffers = [row.copy() for row in values]
    counts = list(range(1, rank_count + 1))
    reduce_block(buffers, op, MeanFactors(counts), np.empty(77, np.float32))
    expected = {
        "sum": lambda: values.astype(np.float64).sum(axis=0),
        "mean": lambda: np.average(values.astype(np.float64), axis=0, weights=counts),
        "max": lambda: values.max(axis=0),
        "min": lambda: values.min(axis=0),
    }[op]()
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, buffers[0])
        np.testing.assert_allclose(buffer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op", "sign"), [("max", 0.0), ("min", -0.0)])
def test_0_is_larger_than_minus_0_whatever_the_order(op: str, sign: float) -> None:
    """NumPy takes the second one on x86-64, and this one on ARM."""
    for first in itertools.product((0.0, -0.0), repeat=3):
        buffers = [np.full(77, value, np.float32) for value in first]
        reduce_block(buffers, op, MeanFactors([1] * 3), np.empty(77, np.float32))
        expected = sign if len(set(map(str, first))) == 2 else first[0]
        assert (np.signbit(buffers[0]) == np.signbit(expected)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 5, BLOCK_ELEMENT_COUNT - 1, BLOCK_ELEMENT_COUNT + 3])
def test_the_first_value_that_is_not_finite_is_found(bad: float, index: int) -> None:
    values = np.ones(BLOCK_ELEMENT_COUNT + 9, np.float32)
    assert first_non_finite(values) is None
    values[index] = values[-1] = bad
    assert first_non_finite(values) == index
    assert first_non_finite(values[:0]) is None
