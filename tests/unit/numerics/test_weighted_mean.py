"""Goal: the weighted mean is right to rounding, exact where it can be, and never overflows.

Method: fractions and float64 beside it, on the arithmetic that every reduction does in float32.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwell.numerics.weighted_mean import MeanFactors

COUNTS = st.lists(st.integers(0, 2**24), min_size=1, max_size=12)
LARGEST = np.finfo(np.float32).max


def mean_of(values: list[np.float32], weights: MeanFactors) -> np.float32:
    """As a reduction takes it: float32 throughout, in order of rank."""
    total = np.float32(0)
    for rank, value in enumerate(values):
        if weights.factor(rank):
            total = np.float32(total + value * np.float32(weights.factor(rank)))
    return np.float32(total / np.float32(weights.divisor))


@given(counts=COUNTS)
def test_factors_are_shares_of_a_power_of_two(counts: list[int]) -> None:
    weights = MeanFactors(counts)
    factors = [Fraction(weights.factor(rank)) for rank in range(len(counts))]
    assert len(weights) == len(counts)
    assert all(float(np.float32(factor)) == factor for factor in factors)
    assert sum(factors) <= 1
    if not any(counts):
        assert (set(factors), weights.divisor) == ({0}, 1.0)
        return
    assert sum(factors) == Fraction(weights.divisor) > Fraction(1, 2)
    for factor, count in zip(factors, counts, strict=True):
        assert factor / sum(factors) == Fraction(count, sum(counts))


@given(counts=COUNTS, seed=st.integers(0, 2**32 - 1))
def test_the_mean_is_that_of_float64(counts: list[int], seed: int) -> None:
    values = list(np.random.default_rng(seed).standard_normal(len(counts)).astype(np.float32))
    expected = np.average(np.float64(values), weights=counts) if any(counts) else 0.0
    np.testing.assert_allclose(mean_of(values, MeanFactors(counts)), expected, rtol=0, atol=2e-5)


@given(counts=COUNTS)
@example(counts=[3, 5])
@example(counts=[1, 1, 1])
@example(counts=[2**24, 2**24 - 1, 1])
def test_the_largest_values_do_not_overflow_on_the_way(counts: list[int]) -> None:
    """Half of the largest in magnitude is far more than a sum of them could hold."""
    if any(counts):
        with np.errstate(over="raise"):
            found = mean_of([np.float32(LARGEST / 2)] * len(counts), MeanFactors(counts))
        np.testing.assert_allclose(found, LARGEST / 2, rtol=1e-5)


@given(
    values=st.lists(st.integers(-(2**16), 2**16), min_size=1, max_size=8),
    count=st.integers(1, 2**24),
)
def test_equal_counts_of_integers_are_summed_exactly(values: list[int], count: int) -> None:
    """Any equal counts, also such as 100: their common divisor goes first."""
    found = mean_of([np.float32(value) for value in values], MeanFactors([count] * len(values)))
    assert found == np.float32(sum(values) / len(values))


@pytest.mark.parametrize("count", [1, 3, 7, 2**24])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_weighted_mean_of_one_is_that_one(count: int, others: int) -> None:
    weights = MeanFactors([0] * others + [count])
    assert (weights.factor(others), weights.divisor) == (1.0, 1.0)


def test_no_worker_has_samples() -> None:
    assert mean_of([np.float32(np.nan)] * 3, MeanFactors([0, 0, 0])) == 0.0
