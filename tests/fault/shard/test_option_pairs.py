"""Goal: each two options of a parameter, or of a table, that may be together are as each of them
says, or refused.

Method: rows of a covering array (harness/data/covering.py), each a training by real processes: a
step, a step in which a shard is killed, steps after it, and a checkpoint that goes on in another
cluster. The weights are held against an oracle in NumPy after each round (harness/oracles/crew.py),
the rows against a dict (harness/oracles/rows.py). Which values may not be together is a list here,
and each of them is refused before anything is made, by a message that names both.
"""

from __future__ import annotations

import abc
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.covering import Row, covering
from harness.oracles.codec import bounds
from harness.oracles.crew import CrewWeights, CrewWorker, Given, Part, cut, cuts_of
from harness.oracles.parameter import integer_gradient
from harness.oracles.rows import ModelRows
from harness.polling import PATIENCE_S
from harness.programs.forked_cluster import ForkedCluster
from harness.programs.forkserver import ForkedCalls
from harness.threads import in_background, together
from shardwell import Elastic, GroupedRate, TensorGroup
from shardwell.transport import arena
from shardwell_server import LocalCluster

SIZE, CHUNK_BYTES = 9000, 4096
TENSORS = {"a": (30, 100), "b": (2500,), "c": (3500,)}
CREWS = {
    "one": {"worker_count": 1},
    "two": {"worker_count": 2},
    "three": {"worker_count": 3},
    "elastic": {"members": Elastic(member_return_s=60, member_lease_s=60)},
    "elastic of one": {
        "members": Elastic(max_count=1, member_return_s=60, member_lease_s=60),
    },
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
    "rmsprop": partial(shardwell.RMSProp, 0.0625, epsilon=1e-2, momentum=0.5),
    "adam": partial(shardwell.Adam, 0.0625, epsilon=1e-2),
    "adamw": partial(shardwell.AdamW, 0.0625, epsilon=1e-2, weight_decay=0.25),
    "average": shardwell.Average,
}
GROUPS: dict[str, list[TensorGroup]] = {
    "frozen": [TensorGroup("b", frozen=True)],
    "groups": [
        TensorGroup("a", learning_rate_factor=0.5, rate_group=1),
        TensorGroup("c", weight_decay=0.5, rate_group=2),
    ],
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "mode": ("sync", "async"),
    "crew": ("two", "one", "three", "elastic", "elastic of one", "elastic by two"),
    "min_contributors": (0, 1, 2),
    "grace_s": (0.0, 0.1),
    "late": ("drop", "carry"),
    "clip_value": (0.0, 0.375),
    "clip_norm": (0.0, 40.0),
    "codec": ("fp32", "fp16", "bf16", "int8", "fp32+lz4", "fp16+lz4", "bf16+lz4"),
    "rule": ("sgd", "momentum", "adagrad", "rmsprop", "adam", "adamw", "average"),
    "tensors": ("vector", "tensors", "frozen", "groups"),
    "learning_rate": ("of the rule", "of each step"),
    "samples": ("equal", "weighted", "sometimes none"),
    "allow_non_finite": (False, True),
    "verb": ("exchange", "put_gradient", "begin_exchange", "exchange_async"),
    "payloads": ("inline", "shared"),
    "durability": ("process", "step", "0.05"),
}
REFUSED: list[tuple[Row, str, str]] = [
    ({"mode": "async", "crew": "elastic"}, "mode", "members"),
    ({"mode": "async", "crew": "elastic of one"}, "mode", "members"),
    ({"mode": "async", "crew": "elastic by two"}, "mode", "members"),
    ({"mode": "async", "min_contributors": 1}, "mode", "min_contributors"),
    ({"mode": "async", "min_contributors": 2}, "mode", "min_contributors"),
    ({"mode": "async", "grace_s": 0.1}, "grace_s", "min_contributors"),
    ({"min_contributors": 0, "grace_s": 0.1}, "grace_s", "min_contributors"),
    ({"min_contributors": 2, "crew": "one"}, "min_contributors", "worker_count"),
    ({"min_contributors": 2, "crew": "elastic of one"}, "min_contributors", "max_count"),
    ({"rule": "average", "tensors": "frozen"}, "Average", "groups"),
    ({"rule": "average", "tensors": "groups"}, "Average", "groups"),
    ({"codec": "int8", "allow_non_finite": True}, "int8", "allow_non_finite"),
    ({"rule": "average", "learning_rate": "of each step"}, "Average", "learning rate"),
]
ROUNDS = 4
"""Before the checkpoint; a shard is killed in the second one."""
ROUNDS_AFTER = 2


def allowed_of(refused: list[tuple[Row, str, str]]) -> Callable[[Row], bool]:
    return lambda row: not any(pair.items() <= row.items() for pair, *_ in refused)


PAIRS = covering(OPTIONS, allowed_of(REFUSED))
SHARES = 40
"""Parts of the rows of three options each, which are several hundred."""


@functools.cache
def triples() -> list[Row]:
    return covering(OPTIONS, allowed_of(REFUSED), count=3)


def first_of(options: dict[str, tuple[Any, ...]]) -> Row:
    return {name: values[0] for name, values in options.items()}


@pytest.fixture
def forked() -> Iterator[ForkedCalls]:
    with ForkedCalls() as started:
        yield started


def spec_of(row: Row) -> dict[str, Any]:
    """Arguments of `Client.parameter`."""
    clips = {name: row[name] for name in ("clip_value", "clip_norm")}
    names = ("mode", "min_contributors", "grace_s", "late", "codec", "allow_non_finite")
    given = {name: row[name] for name in names}
    given |= CREWS[row["crew"]] | {"optimizer": RULES[row["rule"]](**clips)}
    if row["tensors"] == "vector":
        return given | {"size": SIZE}
    return given | {"tensors": TENSORS, "groups": GROUPS.get(row["tensors"], [])}


class Training(abc.ABC):
    """One row's: workers on a cluster, and the oracle beside them."""

    handles: list[Any]
    is_at_once: bool
    """Whether workers of a synchronous crew give their gradients at the same time."""
    is_put = False

    def __init__(self, row: Row, options: dict[str, Any]) -> None:
        self.row, self.options = row, options
        self.is_sync = row["mode"] == "sync"
        self.worker_count = WORKER_COUNTS.get(row["crew"], 2)
        self.members = options.get("members")
        self.reference_count = 0 if self.members is None else self.members.reference_count

    @abc.abstractmethod
    def open(self, clients: list[shardwell.Client], cluster: ForkedCluster | LocalCluster) -> None:
        """Opens it, at first, or after a restore; the last client is a reader's."""

    @abc.abstractmethod
    def call(self, index: int, number: int) -> Any:
        """Gives a worker's gradient; blocks until others have given theirs, unless it is put."""

    @abc.abstractmethod
    def follow(self, order: list[int], number: int, found: list[Any]) -> None:
        """Has the oracle make the same round, and compares."""

    def round(self, number: int, disturb: Callable[[], None] = lambda: None) -> None:
        order = [(number + i) % self.worker_count for i in range(self.worker_count)]
        calls = [partial(self.call, index, number) for index in order]
        if self.is_sync and self.is_at_once:
            under_way = in_background(lambda: together(calls))
            disturb()
            found = under_way.result(PATIENCE_S)
        else:
            found = []
            for place, call in enumerate(calls):
                one = in_background(call)
                if self.is_put:
                    one.result(PATIENCE_S)  # what disturbs comes between two gradients
                if not place:
                    disturb()
                found.append(one.result(PATIENCE_S))
        self.follow(order, number, found)


class ParameterTraining(Training):
    """Of a parameter."""

    def __init__(self, row: Row) -> None:
        super().__init__(row, spec_of(row))
        self.is_at_once = row["verb"] != "put_gradient"
        self.is_put = self.is_sync and not self.is_at_once
        self.handles = []
        self.first_round = 0
        self.off = np.zeros(SIZE)
        rule = self.options["optimizer"]
        clips_mean = self.is_sync and self.worker_count > 1
        parts = [Part(slice(0, SIZE))]
        if row["tensors"] == "frozen":
            parts = [Part(slice(0, 3000)), Part(slice(3000, 5500), is_frozen=True)]
            parts.append(Part(slice(5500, SIZE)))
        elif row["tensors"] == "groups":
            decay = 0.5 if hasattr(rule, "weight_decay") else None
            parts = [Part(slice(0, 3000), 0.5, 1), Part(slice(3000, 5500))]
            parts.append(Part(slice(5500, SIZE), 1.0, 2, decay))
        item = 2 if row["codec"].startswith(("fp16", "bf16")) else 4
        chunk, block = CHUNK_BYTES // item, 256
        if row["codec"] == "int8":
            chunk = block = 4096
        chunks = cuts_of(SIZE, 2, chunk, block) | cuts_of(SIZE, 3, chunk, block)
        parts = cut(parts, chunks)
        self.first = np.linspace(-1, 1, SIZE).astype(np.float32)
        if row["rule"] == "average":
            self.first[:] = 0
        self.held = self.before = self.first
        self.weights = CrewWeights(
            self.first,
            rule,
            parts,
            codec=row["codec"],
            clips_mean=clips_mean,
            reference_count=self.reference_count,
            is_sync=self.is_sync,
        )
        clip = 0.0 if clips_mean else rule.clip_norm
        self.workers = [
            CrewWorker(SIZE, row["codec"], carries=row["late"] == "carry", clip=clip, parts=parts)
            for _ in range(self.worker_count)
        ]
        self.is_rounded_here = bool(clip) and row["codec"].partition("+")[0] != "fp32"
        """Whether gradients are rounded that a worker has scaled: the oracle may round another
        way where its factor differs in the last bit."""

    def open(self, clients: list[shardwell.Client], cluster: ForkedCluster | LocalCluster) -> None:
        self.cluster = cluster
        before = self.handles
        self.handles = [each.parameter("net", **self.options) for each in clients[:-1]]
        for net, old in zip(self.handles, before, strict=False):
            net.load_residual(old.residual)
        for worker in self.workers if before else ():
            worker.carried[:] = 0  # which no other process of the worker has
        for net in self.handles:
            if self.row["rule"] != "average" and not before:
                net.init(self.shaped(self.first))
        if before and self.row["rule"] == "average":  # of which nothing is kept
            self.first_round = ROUNDS
            self.weights.forget()
        if self.members is not None:
            # Who is not first may be late for the first step.
            for index, net in enumerate(self.handles):
                net.join(waits=not index or self.members.min_count > 1)

    def stored(self) -> Any:
        if isinstance(self.cluster, ForkedCluster):
            return self.cluster.stored("net")
        made = [server.shard.parameters.all()[0] for server in self.cluster.servers]
        return np.concatenate([each.storage.weights for each in made])

    def shaped(self, values: Any) -> Any:
        if self.row["tensors"] == "vector":
            return values
        found, start = {}, 0
        for name, shape in TENSORS.items():
            found[name] = values[start : start + int(np.prod(shape))].reshape(shape)
            start += int(np.prod(shape))
        return found

    def flat(self, values: Any) -> Any:
        if isinstance(values, dict):
            return np.concatenate([each.reshape(-1) for each in values.values()])
        return values

    def rate(self, number: int) -> Any:
        if self.row["learning_rate"] == "of the rule":
            return None
        rate = (0.125, 0.25, 0.0625)[number % 3]
        if self.row["tensors"] == "groups":
            return GroupedRate(rate, [(1.0, 2.0)[number % 2], 0.5])
        return rate

    def gradient(self, index: int, number: int) -> tuple[Any, int]:
        """A worker's gradient of a round, or None, and its samples."""
        count = index + 1 if self.row["samples"] == "weighted" else 1
        if self.row["samples"] == "sometimes none":
            if number % 3 == 2 or (number % 3 == 1 and index == number % self.worker_count):
                return None, 0
            count = 0 if number % 3 == 0 and index == 1 and self.is_sync else 2
        return integer_gradient(index, number, SIZE) / np.float32(4), count

    def call(self, index: int, number: int) -> None:
        net, verb, rate = self.handles[index], self.row["verb"], self.rate(number)
        values, count = self.gradient(index, number)
        options = (
            {"learning_rate": rate}
            if values is None
            else {"learning_rate": rate, "sample_count": count}
        )
        if values is None:
            if verb == "put_gradient" and self.is_sync:
                net.abandon_step()
            else:
                net.exchange(None, **options)
            return
        given = self.shaped(values)
        if verb == "begin_exchange":
            flat = values.copy()
            begun = net.begin_exchange(self.shaped(flat), **options)
            begun.ready(0, 4000)
            begun.ready(4000, SIZE)
            begun.finish()
        elif verb == "exchange_async":
            net.exchange_async(given, **options).result(PATIENCE_S)
        else:
            getattr(net, verb)(given, **options)

    def follow(self, order: list[int], number: int, found: list[Any]) -> None:
        given = []
        rate = self.rate(number)
        for index in order:
            values, count = self.gradient(index, number)
            net, worker = self.handles[index], self.workers[index]
            counted = np.ones(SIZE, bool)
            if self.is_sync or values is not None:
                assert net.outcome is not None
                assert not net.outcome.superseded
                for late in net.outcome.late:
                    counted[late.offset : late.stop] = False
            if self.is_sync:
                assert net.outcome.step == number - self.first_round, f"worker {index}"
                assert "members" in self.options or self.row["min_contributors"] or counted.all()
            if values is None:
                if self.is_sync:
                    given.append(Given(np.zeros(SIZE, np.float32), 0, counted))
                continue
            if count == 0:
                given.append(Given(np.zeros(SIZE, np.float32), 0, counted))
                continue
            given.append(Given(worker.sent(values), count, counted))
            worker.settle(counted)
            if not self.is_sync:
                self.weights.step(given[-1:], rate)
        if self.is_sync:
            has_rate = any(
                self.gradient(i, number)[0] is not None or self.row["verb"] != "put_gradient"
                for i in order
            )
            self.weights.step(given, rate if has_rate else None)
        self.compare(number)

    def compare(self, number: int) -> None:
        before = self.held
        minimum = {"min_version": number + 1 - self.first_round} if self.is_sync else {}
        found = [self.flat(net.get_weights(**minimum)) for net in self.handles]
        stored = self.stored()
        wanted = self.weights.weights
        loose = {"average": 0.05}.get(self.row["rule"], 2e-3) if self.is_rounded_here else 2e-5
        if self.row["codec"] == "int8" and self.row["rule"] == "average":
            loose += 0.03
        np.testing.assert_allclose(
            stored, wanted, rtol=2e-5, atol=loose, err_msg=f"round {number} of {self.row}"
        )
        for each in found:
            np.testing.assert_array_equal(each, found[0])
        codec = self.row["codec"].partition("+")[0]
        if codec != "int8":
            self.off = bounds(codec, stored.astype(np.float64))
        elif self.row["rule"] != "average":  # half a step of the change
            has_changed = stored != self.before
            self.off[has_changed] = np.abs(stored - before).max() / (250 if self.is_sync else 100)
        assert (np.abs(found[0] - stored) <= self.off + 1e-7).all()
        self.held, self.before = found[0], stored


def train(training: Training, forked: ForkedCalls, directory: Path, connect: Any) -> None:
    """Trains, with a kill and a restore, and compares."""
    names = [*(f"w{index}" for index in range(training.worker_count)), "reader"]
    with ForkedCluster(
        forked,
        directory / "data",
        shard_count=2,
        chunk_size_bytes=CHUNK_BYTES,
        durability=training.row["durability"],
    ) as running:
        clients = [connect(running.target, name) for name in names]
        training.open(clients, running)
        for number in range(ROUNDS):

            def kill(number: int = number) -> None:
                if number == 1:
                    running.shards[0].kill()
                    running.start(0)

            training.round(number, kill)
        clients[0].save_checkpoint(directory / "saved")
        for client in clients:
            client.close()
    with LocalCluster(3, chunk_size_bytes=CHUNK_BYTES) as other:
        clients = [connect(other, name) for name in names]
        clients[0].restore_checkpoint(directory / "saved")
        training.open(clients, other)
        for number in range(ROUNDS, ROUNDS + ROUNDS_AFTER):
            training.round(number)
        for client in clients:
            client.close()


@pytest.fixture
def trained(
    forked: ForkedCalls, tmp_path: Path, connect: Any, monkeypatch: Any
) -> Callable[[Training], None]:
    def run(training: Training) -> None:
        shared_from = 1 if training.row.get("payloads") == "shared" else 1 << 30
        monkeypatch.setattr(arena, "SHARED_BYTES_MIN", shared_from)
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        try:
            train(training, forked, directory, connect)
        except BaseException as error:
            error.add_note(f"options: {training.row}")
            raise
        shutil.rmtree(directory)

    return run


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: ",".join(map(str, row.values())))
def test_two_options_together(trained: Callable[[Training], None], row: Row) -> None:
    trained(ParameterTraining(row))


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", range(SHARES))
def test_three_options_together(trained: Callable[[Training], None], share: int) -> None:
    for row in triples()[share::SHARES]:
        trained(ParameterTraining(row))


@pytest.mark.parametrize(("pair", "first", "second"), REFUSED, ids=str)
def test_options_that_exclude_each_other(
    cluster: Any, connect: Any, pair: Row, first: str, second: str
) -> None:
    """Before anything is made; a rate that comes with a step, before anything is sent."""
    client = connect(cluster(1), "w0")
    row = first_of(OPTIONS) | pair
    rate = 0.5 if row["learning_rate"] == "of each step" else None

    def give() -> None:
        client.parameter("net", **spec_of(row)).exchange(np.ones(SIZE), learning_rate=rate)

    with pytest.raises(shardwell.ArgumentError) as caught:
        give()
    assert first in str(caught.value)
    assert second in str(caught.value)
    made = client.status()[0].parameters
    assert not made or (rate and not made[0].version_max)


# Each two options of a table that may be together are as each of them says, or refused.


DIM, ID_COUNT, BATCH = 6, 240, 60
TABLE_RULES = {
    **{name: RULES[name] for name in ("sgd", "momentum", "adagrad")},
    "row-wise adagrad": partial(shardwell.RowWiseAdagrad, 0.125, epsilon=1e-3, weight_decay=0.25),
    **{name: RULES[name] for name in ("adam", "adamw")},
    "ftrl": partial(shardwell.FTRL, 0.25, l1=0.0625, l2=0.125),
}
INITIALIZERS = {
    "zeros": shardwell.Zeros(),
    "uniform": shardwell.Uniform(seed=3),
    "normal": shardwell.Normal(std=0.5, seed=2**63),
}
TABLE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mode": ("sync", "async"),
    "crew": ("two", "one", "three", "elastic of one", "elastic by two"),
    "clip_value": (0.0, 0.375),
    "codec": ("fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4"),
    "rule": tuple(TABLE_RULES),
    "initializer": tuple(INITIALIZERS),
    "row_count": (ID_COUNT, None),
    "cache_row_count": (0, 100),
    "learning_rate": ("of the rule", "set"),
    "samples": ("equal", "weighted", "sometimes none"),
    "allow_non_finite": (False, True),
    "verb": ("exchange_rows", "put_row_gradients", "prefetch_rows"),
    "durability": ("process", "step", "0.05"),
}
TABLE_REFUSED: list[tuple[Row, str, str]] = [
    ({"mode": "async", "crew": "elastic of one"}, "mode", "members"),
    ({"mode": "async", "crew": "elastic by two"}, "mode", "members"),
]
OF_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"codec": "int8"}, "int8"),
    ({"optimizer": shardwell.SGD(0.1, clip_norm=1.0)}, "clip_norm"),
    ({"optimizer": shardwell.Average()}, "Average"),
    ({"optimizer": shardwell.RMSProp(0.1)}, "RMSProp"),
]
TABLE_PAIRS = covering(TABLE_OPTIONS, allowed_of(TABLE_REFUSED))


def table_spec_of(row: Row) -> dict[str, Any]:
    """Arguments of `Client.table`."""
    names = ("mode", "codec", "row_count", "cache_row_count", "allow_non_finite")
    return {name: row[name] for name in names} | {
        "dim": DIM,
        "optimizer": TABLE_RULES[row["rule"]](clip_value=row["clip_value"]),
        "initializer": INITIALIZERS[row["initializer"]],
        **CREWS[row["crew"]],
    }


class TableTraining(Training):
    """Of a table: after each round a client that only reads fetches all rows, too."""

    def __init__(self, row: Row) -> None:
        super().__init__(row, table_spec_of(row))
        self.is_at_once = row["verb"] == "exchange_rows"
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
        if self.reference_count:
            self.rows.learning_rate *= self.worker_count / self.reference_count
        self.scale = self.rows.learning_rate / rule.learning_rate

    def open(self, clients: list[shardwell.Client], cluster: ForkedCluster | LocalCluster) -> None:
        self.handles = [client.table("rows", **self.options) for client in clients[:-1]]
        self.reader = clients[-1].table("rows")
        for table in self.handles if self.members is not None else ():
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
        table, verb = self.handles[index], self.row["verb"]
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
            self.handles[0].set_learning_rate(rate)
            self.rows.learning_rate = rate * self.scale
        super().round(number, disturb)

    def follow(self, order: list[int], number: int, found: list[Any]) -> None:
        for index in order:
            self.rows.put(*self.batch(index, number))
        fetched = [self.fetched(table, number) for table in self.handles]
        answers = [*found, *fetched] if self.is_sync else []
        for each in (*answers, self.reader.get_rows(self.ids)):
            if each is not None:
                self.check(each, number)

    def check(self, found: Any, number: int) -> None:
        loose = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1e-2}[self.row["codec"].partition("+")[0]]
        np.testing.assert_allclose(
            found, self.rows.get(self.ids), rtol=loose, atol=loose, err_msg=f"round {number}"
        )


@pytest.mark.parametrize("row", TABLE_PAIRS, ids=lambda row: ",".join(map(str, row.values())))
def test_two_options_of_a_table_together(trained: Callable[[Training], None], row: Row) -> None:
    trained(TableTraining(row))


@pytest.mark.parametrize(("pair", "first", "second"), TABLE_REFUSED, ids=str)
def test_options_of_a_table_that_exclude_each_other(
    cluster: Any, connect: Any, pair: Row, first: str, second: str
) -> None:
    client = connect(cluster(1), "w0")
    row = first_of(TABLE_OPTIONS) | pair
    with pytest.raises(shardwell.ArgumentError) as caught:
        client.table("rows", **table_spec_of(row))
    assert first in str(caught.value)
    assert second in str(caught.value)
    assert not client.status()[0].tables


@pytest.mark.parametrize(("option", "word"), OF_PARAMETERS, ids=str)
def test_options_of_parameters(cluster: Any, connect: Any, option: Any, word: str) -> None:
    client = connect(cluster(1), "w0")
    with pytest.raises(shardwell.ArgumentError, match=rf"table.*{word}|{word}.*table"):
        client.table("rows", **(table_spec_of(first_of(TABLE_OPTIONS)) | option))
    assert not client.status()[0].tables
