"""Rows ahead of time, and rows kept: what comes of them is what is documented, no staler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.table_batches import DIM, open_table
from harness.faults.proxy import Proxy
from harness.faults.standing_still import stopped
from harness.inside import prefetched
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.threads import in_background
from shardwell.table.reader import PREFETCH_CALL_COUNT_MAX, PREFETCH_COUNT_MAX


def _table(client: shardwell.Client, **options: Any) -> shardwell.Table:
    return open_table(client, **{"mode": "async", **options})


def _put(table: shardwell.Table, ids: Any, value: float = -2.0) -> None:
    """Adds 1 to the rows."""
    table.put_row_gradients(ids, np.full((*np.shape(ids), DIM), value))


def _fetched_rows(client: shardwell.Client) -> int:
    return client.traffic.received_value_bytes // (4 * DIM)


def _prefetched(client: shardwell.Client, table: shardwell.Table, ids: Any) -> None:
    """Prefetches, and waits until the rows have come."""
    count = _fetched_rows(client) + np.unique(ids).size
    table.prefetch_rows(ids)
    eventually("the rows are there", lambda: _fetched_rows(client) >= count)


def test_get_rows_takes_what_was_prefetched_once(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    table = _table(client)
    ids = np.array([[5, 1], [5, 700]])
    _put(table, ids)
    _prefetched(client, table, ids)
    _put(table, [1])
    before = _fetched_rows(client)
    rows = table.get_rows(ids)  # from before the second gradient
    assert rows[..., 0].tolist() == [[2, 1], [2, 1]]
    assert rows.shape == (2, 2, DIM)
    assert _fetched_rows(client) == before
    assert table.get_rows(ids)[..., 0].tolist() == [[2, 2], [2, 1]]


def test_out_is_filled_with_what_was_prefetched(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    table = _table(client)
    _put(table, [3, 9])
    _prefetched(client, table, [9, 8])
    out = np.full((2, DIM), np.nan, np.float32)
    assert table.get_rows([9, 8], out=out) is out
    assert out[:, 0].tolist() == [1, 0]


def test_a_prefetch_waits_for_the_steps_that_it_is_to_have_seen(cluster, connect) -> None:
    running = cluster(2)
    first, second = (connect(running, worker) for worker in ("w0", "w1"))
    mine, other = (_table(each, mode="sync", worker_count=2) for each in (first, second))
    step = mine.put_row_gradients([1, 2], np.full((2, DIM), -2.0))
    mine.prefetch_rows([1, 2], min_version=step + 1)
    found = in_background(lambda: mine.get_rows([1, 2], min_version=step + 1))
    eventually("it is waited for", lambda: not prefetched(mine))
    other.put_row_gradients([2], np.full((1, DIM), -2.0))
    assert found.result(PATIENCE_S)[:, 0].tolist() == [0.5, 1]
    assert _fetched_rows(first) == 2


def test_other_ids_are_fetched(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    table = _table(client)
    ids = np.array([1, 2])
    _prefetched(client, table, ids)
    ids[:] = 7  # the caller's own again
    _put(table, [1, 2, 3])
    assert table.get_rows([2, 1])[:, 0].tolist() == [1, 1]
    assert table.get_rows([1])[:, 0].tolist() == [1]
    assert table.get_rows([1, 2])[:, 0].tolist() == [0, 0]


def test_a_prefetch_that_is_too_old_is_not_taken(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    table = _table(client, mode="sync")
    _prefetched(client, table, [1, 2])
    _put(table, [1])
    assert table.get_rows([1, 2], min_version=1)[:, 0].tolist() == [1, 0]


def test_the_oldest_of_too_many_gives_way(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    table = _table(client)
    for key in range(PREFETCH_COUNT_MAX + 1):
        _prefetched(client, table, [key])
    _put(table, range(PREFETCH_COUNT_MAX + 1))
    found = [table.get_rows([key])[0, 0] for key in range(PREFETCH_COUNT_MAX + 1)]
    assert found == [1] + [0] * PREFETCH_COUNT_MAX


@pytest.mark.parametrize("verb", ["get", "put", "exchange"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_prefetch_that_many_calls_have_passed_by_is_not_taken(
    cluster, connect, mode, verb
) -> None:
    client = connect(cluster(2), "w0")
    table = _table(client, mode=mode)
    one = np.full((1, DIM), -2.0)
    calls = {
        "get": lambda: table.get_rows([3]),
        "put": lambda: table.put_row_gradients([3], one),
        "exchange": lambda: table.exchange_rows([3], one),
    }
    for call_count, is_taken in (
        (PREFETCH_CALL_COUNT_MAX, True),
        (PREFETCH_CALL_COUNT_MAX + 1, False),
    ):
        before = table.get_rows([1])[0, 0]
        _prefetched(client, table, [1])
        _put(table, [1])
        for _ in range(call_count - 1):
            calls[verb]()
        assert table.get_rows([1])[0, 0] == before + (not is_taken)
        assert table.get_rows([1])[0, 0] == before + 1


def test_results_that_are_too_old_are_let_go(cluster, connect) -> None:
    """When the call comes that is one too many, not when one wants them."""
    client = connect(cluster(2), "w0")
    table = _table(client)
    table.prefetch_rows([1])
    for _ in range(PREFETCH_CALL_COUNT_MAX):
        _put(table, [3])
    table.prefetch_rows([2])
    assert len(prefetched(table)) == 2
    table.get_rows([3])
    assert [entry.ids.tolist() for entry in prefetched(table)] == [[2]]


def test_a_prefetch_under_way_is_waited_for(cluster, connect) -> None:
    running = cluster(2, processes=True)
    table = _table(connect(running, "w0"))
    with stopped(*(child.pid for child in running.children)):
        table.prefetch_rows([1, 2])
        waiting = in_background(lambda: table.get_rows([1, 2]))
        eventually("it waits", lambda: not prefetched(table))
        assert not waiting.done()
    assert waiting.result(10)[:, 0].tolist() == [0, 0]


def test_a_shard_that_keeps_a_prefetch_waiting_is_named(cluster, connect) -> None:
    running = cluster(2, processes=True)
    table = _table(connect(running, "w0", timeout_s=60))
    ids = np.arange(100)
    assert set(table._placement.shards_of(ids)) == {0, 1}
    with stopped(running.children[1].pid):
        table.prefetch_rows(ids)
        with pytest.raises(shardwell.DeadlineError, match="shard 1 at") as caught:
            table.get_rows(ids, timeout_s=0.2)
        assert (caught.value.shard_index, caught.value.table) == (1, "rows")
        table.close()


def test_a_prefetch_that_failed_is_forgotten(cluster, connect) -> None:
    running = cluster(1)
    with Proxy(running.addresses[0]) as proxy:
        table = _table(connect(proxy.address, "w0", timeout_s=BRIEF_S))
        _put(table, [1, 2])
        proxy.cut(refuse=True)
        table.prefetch_rows([1, 2])
        entry = prefetched(table)[0]
        assert isinstance(entry.future.exception(10), shardwell.ShardUnavailableError)
        proxy.accept()
        assert table.get_rows([1, 2], timeout_s=PATIENCE_S)[:, 0].tolist() == [1, 1]


def test_close_ends_a_wait_for_a_prefetch(cluster, connect) -> None:
    running = cluster(2, processes=True)
    table = _table(connect(running, "w0"))
    with stopped(*(child.pid for child in running.children)):
        table.prefetch_rows([1, 2])
        waiting = in_background(lambda: table.get_rows([1, 2]))
        eventually("it waits", lambda: not prefetched(table))
        table.close()
        assert isinstance(waiting.exception(10), shardwell.ClosedError)


def test_cached_rows_are_not_asked_for(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    table = _table(client, cache_row_count=100, cache_staleness_steps=2)
    ids = np.array([7, 3, 7, 500])
    assert table.get_rows(ids)[:, 0].tolist() == [0, 0, 0, 0]
    before = _fetched_rows(client)
    assert table.get_rows(ids[::-1])[:, 0].tolist() == [0, 0, 0, 0]
    assert _fetched_rows(client) == before
    assert table.get_rows([[3, 4]])[..., 0].tolist() == [[0, 0]]
    assert _fetched_rows(client) == before + 1
    assert table.cache_hit_rate == 4 / 8
    assert _table(client, cache_row_count=100, cache_staleness_steps=2) is table
    table.get_rows(ids)
    assert _fetched_rows(client) == before + 4  # opened anew, it has forgotten


def test_without_a_cache_there_is_no_hit(cluster, connect) -> None:
    table = _table(connect(cluster(1), "w0"))
    for _ in range(2):
        table.get_rows([1])
    assert table.cache_hit_rate == 0


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_cached_row_is_never_staler_than_was_said(cluster, connect, staleness, mode) -> None:
    """Two workers; what the other one did to a row is seen at most so many own steps later."""
    running = cluster(2)
    one = _table(
        connect(running, "w0"),
        cache_row_count=64,
        cache_staleness_steps=staleness,
        mode=mode,
        worker_count=2,
    )
    two = _table(connect(running, "w1"), mode=mode, worker_count=2)
    unit = -2.0 if mode == "async" else -4.0
    seen = []
    for step in range(8):
        rows = one.get_rows([1, 2])[:, 0].tolist()
        own, other = rows
        assert own == step  # its own gradients it always sees
        assert step - staleness <= other <= step
        seen.append(other)
        _put(one, [1], unit)
        _put(two, [2], unit)
    assert seen == [step // (staleness + 1) * (staleness + 1) for step in range(8)]


def test_one_who_only_reads_sees_what_is_new(cluster, connect) -> None:
    running = cluster(2)
    writer = _table(connect(running, "writer"))
    reader = _table(connect(running, "reader"), cache_row_count=64, cache_staleness_steps=2)
    found = []
    for _ in range(7):
        found.append(reader.get_rows([5])[0, 0])
        _put(writer, [5])
    assert found == [0, 0, 0, 3, 3, 3, 6]


def test_exchanged_rows_fill_the_cache(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    table = _table(client, cache_row_count=100, cache_staleness_steps=1, mode="sync")
    rows = table.exchange_rows([1, 2], np.full((2, DIM), -2.0), [1, 2, 3])
    assert rows[:, 0].tolist() == [1, 1, 0]
    before = _fetched_rows(client)
    assert table.get_rows([3, 2, 1])[:, 0].tolist() == [0, 1, 1]
    assert _fetched_rows(client) == before
    assert table.get_rows([3, 2], min_version=1)[:, 0].tolist() == [0, 1]
    assert _fetched_rows(client) == before + 2


def test_evicted_rows_are_forgotten(cluster, connect) -> None:
    table = _table(connect(cluster(2), "w0"), cache_row_count=100, cache_staleness_steps=9)
    _put(table, [1])
    assert table.get_rows([1])[0, 0] == 1
    assert table.evict(older_than_step=9) == 1
    assert table.get_rows([1])[0, 0] == 0


def test_prefetches_and_the_cache_together(cluster, connect) -> None:
    """A loop as trainers have it: each batch is asked for while the one before is computed with."""
    running = cluster(2)
    table = _table(connect(running, "w0"), cache_row_count=200, cache_staleness_steps=50)
    generator = np.random.default_rng(0)
    batches = [generator.integers(0, 60, 30) for _ in range(20)]
    total, before = np.zeros(1000), np.zeros(1000)
    for ids, following in zip(batches, [*batches[1:], []], strict=True):
        rows = table.get_rows(ids)[:, 0]
        assert (rows <= total[ids]).all()
        assert (rows >= before[ids]).all()  # but for the last gradient, which the prefetch may lack
        before = total.copy()
        table.prefetch_rows(following)
        table.put_row_gradients(ids, np.full((30, DIM), -2.0))
        np.add.at(total, ids, 1.0)
    fresh = _table(connect(running, "w1"))
    np.testing.assert_array_equal(fresh.get_rows(np.arange(1000))[:, 0], total)
