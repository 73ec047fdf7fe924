"""Several workers and threads on one table: who waits for whom, who goes on where, and takes turns.

Method: whole numbers as gradients, so that sums are exact in any order; the oracle is a dict.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardwell
from harness.data.table_batches import DIM, open_table, random_ids, whole_numbers
from harness.inside import endpoint_of
from harness.oracles.rows import OPTIMIZERS, ModelRows
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.threads import in_background, together
from shardwell.transport.stream_pool import IDLE_STREAM_SET_COUNT_MAX, STREAM_SET_COUNT_MAX
from shardwell_server import Limits

SGD = OPTIMIZERS["sgd"]
WAITED = f"waited {BRIEF_S:g} s for version 1,.*missing of 2 workers: 'w1'"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_several_workers_at_the_same_time(cluster, connect, mode) -> None:
    """Whole numbers: in asynchronous mode their order does not matter."""
    worker_count, step_count = 3, 6
    running = cluster(2)
    tables = [
        open_table(connect(running, f"w{index}"), worker_count=worker_count, mode=mode)
        for index in range(worker_count)
    ]
    model = ModelRows(DIM, SGD, worker_count=worker_count, mode=mode)
    generator = np.random.default_rng(2)
    batches = [
        [
            (random_ids(generator, 1000, 60), 6 * whole_numbers(generator, 60, DIM))
            for _ in range(step_count)
        ]
        for _ in range(worker_count)
    ]
    for step in range(step_count):
        for index in range(worker_count):
            model.put(*batches[index][step])

    def train(index: int) -> None:
        for step, (ids, gradients) in enumerate(batches[index]):
            if step % 2:
                tables[index].exchange_rows(ids, gradients)
            else:
                tables[index].put_row_gradients(ids, gradients)

    together([lambda index=index: train(index) for index in range(worker_count)])
    every = np.arange(1000)
    for table in tables:
        found = table.get_rows(every, min_version=step_count)
        np.testing.assert_allclose(found, model.get(every), rtol=1e-6)
        assert table.next_step == step_count


def test_min_version_waits_and_names_who_is_missing(cluster, connect) -> None:
    running = cluster(2)
    one, two = (open_table(connect(running, f"w{i}"), worker_count=2) for i in (0, 1))
    ones = np.ones((3, DIM), np.float32)
    one.put_row_gradients([1, 2, 3], ones)
    with pytest.raises(shardwell.WorkersMissingError, match=WAITED) as caught:
        one.get_rows([1, 2, 3], min_version=1, timeout_s=BRIEF_S)
    assert caught.value.missing_worker_ids == ("w1",)
    with pytest.raises(shardwell.WorkersMissingError, match=WAITED):
        one.put_row_gradients([7], ones[:1], timeout_s=BRIEF_S)
    waiting = in_background(lambda: one.get_rows([1, 2, 3], min_version=1))
    two.put_row_gradients([3], ones[:1])
    assert waiting.result(PATIENCE_S)[:, 0].tolist() == [-0.25, -0.25, -0.5]
    assert one.put_row_gradients([7], ones[:1]) == 1  # the same as the call that failed


def test_exchange_waits_for_the_others(cluster, connect) -> None:
    running = cluster(2)
    one, two = (open_table(connect(running, f"w{i}"), worker_count=2) for i in (0, 1))
    ones = np.ones((1, DIM), np.float32)
    with pytest.raises(shardwell.WorkersMissingError, match=WAITED):
        one.exchange_rows([1], ones, [1, 2], timeout_s=BRIEF_S)
    assert one.next_step == 0
    assert one.is_step_begun
    waiting = in_background(lambda: one.exchange_rows([1], ones, [1, 2]))
    two.put_row_gradients([2], 3 * ones)
    assert waiting.result(PATIENCE_S)[:, 0].tolist() == [-0.25, -0.75]
    assert (one.next_step, one.version, one.is_step_begun) == (1, 1, False)


def test_a_restarted_worker_goes_on(cluster, connect) -> None:
    running = cluster(2)
    first = connect(running, "w0")
    table = open_table(first)
    for step in range(3):
        assert table.put_row_gradients([1, 2], np.ones((2, DIM))) == step
    first.close()
    again = open_table(connect(running, "w0"))
    assert (again.next_step, again.version, again.is_step_begun) == (3, 3, False)
    assert again.put_row_gradients([2], np.ones((1, DIM))) == 3
    assert again.get_rows([1, 2])[:, 0].tolist() == [-1.5, -2.0]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("verb", ["put", "exchange", "abandon"])
def test_what_the_worker_before_had_sent_may_be_counted_after_opening(
    cluster, connect, mode, verb
) -> None:
    """The step that `next_step` gave is the one that is sent: it counts once."""
    running = cluster(2)
    earlier = connect(running, "w0")
    before = open_table(earlier, mode=mode)
    gradients = np.ones((3, DIM), np.float32)
    for _ in range(2):
        before.put_row_gradients([1, 2, 3], gradients)
    after = open_table(connect(running, "w0"), mode=mode)
    assert (after.next_step, after.is_step_begun) == (2, False)
    before.put_row_gradients([1, 2, 3], gradients)
    earlier.close()
    if verb == "put":
        assert after.put_row_gradients([1, 2, 3], gradients) == 2
    elif verb == "exchange":
        assert after.exchange_rows([1, 2, 3], gradients)[0, 0] == -1.5
    else:
        assert after.abandon_step() == 2
    assert (after.next_step, after.is_step_begun) == (3, False)
    assert after.get_rows([1])[0, 0] == -1.5
    assert after.put_row_gradients([1, 2, 3], gradients) == 3
    assert after.get_rows([1])[0, 0] == -2


def test_opening_again(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    table = open_table(client)
    table.put_row_gradients([1], np.ones((1, DIM)))
    assert open_table(client) is table
    assert table.next_step == 1
    with pytest.raises(shardwell.SpecMismatchError, match="dim: 5 exists, 6 was asked for"):
        open_table(client, dim=6)
    with pytest.raises(shardwell.ArgumentError, match=r"cache_row_count .* close it first"):
        open_table(client, cache_row_count=10)
    with table as entered:
        assert entered is table
    for call in (lambda: table.get_rows([1]), lambda: table.prefetch_rows([1]), table.row_ids):
        with pytest.raises(shardwell.ClosedError, match="table 'rows' was closed"):
            call()
    table.close()
    other = open_table(client, cache_row_count=10)
    assert other is not table
    assert other.next_step == 1
    assert (other.name, other.dim, other.row_count) == ("rows", DIM, 1000)
    client.parameter("other", size=3, optimizer=SGD)
    client.close()
    with pytest.raises(shardwell.ClosedError):
        other.get_rows([1])


def test_a_reader_needs_no_seat(cluster, connect) -> None:
    running = cluster(2)
    writer, reader = (open_table(connect(running, name)) for name in ("writer", "reader"))
    for step in range(5):
        writer.put_row_gradients([step], -2 * np.ones((1, DIM)))
        assert reader.get_rows([step])[0, 0] == 1
    late = open_table(connect(running, "late"))
    assert late.next_step == 5
    with pytest.raises(shardwell.SeatsTakenError, match="writer"):
        late.put_row_gradients([1], np.ones((1, DIM)))
    assert late.get_rows([4])[0, 0] == 1


def test_more_calls_than_may_be_under_way_wait(cluster, connect) -> None:
    running = cluster(1)
    reader, writer = (open_table(connect(running, name)) for name in ("reader", "writer"))
    waiting = [
        in_background(lambda: reader.get_rows([1], min_version=1))
        for _ in range(STREAM_SET_COUNT_MAX)
    ]
    streams = endpoint_of(running.servers[0]).streams
    eventually("all have their streams", lambda: streams.count == STREAM_SET_COUNT_MAX)
    with pytest.raises(shardwell.DeadlineError, match="8 calls of other threads on table 'rows'"):
        reader.get_rows([1], timeout_s=0.2)
    late = in_background(lambda: reader.get_rows([1]))
    writer.put_row_gradients([1], np.ones((1, DIM)))
    for each in (*waiting, late):
        assert each.result(PATIENCE_S)[0, 0] == -0.5
    kept = IDLE_STREAM_SET_COUNT_MAX + 1  # and the writer's
    eventually("few are kept", lambda: streams.count == kept)


def test_many_tables_share_a_few_streams(cluster, connect) -> None:
    """As recommenders have them: a table for each feature."""
    client = connect(cluster(2, limits=Limits(stream_count_max=2)), "w0")
    tables = [
        client.table(f"feature-{n}", row_count=100, dim=n + 1, optimizer=SGD) for n in range(30)
    ]
    for table in tables * 2:
        table.put_row_gradients(np.arange(50), np.ones((50, table.dim)))
    for number, table in enumerate(tables):
        rows = table.exchange_rows([1, 2], np.ones((2, table.dim)), [2, 3])
        assert rows.shape == (2, number + 1)
        np.testing.assert_array_equal(rows, table.get_rows([2, 3]))
    tables[0].close()
    assert tables[1].get_rows([1]).shape == (1, 2)
    assert [status.open_stream_count for status in client.status()] == [1, 1]


def test_a_call_that_waits_for_another_threads_has_its_deadline(cluster, connect) -> None:
    running = cluster(2)
    one, two = (open_table(connect(running, f"w{index}"), worker_count=2) for index in (0, 1))
    ones = np.ones((1, DIM), np.float32)
    one.put_row_gradients([1], ones)
    waiting = in_background(lambda: one.put_row_gradients([2], ones))
    eventually("it waits", one._calls._turn_lock.locked)
    for call in (
        lambda: one.put_row_gradients([3], ones, timeout_s=0.2),
        lambda: one.set_learning_rate(0.25, timeout_s=0.2),
        lambda: one.abandon_step(timeout_s=0.2),
    ):
        with pytest.raises(shardwell.DeadlineError, match="another thread's call on table 'rows'"):
            call()
    two.put_row_gradients([1], ones)
    assert waiting.result(PATIENCE_S) == 1
    assert one.next_step == 2


def test_who_is_behind_does_not_change_the_past(cluster, connect) -> None:
    """A reader takes no part, so its next step is that at which it opened the table."""
    running = cluster(2)
    writer, reader = (open_table(connect(running, name)) for name in ("writer", "reader"))
    for step in range(3):
        writer.put_row_gradients([step], np.ones((1, DIM)))
    with pytest.raises(shardwell.StepOrderError, match=r"from step 0.*reached step 3; pass now="):
        reader.set_learning_rate(0.25)
    reader.set_learning_rate(0.25, now=True)
    assert {status.learning_rate for status in writer.status()} == {0.25}
    reader.reopen()
    reader.set_learning_rate(0.125)
    assert {status.learning_rate for status in writer.status()} == {0.125}


def test_threads_fetch_beside_gradients(cluster, connect) -> None:
    """Each row is always whole: all its values are those of one step."""
    table = open_table(connect(cluster(2), "w0"), dim=64)
    ids = np.arange(50)

    def fetch() -> int:
        last = 0.0
        for _ in range(30):
            rows = table.get_rows(ids)
            assert (rows == rows[:, :1]).all()
            assert rows.max() >= last
            last = rows.min()
        return 0

    def put() -> int:
        for _ in range(15):
            table.put_row_gradients(ids, -np.ones((50, 64)))
        return 0

    together([fetch, fetch, fetch, put, put])
    assert table.next_step == 30
    assert (table.get_rows(ids) == 15).all()
