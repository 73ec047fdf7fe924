"""Goal: each row of a table is updated by types.proto's formulas and its own count of updates.

Method: random batches of rows, beside one float64 oracle a row (harness/oracles/optimizers.py); the
same rows in other company, and the dense rule where all rows are touched, are compared bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.oracles.optimizers import OPTIMIZERS, Oracle, gradients_of, run
from shardwell import FTRL, SGD, Adagrad, Average, Optimizer, RMSProp, RowWiseAdagrad
from shardwell.errors import ArgumentError
from shardwell.numerics.codec import Float32
from shardwell.numerics.row_update_rules import RowUpdateRule
from shardwell.specs.optimizers import check_learning_rate

ROW_OPTIMIZERS: dict[str, Optimizer] = {
    name: optimizer
    for name, optimizer in OPTIMIZERS.items()
    if not isinstance(optimizer, Average | RMSProp)
} | {
    "row_wise_adagrad": RowWiseAdagrad(learning_rate=0.1),
    "row_wise_adagrad, all": RowWiseAdagrad(
        learning_rate=0.1,
        epsilon=1e-3,
        initial_accumulator=0.5,
        weight_decay=0.2,
        clip_value=1.0,
    ),
    "ftrl": FTRL(learning_rate=0.1),
    "ftrl, beta 0": FTRL(learning_rate=0.1, beta=0.0),
    "ftrl, l1": FTRL(learning_rate=0.2, l1=2.0),
    "ftrl, all": FTRL(learning_rate=0.3, beta=0.5, l1=0.5, l2=0.1, clip_value=2.0),
}
DENSE = sorted(set(ROW_OPTIMIZERS) & set(OPTIMIZERS))
"""Those that parameters have too."""
ROW_COUNT = 11


class Rows:
    """All rows of a table, updated some at a time, as a shard does it."""

    def __init__(self, optimizer: Optimizer, weights: Float32) -> None:
        self.rule = RowUpdateRule(optimizer)
        self.weights = weights.copy()
        width = 1 if isinstance(optimizer, RowWiseAdagrad) else weights.shape[1]
        self.slots = tuple(
            np.full((len(weights), width), start, np.float32) for start in self.rule.initial_slots
        )
        self.counts = np.zeros(len(weights), np.int64)

    def update(self, ids: Sequence[int], gradients: Float32, rate: float | None = None) -> None:
        self.counts[ids] += 1
        weights, slots = self.weights[ids], tuple(slot[ids] for slot in self.slots)
        rate = self.rule.learning_rate if rate is None else rate
        self.rule.apply(weights, gradients.copy(), slots, self.counts[ids], rate)
        self.weights[ids] = weights
        for all_rows, rows in zip(self.slots, slots, strict=True):
            all_rows[ids] = rows

    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in (self.weights, *self.slots)]


def first_weights(row_count: int, dim: int) -> Float32:
    return np.random.default_rng(42).standard_normal((row_count, dim)).astype(np.float32)


def batches_of(count: int, dim: int, seed: int) -> list[tuple[list[int], Float32]]:
    """Some rows each time, in any order, with their gradients."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        ids = random.permutation(ROW_COUNT)[: random.integers(1, ROW_COUNT + 1)]
        (gradients,) = gradients_of(1, len(ids) * dim, seed=1000 * seed + index)
        made.append((ids.tolist(), gradients.reshape(len(ids), dim)))
    return made


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_each_row_follows_the_formulas_by_its_own_count(name: str, dim: int) -> None:
    optimizer = ROW_OPTIMIZERS[name]
    rows = Rows(optimizer, first_weights(ROW_COUNT, dim))
    oracles = [Oracle(optimizer, row) for row in rows.weights]
    rates = itertools.cycle([None, None, 0.05, 0.3])
    for (ids, gradients), rate in zip(batches_of(60, dim, seed=dim), rates, strict=False):
        rows.update(ids, gradients, rate)
        for row, gradient in zip(ids, gradients, strict=True):
            oracles[row].update(gradient, rows.rule.learning_rate if rate is None else rate)
    want = np.stack([oracle.weights for oracle in oracles])
    np.testing.assert_allclose(rows.weights, want, rtol=5e-5, atol=5e-5)
    assert len(set(rows.counts.tolist())) > 1


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(sorted(ROW_OPTIMIZERS)),
    dim=st.sampled_from([1, 2, 3, 5, 8, 15, 16, 17, 64, 100]),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_rows_bits_do_not_depend_on_its_company(
    name: str, dim: int, seed: int, data: st.DataObject
) -> None:
    together = Rows(ROW_OPTIMIZERS[name], first_weights(ROW_COUNT, dim))
    apart = Rows(ROW_OPTIMIZERS[name], first_weights(ROW_COUNT, dim))
    for ids, gradients in batches_of(4, dim, seed):
        together.update(ids, gradients)
        order = data.draw(st.permutations(range(len(ids))))
        cuts = data.draw(st.sets(st.integers(1, len(ids)), max_size=4))
        for start, stop in itertools.pairwise(sorted({0, len(ids)} | cuts)):
            chosen = order[start:stop]
            apart.update([ids[place] for place in chosen], gradients[chosen])
    assert together.bits() == apart.bits()


@pytest.mark.sampled(28)
@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
@pytest.mark.parametrize(("row_count", "dim"), [(2500, 64), (5, 30_011), (3, 65_536), (140_000, 1)])
def test_batches_beyond_a_block_give_the_same_bits_as_rows_alone(
    name: str, row_count: int, dim: int
) -> None:
    together = Rows(ROW_OPTIMIZERS[name], first_weights(row_count, dim))
    (gradients,) = gradients_of(1, row_count * dim)
    gradients = gradients.reshape(row_count, dim)
    alone = Rows(ROW_OPTIMIZERS[name], together.weights)
    for rows in (together, alone):
        rows.counts[:] = np.arange(row_count) % 7
    together.update(range(row_count), gradients)
    some = range(0, row_count, max(row_count // 50, 1))
    for row in some:
        alone.update([row], gradients[row : row + 1])
    for whole, single in zip(
        (together.weights, *together.slots), (alone.weights, *alone.slots), strict=True
    ):
        assert whole[some].tobytes() == single[some].tobytes()


@pytest.mark.parametrize("name", DENSE)
def test_all_rows_touched_each_step_give_the_bits_of_a_dense_parameter(name: str) -> None:
    dim, step_count = 19, 40
    rows = Rows(ROW_OPTIMIZERS[name], first_weights(ROW_COUNT, dim))
    gradients = gradients_of(step_count, ROW_COUNT * dim)
    weights, slots = run(OPTIMIZERS[name], rows.weights.reshape(-1), gradients)
    for gradient in gradients:
        rows.update(range(ROW_COUNT), gradient.reshape(ROW_COUNT, dim))
    # As numbers: momentum may start with a zero of the other sign.
    np.testing.assert_array_equal(rows.weights.reshape(-1), weights)
    for mine, dense in zip(rows.slots, slots, strict=True):
        np.testing.assert_array_equal(mine.reshape(-1), dense)


def test_row_wise_adagrad_of_one_column_is_adagrad() -> None:
    one, other = (
        Rows(kind(learning_rate=0.1, weight_decay=0.1), first_weights(ROW_COUNT, 1))
        for kind in (RowWiseAdagrad, Adagrad)
    )
    for ids, gradients in batches_of(20, 1, seed=3):
        one.update(ids, gradients)
        other.update(ids, gradients)
    assert one.bits() == other.bits()


def test_ftrl_is_sparse_where_gradients_are_small() -> None:
    rows = Rows(FTRL(learning_rate=0.5, l1=1.0), np.zeros((1, 4), np.float32))
    for _ in range(3):
        rows.update([0], np.array([[0.1, -0.1, 2.0, 0.0]], np.float32))
    assert rows.weights[0, [0, 1, 3]].tolist() == [0.0, 0.0, 0.0]
    assert rows.weights[0, 2] < 0.0


@pytest.mark.parametrize("gradient", [0.0, 1e-30, -1e-30, 1e19])
def test_ftrl_without_beta_divides_by_no_zero(gradient: float) -> None:
    rows = Rows(FTRL(learning_rate=0.5, beta=0.0), np.zeros((2, 3), np.float32))
    for _ in range(2):
        rows.update([1], np.full((1, 3), gradient, np.float32))
        assert np.isfinite(rows.weights).all()


def test_ftrl_has_no_rate_of_zero() -> None:
    with pytest.raises(ArgumentError, match="rate must be above 0 with FTRL"):
        check_learning_rate("rate", 0.0, FTRL(learning_rate=1.0))
    assert check_learning_rate("rate", 0.0, SGD(learning_rate=1.0)) == 0.0
    with pytest.raises(ArgumentError, match=r"FTRL.learning_rate must be above 0"):
        FTRL(learning_rate=0)


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("sgd", ()),
        ("sgd, momentum", (0.0,)),
        ("adagrad, all", (0.5,)),
        ("row_wise_adagrad, all", (0.5,)),
        ("adam", (0.0, 0.0)),
        ("adam_w", (0.0, 0.0)),
        ("ftrl", (0.0, 0.0)),
    ],
)
def test_the_state_that_is_kept_of_rows(name: str, starts: tuple[float, ...]) -> None:
    assert RowUpdateRule(ROW_OPTIMIZERS[name]).initial_slots == starts
    assert len(ROW_OPTIMIZERS[name].slot_names) == len(starts)


def test_adams_first_update_is_the_rate_however_late_it_comes() -> None:
    rows = Rows(ROW_OPTIMIZERS["adam"], np.zeros((2, 3), np.float32))
    one = np.ones((1, 3), np.float32)
    for _ in range(500):
        rows.update([0], one)
    rows.update([0, 1], np.ones((2, 3), np.float32))
    np.testing.assert_allclose(rows.weights[1], -rows.rule.learning_rate, rtol=1e-6)


def test_momentum_starts_with_the_rows_first_gradient_whatever_was_there() -> None:
    rows = Rows(ROW_OPTIMIZERS["sgd, dampening"], np.zeros((2, 3), np.float32))
    rows.slots[0][:] = np.nan
    rows.update([1], np.ones((1, 3), np.float32))
    assert rows.slots[0][1].tolist() == [1.0, 1.0, 1.0]
    assert np.isnan(rows.slots[0][0]).all()


def test_what_is_not_finite_goes_through_in_silence() -> None:
    rows = Rows(Adagrad(learning_rate=0.1), np.ones((3, 2), np.float32))
    rows.update([0, 1, 2], np.array([[np.nan, 1], [3e38, 1], [1, 1]], np.float32))
    assert np.isnan(rows.weights[0, 0])
    assert np.isfinite(rows.weights[2]).all()


def test_no_rows_are_no_error() -> None:
    for optimizer in ROW_OPTIMIZERS.values():
        Rows(optimizer, np.ones((3, 2), np.float32)).update([], np.empty((0, 2), np.float32))


@pytest.mark.parametrize("optimizer", [Average(), RMSProp(learning_rate=0.1)])
def test_optimizers_that_do_not_know_rows_are_refused(optimizer: Optimizer) -> None:
    with pytest.raises(TypeError, match="no update rule for rows"):
        RowUpdateRule(optimizer)
