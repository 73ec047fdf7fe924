"""Opening parameters: specs that must agree, order of steps, seats, and errors that name things."""

from __future__ import annotations

import re

import numpy as np
import pytest

import shardwell
from harness.threads import together
from harness.wire_client.worker import WireWorker, error_detail, spec
from shardwell.v1 import types_pb2

SGD = shardwell.SGD(learning_rate=0.5)
ORIGINAL = {"size": 100, "optimizer": SGD, "worker_count": 2, "codec": "fp16"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 101}, ["size", "100", "101"]),
        ({"optimizer": shardwell.SGD(learning_rate=0.25)}, ["optimizer", "0.5", "0.25"]),
        ({"optimizer": shardwell.Adam()}, ["optimizer", "SGD", "Adam"]),
        ({"worker_count": 3}, ["worker_count", "2", "3"]),
        ({"codec": "bf16"}, ["codec", "fp16", "bf16"]),
        ({"codec": "fp16+lz4"}, ["codec", "fp16", "fp16\\+lz4"]),
        ({"mode": "async"}, ["mode", "sync", "async"]),
        ({"allow_non_finite": True}, ["allow_non_finite", "False", "True"]),
        ({"size": 7, "codec": "fp32"}, ["size", "codec"]),
    ],
)
def test_another_spec_is_refused_with_the_differences(cluster, connect, change, words) -> None:
    running = cluster()
    connect(running, "w0").parameter("model", **ORIGINAL)
    other = connect(running, "w1")
    with pytest.raises(shardwell.SpecMismatchError, match=r".*".join(words)) as caught:
        other.parameter("model", **{**ORIGINAL, **change})
    assert caught.value.parameter == "model"
    for field in {"size", "optimizer", "worker_count", "codec", "mode"} - set(change):
        if field != "worker_count" or "mode" not in change:
            assert not re.search(rf"\b{field}:", caught.value.message)
    other.parameter("model", **ORIGINAL)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "-a"},
        {"name": "x" * 129},
        {"name": None},
        {"size": 0},
        {"size": -1},
        {"size": 2**48 + 1},
        {"size": 1.0},
        {"size": "1"},
        {"size": True},
        {"worker_count": 0},
        {"worker_count": 2**16 + 1},
        {"codec": "fp8"},
        {"codec": None},
        {"mode": "later"},
        {"optimizer": None},
        {"optimizer": "sgd"},
        {"allow_non_finite": 1},
    ],
    ids=str,
)
def test_a_spec_that_is_none(cluster, connect, arguments) -> None:
    client = connect(cluster(), "w0")
    values = {"name": "model", "size": 10, "optimizer": SGD, **arguments}
    with pytest.raises(shardwell.ArgumentError):
        client.parameter(values.pop("name"), **values)
    assert all(not status.parameters for status in client.status())


def test_not_initialized_names_the_parameter(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("fresh", size=10, optimizer=SGD)
    for call in (
        lambda: model.get_weights(),
        lambda: model.put_gradient(np.zeros(10, np.float32)),
        lambda: model.exchange(np.zeros(10, np.float32)),
    ):
        with pytest.raises(shardwell.NotInitializedError, match="'fresh'") as caught:
            call()
        assert (caught.value.parameter, caught.value.retryable) == ("fresh", True)
    model.init(np.zeros(10, np.float32))
    np.testing.assert_array_equal(model.exchange(np.ones(10, np.float32)), -0.5)


def test_one_worker_too_many_gets_the_names_of_those_with_seats(cluster, connect) -> None:
    running = cluster()
    models = [
        connect(running, name).parameter("model", size=40, optimizer=SGD, worker_count=2)
        for name in ("ann", "bob", "eve")
    ]
    models[0].init(np.zeros(40, np.float32))
    for model in models[:2]:
        model.put_gradient(np.ones(40, np.float32))
    for verb in (models[2].put_gradient, models[2].exchange):
        with pytest.raises(shardwell.SeatsTakenError, match=r"'ann', 'bob'.*'eve'") as caught:
            verb(np.ones(40, np.float32))
        assert caught.value.worker_id == "eve"
    np.testing.assert_array_equal(models[2].get_weights(min_version=1), -0.5)


def test_steps_may_not_be_skipped(cluster, connect) -> None:
    model = connect(cluster(), "w0").parameter("model", size=40, optimizer=SGD)
    model.init(np.zeros(40, np.float32))
    model.next_step = 3
    for verb in (model.put_gradient, model.exchange):
        with pytest.raises(shardwell.StepOrderError, match=r"step 3.*expected step 0") as caught:
            verb(np.ones(40, np.float32))
        assert caught.value.worker_id == "w0"
    model.next_step = 0
    np.testing.assert_array_equal(model.exchange(np.ones(40, np.float32)), -0.5)


def test_a_repeated_step_counts_once(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    model = client.parameter("model", size=100, optimizer=SGD)
    model.init(np.zeros(100, np.float32))
    for verb in (model.exchange, model.put_gradient, model.exchange):
        verb(np.ones(100, np.float32))
        model.next_step = 0
    np.testing.assert_array_equal(model.get_weights(), -0.5)
    counted = sum(status.parameters[0].counted_chunk_count for status in client.status())
    repeated = sum(status.parameters[0].duplicate_chunk_count for status in client.status())
    assert (counted, repeated) == (4, 8)


def test_a_step_that_was_made_long_ago_is_out_of_order(cluster, connect) -> None:
    """A worker that another process has replaced under its name."""
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    model = client.parameter("model", size=100, optimizer=SGD)
    model.init(np.zeros(100, np.float32))
    for _ in range(3):
        model.exchange(np.ones(100, np.float32))
    model.next_step = 0
    for _ in range(2):
        with pytest.raises(shardwell.StepOrderError, match=r"version 3.*expected 1") as caught:
            model.exchange(np.full(100, 7, np.float32))
        assert (caught.value.worker_id, caught.value.parameter) == ("w0", "model")
    np.testing.assert_array_equal(model.get_weights(), -1.5)
    model.reopen()
    np.testing.assert_array_equal(model.exchange(np.ones(100, np.float32)), -2)

    table = client.table("rows", row_count=10, dim=1, optimizer=SGD, codec="fp32")
    before = table.get_rows([1])
    for _ in range(3):
        table.exchange_rows([1], np.ones((1, 1), np.float32), [1])
    table._view.next_step = 0
    for _ in range(2):
        with pytest.raises(shardwell.StepOrderError, match=r"version 3.*expected 1") as caught:
            table.exchange_rows([1], np.full((1, 1), 7, np.float32), [1])
        assert (caught.value.worker_id, caught.value.table) == ("w0", "rows")
    np.testing.assert_array_equal(table.get_rows([1]), before - 1.5)


def test_opened_again_it_goes_on_where_it_was(cluster, connect) -> None:
    running = cluster(3)
    for expected in range(3):
        with shardwell.connect(running.target, worker_id="w0") as client:
            model = client.parameter("model", size=100, optimizer=SGD)
            assert model.next_step == expected
            model.init(np.zeros(100, np.float32))
            model.exchange(np.ones(100, np.float32))
    other = connect(running, "w1").parameter("async", size=100, optimizer=SGD, mode="async")
    assert other.next_step == 0


def test_opened_again_after_its_close_it_is_another(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    model = client.parameter("model", size=100, optimizer=SGD)
    model.init(np.zeros(100, np.float32))
    model.exchange(np.ones(100, np.float32))
    assert client.parameter("model", size=100, optimizer=SGD) is model
    model.close()
    with pytest.raises(shardwell.ClosedError, match=r"'model' was closed.*open it again"):
        model.get_weights()
    other = client.parameter("model", size=100, optimizer=SGD)
    assert other is not model
    assert (model.is_closed, other.is_closed) == (True, False)
    assert other.next_step == 1
    np.testing.assert_array_equal(other.get_weights(), -0.5)


def test_an_unknown_parameter_is_named(cluster) -> None:
    running = cluster(1)
    with WireWorker(running.target, "w0") as worker:
        ghost = worker.create(spec("model", 10))
        ghost.spec.name = "ghost"
        with pytest.raises(Exception, match="'ghost'") as caught:
            ghost.pull()
        assert caught.value.code().name == "NOT_FOUND"
        detail = error_detail(caught.value)
        assert detail.code == types_pb2.ERROR_CODE_UNKNOWN_PARAMETER
        assert detail.parameter == "ghost"


def test_a_cluster_that_lost_its_memory_says_unknown_parameter(cluster, connect) -> None:
    """The same addresses and name, an empty shard: the SDK's error, from every verb."""
    first = cluster(1, cluster_id="same")
    model = connect(first, "w0").parameter("model", size=10, optimizer=SGD)
    model.init(np.zeros(10, np.float32))
    first.servers[0].shard.parameters._by_name.clear()
    for call in (
        lambda: model.get_weights(),
        lambda: model.put_gradient(np.zeros(10, np.float32)),
        lambda: model.exchange(np.zeros(10, np.float32)),
        lambda: model.set_learning_rate(0.1),
        lambda: model.init(np.zeros(10, np.float32)),
    ):
        with pytest.raises(shardwell.UnknownParameterError, match="'model'"):
            call()


def test_what_is_opened_says_what_it_is(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    assert repr(client.parameter("model", **ORIGINAL)) == (
        "Parameter('model', size=100, mode='sync')"
    )
    tables = {
        row_count: client.table(
            f"t-{row_count}", row_count=row_count, dim=4, optimizer=SGD, mode="async"
        )
        for row_count in (9, None)
    }
    for row_count, table in tables.items():
        assert repr(table) == f"Table('t-{row_count}', row_count={row_count}, dim=4, mode='async')"


def test_many_at_once_from_threads_of_one_client(cluster, connect) -> None:
    """Each is opened by two threads, which get the same one."""
    client = connect(cluster(2), "w0")

    def trained(thread: int) -> list[shardwell.Parameter]:
        opened = []
        for index in range(thread // 2, 40, 4):
            net = client.parameter(f"p{index}", size=10, optimizer=SGD)
            net.init(np.full(10, index, np.float32))
            opened.append(net)
        return opened

    found = together([lambda thread=thread: trained(thread) for thread in range(8)])
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert all(a is b for a, b in zip(one, other, strict=True))

    def step(index: int) -> None:
        net = client.parameter(f"p{index}")
        assert (net.exchange(np.ones(10, np.float32)) == index - 0.5).all()

    together([lambda index=index: step(index) for index in range(40)])
    assert [client.parameter(f"p{index}").next_step for index in range(40)] == [1] * 40
