"""Every limit of tables that can be reached: the error names it, and nothing changed."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.polling import eventually, until_accepted
from harness.wire_client.table import WireTable, table_spec
from harness.wire_client.worker import WireWorker, error_detail
from shardwell.v1 import parameter_server_pb2
from shardwell.v1 import types_pb2 as types
from shardwell_server import Limits

QUESTION = parameter_server_pb2.GetStatusRequest()


def limited(call: Any, text: str) -> types.ErrorDetail:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    detail = error_detail(caught.value)
    assert detail.code == types.ERROR_CODE_LIMIT_EXCEEDED
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text in str(caught.value.details())
    return detail


def test_table_count_max(cluster) -> None:
    with WireWorker(cluster(1, limits=Limits(table_count_max=2)).target, "w0") as worker:
        for name in ("one", "two"):
            WireTable(worker, table_spec(name))
        detail = limited(lambda: WireTable(worker, table_spec("three")), "table_count_max=2")
        assert detail.table == "three"
        WireTable(worker, table_spec("two"))


def test_table_row_count_max(cluster) -> None:
    """Of rows that exist: what is evicted makes room."""
    with WireWorker(cluster(1, limits=Limits(table_row_count_max=3)).target, "w0") as worker:
        table = WireTable(worker, table_spec(dim=1))
        table.put([1, 2], [[1], [1]])
        detail = limited(lambda: table.put([2, 3, 4], [[1]] * 3), "table_row_count_max=3")
        assert detail.table == "t"
        assert table.row_ids() == [1, 2]
        np.testing.assert_array_equal(table.get([2]), [[-1]])
        table.put([2, 3], [[1]] * 2)
        assert table.evict(older_than_step=1) == 1
        table.put([3, 4], [[1]] * 2)
        assert table.row_ids() == [2, 3, 4]
        np.testing.assert_array_equal(table.get([1, 2, 3, 4]), [[0], [-2], [-2], [-1]])


def test_bytes_of_tables_have_a_limit(cluster, connect) -> None:
    """Rows and parameters share it; a row costs its values, state, and five words."""
    row_size_bytes = 4 * 8 * 2 + 40
    limits = Limits(stored_bytes_max=10 * row_size_bytes)
    running = cluster(1, limits=limits)
    adagrad = types.Optimizer(adagrad=types.Adagrad(learning_rate=1, epsilon=1))
    with WireWorker(running.target, "w0") as worker:
        table = WireTable(worker, table_spec(dim=8, optimizer=adagrad))
        table.put(list(range(8)), np.ones((8, 8)))
        (status,) = table.status()
        assert status.stored_bytes == 8 * row_size_bytes
        limited(
            lambda: table.put([8, 9, 10], np.ones((3, 8))),
            f"stored_bytes_max={limits.stored_bytes_max}",
        )
        client = connect(running, "w0")
        with pytest.raises(shardwell.LimitError, match="stored_bytes_max"):
            client.parameter("p", size=53, optimizer=shardwell.SGD(learning_rate=1.0))
        client.parameter("p", size=52, optimizer=shardwell.SGD(learning_rate=1.0))
        limited(lambda: table.put([8], np.ones((1, 8))), "stored_bytes_max")
        assert table.row_ids() == list(range(8))
        assert client.status()[0].stored_bytes == 10 * row_size_bytes


def test_workers_of_a_table_have_a_limit(cluster) -> None:
    running = cluster(1, limits=Limits(worker_count_max=2))
    spec = table_spec(mode=types.MODE_ASYNC)
    for name in ("reader-1", "reader-2", "reader-3"):
        with WireWorker(running.target, name) as worker:
            WireTable(worker, spec)
    for name in ("a", "b"):
        with WireWorker(running.target, name) as worker:
            WireTable(worker, spec, take_seat=True)
    with WireWorker(running.target, "c") as worker:
        limited(lambda: WireTable(worker, spec, take_seat=True), "worker_count_max=2")


def test_streams_of_tables_have_a_limit(cluster) -> None:
    running = cluster(1, limits=Limits(stream_count_max=1))
    with WireWorker(running.target, "a") as one, WireWorker(running.target, "b") as two:
        spec = table_spec(worker_count=2, dim=1)
        first, second = WireTable(one, spec), WireTable(two, spec)
        first.put([1], [[1]])
        waiting = first.stream(0, [first.fetch([1], min_version=1)])
        eventually("it waits", lambda: one.stubs[0].GetStatus(QUESTION).open_stream_count)
        limited(lambda: second.get([1]), "stream_count_max=1")
        waiting.cancel()
        until_accepted(lambda: second.get([1]), grpc.RpcError)


def test_changes_of_a_table_s_rate_have_a_limit(cluster) -> None:
    limits = Limits(learning_rate_change_count_max=2)
    with WireWorker(cluster(1, limits=limits).target, "w0") as worker:
        table = WireTable(worker, table_spec(dim=1))
        table.set_learning_rate(0.25, from_step=1)
        limited(
            lambda: table.set_learning_rate(0.5, from_step=2), "learning_rate_change_count_max=2"
        )
        for _ in range(2):
            table.put([1], [[1]])
        np.testing.assert_array_equal(table.get([1]), [[-1.25]])
        table.set_learning_rate(0.5)  # the first has taken effect
