"""A shard that comes back with nothing: noticed, never mixed with what the others still have.

Method: a real server is stopped, and a new one started on its port, with nothing in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import shardwell
from shardwell.table_opening import TableOpening
from shardwell_server import LocalCluster, ShardServer

pytestmark = pytest.mark.timeout(60)

SIZE = 40
ONES = np.ones(SIZE, np.float32)


@contextmanager
def restarted(running: LocalCluster, shard_index: int) -> Iterator[None]:
    """The shard begins anew, on the same address."""
    old = running.servers[shard_index]
    old.stop(0.0)
    with ShardServer(dataclasses.replace(old.config, listen=old.address)):
        yield


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize(
    "optimizer", [shardwell.SGD(learning_rate=1.0), shardwell.Average()], ids=["SGD", "Average"]
)
def test_the_same_name_is_refused_and_another_one_works(
    cluster, connect, optimizer, shard_index
) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    model = client.parameter("model", size=SIZE, optimizer=optimizer)
    if not isinstance(optimizer, shardwell.Average):
        model.init(ONES)
    for _ in range(5):
        model.exchange(ONES)
    with restarted(running, shard_index):
        with pytest.raises(shardwell.UnknownParameterError):
            model.exchange(ONES)
        for again in (client, connect(running, "w0")):
            with pytest.raises(shardwell.StepOrderError, match="lost its memory"):
                again.parameter("model", size=SIZE, optimizer=optimizer)
        fresh = client.parameter("model-2", size=SIZE, optimizer=optimizer)
        if not isinstance(optimizer, shardwell.Average):
            fresh.init(np.zeros(SIZE, np.float32))
        assert np.isfinite(fresh.exchange(ONES)).all()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_that_goes_on_while_a_table_is_opened(cluster, connect, monkeypatch, mode) -> None:
    """Between two shards' answers: they are steps apart then, and nothing is lost."""
    running = cluster(3)
    options = {"row_count": 100, "dim": 1, "optimizer": shardwell.SGD(learning_rate=1.0)}
    options |= {"mode": mode, "initializer": shardwell.Zeros()}
    writer = connect(running, "w0").table("rows", **options)
    ids, ones = np.arange(10), np.ones((10, 1))
    join = TableOpening._join

    def interrupted(opening: TableOpening, *given: Any, **options: Any) -> Any:
        answer = join(opening, *given, **options)
        if opening is not writer._opening:
            for _ in range(3):
                writer.put_row_gradients(ids, ones)
        return answer

    monkeypatch.setattr(TableOpening, "_join", interrupted)
    reader = connect(running, "reader").table("rows", **options)
    assert writer.next_step == 9
    np.testing.assert_array_equal(reader.get_rows(ids), -9 * ones)


def test_before_the_first_step_old_first_weights_are_not_taken_for_new(cluster, connect) -> None:
    running = cluster(2)
    sgd = shardwell.SGD(learning_rate=1.0)
    model = connect(running, "w0").parameter("model", size=SIZE, optimizer=sgd)
    model.init(ONES)
    with restarted(running, 0):
        again = connect(running, "w1").parameter("model", size=SIZE, optimizer=sgd)
        with pytest.raises(shardwell.StepOrderError, match="epoch"):
            again.init(2 * ONES)


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_that_are_gone_are_not_taken_for_new_ones(cluster, connect, mode, shard_index) -> None:
    """Whoever opens the table again, under whatever name, is told."""
    running = cluster(2)
    options = {"row_count": 100, "dim": 1, "optimizer": shardwell.SGD(learning_rate=1.0)}
    options |= {"mode": mode, "initializer": shardwell.Zeros()}
    client = connect(running, "w0")
    table = client.table("rows", **options)
    ids, ones = np.arange(10), np.ones((10, 1))
    for _ in range(5):
        table.put_row_gradients(ids, ones)
    with restarted(running, shard_index):
        with pytest.raises(shardwell.UnknownTableError):
            table.get_rows(ids)
        for again in (client, connect(running, "w0"), connect(running, "reader")):
            for _ in range(2):
                with pytest.raises(shardwell.StepOrderError, match="lost its memory") as caught:
                    again.table("rows", **options)
                assert caught.value.table == "rows"
        # Shard 0 has made it anew when it was asked to open it, and can't know that it had it.
        expected = shardwell.UnknownTableError if shard_index else shardwell.StepOrderError
        with pytest.raises(expected, match="lost its"):
            table.get_rows(ids)
        fresh = client.table("rows-2", **options)
        np.testing.assert_array_equal(fresh.exchange_rows(ids, ones), -ones)
