"""Goal: values at the edges of float32 and chunks of full size are reduced as IEEE 754 adds.

Method: as in test_arithmetic.py, with arrays aimed at the edges.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.oracles.reductions import (
    FLOAT32_MAX,
    LOSSY,
    STRATEGIES,
    bits,
    normal,
    one_result,
    run,
)
from harness.oracles.relay import ORDERS
from shardwell.group.schedule.arithmetic import Reduction, chunk_element_count
from shardwell.group.schedule.plan import Operation
from shardwell.group.schedule.strategies import Strategy, Tree

strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
each_operation = pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)


@strategies
@pytest.mark.parametrize(
    "counts", [(1, 2, 3), (3, 5, 7), (1, 0, 2**24), (1, 1, 1), (2**24, 1)], ids=str
)
def test_a_mean_of_the_largest_values(strategy: Strategy, counts: tuple[int, ...]) -> None:
    """It is no larger than they are, whatever is rounded on the way."""
    for value in (FLOAT32_MAX, FLOAT32_MAX * (1 - 2.0**-20)):
        found = one_result(
            run(
                Operation.ALL_REDUCE,
                strategy,
                [np.full(11, value, np.float32) for _ in counts],
                reduction=Reduction.MEAN,
                sample_counts=counts,
            )
        )
        if value == FLOAT32_MAX:
            assert np.all(np.isfinite(found) & (found >= FLOAT32_MAX * (1 - 2.0**-20)))
        else:
            np.testing.assert_allclose(found, value, rtol=1e-6)


@strategies
@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_sums_beyond_float32_are_infinite(strategy: Strategy, codec: str) -> None:
    arrays = [np.full(23, 3e38, np.float32) for _ in range(4)]
    for array in arrays:
        array[1::3] = -3e38
        array[2::3] = 1.0
    found = one_result(run(Operation.ALL_REDUCE, strategy, arrays, codec=codec))
    np.testing.assert_array_equal(found[0::3], np.inf)
    np.testing.assert_array_equal(found[1::3], -np.inf)
    if codec != "fp16":  # which loses what is 2^-39 of its block's peak
        np.testing.assert_array_equal(found[2::3], 4.0)


@strategies
@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_what_is_not_finite_travels(strategy: Strategy, codec: str) -> None:
    """Where a group allows it: as IEEE 754 adds it."""
    arrays = [np.ones(12, np.float32) for _ in range(5)]
    arrays[3][2], arrays[1][7], arrays[4][5], arrays[0][5] = np.inf, np.nan, np.inf, -np.inf
    found = one_result(run(Operation.ALL_REDUCE, strategy, arrays, codec=codec))
    wanted = np.full(12, 5.0)
    wanted[[2, 7, 5]] = np.inf, np.nan, np.nan
    np.testing.assert_array_equal(found, wanted)


@strategies
def test_denormals_are_added_exactly(strategy: Strategy) -> None:
    smallest = math.ldexp(1.0, -149)
    arrays = [np.full(9, smallest * (rank + 1), np.float32) for rank in range(6)]
    found = one_result(run(Operation.ALL_REDUCE, strategy, arrays))
    np.testing.assert_array_equal(found, np.float32(21 * smallest))


@strategies
@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.MEAN, Reduction.MAX])
def test_minus_zero_stays(reduction: Reduction, codec: str, strategy: Strategy) -> None:
    """IEEE 754: a sum of minus zeros is one."""
    arrays = [np.full(9, -0.0, np.float32) for _ in range(4)]
    for operation in (Operation.ALL_REDUCE, Operation.BROADCAST):
        results = run(operation, strategy, arrays, codec=codec, reduction=reduction)
        found = one_result(results)
        np.testing.assert_array_equal(found, 0.0)
        assert np.all(np.signbit(found))


@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_chunks_of_full_size(codec: str) -> None:
    """More than one chunk a segment, at the size that is used: buffers are large enough."""
    chunk = chunk_element_count(codec)
    assert chunk * (4 if codec == "fp32" else 2) == 2**20
    arrays = [np.full(2 * chunk + 7, rank + 1, np.float32) for rank in range(3)]
    found = one_result(
        run(Operation.ALL_REDUCE, Tree(2), arrays, codec=codec, chunk=chunk, order=ORDERS[3])
    )
    np.testing.assert_array_equal(found, 6.0)


@pytest.mark.parametrize("codec", LOSSY)
def test_the_root_of_a_broadcast_has_what_it_sent(codec: str) -> None:
    """It takes what it wrote, decoded; a rank alone writes nothing, and keeps its values."""
    arrays = normal(3, 13)
    found = one_result(run(Operation.BROADCAST, Tree(2), arrays, root=1, codec=codec))
    assert bits(found) != bits(arrays[1])
    alone = run(Operation.BROADCAST, Tree(2), arrays[:1], codec=codec)
    assert bits(alone[0]) == bits(arrays[0])
