"""What a table can't be asked: each is an error that says what and where, and nothing was sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.memory import at_byte
from harness.data.nans import CANONICAL, ODD_NANS, nan_bits
from harness.oracles.rows import OPTIMIZERS
from shardwell_server.config import Limits

DIM = 3
OPTIONS = {
    "row_count": 10,
    "dim": DIM,
    "optimizer": OPTIMIZERS["sgd"],
    "initializer": shardwell.Zeros(),
    "codec": "fp32",
}


def _table(client: shardwell.Client, **options: Any) -> shardwell.Table:
    return client.table("rows", **{**OPTIONS, **options})


def _ones(count: int) -> np.ndarray:
    return np.ones((count, DIM), np.float32)


@pytest.fixture
def table(cluster, connect) -> shardwell.Table:
    return _table(connect(cluster(2), "w0"))


BAD_IDS = [
    ([10], "row id 10 at place 0 is out of range; the table's ids are 0 to 9"),
    ([3, -1], "row id -1 at place 1"),
    ([2**70], f"ids must be integers of 64 bits; got {2**70} at place 0"),
    ([[1], [-(2**63) - 1]], r"of 64 bits; got -9223372036854775809 at place \(1, 0\)"),
    (np.array([1.0]), "ids must be integers; got float64 .* would give other ids"),
    ([2**63, 1.5], "ids must be integers; got float64 .* would give other ids"),
    (np.array([True]), "got bool"),
    (["1"], "got <U1"),
    (None, "got object"),
]


@pytest.mark.parametrize(("ids", "match"), BAD_IDS)
def test_row_ids_that_no_table_has_are_refused(table, ids, match) -> None:
    for call in (
        lambda: table.get_rows(ids),
        lambda: table.prefetch_rows(ids),
        lambda: table.put_row_gradients(ids, _ones(np.size(ids))),
        lambda: table.exchange_rows(ids, _ones(np.size(ids))),
        lambda: table.exchange_rows([1], _ones(1), ids if ids is not None else "x"),
    ):
        with pytest.raises(shardwell.ArgumentError, match=match if ids is not None else "integers"):
            call()
    _nothing_was_sent(table)


@pytest.mark.parametrize("repeated", [False, True])
def test_ids_and_gradients_at_odd_addresses(table, repeated: bool) -> None:
    ids, gradients = np.array([4, 4 if repeated else 7]), np.ones((2, DIM), np.float32)
    for number, call in enumerate((table.put_row_gradients, table.exchange_rows), 1):
        call(at_byte(1, ids), at_byte(3, gradients))
        found = table.get_rows(at_byte(5, ids))
        assert (found == -0.5 * number * (1 + repeated)).all()


@pytest.mark.parametrize(
    ("gradients", "match"),
    [
        (np.ones((3, DIM)), r"must be of shape \(2, 3\).*got \(3, 3\)"),
        (np.ones((2, DIM + 1)), r"got \(2, 4\)"),
        (np.ones(2 * DIM), r"got \(6,\)"),
        (np.ones((2, DIM), int), "float32 .* got int64"),
        ([["a"] * DIM] * 2, "must be"),
        ([[1.0]] * 2, r"got \(2, 1\)"),
        (np.array([[1, 1, 1], [1, np.nan, 1]]), "row id 5 of 'rows': element 1 .* is nan"),
        (np.array([[1, 1, 1e39], [1, 1, 1]]), "row id 4 of 'rows': element 2 .* is inf"),
    ],
)
def test_row_gradients_of_a_wrong_shape_or_value_are_refused(table, gradients, match) -> None:
    for call in (table.put_row_gradients, table.exchange_rows):
        with pytest.raises(shardwell.ArgumentError, match=match):
            call([4, 5], gradients)
    _nothing_was_sent(table)


def test_other_arguments_of_tables_are_checked(table) -> None:
    out = np.zeros((2, DIM), np.float32)
    with pytest.raises(
        shardwell.ArgumentError, match=r"out must be of shape \(2, 3\); got \(3, 2\)"
    ):
        table.get_rows([1, 2], out=np.empty((DIM, 2), np.float32))
    for bad in (np.empty((2, DIM)), np.empty((3, DIM), np.float32), out[:, ::-1], [0.0] * 6):
        with pytest.raises(shardwell.ArgumentError, match="out must be a writable C-contiguous"):
            table.get_rows([1, 2], out=bad)
        with pytest.raises(shardwell.ArgumentError, match="out must be a writable C-contiguous"):
            table.exchange_rows([1], _ones(1), [1, 2], out=bad)
    with pytest.raises(shardwell.ArgumentError, match="overlap"):
        table.exchange_rows([1, 2], out, out=out)
    for bad in (-1, 2**24 + 1, 1.5, True, None):
        with pytest.raises(shardwell.ArgumentError, match="sample_count"):
            table.put_row_gradients([1], _ones(1), sample_count=bad)
    for bad in (-1, 0.5, None):
        with pytest.raises(shardwell.ArgumentError, match="min_version"):
            table.get_rows([1], min_version=bad)
        with pytest.raises(shardwell.ArgumentError, match="older_than_step"):
            table.evict(older_than_step=bad)
    for bad in (0, -1, "1", float("nan")):
        with pytest.raises(shardwell.ArgumentError, match="timeout_s"):
            table.get_rows([1], timeout_s=bad)
    for bad in (-1.0, float("inf"), "a"):
        with pytest.raises(shardwell.ArgumentError, match="learning_rate"):
            table.set_learning_rate(bad)
    _nothing_was_sent(table)


def _nothing_was_sent(table: shardwell.Table) -> None:
    assert (table.next_step, table.is_step_begun) == (0, False)
    assert sum(status.counted_row_count for status in table.status()) == 0
    assert table.put_row_gradients([1], _ones(1)) == 0
    assert table.get_rows([1]).tolist() == [[-0.5] * DIM]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"row_count": 0}, "row_count"),
        ({"row_count": 1.5}, "row_count"),
        ({"dim": 0}, "dim"),
        ({"dim": 65537}, "dim"),
        ({"optimizer": shardwell.Average()}, "optimizer of a table must be one of SGD"),
        ({"optimizer": "sgd"}, "optimizer of a table"),
        ({"initializer": 0.0}, r"initializer must be one of shardwell\.Zeros"),
        ({"worker_count": 0}, "worker_count"),
        ({"codec": "fp8"}, "codec"),
        ({"mode": "later"}, "mode"),
        ({"cache_row_count": -1}, "cache_row_count"),
        ({"cache_staleness_steps": 0.5}, "cache_staleness_steps"),
    ],
)
def test_impossible_specs_of_tables_are_refused(cluster, connect, options, match) -> None:
    client = connect(cluster(1), "w0")
    with pytest.raises(shardwell.ArgumentError, match=match):
        _table(client, **options)


def test_values_that_are_not_finite_may_be_allowed(cluster, connect) -> None:
    table = _table(connect(cluster(2), "w0"), allow_non_finite=True)
    gradients = _ones(2)
    gradients[1, 1] = np.inf
    rows = table.exchange_rows([1, 2], gradients)
    assert rows.tolist() == [[-0.5] * DIM, [-0.5, -np.inf, -0.5]]


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "fp32+lz4"])
def test_a_nan_in_a_row_comes_back_with_one_pattern(cluster, connect, codec) -> None:
    table = _table(connect(cluster(2), "w0"), allow_non_finite=True, codec=codec)
    gradients = np.resize(ODD_NANS, (8, DIM))
    rows = table.exchange_rows(np.arange(8), gradients)
    for found in (rows, table.get_rows(np.arange(8)), table.get_rows([3, 3, 1])):
        assert np.isnan(found).all()
        assert nan_bits(found) == {CANONICAL}


def test_sums_that_overflow_on_a_shard_are_mapped_back(cluster, connect) -> None:
    """A second weight 2^24 times the first: finite on each worker, and not as a sum."""
    running = cluster(2)
    one, two = (_table(connect(running, f"w{i}"), worker_count=2) for i in (0, 1))
    gradients = _ones(4)
    one.put_row_gradients([1, 2, 3, 4], gradients, sample_count=1)
    gradients[2, 1] = 3e38
    with pytest.raises(shardwell.NonFiniteError, match="row id 1") as caught:
        two.put_row_gradients([4, 3, 1, 2], gradients, sample_count=2**24)
    assert caught.value.element_index == 2 * DIM + 1
    assert two.is_step_begun


def test_which_sum_overflowed_is_not_known_of_several_messages(cluster, connect) -> None:
    running = cluster(1)
    options = {"worker_count": 2, "row_count": 20, "dim": 2**16, "codec": "fp32"}
    one, two = (_table(connect(running, f"w{i}"), **options) for i in (0, 1))
    gradients = np.ones((20, 2**16), np.float32)
    one.put_row_gradients(range(20), gradients, sample_count=1)
    gradients[19, 1] = 3e38
    with pytest.raises(shardwell.NonFiniteError, match="row id 19") as caught:
        two.put_row_gradients(range(20), gradients, sample_count=2**24)
    assert caught.value.element_index == -1


def test_a_part_that_state_can_t_take_says_how_the_step_is_ended(cluster, connect) -> None:
    table = _table(connect(cluster(1), "w0"), optimizer=shardwell.Adagrad(0.5), codec="fp32")
    with pytest.raises(
        shardwell.NonFiniteError,
        match=r"'sum' of row id 1, .*; abandon_step\(\) ends .* table with allow_non_finite",
    ):
        table.put_row_gradients([1], np.full((1, table.dim), 1e30, np.float32))
    assert table.abandon_step() == 0
    assert table.put_row_gradients([1], np.ones((1, table.dim), np.float32)) == 1


def test_a_shard_without_room_refuses_and_the_step_can_be_ended(cluster, connect) -> None:
    """One shard has counted its rows, the other has not: again, or with what was counted."""
    running = cluster(2, limits=Limits(table_row_count_max=3))
    table = _table(connect(running, "w0"), row_count=1000, mode="async")
    ids = np.arange(6)
    assert table.put_row_gradients(ids, _ones(6)) == 0
    others = [6, 7, 8]
    with pytest.raises(shardwell.LimitError, match="table_row_count_max=3") as caught:
        table.put_row_gradients([*range(20)], _ones(20))
    assert caught.value.table == "rows"
    assert (table.next_step, table.is_step_begun) == (1, True)
    with pytest.raises(
        shardwell.StepOrderError, match=r"call again with those rows, or .*abandon_st"
    ):
        table.put_row_gradients(others, _ones(3))
    with pytest.raises(shardwell.LimitError, match="table_row_count_max"):
        table.put_row_gradients([*range(20)], _ones(20))
    assert table.abandon_step() == 1
    assert (table.next_step, table.is_step_begun) == (2, False)
    before = table.get_rows(ids)
    assert table.put_row_gradients(ids, _ones(6)) == 2
    np.testing.assert_array_equal(table.get_rows(ids), before - 0.5)


def test_keys_of_both_signs_are_exact_in_lists_too(cluster, connect) -> None:
    """NumPy has no dtype for them together, and makes floats of them, which round."""
    table = _table(connect(cluster(2), "w0"), row_count=None)
    keys = [2**63, -1, 2**64 - 2, 2**53 + 1]
    table.put_row_gradients(keys, np.full((4, DIM), -2.0))
    assert table.row_ids().tolist() == sorted([-(2**63), -1, -2, 2**53 + 1])
    rows = table.get_rows([[2**63], [-1]])
    assert rows[..., 0].tolist() == [[1.0], [1.0]]
    assert table.get_rows(tuple(keys))[:, 0].tolist() == [1.0] * 4
