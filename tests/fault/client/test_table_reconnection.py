"""Goal: a step of a table that failed in part is repeated or abandoned, and each part counts once.

Method: as test_reconnection.py, which has what is true of parameters and tables alike: real shards
behind proxies that cut, refuse and stall; at the end the rows of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.table_training import (
    DIM,
    EVERY,
    ID_COUNT,
    OPTIONS,
    KnownRows,
    batch,
    sent_row_count,
)
from harness.faults.proxy import Direction, Proxy
from harness.inside import channels_of, endpoint_of, idle_streams
from harness.oracles.rows import ModelRows
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.threads import in_background
from shardwell.placement.rows import RowPlacement
from shardwell.table.exchange import RowTransfer
from shardwell.table.reader import RowReading
from shardwell.v1 import table_pb2

RATE = 0.25


@pytest.fixture
def running(cluster):
    return cluster(2)


@pytest.fixture
def proxies(running) -> Iterator[list[Proxy]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Proxy(address)) for address in running.addresses]


@pytest.fixture
def join(proxies, connect) -> Callable[..., tuple[shardwell.Client, shardwell.Table]]:
    target = ",".join(proxy.address for proxy in proxies)

    def join_as(index: int = 0, **options: Any) -> tuple[shardwell.Client, shardwell.Table]:
        client = connect(target, f"w{index}", timeout_s=options.pop("timeout_s", 30.0))
        return client, client.table("rows", **{**OPTIONS, **options})

    return join_as


def _counted(running) -> tuple[int, int]:
    """Rows that were counted, and the steps, of all shards."""
    status = _status(running)
    return sum(each.counted_row_count for each in status), min(each.version for each in status)


def _status(running) -> list[Any]:
    with shardwell.connect(running.target, worker_id="observer") as observer:
        return [
            channel.call(
                "GetTableStatus",
                table_pb2.GetTableStatusRequest(shard=channel.identity, table="rows"),
                table_pb2.GetTableStatusResponse,
                timeout_s=5.0,
                table="rows",
            ).tables[0]
            for channel in channels_of(observer)
        ]


def _half_counted(running, proxies: list[Proxy], call: Callable[[], Any]) -> None:
    """Has a gradient counted by shard 0 and not by shard 1, which is out of reach then."""
    before = _status(running)[0].version
    proxies[1].stall()
    calling = in_background(call)
    eventually("shard 0 has it", lambda: before < _status(running)[0].version)
    proxies[1].cut(refuse=True)
    proxies[1].resume()
    assert isinstance(calling.exception(PATIENCE_S), shardwell.ShardUnavailableError)


def test_a_fetch_goes_on_from_where_it_was(running, proxies, join) -> None:
    """Each connection takes it some messages further; none of them would last for all."""
    _, table = join()
    table.put_row_gradients(*batch(0))
    proxies[1].cut_after(Direction.TO_CLIENT, 1_500_000, refuse=False, count=1_000)
    ids = np.arange(2 * ID_COUNT)
    KnownRows(1).check(table.get_rows(ids), ids)
    assert proxies[1].cut_count >= 2


def test_a_step_that_failed_is_repeated(running, proxies, join) -> None:
    """With the same rows; others are refused until then."""
    _, table = join()
    table.put_row_gradients(*batch(0))
    proxies[1].cut(refuse=True)
    with pytest.raises(shardwell.ShardUnavailableError):
        table.put_row_gradients(*batch(1), timeout_s=BRIEF_S)
    assert table.next_step == 1
    assert table.is_step_begun
    proxies[1].accept()
    with pytest.raises(shardwell.StepOrderError, match=r"step 1 of table 'rows'.*abandon_step"):
        table.put_row_gradients(*batch(2))
    ids, gradients = batch(1)
    with pytest.raises(shardwell.StepOrderError, match="sent other rows"):
        table.put_row_gradients(ids, gradients + 1)
    with pytest.raises(shardwell.StepOrderError, match="sent other rows"):
        table.put_row_gradients(ids, gradients, sample_count=2)
    assert table.put_row_gradients(ids, gradients) == 1
    assert not table.is_step_begun
    assert table.put_row_gradients(*batch(2)) == 2
    KnownRows(3).check(table.get_rows(EVERY))
    assert _counted(running) == (sent_row_count(3), 3)


def test_a_step_that_was_begun_is_abandoned(running, proxies, join) -> None:
    """What one shard counted stays, the other has nothing of it, and the next step goes on."""
    _, table = join()
    table.put_row_gradients(*batch(0))
    _half_counted(running, proxies, lambda: table.put_row_gradients(*batch(1), timeout_s=BRIEF_S))
    with pytest.raises(shardwell.ShardUnavailableError):
        table.abandon_step(timeout_s=BRIEF_S)
    with pytest.raises(shardwell.StepOrderError, match=r"began to abandon it.*; end the step with"):
        table.put_row_gradients(*batch(1))
    proxies[1].accept()
    assert table.abandon_step() == 1
    rows = table.get_rows(EVERY, min_version=2)
    home = RowPlacement(2 * ID_COUNT, 2).shards_of(EVERY)
    KnownRows(2).check(rows[home == 0], EVERY[home == 0])
    KnownRows(1).check(rows[home == 1], EVERY[home == 1])
    assert table.put_row_gradients([], np.zeros((0, DIM))) == 2


def test_the_others_go_on_with_what_was_counted_of_an_abandoned_step(
    running, proxies, join, connect
) -> None:
    """Two workers; of the one that gives up nothing was counted anywhere, as if it had no rows."""
    other = connect(running, "w1").table("rows", **{**OPTIONS, "worker_count": 2})
    _, table = join(worker_count=2)
    for step in range(2):
        if step == 1:
            with pytest.raises(shardwell.NonFiniteError):
                table.put_row_gradients([1], np.full((1, DIM), np.nan))
            assert table.abandon_step() == 1
        else:
            table.put_row_gradients(*batch(0))
        other.put_row_gradients(*batch(step, 1))
    model = ModelRows(1, OPTIONS["optimizer"], worker_count=2)
    for ids, gradients, count in (
        (*batch(0), 1),
        (*batch(0, 1), 1),
        ([], np.zeros((0, 1)), 0),
        (*batch(1, 1), 1),
    ):
        model.put(ids, gradients[:, :1], count)
    rows = table.get_rows(EVERY, min_version=2)
    np.testing.assert_array_equal(rows, np.broadcast_to(model.get(EVERY), rows.shape))


def test_a_worker_that_died_in_the_middle_goes_on(running, proxies, join, connect) -> None:
    """Its next process learns of it, sends the same rows again, and each counts once."""
    client, table = join(timeout_s=BRIEF_S)
    table.put_row_gradients(*batch(0))
    _half_counted(running, proxies, lambda: table.put_row_gradients(*batch(1)))
    client.close()
    again = connect(running, "w0").table("rows", **OPTIONS)
    assert (again.next_step, again.is_step_begun) == (1, True)
    assert again.put_row_gradients(*batch(1)) == 1
    assert not again.is_step_begun
    KnownRows(2).check(again.get_rows(EVERY))
    assert _counted(running) == (sent_row_count(2), 2)


@pytest.mark.parametrize(("direction", "verb"), [("to shard", "put"), ("to client", "get")])
def test_a_damaged_message_is_sent_again(running, proxies, join, direction, verb) -> None:
    _, table = join()
    table.put_row_gradients(*batch(0))
    mark = np.full(8, 7.5, np.float32).tobytes()  # only payloads have it
    ids = np.arange(20)
    table.put_row_gradients(ids, np.full((20, DIM), -15.0))
    before = table.get_rows(ids)
    if verb == "put":
        proxies[1].corrupt_after(Direction.TO_SHARD, mark)
        assert table.put_row_gradients(ids, np.full((20, DIM), 7.5)) == 2
        np.testing.assert_array_equal(table.get_rows(ids), before - 3.75)
    else:
        delta = 2 * (before - 7.5)
        table.put_row_gradients(ids, delta)
        proxies[1].corrupt_after(Direction.TO_CLIENT, mark)
        assert (table.get_rows(ids) == 7.5).all()
    assert proxies[1].corrupted_count == 1


def test_an_interrupted_call_leaves_no_stream_and_no_answer_behind(
    running, join, monkeypatch
) -> None:
    _, table = join()
    table.put_row_gradients(*batch(0))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RowTransfer, "_take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.get_rows(np.arange(50))
    eventually(
        "its streams have ended",
        lambda: not any(endpoint_of(s).streams.count for s in running.servers),
    )
    KnownRows(1).check(table.get_rows(EVERY))


def test_a_step_that_was_interrupted_at_its_very_end_is_known_to_be_begun(
    join, monkeypatch
) -> None:
    """Otherwise other rows would be sent for it, and taken for its repetition."""
    _, table = join()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(table._view, "end_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.put_row_gradients(*batch(0))
    assert (table.next_step, table.is_step_begun) == (0, True)
    with pytest.raises(shardwell.StepOrderError, match="sent other rows of it"):
        table.put_row_gradients(*batch(1))
    assert table.put_row_gradients(*batch(0)) == 0
    KnownRows(1).check(table.get_rows(EVERY))


def test_streams_dropped_by_the_shard_are_opened_again(running, join) -> None:
    _, table = join()
    for step in range(3):
        KnownRows(step + 1).check(table.exchange_rows(*batch(step), EVERY))
        # All before any is dropped: the client then ends the others itself.
        eventually("the streams are idle", lambda: all(idle_streams(s) for s in running.servers))
        for server in running.servers:
            for stream in list(idle_streams(server)):
                stream.end(shardwell.ShardUnavailableError("idle"))


# A step of a table that fails when all is counted is not taken for another. Method: a failure
# where rows are handed out. Oracle: each step adds 1 to a row for each time it names it. What real
# signals do is in test_interrupts.py.


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
