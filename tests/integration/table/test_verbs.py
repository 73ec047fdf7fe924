"""A table on real shards: its rows are those of a dict in float64, whatever cluster has them.

Method: random batches with repeated ids, put and exchanged in turns, on several shard counts; whole
numbers where exact values are asked for. Clients are real, one a worker.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.data.table_batches import DIM, open_table, random_ids, whole_numbers
from harness.oracles.rows import OPTIMIZERS, ModelRows

SGD = OPTIMIZERS["sgd"]
CODECS = ("fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4")


@pytest.mark.sampled(11)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("row_count", [1, 7, 1000, 2**62, None])
@pytest.mark.parametrize("shard_count", [1, 2, 3, 4])
def test_rows_are_those_of_the_model(cluster, connect, shard_count, row_count, mode) -> None:
    table = open_table(connect(cluster(shard_count), "w0"), row_count=row_count, mode=mode)
    model = ModelRows(DIM, SGD, mode=mode)
    generator = np.random.default_rng(shard_count)
    every = random_ids(generator, row_count, 300)
    for step in range(6):
        ids, gradients = random_ids(generator, row_count, 50), whole_numbers(generator, 50, DIM)
        model.put(ids, gradients)
        if step % 2:
            assert table.put_row_gradients(ids, gradients) == step
        else:
            rows = table.exchange_rows(ids, gradients, every)
            np.testing.assert_array_equal(rows, model.get(every))
        assert table.next_step == step + 1
        rows = table.get_rows(every, min_version=step + 1)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, model.get(every))
        assert table.version == step + 1
    np.testing.assert_array_equal(table.row_ids(), sorted(model.rows))
    assert sum(status.row_count for status in table.status()) == len(model.rows)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_in_every_codec(cluster, connect, codec) -> None:
    """Whole numbers are exact in all of them; others as near as the codec is."""
    table = open_table(connect(cluster(2), "w0"), codec=codec, dim=64)
    model = ModelRows(64, SGD)
    generator = np.random.default_rng(3)
    ids = random_ids(generator, 1000, 400)
    for gradients in (whole_numbers(generator, 400, 64), np.zeros((400, 64), np.float32)):
        model.put(ids, gradients)
        np.testing.assert_array_equal(table.exchange_rows(ids, gradients), model.get(ids))
    gradients = generator.standard_normal((400, 64))
    model.put(ids, gradients)
    found = table.exchange_rows(ids, gradients)
    bound = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2}[codec.removesuffix("+lz4")]
    np.testing.assert_allclose(found, model.get(ids), atol=bound * 20)
    assert np.abs(found - model.get(ids)).max() > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("worker_count", [1, 2])
def test_rows_under_every_optimizer(cluster, connect, name, worker_count) -> None:
    optimizer, initializer = OPTIMIZERS[name], shardwell.Uniform(low=-0.5, high=0.5, seed=3)
    running = cluster(2)
    tables = [
        open_table(
            connect(running, f"w{index}"),
            optimizer=optimizer,
            initializer=initializer,
            worker_count=worker_count,
        )
        for index in range(worker_count)
    ]
    model = ModelRows(DIM, optimizer, initializer=initializer, worker_count=worker_count)
    generator = np.random.default_rng(5)
    every = np.arange(1000)
    for step in range(8):
        for index, table in enumerate(tables):
            ids = random_ids(generator, 1000, 40)
            gradients = generator.standard_normal((40, DIM)).astype(np.float32)
            model.put(ids, gradients, 3 + index)
            table.put_row_gradients(ids, gradients, sample_count=3 + index)
        found = tables[0].get_rows(every, min_version=step + 1)
        np.testing.assert_allclose(found, model.get(every), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "initializer",
    [
        shardwell.Zeros(),
        shardwell.Uniform(),
        shardwell.Uniform(low=2.0, high=3.0, seed=2**64 - 1),
        shardwell.Normal(mean=1.0, std=0.5, seed=7),
    ],
)
@pytest.mark.parametrize("row_count", [1000, None])
def test_rows_before_their_first_gradient(cluster, connect, initializer, row_count) -> None:
    """Fetching makes none; the first gradient starts from the same values."""
    table = open_table(connect(cluster(2), "w0"), initializer=initializer, row_count=row_count)
    model = ModelRows(DIM, SGD, initializer=initializer)
    ids = np.arange(100) if row_count else np.array([-1, 2**63 - 1, -(2**63), 0, 5])
    before = table.get_rows(ids)
    np.testing.assert_allclose(before, model.get(ids), rtol=1e-6, atol=1e-6)
    assert table.row_ids().size == 0
    after = table.exchange_rows(ids[:3], np.ones((3, DIM)), ids)
    np.testing.assert_allclose(after[:3], before[:3] - 0.5, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(after[3:], before[3:])
    assert table.row_ids().tolist() == sorted(ids[:3].tolist())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("row_count", [5000, None])
def test_the_same_bits_on_any_number_of_shards(cluster, connect, codec, row_count) -> None:
    """Small and large values in one batch, so that the codec's rounding depends on its scale."""
    found = []
    for shard_count in (1, 2, 3):
        table = open_table(
            connect(cluster(shard_count), "w0"),
            codec=codec,
            row_count=row_count,
            optimizer=OPTIMIZERS["adagrad"],
            initializer=shardwell.Normal(std=0.1, seed=4),
        )
        generator = np.random.default_rng(8)
        for step in range(3):
            ids = generator.integers(0, 5000, 700)
            sizes = 10.0 ** generator.integers(-9, 6, (700, 1))
            table.put_row_gradients(ids, sizes * generator.standard_normal((700, DIM)))
            assert table.next_step == step + 1
        # Asked for one by one, so that what comes back does not share a message with others.
        found.append(b"".join(table.get_rows(int(key)).tobytes() for key in range(0, 5000, 50)))
    assert found[0] == found[1] == found[2]


def test_batches_of_many_messages(cluster, connect) -> None:
    """63 rows fill a message; a step's parts count together, and rows come in order."""
    dim = 4096
    table = open_table(connect(cluster(2), "w0"), dim=dim, row_count=None)
    model = ModelRows(dim, SGD)
    generator = np.random.default_rng(9)
    ids = generator.integers(-(2**63), 2**63 - 1, 700)[generator.integers(0, 700, 800)]
    gradients = whole_numbers(generator, 800, dim)
    model.put(ids, gradients)
    rows = table.exchange_rows(ids, gradients, ids[::-1])
    np.testing.assert_array_equal(rows, model.get(ids[::-1]))
    model.put(ids[:300], gradients[:300])
    assert table.put_row_gradients(ids[:300], gradients[:300]) == 1
    np.testing.assert_array_equal(table.get_rows(ids), model.get(ids))
    counted = sum(status.counted_row_count for status in table.status())
    assert counted == np.unique(ids).size + np.unique(ids[:300]).size


def test_shapes_of_ids_and_rows(cluster, connect) -> None:
    table = open_table(connect(cluster(2), "w0"))
    table.put_row_gradients([[1, 2], [3, 1]], -2 * np.ones((2, 2, DIM)))
    assert table.get_rows([[1, 2], [3, 1]]).tolist() == [
        [[2] * DIM, [1] * DIM],
        [[1] * DIM, [2] * DIM],
    ]
    assert table.get_rows(2).tolist() == [1] * DIM
    assert table.get_rows(np.int8(1)).shape == (DIM,)
    assert table.get_rows(np.empty((3, 0), np.uint16)).shape == (3, 0, DIM)
    assert table.get_rows([]).shape == (0, DIM)
    assert table.put_row_gradients(4, -2 * np.ones(DIM)) == 1
    assert table.get_rows(np.array([4, 1])[::-1]).tolist() == [[2] * DIM, [1] * DIM]


def test_out_is_filled_with_rows_and_returned(cluster, connect) -> None:
    for shard_count in (1, 3):
        table = open_table(connect(cluster(shard_count), "w0"))
        table.put_row_gradients([1, 2], -2 * np.ones((2, DIM)))
        for ids in ([1, 2], [2, 9, 2]):
            out = np.full((len(ids), DIM), np.nan, np.float32)
            assert table.get_rows(ids, out=out) is out
            np.testing.assert_array_equal(out, table.get_rows(ids))
        out = np.full((2, 1, DIM), np.nan, np.float32)
        assert table.exchange_rows([1], -2 * np.ones((1, DIM)), [[1], [2]], out=out) is out
        assert out.tolist() == [[[2] * DIM], [[1] * DIM]]


def test_an_empty_batch_is_a_step(cluster, connect) -> None:
    """Synchronous: a contribution of its sample_count; the others go on with it."""
    running = cluster(2)
    one, two = (open_table(connect(running, f"w{i}"), worker_count=2) for i in (0, 1))
    assert one.put_row_gradients([], np.zeros((0, DIM)), sample_count=3) == 0
    assert two.put_row_gradients([5], -8 * np.ones((1, DIM))) == 0
    assert one.get_rows(5, min_version=1).tolist() == [1] * DIM


def test_rows_that_are_evicted_begin_again(cluster, connect) -> None:
    table = open_table(
        connect(cluster(3), "w0"), initializer=shardwell.Uniform(seed=1), row_count=None
    )
    model = ModelRows(DIM, SGD, initializer=shardwell.Uniform(seed=1))
    generator = np.random.default_rng(0)
    every = np.arange(-40, 40)
    for step in range(6):
        ids, gradients = generator.choice(every, 12), whole_numbers(generator, 12, DIM)
        model.put(ids, gradients)
        table.put_row_gradients(ids, gradients)
        if step in (2, 3, 5):
            assert table.evict(older_than_step=step) == model.evict(step)
            assert table.row_ids().tolist() == sorted(model.rows)
        np.testing.assert_allclose(table.get_rows(every), model.get(every), rtol=1e-6, atol=1e-6)
    assert table.evict(older_than_step=0) == 0


def test_many_rows_are_evicted_and_their_places_used_again(cluster, connect) -> None:
    table = open_table(connect(cluster(1), "w0"), row_count=None)
    for count in (3000, 10_000, 500):
        ids = np.arange(count) * 7 - 3500
        table.put_row_gradients(ids, np.full((count, DIM), -2.0))
        assert table.evict(older_than_step=table.next_step) == count
        assert table.row_ids().size == 0
    (status,) = table.status()
    assert 10_000 <= status.row_capacity < 20_000
    ids = np.arange(6000)
    gradients = np.repeat(-2.0 * ids, DIM).reshape(-1, DIM)
    rows = table.exchange_rows(ids, gradients)
    np.testing.assert_array_equal(rows, -gradients / 2)
    np.testing.assert_array_equal(table.row_ids(), ids)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_learning_rate_is_changed_everywhere(cluster, connect, mode) -> None:
    table = open_table(connect(cluster(2), "w0"), mode=mode)
    model = ModelRows(DIM, SGD, mode=mode)
    ids, gradients = np.arange(20), np.ones((20, DIM))
    for rate in (None, 0.25, 0.0, 2.0):
        if rate is not None:
            table.set_learning_rate(rate, now=rate == 0.0)
            model.learning_rate = rate
        model.put(ids, gradients)
        np.testing.assert_array_equal(table.exchange_rows(ids, gradients), model.get(ids))
    assert {status.learning_rate for status in table.status()} == {2.0}
