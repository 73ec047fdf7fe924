"""Goal: a step of a table that fails when all is counted is not taken for another.

Method: a failure where rows are handed out. Oracle: each step adds 1 to a row for each time it
names it. What real signals do is in test_interrupts.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell
from shardwell.table.reader import RowReading

IDS = np.array([5, 1, 5, 700])
GRADIENTS = np.full((4, 2), -1.0, np.float32)


def table_of(client: shardwell.Client, **options: Any) -> shardwell.Table:
    return client.table(
        "t",
        row_count=1000,
        dim=2,
        optimizer=shardwell.SGD(learning_rate=1.0),
        initializer=shardwell.Zeros(),
        codec="fp32",
        **options,
    )


def test_a_step_that_is_interrupted_at_its_end_is_not_taken_for_another(
    cluster, connect, monkeypatch
) -> None:
    """Its rows were not handed out: other rows are refused until it is abandoned."""
    running = cluster(2)
    table = table_of(connect(running, "w0"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RowReading, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.exchange_rows(IDS, GRADIENTS)
    assert (table.next_step, table.is_step_begun) == (0, True)
    with pytest.raises(shardwell.StepOrderError, match="sent other rows of it"):
        table.exchange_rows(IDS, 2 * GRADIENTS)
    assert table.get_rows(IDS)[:, 0].tolist() == [0, 0, 0, 0]  # as they were before its next step
    reader = connect(running, "reader").table("t")
    assert reader.get_rows(IDS)[:, 0].tolist() == [2, 1, 2, 1]
    assert table.abandon_step() == 0
    assert table.get_rows(IDS)[:, 0].tolist() == [2, 1, 2, 1]
    rows = table.exchange_rows(IDS, GRADIENTS)
    assert rows[:, 0].tolist() == [4, 2, 4, 2]
