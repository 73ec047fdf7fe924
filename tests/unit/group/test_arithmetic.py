"""Goal: every rank gets the right numbers, and the same bits, whatever the codec and the order.

Method: real messages of collectives are carried in memory; results are compared with NumPy's in
float64, exactly where values are integers, within the codecs' stated bounds where they are not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from harness.oracles.reductions import (
    LOSSY,
    STRATEGIES,
    bits,
    exactly,
    expected,
    integers,
    normal,
    one_result,
    run,
    segment,
)
from harness.oracles.relay import ORDERS
from shardwell.group.schedule.arithmetic import Reduction
from shardwell.group.schedule.plan import Operation
from shardwell.group.schedule.strategies import Ring, Strategy, Tree
from shardwell.numerics.codec import Float32

strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
each_operation = pytest.mark.parametrize("operation", Operation, ids=lambda each: each.value)


def relative_error(found: Float32, exact: npt.NDArray[np.float64]) -> float:
    error = np.linalg.norm(found.astype(np.float64) - exact)
    return float(error / np.linalg.norm(exact))


@pytest.mark.sampled(6)
@strategies
@each_operation
def test_integers_are_exact(operation: Operation, strategy: Strategy) -> None:
    turn = 0
    for size in (1, 2, 3, 5, 8, 13, 17):
        for length in (0, 1, size - 1, size, size + 1, 41, 100):
            turn += 1
            arrays, root = integers(size, length, turn), turn % size
            order = ORDERS[turn % len(ORDERS)]
            results = run(operation, strategy, arrays, root=root, order=order, chunk=3 + turn % 5)
            for rank, result in enumerate(results):
                exact = expected(operation, arrays, rank, root)
                np.testing.assert_array_equal(result, exact, f"{size} ranks, rank {rank}")


@pytest.mark.sampled(28)
@strategies
@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
@each_operation
def test_the_same_bits_in_any_order(operation: Operation, codec: str, strategy: Strategy) -> None:
    """On all ranks where all get the same, and from run to run."""
    arrays = normal(7, 53)
    first = run(operation, strategy, arrays, root=2, codec=codec)
    if operation in (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.ALL_GATHER):
        one_result(first)
    for order in ORDERS[1:]:
        again = run(operation, strategy, arrays, root=2, codec=codec, order=order)
        assert [bits(array) for array in again] == [bits(array) for array in first], str(order)


@strategies
def test_fp32_adds_own_then_children_in_order(strategy: Strategy) -> None:
    """Bit for bit what peer.proto's trees make of float32 additions, one after another."""
    size = 9
    arrays = normal(size, 40)

    def partial(rank: int, collector: int) -> Float32:
        total = arrays[rank].copy()
        for child in children(rank, collector):
            total = total + partial(child, collector)
        return total

    def children(rank: int, collector: int) -> list[int]:
        place = (rank - collector) % size
        if isinstance(strategy, Ring):
            return [] if place == 1 else [(rank - 1) % size]
        arity = strategy.arity if isinstance(strategy, Tree) else size
        return [
            (collector + other) % size for other in range(1, size) if (other - 1) // arity == place
        ]

    found = one_result(run(Operation.ALL_REDUCE, strategy, arrays))
    for collector in range(size):
        where = segment(40, collector, size)
        wanted = partial(collector if isinstance(strategy, Ring) else 0, collector)
        if not isinstance(strategy, Ring):
            wanted = partial(0, 0)
        assert bits(found[where]) == bits(wanted[where])


@strategies
@pytest.mark.parametrize(("codec", "bound"), [("fp16", 1e-3), ("bf16", 8e-3)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e-10, 1e30])
def test_lossy_sums_of_eight_ranks(
    strategy: Strategy, codec: str, bound: float, magnitude: float
) -> None:
    """Whatever the magnitude: fp16 has a scale."""
    arrays = normal(8, 4000, magnitude)
    found = one_result(run(Operation.ALL_REDUCE, strategy, arrays, codec=codec, chunk=700))
    assert 0 < relative_error(found, exactly(arrays).sum(axis=0)) <= bound


@pytest.mark.parametrize("codec", LOSSY)
@strategies
def test_error_of_each_element(strategy: Strategy, codec: str) -> None:
    """Each of at most n roundings on the way is within the codec's bound (numerics/codec.py)."""
    size = 8
    arrays = normal(size, 500)
    values = exactly(arrays)
    found = one_result(run(Operation.ALL_REDUCE, strategy, arrays, codec=codec, chunk=50))
    # No partial sum is larger than the sum of magnitudes.
    most = np.abs(values).sum(axis=0)
    unit = 2.0**-11 if codec == "fp16" else 2.0**-8
    bound = size * 1.1 * (unit * most + 2.0**-19 * most.max())
    assert np.all(np.abs(found - values.sum(axis=0)) <= bound)


@strategies
@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
@pytest.mark.parametrize("reduction", [Reduction.MAX, Reduction.MIN])
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30])
def test_largest_and_smallest(
    reduction: Reduction, codec: str, strategy: Strategy, magnitude: float
) -> None:
    arrays = normal(6, 47, magnitude)
    results = run(Operation.ALL_REDUCE, strategy, arrays, codec=codec, reduction=reduction)
    values = exactly(arrays)
    exact = values.max(axis=0) if reduction is Reduction.MAX else values.min(axis=0)
    if codec == "fp32":
        np.testing.assert_array_equal(one_result(results), exact)
    else:
        assert relative_error(one_result(results), exact) <= (1e-3 if codec == "fp16" else 4e-3)


@strategies
@each_operation
def test_largest_of_all_negative(operation: Operation, strategy: Strategy) -> None:
    """Nothing is mixed with zeros of buffers."""
    arrays = [-np.abs(array) - 1 for array in integers(5, 23)]
    results = run(operation, strategy, arrays, root=1, reduction=Reduction.MAX)
    largest = np.max(arrays, axis=0)
    if operation in (Operation.ALL_REDUCE, Operation.REDUCE):
        np.testing.assert_array_equal(results[1], largest)
    elif operation is Operation.REDUCE_SCATTER:
        mine = segment(23, 4, 5)
        np.testing.assert_array_equal(results[4][mine], largest[mine])


@strategies
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_mean_of_equal_counts_is_the_rounded_quotient(strategy: Strategy, size: int) -> None:
    arrays = integers(size, 31)
    for sample_count in (1, 5, 2**24):
        results = run(
            Operation.ALL_REDUCE,
            strategy,
            arrays,
            reduction=Reduction.MEAN,
            sample_counts=[sample_count] * size,
        )
        exact = (exactly(arrays).sum(axis=0) / size).astype(np.float32)
        np.testing.assert_array_equal(one_result(results), exact)


@strategies
@pytest.mark.parametrize(
    "counts",
    [
        (1, 2, 3, 4, 5),
        (0, 1, 0, 0, 0),
        (0, 0, 0, 0, 7),
        (2**24, 1, 0, 3, 2**24),
        (1, 1, 1, 1, 0),
        (8, 8, 0, 16, 0),
    ],
    ids=str,
)
@each_operation
def test_means_by_weights_are_numpys(
    operation: Operation, counts: tuple[int, ...], strategy: Strategy
) -> None:
    if operation in (Operation.BROADCAST, Operation.ALL_GATHER):
        return
    arrays = normal(5, 29)
    results = run(
        operation, strategy, arrays, root=3, reduction=Reduction.MEAN, sample_counts=counts
    )
    exact = np.average(exactly(arrays), axis=0, weights=counts)
    most = np.abs(exactly(arrays)).max(axis=0)
    for rank, result in enumerate(results):
        where = slice(None)
        if operation is Operation.REDUCE_SCATTER:
            where = segment(29, rank, 5)
        elif operation is Operation.REDUCE and rank != 3:
            assert bits(result) == bits(arrays[rank])
            continue
        assert np.all(np.abs(result - exact)[where] <= 2.0**-20 * most[where])


@strategies
def test_a_mean_of_one_rank_alone_is_its_own_values(strategy: Strategy) -> None:
    """Counts that are zero take nothing from the others: 1 / 1 is no rounding."""
    arrays = normal(4, 19)
    for array in arrays:
        array[::3] = -0.0
    found = one_result(
        run(
            Operation.ALL_REDUCE,
            strategy,
            arrays,
            reduction=Reduction.MEAN,
            sample_counts=(0, 0, 4096, 0),
        )
    )
    assert bits(found) == bits(arrays[2])


@strategies
@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_a_mean_of_no_samples_is_zero(strategy: Strategy, codec: str) -> None:
    results = run(
        Operation.ALL_REDUCE,
        strategy,
        normal(4, 19),
        codec=codec,
        reduction=Reduction.MEAN,
        sample_counts=[0] * 4,
    )
    np.testing.assert_array_equal(one_result(results), 0.0)
