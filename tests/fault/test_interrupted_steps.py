"""Goal: Ctrl-C in a step of a table, whenever it comes, loses no step and counts none twice.

Method: KeyboardInterrupt at each moment, in turn, at which the SDK's code can be interrupted; then
the caller does what is documented. Oracle: each step adds 1 to a row for each time it names it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell
from harness.interrupts import Interrupt

pytestmark = pytest.mark.timeout(120)

FILES = (
    "shardwell/table.py",
    "shardwell/table_steps.py",
    "shardwell/table_streams.py",
    "shardwell/row_reading.py",
    "shardwell/row_transfer.py",
    "shardwell/turns.py",
)
AT_THE_END = {
    "table_steps.py:put",
    "turns.py:turn",
    "table.py:exchange_rows",
    "table.py:put_row_gradients",
}
"""Where a step that has ended may be interrupted: nothing is left to be done but to return."""
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


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("verb", ["exchange", "put"])
def test_a_step_that_is_interrupted_and_sent_again_counts_once(
    cluster, connect, verb: str, mode: Any
) -> None:
    table = table_of(connect(cluster(1), "w0"), mode=mode, cache_row_count=100)

    def send() -> None:
        if verb == "put":
            table.put_row_gradients(IDS, GRADIENTS)
        else:
            rows = table.exchange_rows(IDS, GRADIENTS)
            assert rows[:, 0].tolist() == [2 * steps, steps, 2 * steps, steps]

    steps, number, ended_count = 1, 0, 0
    send()
    while True:
        step, steps = table.next_step, steps + 1
        interrupt = Interrupt(FILES, number)
        number += 1
        if not interrupt.run(send):
            break
        if table.next_step == step:
            send()
        else:
            ended_count += 1
            assert interrupt.place in AT_THE_END
        assert (table.next_step, table.is_step_begun) == (step + 1, False)
        assert table.get_rows(IDS)[:, 1].tolist() == [2 * steps, steps, 2 * steps, steps]
    assert number > 50
    assert ended_count <= 5


def test_a_step_that_is_interrupted_at_its_end_is_not_taken_for_another(
    cluster, connect, monkeypatch
) -> None:
    """Its rows were not handed out: other rows are refused until it is abandoned."""
    table = table_of(connect(cluster(2), "w0"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(table._reading, "answered", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.exchange_rows(IDS, GRADIENTS)
    assert (table.next_step, table.is_step_begun) == (0, True)
    with pytest.raises(shardwell.StepOrderError, match="sent other rows of it"):
        table.exchange_rows(IDS, 2 * GRADIENTS)
    assert table.get_rows(IDS)[:, 0].tolist() == [2, 1, 2, 1]
    assert table.abandon_step() == 0
    rows = table.exchange_rows(IDS, GRADIENTS)
    assert rows[:, 0].tolist() == [4, 2, 4, 2]
