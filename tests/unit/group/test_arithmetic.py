"""Goal: every rank gets the right numbers, and the same bits, whatever the codec and the order.

Method: real messages of collectives are carried in memory; results are compared with NumPy's in
float64, exactly where values are integers, within the codecs' stated bounds where they are not.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from harness.oracles.reductions import (
    FLOAT32_MAX,
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
from shardwell.group.schedule.arithmetic import Reduction, chunk_element_count
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


# Values at the edges of float32 and chunks of full size are reduced as IEEE 754 adds.


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
