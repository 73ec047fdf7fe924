"""A parameter and a table in training whose outcome is known, with all verbs by name.

Tests of cut lines and lost shards are written once, and run with either.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np

import shardwell
from harness.data.table_training import EVERY, OPTIONS, KnownRows, batch, sent_row_count
from harness.oracles.parameter import integer_gradient
from harness.polling import PATIENCE_S

CHUNK_SIZE_BYTES = 1024
SIZE = 40_000
SGD = shardwell.SGD(learning_rate=0.5)
RATE = 0.25
"""Another one than it begins with."""
_SHARD_COUNT = 2
_FIRST = 9
"""What `init` sets where it is tried."""


def gradient(step: int, worker_index: int = 0) -> np.ndarray:
    """A parameter's: whole numbers."""
    return integer_gradient(worker_index, step, SIZE)


def after(step_count: int, worker_count: int = 1, *, mode: str = "sync") -> np.ndarray:
    """A parameter's weights."""
    total = sum(gradient(s, w) for s in range(step_count) for w in range(worker_count))
    return -0.5 * total / (worker_count if mode == "sync" else 1)


class Trained(abc.ABC):
    """One worker's.

    Args:
        client: The worker's.
        options: Others than usual, as for opening it.
    """

    verbs: tuple[str, ...]
    """What may be called; "put" and "exchange" end a step, "first ..." the first."""
    timed: tuple[str, ...]
    """Those among them that take a `timeout_s`."""
    handle: Any

    def __init__(self, client: shardwell.Client, **options: Any) -> None:
        self.client = client
        self.handle = self.open("model", **options)

    @abc.abstractmethod
    def open(self, name: str, **options: Any) -> Any:
        """One of that name."""

    @abc.abstractmethod
    def initialize(self) -> None:
        """Before the first step."""

    @abc.abstractmethod
    def step(self, verb: str, number: int, worker_index: int = 0, **options: Any) -> Any:
        """Makes one: "put" or "exchange"."""

    @abc.abstractmethod
    def call(self, verb: str, **options: Any) -> Any:
        """Calls by name; of a step, the first or the second one."""

    @abc.abstractmethod
    def check(self, step_count: int, worker_count: int = 1, *, mode: str = "sync") -> None:
        """All values are those of so many steps, bit for bit."""

    @abc.abstractmethod
    def check_result(self, verb: str, result: Any, step_count: int) -> None:
        """A call's result is that of so many steps."""

    @abc.abstractmethod
    def check_next(self, step_count: int, rate: float) -> None:
        """A further step does what it must, at that learning rate."""

    @abc.abstractmethod
    def counted(self, target: str) -> int:
        """Chunks, or rows, that the shards have counted."""

    @abc.abstractmethod
    def sent(self, step_count: int, worker_count: int = 1) -> int:
        """How many there are in so many steps."""

    def prepare(self, verb: str) -> None:
        """Makes what a call needs: nothing, or first values and a step."""
        if verb != "init":
            self.initialize()
            if not verb.startswith("first"):
                self.step("exchange", 0)

    def steps_after(self, verb: str) -> int:
        """Steps of which the call is the last, or after which it comes."""
        return 0 if verb == "init" else 1 + (verb in ("put", "exchange"))

    def rate_after(self, verb: str) -> float:
        """The learning rate then."""
        return RATE if verb.startswith("set_learning_rate") else 0.5


class TrainedParameter(Trained):
    """Two slices of many chunks, fp16."""

    verbs = (
        *("first exchange", "exchange", "first put", "put", "get", "get_async", "init"),
        *("set_learning_rate", "set_learning_rate now", "reopen", "open"),
    )
    timed = ("exchange", "put", "get", "init", "set_learning_rate")
    handle: shardwell.Parameter
    _is_nine = False

    def open(self, name: str, **options: Any) -> shardwell.Parameter:
        return self.client.parameter(name, size=SIZE, optimizer=SGD, **options)

    def initialize(self) -> None:
        self.handle.init(np.zeros(SIZE, np.float32))

    def step(self, verb: str, number: int, worker_index: int = 0, **options: Any) -> Any:
        make = self.handle.put_gradient if verb == "put" else self.handle.exchange
        return make(gradient(number, worker_index), **options)

    def call(self, verb: str, **options: Any) -> Any:
        if verb.split()[-1] in ("put", "exchange"):
            return self.step(verb.split()[-1], 0 if verb.startswith("first") else 1, **options)
        calls: dict[str, Callable[..., Any]] = {
            "get": self.handle.get_weights,
            "get_async": lambda: self.handle.get_weights_async().result(PATIENCE_S),
            "init": lambda **o: self.handle.init(np.full(SIZE, _FIRST, np.float32), **o),
            "set_learning_rate": lambda **o: self.handle.set_learning_rate(RATE, **o),
            "set_learning_rate now": lambda: self.handle.set_learning_rate(RATE, now=True),
            "reopen": self.handle.reopen,
            "open": lambda: self.open("another"),
        }
        return calls[verb](**options)

    def check(self, step_count: int, worker_count: int = 1, *, mode: str = "sync") -> None:
        weights = self.handle.get_weights(min_version=step_count if mode == "sync" else 0)
        expected = after(step_count, worker_count, mode=mode)
        np.testing.assert_array_equal(weights, expected + _FIRST * self._is_nine)

    def check_result(self, verb: str, result: Any, step_count: int) -> None:
        if verb in ("exchange", "get", "get_async"):
            np.testing.assert_array_equal(result, after(step_count))
        if verb == "open":
            result.init(np.ones(SIZE, np.float32))
            np.testing.assert_array_equal(result.get_weights(), 1)
        self._is_nine = verb == "init"

    def check_next(self, step_count: int, rate: float) -> None:
        expected = after(step_count) + _FIRST * self._is_nine - rate * gradient(step_count)
        np.testing.assert_array_equal(self.handle.exchange(gradient(step_count)), expected)

    def counted(self, target: str) -> int:
        with shardwell.connect(target, worker_id="observer") as observer:
            found = [parameter for shard in observer.status() for parameter in shard.parameters]
            return sum(each.counted_chunk_count for each in found if each.spec.name == "model")

    def sent(self, step_count: int, worker_count: int = 1) -> int:
        # From its definition: blocks of 256 are dealt to the shards, two bytes an element.
        dealt = np.array_split(range(-(-SIZE // 256)), _SHARD_COUNT)
        chunk_count = sum(-(-len(blocks) // (CHUNK_SIZE_BYTES // 2 // 256)) for blocks in dealt)
        return step_count * worker_count * chunk_count


class TrainedTable(Trained):
    """Two messages a shard and step; see harness/data/table_training.py."""

    verbs = (
        *("first put", "put", "exchange", "get", "prefetch", "row_ids", "evict"),
        *("set_learning_rate", "set_learning_rate now", "status", "reopen", "open"),
    )
    timed = ("put", "exchange", "get", "row_ids", "evict", "set_learning_rate", "status")
    handle: shardwell.Table

    def open(self, name: str, **options: Any) -> shardwell.Table:
        return self.client.table(name, **{**OPTIONS, **options})

    def initialize(self) -> None:
        pass  # a row begins when it is first used

    def step(self, verb: str, number: int, worker_index: int = 0, **options: Any) -> Any:
        if verb == "put":
            return self.handle.put_row_gradients(*batch(number, worker_index), **options)
        return self.handle.exchange_rows(*batch(number, worker_index), EVERY, **options)

    def call(self, verb: str, **options: Any) -> Any:
        if verb.split()[-1] in ("put", "exchange"):
            return self.step(verb.split()[-1], 0 if verb.startswith("first") else 1, **options)
        calls: dict[str, Callable[..., Any]] = {
            "get": lambda **o: self.handle.get_rows(EVERY, **o),
            "prefetch": lambda: (self.handle.prefetch_rows(EVERY), self.handle.get_rows(EVERY))[1],
            "row_ids": self.handle.row_ids,
            "evict": lambda **o: self.handle.evict(older_than_step=0, **o),
            "set_learning_rate": lambda **o: self.handle.set_learning_rate(RATE, **o),
            "set_learning_rate now": lambda: self.handle.set_learning_rate(RATE, now=True),
            "status": self.handle.status,
            "reopen": self.handle.reopen,
            "open": lambda: self.open("another"),
        }
        return calls[verb](**options)

    def check(self, step_count: int, worker_count: int = 1, *, mode: str = "sync") -> None:
        rows = self.handle.get_rows(EVERY, min_version=step_count)
        KnownRows(step_count, worker_count, mode=mode).check(rows)

    def check_result(self, verb: str, result: Any, step_count: int) -> None:
        if verb in ("get", "prefetch", "exchange"):
            KnownRows(step_count).check(result)
        if verb == "row_ids":
            np.testing.assert_array_equal(result, np.unique(batch(0)[0]))

    def check_next(self, step_count: int, rate: float) -> None:
        known = KnownRows(step_count)
        known.model.learning_rate = rate
        ids, gradients = batch(step_count)
        known.model.put(ids, gradients[:, :1])
        known.check(self.handle.exchange_rows(ids, gradients, EVERY))

    def counted(self, target: str) -> int:
        with shardwell.connect(target, worker_id="observer") as observer:
            return sum(each.counted_row_count for each in observer.table("model").status())

    def sent(self, step_count: int, worker_count: int = 1) -> int:
        return sent_row_count(step_count, worker_count)


KINDS: dict[str, type[Trained]] = {"parameter": TrainedParameter, "table": TrainedTable}
