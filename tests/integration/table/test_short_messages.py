"""Work on a shard's loop, which all calls need, is short; long work never runs there."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.table_batches import open_table
from harness.threads import in_background
from shardwell_server.shard.table.slice import TableSlice

LOOP = "shardwell-loop"
DIM = 64
MANY = 1200
"""Whose ids are a short message, and whose values are many."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[bool]]:
    """Whether messages were served on the loop, by what was asked for and how many rows."""
    found: dict[str, set[bool]] = defaultdict(set)

    def noted(name: str, count: Any) -> None:
        real = getattr(TableSlice, name)

        def method(self: TableSlice, *arguments: Any) -> Any:
            key = f"{name} {count(*arguments)}"
            found[key].add(LOOP in threading.current_thread().name)
            return real(self, *arguments)

        monkeypatch.setattr(TableSlice, name, method)

    noted("rows_message", lambda fetch, *_: fetch.rows.row_count)
    noted("contribute", lambda _, header, *__: header.rows.row_count)
    return found


def _ones(count: int) -> np.ndarray:
    return np.ones((count, DIM), np.float32)


def _table(client: shardwell.Client, **options: Any) -> shardwell.Table:
    return open_table(
        client, **{"mode": "async", "row_count": 10_000, "dim": DIM, "codec": "fp16", **options}
    )


def _use(table: shardwell.Table) -> None:
    for _ in range(3):
        for count in (4, MANY, 4):
            table.put_row_gradients(range(count), _ones(count))
            table.get_rows(range(count))


def test_few_rows_in_memory_are_served_on_the_loop(cluster, connect, threads) -> None:
    client = connect(cluster(1), "w0")
    _use(_table(client))
    assert True in threads["rows_message 4"]
    assert True in threads["contribute 4"]
    assert threads[f"rows_message {MANY}"] == {False}
    assert threads[f"contribute {MANY}"] == {False}


def test_many_narrow_rows_are_not(cluster, connect, threads) -> None:
    """Whose values are few, and whose ids alone are more than a few."""
    table = open_table(
        connect(cluster(1), "w0"), mode="async", row_count=50_000, dim=1, codec="fp16"
    )
    for _ in range(3):
        for count in (4, 20_000, 4):
            table.put_row_gradients(range(count), np.ones((count, 1), np.float32))
    assert True in threads["contribute 4"]
    assert threads["contribute 20000"] == {False}


def test_nothing_that_may_wait_for_a_disk_is(cluster, connect, threads, tmp_path) -> None:
    client = connect(cluster(1, data_dir=tmp_path), "w0")
    _use(_table(client))
    assert threads["rows_message 4"] == threads["contribute 4"] == {False}


def test_no_part_is_that_may_close_a_step_of_several(cluster, connect, threads) -> None:
    target = cluster(1)
    both = {"mode": "sync", "worker_count": 2}
    tables = [_table(connect(target, f"w{rank}"), **both) for rank in range(2)]
    for step in range(3):
        for table in tables:
            table.put_row_gradients([1, 2], _ones(2))
        for table in tables:
            table.get_rows([1, 2], min_version=step + 1)
    assert threads["contribute 2"] == threads["rows_message 2"] == {False}


def test_a_change_on_another_thread_holds_no_other_call_up(cluster, connect, monkeypatch) -> None:
    target = cluster(1)
    one, other = (connect(target, worker_id) for worker_id in ("w0", "w1"))
    table, beside = (_table(each) for each in (one, other))
    for each in (table, beside):
        each.put_row_gradients([1], _ones(1))
    begun, may_end = threading.Event(), threading.Event()
    real = TableSlice._count

    def count(self: TableSlice, seat: Any, part: Any) -> None:
        if part.ids.size == MANY:
            begun.set()
            assert may_end.wait(20)
        real(self, seat, part)

    monkeypatch.setattr(TableSlice, "_count", count)
    large = in_background(lambda: table.put_row_gradients(range(MANY), _ones(MANY)))
    assert begun.wait(20)
    small = in_background(lambda: beside.put_row_gradients([1], _ones(1)))
    beside.status(timeout_s=20)  # the loop answers
    assert not small.done()
    may_end.set()
    assert (large.result(20), small.result(20)) == (1, 1)
