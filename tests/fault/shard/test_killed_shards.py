"""Shards killed with SIGKILL: calls end at their deadline, with an error that names the shard.

Until there is a durable store a shard that comes back is empty, and the error says so.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from functools import partial

import numpy as np
import pytest

import shardwell
from harness.data.table_training import EVERY, OPTIONS, KnownRows, batch
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.programs.commands import ServingShard
from harness.programs.ports import free_port
from harness.threads import in_background

SGD = shardwell.SGD(learning_rate=0.5)
SIZE = 300
HASTY_S = 0.5


@pytest.fixture
def running(cluster):
    return cluster(2, processes=True)


@pytest.mark.parametrize("killed", [0, 1])
def test_each_verb_names_the_dead_shard(running, connect, killed) -> None:
    client = connect(running, "w0")
    model = client.parameter("m", size=SIZE, optimizer=SGD)
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(np.ones(SIZE, np.float32))
    hasty = connect(running, "w1", timeout_s=HASTY_S)
    running.children[killed].kill()
    gradient = np.ones(SIZE, np.float32)
    calls = {
        "exchange": lambda: model.exchange(gradient, timeout_s=HASTY_S),
        "put_gradient": lambda: model.put_gradient(gradient, timeout_s=HASTY_S),
        "get_weights": lambda: model.get_weights(timeout_s=HASTY_S),
        "get_weights_async": lambda: model.get_weights_async(timeout_s=HASTY_S).result(PATIENCE_S),
        "parameter": lambda: hasty.parameter("other", size=10, optimizer=SGD),
        "set_learning_rate": lambda: model.set_learning_rate(0.1, now=True, timeout_s=HASTY_S),
        "status": lambda: client.status(),
    }
    for name, call in calls.items():
        watch = Stopwatch()
        with pytest.raises(shardwell.ShardUnavailableError, match=f"shard {killed}") as caught:
            call()
        assert watch.elapsed_s < PATIENCE_S, name
        assert caught.value.shard_index == killed, name
    assert model.next_step == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_while_every_verb_waits(running, connect, killed) -> None:
    """The other worker never comes, so all wait at both shards when one of them is killed."""
    observer = connect(running, "observer")
    waiting = {}
    for verb in ("exchange", "get_weights", "put_gradient"):
        model = connect(running, verb).parameter(verb, size=SIZE, optimizer=SGD, worker_count=2)
        gradient = np.ones(SIZE, np.float32)
        model.init(np.zeros(SIZE, np.float32))
        if verb == "exchange":
            call = partial(model.exchange, gradient)
        elif verb == "get_weights":
            call = partial(model.get_weights, min_version=1)
        else:
            model.put_gradient(gradient)
            call = partial(model.put_gradient, gradient)
        waiting[verb] = in_background(partial(call, timeout_s=10.0))
    eventually(
        "all wait", lambda: all(status.open_stream_count == 3 for status in observer.status())
    )
    running.children[killed].kill()
    watch = Stopwatch()
    errors = {verb: future.exception(PATIENCE_S) for verb, future in waiting.items()}
    assert {
        verb: (type(error).__name__, getattr(error, "shard_index", None))
        for verb, error in errors.items()
    } == dict.fromkeys(waiting, ("ShardUnavailableError", killed))
    assert watch.elapsed_s < PATIENCE_S


def test_killed_in_the_middle_of_training(running, connect) -> None:
    """At no particular instant, with bytes on the way in both directions."""
    model = connect(running, "w0").parameter("m", size=100_000, optimizer=SGD)
    model.init(np.zeros(100_000, np.float32))

    def train() -> None:
        while True:
            model.exchange(np.ones(100_000, np.float32), timeout_s=BRIEF_S)

    training = in_background(train)
    eventually("it trains", lambda: model.next_step >= 3)
    running.children[1].kill()
    error = training.exception(PATIENCE_S)
    assert isinstance(error, shardwell.ShardUnavailableError)
    assert error.shard_index == 1


def test_a_shard_that_comes_back_empty_says_so(connect) -> None:
    port = free_port()
    with ServingShard(port=port) as first:
        address = first.address()
        client = connect(address, "w0")
        model = client.parameter("m", size=SIZE, optimizer=SGD)
        model.init(np.zeros(SIZE, np.float32))
        model.exchange(np.ones(SIZE, np.float32))
        first.close()
        with ServingShard(port=port) as second:
            assert second.address() == address
            watch = Stopwatch()
            with pytest.raises(shardwell.UnknownParameterError, match="lost its memory"):
                model.exchange(np.ones(SIZE, np.float32))
            assert watch.elapsed_s < PATIENCE_S
            again = client.parameter("m", size=SIZE, optimizer=SGD)
            assert again.next_step == 0
            again.init(np.zeros(SIZE, np.float32))
            np.testing.assert_array_equal(again.exchange(np.ones(SIZE, np.float32)), -0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="a port can be kept on Linux alone")
def test_no_process_gets_the_port_of_a_dead_shard(running) -> None:
    """Of those that the system gives out, an outgoing connection might take it meanwhile."""
    port = int(running.addresses[0].rpartition(":")[2])
    running.children[0].kill()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    running.start_again(0)


# A shard of a table that was killed goes on from its files, or says that it has none.


def test_a_shard_that_lost_its_memory_is_noticed(connect) -> None:
    """It kept nothing: rows that are gone are never taken for rows that are new."""
    with ServingShard() as shard:
        address = shard.address()
        client = connect(address, "w0", timeout_s=PATIENCE_S)
        table = client.table("rows", **OPTIONS)
        for step in range(2):
            table.put_row_gradients(*batch(step))
        port = int(address.rpartition(":")[2])
    with ServingShard(port=port):
        with pytest.raises(shardwell.UnknownTableError, match="rows") as caught:
            table.get_rows(EVERY)
        assert caught.value.table == "rows"
        with pytest.raises(shardwell.UnknownTableError):
            table.put_row_gradients(*batch(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "verb"), [("sync", "exchange"), ("async", "put")])
def test_a_table_of_a_killed_shard_comes_back_from_its_files(connect, tmp_path, mode, verb) -> None:
    """Two workers train on; one of two shards is killed twice, and started again on its port."""
    step_count = 14
    tables: list[shardwell.Table] = []

    def train(index: int) -> None:
        for step in range(step_count):
            if verb == "exchange":
                tables[index].exchange_rows(*batch(step, index))
            else:
                tables[index].put_row_gradients(*batch(step, index))

    with contextlib.ExitStack() as stack:

        def serve(index: int, port: int = 0) -> ServingShard:
            flags = (f"--data-dir={tmp_path}/{index}",)
            return stack.enter_context(ServingShard(*flags, index=index, count=2, port=port))

        shards = [serve(0), serve(1)]
        addresses = [shard.address() for shard in shards]
        for index in (0, 1):
            client = connect(",".join(addresses), f"w{index}", timeout_s=PATIENCE_S)
            options = {**OPTIONS, "worker_count": 2, "mode": mode}
            tables.append(client.table("rows", **options))
        training = [in_background(partial(train, index)) for index in (0, 1)]
        for kill_count in (1, 2):
            eventually("it trains", lambda n=kill_count: tables[0].next_step >= 4 * n)
            shards[1].close()
            shards[1] = serve(1, int(addresses[1].rpartition(":")[2]))
            assert shards[1].address() == addresses[1]
        for each in training:
            each.result(PATIENCE_S)
        model = KnownRows(step_count, 2, mode=mode)
        model.check(tables[0].get_rows(EVERY, min_version=step_count))
        np.testing.assert_array_equal(tables[1].row_ids(), sorted(model.model.rows))
