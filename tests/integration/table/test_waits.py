"""Waits of tables for other workers: who is missing is named, and stopping ends them.

Method: workers of harness/wire_client/table.py against real servers; nothing sleeps.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.threads import in_background
from harness.wire_client.refusing import wait_until_refusing
from harness.wire_client.table import WireTable, table_spec
from harness.wire_client.worker import WireWorker, error_detail
from shardwell.v1 import parameter_server_pb2
from shardwell.v1 import types_pb2 as types

PAIR = {"worker_count": 2, "dim": 1}


def fed(messages: queue.SimpleQueue[Any]) -> Iterator[Any]:
    while (message := messages.get()) is not None:
        yield message


def test_a_question_waits_for_its_version(cluster) -> None:
    running = cluster(1)
    with WireWorker(running.target, "a") as one, WireWorker(running.target, "b") as two:
        first, second = WireTable(one, table_spec(**PAIR)), WireTable(two, table_spec(**PAIR))
        first.put([1], [[2]])
        waiting = in_background(lambda: first.get([1], min_version=1, wait_timeout_s=PATIENCE_S))
        second.put([1], [[4]])
        np.testing.assert_array_equal(waiting.result(PATIENCE_S), [[-3]])


@pytest.mark.parametrize("seen", ["never", "opened", "seated"])
def test_workers_that_a_table_waits_for_are_named(cluster, seen) -> None:
    running = cluster(1)
    spec = table_spec(**PAIR)
    with WireWorker(running.target, "a") as one, WireWorker(running.target, "b") as two:
        first = WireTable(one, spec)
        if seen != "never":
            second = WireTable(two, spec)
        if seen == "seated":
            for table in (first, second):
                table.put([2], [[1]])
        step = first.next_step
        first.put([1], [[2]])
        for asks in (
            [first.fetch([1], min_version=step + 1, wait_timeout_s=0.05)],
            first.parts([1], [[1]], wait_timeout_s=0.05),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(first.stream(0, asks))
            detail = error_detail(caught.value)
            assert detail.code == types.ERROR_CODE_WORKERS_MISSING
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert list(detail.missing_worker_ids) == ([] if seen == "never" else ["b"])
            text = "1 that never opened the table" if seen == "never" else "'b'"
            assert text in str(caught.value.details())
            assert f"version {step + 1}, and it is at {step}" in str(caught.value.details())
        (status,) = first.status()
        assert list(status.contributed_worker_ids) == ["a"]
        assert list(status.missing_worker_ids) == ([] if seen == "never" else ["b"])
        assert status.unknown_worker_count == (seen == "never")


def test_the_next_step_waits_for_the_open_one(cluster) -> None:
    running = cluster(2)
    with WireWorker(running.target, "a") as one, WireWorker(running.target, "b") as two:
        first, second = WireTable(one, table_spec(**PAIR)), WireTable(two, table_spec(**PAIR))
        first.put([1], [[2]])
        waiting = in_background(lambda: first.put([1], [[6]], wait_timeout_s=PATIENCE_S))
        second.put([1], [[2]])
        assert all(answer.counted.step == 1 for answer in waiting.result(PATIENCE_S))
        np.testing.assert_array_equal(first.get([1]), [[-2]])
        second.put([1], [[2]])
        np.testing.assert_array_equal(first.get([1], min_version=2), [[-6]])


def test_an_asynchronous_table_never_waits(cluster) -> None:
    spec = table_spec(mode=types.MODE_ASYNC, dim=1)
    with WireWorker(cluster(1).target, "a") as worker:
        table = WireTable(worker, spec)
        np.testing.assert_array_equal(table.get([1], min_version=9), [[0]])


def test_one_worker_more_has_no_seat(cluster) -> None:
    running = cluster(1)
    spec = table_spec(**PAIR)
    with (
        WireWorker(running.target, "a") as one,
        WireWorker(running.target, "b") as two,
        WireWorker(running.target, "c") as three,
    ):
        WireTable(one, spec, take_seat=True)
        WireTable(two, spec, take_seat=True)
        third = WireTable(three, spec)  # a reader needs none
        np.testing.assert_array_equal(third.get([1]), [[0]])
        for ask in (lambda: third.open(take_seat=True), lambda: third.put([1], [[1]])):
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            detail = error_detail(caught.value)
            assert (detail.code, detail.worker_id) == (types.ERROR_CODE_SEATS_TAKEN, "c")
            assert "'a', 'b'" in str(caught.value.details())


def test_a_seat_needs_the_table(cluster) -> None:
    with WireWorker(cluster(1).target, "a") as worker:
        table = WireTable(worker, table_spec("other"))
        table.spec = table_spec()
        with pytest.raises(grpc.RpcError) as caught:
            table.open(take_seat=True)
        assert error_detail(caught.value).code == types.ERROR_CODE_UNKNOWN_TABLE


def test_a_replacement_goes_on(cluster) -> None:
    """Another process under the same name: what was counted is not counted again."""
    running = cluster(2)
    spec = table_spec(**PAIR)
    with WireWorker(running.target, "b") as two:
        second = WireTable(two, spec)
        with WireWorker(running.target, "a") as one:
            first = WireTable(one, spec)
            shard_index = next(index for index, ids in enumerate(first.split([1])) if ids)
            list(first.stream(shard_index, first.parts([1], [[2]])))  # and dies before the others
        second.put([1], [[4]])
        with WireWorker(running.target, "a") as one:
            first = WireTable(one, spec)
            assert {answer.next_step for answer in first.answers} == {0, 1}
            assert first.next_step == 0
            first.put([1], [[2]])
            np.testing.assert_array_equal(first.get([1], min_version=1), [[-3]])


def test_a_shard_with_an_idle_table_stops_at_once(cluster) -> None:
    running = cluster(1, grace_s=20.0)
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with WireWorker(running.target, "a") as worker:
        table = WireTable(worker, table_spec(dim=1))
        try:
            stream = table.stream(0, fed(outgoing))
            for part in table.parts([1], [[1]]):
                outgoing.put(part)
            assert next(stream).counted.counted_part_count == 1
            outgoing.put(table.fetch([1]))
            assert next(stream).rows.row_count == 1
            watch = Stopwatch()
            running.close()
            assert watch.elapsed_s < PATIENCE_S
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
            assert caught.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        finally:
            outgoing.put(None)


def test_a_step_in_flight_finishes_within_the_grace(cluster) -> None:
    running = cluster(1, grace_s=4 * BRIEF_S)
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with WireWorker(running.target, "a") as worker:
        table = WireTable(worker, table_spec(dim=1))
        parts = table.parts([1, 2], [[1], [2]], rows_per_part=1)
        try:
            stream = table.stream(0, fed(outgoing))
            outgoing.put(parts[0])
            eventually("the first part counts", lambda: table.status()[0].counted_row_count)
            stopping = in_background(running.close)
            wait_until_refusing(running.target)
            outgoing.put(parts[1])
            assert next(stream).counted.counted_part_count == 2
            watch = Stopwatch()
            stopping.result(PATIENCE_S)
            assert watch.elapsed_s < PATIENCE_S
        finally:
            outgoing.put(None)


@pytest.mark.parametrize("asks", ["fetch", "parts"])
def test_waits_end_when_a_shard_stops(cluster, asks) -> None:
    running = cluster(1, grace_s=1.0)
    with WireWorker(running.target, "a") as worker:
        table = WireTable(worker, table_spec(**PAIR))
        table.put([1], [[1]])
        messages = [table.fetch([1], min_version=1)] if asks == "fetch" else table.parts([1], [[1]])
        status = worker.stubs[0].GetStatus

        def open_stream_count() -> int:
            return status(parameter_server_pb2.GetStatusRequest()).open_stream_count

        eventually("the first stream has ended", lambda: open_stream_count() == 0)
        waiting = in_background(lambda: list(table.stream(0, messages)))
        eventually("it waits", lambda: open_stream_count() == 1)
        watch = Stopwatch()
        running.close()
        assert watch.elapsed_s < PATIENCE_S
        with pytest.raises(grpc.RpcError) as caught:
            waiting.result(PATIENCE_S)
        # Cancelled where it had not come to the message that waits, and was idle: go on elsewhere.
        assert caught.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
