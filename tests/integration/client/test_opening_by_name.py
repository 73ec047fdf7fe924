"""Opening what exists by its name: the spec is the shards', and what else is given must agree."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from harness.threads import in_background

pytestmark = pytest.mark.timeout(60)

MODEL = {
    "size": 101,
    "optimizer": shardwell.Adam(learning_rate=0.25, beta1=0.5),
    "worker_count": 2,
    "codec": "bf16+lz4",
    "allow_non_finite": True,
}
USERS = {
    "row_count": None,
    "dim": 3,
    "optimizer": shardwell.FTRL(learning_rate=0.25),
    "initializer": shardwell.Normal(std=0.5, seed=7),
    "worker_count": 2,
    "codec": "fp32",
}
OPEN = {
    "parameter": lambda client, **given: client.parameter("one", **given),
    "table": lambda client, **given: client.table("one", **given),
}
SPECS: dict[str, dict[str, Any]] = {"parameter": MODEL, "table": USERS}
UNKNOWN = {
    "parameter": shardwell.UnknownParameterError,
    "table": shardwell.UnknownTableError,
}
KINDS = pytest.mark.parametrize("kind", ["parameter", "table"])


@KINDS
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("shard_count", [1, 3])
def test_the_spec_is_that_of_the_shards(cluster, connect, kind, mode, shard_count) -> None:
    running = cluster(shard_count)
    made = OPEN[kind](connect(running, "w0"), **SPECS[kind], mode=mode)
    joined = OPEN[kind](connect(running, "w1"))
    assert joined.spec == made.spec
    given = {**SPECS[kind], "mode": mode}
    for left_out in given:
        some = {name: value for name, value in given.items() if name != left_out}
        if left_out in ("codec", "mode", "allow_non_finite", "worker_count", "initializer"):
            del some["optimizer"]  # with all that it needs, it would be a spec of its own
        assert OPEN[kind](connect(running, f"without-{left_out}"), **some).spec == made.spec


def test_a_reader_and_a_worker_that_join_by_name(cluster, connect) -> None:
    running = cluster(2)
    first = connect(running, "w0").parameter("model", **MODEL)
    first.init(np.arange(101.0))
    second = connect(running, "w1").parameter("model")
    reader = connect(running, "reader").parameter("model")
    waiting = in_background(lambda: first.exchange(np.ones(101)))
    weights = second.exchange(np.ones(101))
    np.testing.assert_array_equal(waiting.result(20), weights)
    np.testing.assert_array_equal(reader.get_weights(), weights)
    assert (reader.version, reader.next_step) == (1, 0)


def test_rows_by_the_name_of_their_table(cluster, connect) -> None:
    running = cluster(2)
    first = connect(running, "w0").table("users", **USERS)
    second = connect(running, "w1").table("users")
    ids, gradients = np.array([-5, 2**62]), np.ones((2, 3), np.float32)
    first.put_row_gradients(ids, gradients)
    second.put_row_gradients(ids, gradients)
    reader = connect(running, "reader").table("users", cache_row_count=10)
    rows = reader.get_rows(ids, min_version=1)
    np.testing.assert_array_equal(rows, first.get_rows(ids))
    assert reader.get_rows([17]).tolist() == first.get_rows([17]).tolist()  # of its initializer


@KINDS
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codec": "fp16"}, "codec: 'bf16.lz4' exists, 'fp16' was asked for|codec: 'fp32' exists"),
        ({"worker_count": 3}, "worker_count: 2 exists, 3 was asked for"),
        ({"mode": "async"}, "mode: 'sync' exists, 'async' was asked for"),
        (
            {"optimizer": shardwell.SGD(learning_rate=1.0)},
            r"optimizer: \w+ exists, SGD was asked for",
        ),
    ],
)
def test_what_is_given_must_agree(cluster, connect, kind, change, words) -> None:
    running = cluster(2)
    OPEN[kind](connect(running, "w0"), **SPECS[kind])
    other = connect(running, "w1")
    with pytest.raises(shardwell.SpecMismatchError, match=words) as caught:
        OPEN[kind](other, **change)
    assert (caught.value.parameter, caught.value.table) == (
        ("one", None) if kind == "parameter" else (None, "one")
    )
    for way in ("by its name alone", "choose another name", "shardwell delete one"):
        assert way in caught.value.message
    OPEN[kind](other)


def test_any_key_or_a_count_must_agree(cluster, connect) -> None:
    running = cluster(2)
    connect(running, "w0").table("keys", **USERS)
    connect(running, "w0b").table("ids", **{**USERS, "row_count": 9})
    other = connect(running, "w1")
    assert other.table("keys", row_count=None).row_count is None
    assert other.table("ids", row_count=9).row_count == 9
    for name, row_count in (("keys", 9), ("ids", None), ("ids", 10)):
        with pytest.raises(shardwell.SpecMismatchError, match=rf"row_count: .*{row_count} was"):
            other.table(name, row_count=row_count)


@KINDS
@pytest.mark.parametrize("change", [{}, {"codec": "fp32"}, {"optimizer": None}, {"mode": "x"}])
def test_what_does_not_exist_needs_a_spec(cluster, connect, kind, change) -> None:
    client = connect(cluster(2), "w0")
    words = {
        "parameter": "size= or tensors= and optimizer=",
        "table": "row_count=, dim= and optimizer=",
    }
    with pytest.raises(UNKNOWN[kind], match=f"'one'; pass {re.escape(words[kind])}") as caught:
        OPEN[kind](client, **change)
    assert "one" in (caught.value.parameter, caught.value.table)
    (status, _) = client.status()
    assert (status.parameters, status.tables) == ((), ())


@KINDS
@pytest.mark.parametrize(
    "change",
    [{"codec": None}, {"mode": "x"}, {"optimizer": None}, {"worker_count": 0}, {"codec": "fp8"}],
)
def test_what_can_not_be_opened_by_name(cluster, connect, kind, change) -> None:
    running = cluster(1)
    OPEN[kind](connect(running, "w0"), **SPECS[kind])
    with pytest.raises(shardwell.ArgumentError):
        OPEN[kind](connect(running, "w1"), **change)
    for name in ("", "a b", None, 5):
        with pytest.raises(shardwell.ArgumentError, match="name"):
            getattr(connect(running, "w2"), kind)(name)


@KINDS
def test_opening_again_by_name(cluster, connect, kind) -> None:
    client = connect(cluster(2), "w0")
    caching = {"cache_row_count": 9, "cache_staleness_steps": 4} if kind == "table" else {}
    made = OPEN[kind](client, **SPECS[kind], **caching)
    assert OPEN[kind](client) is made
    if kind == "table":
        assert made.caching == (9, 4)


@KINDS
def test_a_shard_that_is_away_is_waited_for(cluster, connect, kind, tmp_path) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True)
    made = OPEN[kind](connect(running, "w0"), **SPECS[kind])
    client = connect(running, "w1")
    running.children[0].kill()
    opening = in_background(lambda: OPEN[kind](client))
    running.start_again(0)
    assert opening.result(20).spec == made.spec


def test_statuses_are_values_that_can_be_printed(cluster, connect) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    model = client.parameter("model", **MODEL)
    users = client.table("users", **USERS)
    users.put_row_gradients([4], np.ones((1, 3)))

    def statuses() -> list[shardwell.ShardStatus]:
        return client.status()

    eventually("both are there", lambda: all(one.parameters for one in statuses()))
    for index, status in enumerate(statuses()):
        (parameter,), (table,) = status.parameters, status.tables
        assert (parameter.spec, table.spec) == (model.spec, users.spec)
        again = users.status()[index]
        # Which go on.
        again = dataclasses.replace(again, wait=table.wait, members=table.members)
        assert table == again
        assert hash(table) == hash(again)
        with pytest.raises(AttributeError):
            status.shard_index = 7
        shown = repr(status)
        for words in (
            f"shard_index={index}, shard_count=2, cluster_id='{running.cluster_id}'",
            "name='model', size=101, optimizer=Adam(clip_value=0.0, clip_norm=0.0, "
            "learning_rate=0.25, beta1=0.5",
            "missing_worker_ids=('w0',)",
            "TableStatus(spec=TableSpec(name='users'",
        ):
            assert words in shown
    assert sum(table.row_count for status in statuses() for table in status.tables) == 1
