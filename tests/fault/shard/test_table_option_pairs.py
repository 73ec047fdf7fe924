"""Goal: each two options of a table that may be together are as each of them says, or refused.

Method: as in test_option_pairs.py; the oracle is a dict of rows (harness/oracles/rows.py), and a
client that only reads fetches all rows after each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.covering import Row, covering
from harness.oracles.rows import ModelRows
from harness.polling import PATIENCE_S
from harness.programs.forked_cluster import ForkedCluster
from harness.programs.forkserver import ForkedCalls
from harness.threads import in_background, together
from shardwell import Elastic
from shardwell_server import LocalCluster

DIM, ID_COUNT, BATCH = 6, 240, 60
CREWS: dict[str, dict[str, Any]] = {
    "one": {"worker_count": 1},
    "two": {"worker_count": 2},
    "three": {"worker_count": 3},
    "elastic of one": {"members": Elastic(max_count=1, member_return_s=60, member_lease_s=60)},
    "elastic by two": {
        "members": Elastic(min_count=2, member_return_s=60, member_lease_s=60, reference_count=4)
    },
}
WORKER_COUNTS = {"one": 1, "elastic of one": 1, "three": 3}
"""Of others: two."""
RULES = {
    "sgd": partial(shardwell.SGD, 0.125, weight_decay=0.25),
    "momentum": partial(shardwell.SGD, 0.125, momentum=0.5, dampening=0.25),
    "adagrad": partial(shardwell.Adagrad, 0.125, epsilon=1e-3),
    "row-wise adagrad": partial(shardwell.RowWiseAdagrad, 0.125, epsilon=1e-3, weight_decay=0.25),
    "adam": partial(shardwell.Adam, 0.0625, epsilon=1e-2),
    "adamw": partial(shardwell.AdamW, 0.0625, epsilon=1e-2, weight_decay=0.25),
    "ftrl": partial(shardwell.FTRL, 0.25, l1=0.0625, l2=0.125),
}
INITIALIZERS = {
    "zeros": shardwell.Zeros(),
    "uniform": shardwell.Uniform(seed=3),
    "normal": shardwell.Normal(std=0.5, seed=2**63),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "mode": ("sync", "async"),
    "crew": ("two", "one", "three", "elastic of one", "elastic by two"),
    "clip_value": (0.0, 0.375),
    "codec": ("fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4"),
    "rule": tuple(RULES),
    "initializer": tuple(INITIALIZERS),
    "row_count": (ID_COUNT, None),
    "cache_row_count": (0, 100),
    "learning_rate": ("of the rule", "set"),
    "samples": ("equal", "weighted", "sometimes none"),
    "allow_non_finite": (False, True),
    "verb": ("exchange_rows", "put_row_gradients", "prefetch_rows"),
    "durability": ("process", "step", "0.05"),
}
REFUSED: list[tuple[Row, str, str]] = [
    ({"mode": "async", "crew": "elastic of one"}, "mode", "members"),
    ({"mode": "async", "crew": "elastic by two"}, "mode", "members"),
]
OF_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"codec": "int8"}, "int8"),
    ({"optimizer": shardwell.SGD(0.1, clip_norm=1.0)}, "clip_norm"),
    ({"optimizer": shardwell.Average()}, "Average"),
    ({"optimizer": shardwell.RMSProp(0.1)}, "RMSProp"),
]
ROUNDS, ROUNDS_AFTER = 4, 2


def is_allowed(row: Row) -> bool:
    return not any(refused.items() <= row.items() for refused, *_ in REFUSED)


PAIRS = covering(OPTIONS, is_allowed)


@pytest.fixture
def forked() -> Iterator[ForkedCalls]:
    with ForkedCalls() as started:
        yield started


def spec_of(row: Row) -> dict[str, Any]:
    """Arguments of `Client.table`."""
    names = ("mode", "codec", "row_count", "cache_row_count", "allow_non_finite")
    return {name: row[name] for name in names} | {
        "dim": DIM,
        "optimizer": RULES[row["rule"]](clip_value=row["clip_value"]),
        "initializer": INITIALIZERS[row["initializer"]],
        **CREWS[row["crew"]],
    }


class Training:
    """One row's: workers on a cluster, and the oracle beside them."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.options = spec_of(row)
        self.is_sync = row["mode"] == "sync"
        self.worker_count = WORKER_COUNTS.get(row["crew"], 2)
        self.tables: list[Any] = []
        self.reader: Any = None
        self.ids = np.arange(ID_COUNT)
        if row["row_count"] is None:  # any of 64 bits
            self.ids = self.ids * (2**64 // ID_COUNT // 2) - 2**62
        rule = self.options["optimizer"]
        self.rows = ModelRows(
            DIM,
            rule,
            initializer=self.options["initializer"],
            worker_count=self.worker_count,
            mode=row["mode"],
        )
        members = self.options.get("members")
        if members is not None and members.reference_count:
            self.rows.learning_rate *= self.worker_count / members.reference_count
        self.scale = self.rows.learning_rate / rule.learning_rate

    def open(self, clients: list[shardwell.Client], reader: shardwell.Client) -> None:
        self.tables = [client.table("rows", **self.options) for client in clients]
        self.reader = reader.table("rows")
        if "members" in self.options:
            for table in self.tables:
                table.join()

    def batch(self, index: int, number: int) -> tuple[Any, Any, int]:
        """Ids, some of them twice, gradients and samples."""
        draw = np.random.default_rng([index, number])
        ids = draw.choice(self.ids, BATCH)
        gradients = draw.integers(-8, 9, (BATCH, DIM)).astype(np.float32) / 8
        count = index + 1 if self.row["samples"] == "weighted" else 1
        has_none = number % 3 == 2 or (number % 3 == 1 and index == number % self.worker_count)
        if self.row["samples"] == "sometimes none" and has_none:
            size = 0 if number < 3 else BATCH  # of no weight, with rows or without
            return ids[:size], gradients[:size], 0
        return ids, gradients, count

    def call(self, index: int, number: int) -> Any:
        table, verb = self.tables[index], self.row["verb"]
        ids, gradients, count = self.batch(index, number)
        if verb == "exchange_rows":
            return table.exchange_rows(ids, gradients, self.ids, sample_count=count)
        step = table.put_row_gradients(ids, gradients, sample_count=count)
        assert step == number or not self.is_sync
        return None

    def fetched(self, table: Any, number: int) -> Any:
        minimum = {"min_version": number + 1} if self.is_sync else {}
        if self.row["verb"] == "prefetch_rows":
            table.prefetch_rows(self.ids, **minimum)
        return table.get_rows(self.ids, **minimum)

    def round(self, number: int, disturb: Callable[[], None] = lambda: None) -> None:
        if number in (1, 4) and self.row["learning_rate"] == "set":
            rate = (0.25, 0.0625)[number // 4]
            self.tables[0].set_learning_rate(rate)
            self.rows.learning_rate = rate * self.scale
        order = [(number + i) % self.worker_count for i in range(self.worker_count)]
        if self.is_sync and self.row["verb"] == "exchange_rows":
            calls = [partial(self.call, index, number) for index in order]
            under_way = in_background(lambda: together(calls))
            disturb()
            found = under_way.result(PATIENCE_S)
        else:
            found = []
            for place, index in enumerate(order):
                one = in_background(partial(self.call, index, number))
                if not place:
                    disturb()
                found.append(one.result(PATIENCE_S))
                self.check(found[-1] if not self.is_sync else None)
        for index in order:
            self.rows.put(*self.batch(index, number))
        if self.is_sync:
            found += [self.fetched(table, number) for table in self.tables]
            for each in found:
                self.check(each, number)
        else:
            for table in self.tables:
                self.fetched(table, number)
        self.check(self.reader.get_rows(self.ids), number)

    def check(self, found: Any, number: int = -1) -> None:
        if found is None or number < 0:
            return
        loose = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1e-2}[self.row["codec"].partition("+")[0]]
        np.testing.assert_allclose(
            found, self.rows.get(self.ids), rtol=loose, atol=loose, err_msg=f"round {number}"
        )


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: ",".join(map(str, row.values())))
def test_two_options_of_a_table_together(
    forked: ForkedCalls, tmp_path: Path, connect: Any, row: Row
) -> None:
    training = Training(row)
    names = [f"w{i}" for i in range(training.worker_count)]
    with ForkedCluster(
        forked,
        tmp_path / "data",
        shard_count=2,
        chunk_size_bytes=4096,
        durability=row["durability"],
    ) as running:
        clients = [connect(running.target, name) for name in (*names, "reader")]
        training.open(clients[:-1], clients[-1])
        for number in range(ROUNDS):

            def kill(number: int = number) -> None:
                if number == 1:
                    running.shards[0].kill()
                    running.start(0)

            training.round(number, kill)
        clients[0].save_checkpoint(tmp_path / "saved", tables=["rows"])
        for client in clients:
            client.close()
    with LocalCluster(3) as other:
        clients = [connect(other, name) for name in (*names, "reader")]
        clients[0].restore_checkpoint(tmp_path / "saved")
        training.open(clients[:-1], clients[-1])
        for number in range(ROUNDS, ROUNDS + ROUNDS_AFTER):
            training.round(number)
        for client in clients:
            client.close()


@pytest.mark.parametrize(("pair", "first", "second"), REFUSED, ids=str)
def test_options_of_a_table_that_exclude_each_other(
    cluster: Any, connect: Any, pair: Row, first: str, second: str
) -> None:
    client = connect(cluster(1), "w0")
    row = {name: values[0] for name, values in OPTIONS.items()} | pair
    with pytest.raises(shardwell.ArgumentError) as caught:
        client.table("rows", **spec_of(row))
    assert first in str(caught.value)
    assert second in str(caught.value)
    assert not client.status()[0].tables


@pytest.mark.parametrize(("option", "word"), OF_PARAMETERS, ids=str)
def test_options_of_parameters(cluster: Any, connect: Any, option: Any, word: str) -> None:
    client = connect(cluster(1), "w0")
    row = {name: values[0] for name, values in OPTIONS.items()}
    with pytest.raises(shardwell.ArgumentError, match=rf"table.*{word}|{word}.*table"):
        client.table("rows", **(spec_of(row) | option))
    assert not client.status()[0].tables
