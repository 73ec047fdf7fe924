"""A table in one process against the oracle of tables: the same rows, the same updates."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.local_table import LocalTable
from harness.oracles.rows import OPTIMIZERS, ModelRows
from shardwell import Normal, Uniform
from shardwell.specs.table import TableSpec

ROW_COUNT, DIM = 7, 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "initializer", [Uniform(seed=5), Normal(seed=6)], ids=["uniform", "normal"]
)
def test_rows_are_those_of_the_oracle(optimizer, initializer):
    table = LocalTable(
        TableSpec(
            name="t",
            row_count=ROW_COUNT,
            dim=DIM,
            optimizer=optimizer,
            initializer=initializer,
            worker_count=0,
            mode="async",
        )
    )
    model = ModelRows(DIM, optimizer, initializer=initializer, mode="async")
    random = np.random.default_rng(1)
    for step in range(12):
        assert table.next_step == table.version == step
        if step == 8:
            table.set_learning_rate(0.01)
            model.learning_rate = 0.01
        ids = random.integers(0, ROW_COUNT - 1, 9)  # some twice; the last never
        gradients = random.normal(0.0, 2.0, (9, DIM)).astype(np.float32)
        next_ids = random.integers(0, ROW_COUNT, 5)
        model.put(ids, gradients)
        rows = table.exchange_rows(ids, gradients, next_ids)
        np.testing.assert_allclose(rows, model.get(next_ids), rtol=2e-5, atol=1e-5)
    everything = np.arange(ROW_COUNT)
    np.testing.assert_allclose(
        table.get_rows(everything), model.get(everything), rtol=2e-5, atol=1e-5
    )


def test_what_it_gives_is_a_copy():
    spec = TableSpec(
        name="t",
        row_count=ROW_COUNT,
        dim=DIM,
        optimizer=OPTIMIZERS["adagrad"],
        initializer=Uniform(),
        worker_count=0,
        mode="async",
    )
    table = LocalTable(spec)
    rows = table.get_rows(np.array([2, 2]))
    kept = rows.copy()
    rows[:] = 9.0
    np.testing.assert_array_equal(table.get_rows(np.array([2, 2])), kept)
