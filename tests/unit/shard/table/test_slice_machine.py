"""Goal: any order of calls, kills and restarts leaves a table on a shard where plain Python says.

Method: a hypothesis state machine drives a table of a Shard, in memory or on files, through
messages made by protobuf and NumPy; a kill is an image of the files after some write of a call
(harness/stories/images.py), with which it goes on. Oracle: rows in a dict, in float64
(harness/oracles/table.py); placement and initial values are harness/wire_client/table.py's own.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import shardwell
from harness.data.sessions import contributor, enter
from harness.oracles.table import ModelTable, adam, sgd
from harness.stories.crash import SameMachine
from harness.stories.images import Image, image_of, in_memory, restore
from harness.wire_client import crc as wire_crc
from harness.wire_client.row_messages import answered, asking, part
from harness.wire_client.table import owner, uniform
from shardwell.errors import SeatsTakenError, StepOrderError, WorkersMissingError
from shardwell.specs.table import TableSpec
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.shard import registry
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.shard import Shard
from shardwell_server.store.memory.store import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

WORKERS = ["w0", "w1", "w2"]
DIM = 2
SHARD_COUNT = 2
CONFIG = ShardConfig(shard_index=1, shard_count=SHARD_COUNT, limits=Limits(table_row_count_max=40))
SEED = 5
BATCH_ROW_COUNT = 5

NUMBERED = [i for i in range(24) if owner(i, 24, SHARD_COUNT) == 1]
KEYS = [
    key
    for key in [*range(12), -1, -7, 2**63 - 1, -(2**63), *(k << 40 for k in range(1, 12))]
    if owner(key, 0, SHARD_COUNT) == 1
]
PATIENCE = RequestDeadline(0.0)


class TableMachine(RuleBasedStateMachine):
    """One table, its model, and all parts that were sent."""

    worker_count = 0
    on_files = False
    kills = st.none() | st.floats(0, 1, exclude_max=True)

    def __init__(self) -> None:
        super().__init__()
        self.open = contextlib.ExitStack()
        self.images: list[Image] | None = None
        # So that steps close in several batches, and a large table's files are small.
        self.open.enter_context(
            mock.patch.object(registry, "rows_per_message_max", return_value=BATCH_ROW_COUNT)
        )
        if self.on_files:
            path = self.open.enter_context(in_memory(Path(tempfile.gettempdir())))
            self.path = Path(tempfile.mkdtemp(dir=path))
            self.open.callback(shutil.rmtree, self.path)

    @initialize(keyed=st.booleans(), optimizer=st.sampled_from("sa"))
    def begin(self, keyed: bool, optimizer: str) -> None:
        rate = 0.5
        self.ids = KEYS if keyed else NUMBERED
        worker_count = self.worker_count
        self.spec = TableSpec(
            name="t",
            row_count=None if keyed else 24,
            dim=DIM,
            optimizer=shardwell.SGD(learning_rate=rate)
            if optimizer == "s"
            else shardwell.Adam(learning_rate=rate),
            initializer=shardwell.Uniform(low=-2, high=1, seed=SEED),
            worker_count=worker_count,
            mode="sync" if worker_count else "async",
            codec="fp32",
        )
        self.model = ModelTable(
            lambda row_id: uniform(-2, 1, SEED, row_id % 2**64, DIM),
            sgd if optimizer == "s" else adam,
            worker_count,
            rate,
        )
        self.samples: dict[str, int] = {}
        self.sent: list[tuple[str, int, int, Any]] = []
        self.start()
        self.call(self.make, None)

    def start(self) -> None:
        """A new process: nothing is left of the old one but its files."""
        self.shard = Shard(
            CONFIG,
            MmapStore(self.path, boot=SameMachine(self.path), reached=self.reached)
            if self.on_files
            else MemoryStore(),
        )

    def reached(self, point: str) -> None:
        if self.images is not None:
            self.images.append(image_of(self.path))

    def make(self) -> None:
        self.table, _ = self.shard.tables.open(self.spec)

    def call(self, make: Callable[[], Any], kill: float | None) -> Any:
        """Makes a call; killed at one of its writes, the shard comes back and it is sent again."""
        if kill is None or not self.on_files:
            return make()
        self.images = []
        make()
        images, self.images = self.images, None
        if images:
            restore(images[int(kill * len(images))], self.path)
            self.come_back()
            make()
        return True

    @precondition(lambda self: self.on_files)
    @rule()
    def come_back(self) -> None:
        """Killed while nothing is under way."""
        self.start()
        self.table = self.shard.tables.get("t")

    def gradients(self, data: st.DataObject) -> dict[int, np.ndarray]:
        ids = data.draw(st.lists(st.sampled_from(self.ids), unique=True, max_size=BATCH_ROW_COUNT))
        values = st.lists(st.integers(-4, 4), min_size=DIM, max_size=DIM)
        return {row_id: np.array(data.draw(values), np.float64) for row_id in sorted(ids)}

    @rule(
        worker=st.sampled_from(WORKERS),
        ends=st.booleans(),
        samples=st.integers(0, 3),
        data=st.data(),
        kill=kills,
    )
    def send_part(
        self, worker: str, ends: bool, samples: int, data: st.DataObject, kill: float | None
    ) -> None:
        self.send(worker, ends, samples, data, kill)

    def send(
        self, worker: str, ends: bool, samples: int, data: st.DataObject, kill: float | None
    ) -> None:
        """The next part that is due, or one that has to wait, or of a worker too many."""
        step, count = self.model.next_part(worker)
        if count:
            samples = self.samples[worker]
        gradients = self.gradients(data)
        message = part(step, count, gradients, ends=ends, samples=samples)
        if self.model.is_full(worker):
            with pytest.raises(SeatsTakenError):
                self.give(worker, message)
        elif self.model.waits(worker):
            with pytest.raises(WorkersMissingError, match="waited 0 s") as caught:
                self.give(worker, message)
            seated = set(self.model.positions)
            if len(seated) == self.model.worker_count:
                assert set(caught.value.missing_worker_ids) == seated - self.model.ended
        else:
            assert self.call(lambda: self.give(worker, message), kill)
            self.model.take(worker, gradients, samples=samples, ends=ends, first=count == 0)
            self.samples[worker] = samples
            self.sent.append((worker, step, count, message))

    @rule(samples=st.integers(0, 2), data=st.data(), kill=kills)
    def step(self, samples: int, data: st.DataObject, kill: float | None) -> None:
        """Everybody who has a seat, or may have one, sends something and ends its step."""
        for worker in WORKERS:
            if not self.model.is_full(worker) and not self.model.waits(worker):
                is_last = worker == WORKERS[max(self.worker_count, 1) - 1]
                self.send(worker, True, samples, data, kill if is_last else None)

    def give(self, worker: str, message: Any) -> bool:
        wire_crc.seal(message, wire_crc.ROW_GRADIENTS, "t", worker)
        payload = np.frombuffer(message.payload, np.uint8)
        enter(self.table, worker)
        return self.table.contribute(contributor(worker), message.gradient, payload, PATIENCE)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A part that was counted counts no more."""
        if self.sent:
            worker, _, _, message = data.draw(st.sampled_from(self.sent))
            assert not self.give(worker, message)

    @rule(
        worker=st.sampled_from(WORKERS),
        steps=st.integers(0, 2),
        parts=st.integers(0, 2),
        ends=st.booleans(),
    )
    def skip(self, worker: str, steps: int, parts: int, ends: bool) -> None:
        """Parts and steps that no worker can send yet."""
        if (steps, parts) == (0, 0) or self.model.is_full(worker):
            return
        step, count = self.model.next_part(worker)
        index = parts if steps else count + parts
        with pytest.raises(StepOrderError):
            self.give(worker, part(step + steps, index, {}, ends=ends))
        self.model.positions.setdefault(worker, (step, 0))  # it has a seat from now on

    @rule(worker=st.sampled_from(WORKERS), back=st.integers(0, 1), kill=kills)
    def abandon(self, worker: str, back: int, kill: float | None) -> None:
        step, _ = self.model.next_part(worker)
        if self.model.is_full(worker) or step < back:
            return
        message = part(step - back, 7, {}, samples=9, abandons=True)
        if back:
            if self.model.positions.get(worker, (0, 0))[0] > step - back:
                assert not self.give(worker, message)
        elif self.model.waits(worker):
            with pytest.raises(WorkersMissingError):
                self.give(worker, message)
        else:
            assert self.call(lambda: self.give(worker, message), kill)
            self.model.take(worker, {}, samples=0, ends=True, first=False)
            assert self.model.next_part(worker) == (step + 1, 0)

    @rule(back=st.integers(-1, 1), kill=kills)
    def evict(self, back: int, kill: float | None) -> None:
        older = max(self.model.version - back, 0)
        found = self.call(lambda: self.table.evict(older), kill)
        expected = self.model.evict(older)
        assert found == expected or kill is not None

    @rule(rate=st.sampled_from([0.25, 1.0]), later=st.integers(0, 2), kill=kills)
    def change_rate(self, rate: float, later: int, kill: float | None) -> None:
        if not self.model.worker_count:
            later = 0
        first = self.model.version + later
        self.call(lambda: self.table.change_learning_rate(first if later else None, rate), kill)
        kept = {step: value for step, value in self.model.rates.items() if step < first}
        self.model.rates = {**kept, first: rate}

    @rule(data=st.data(), ahead=st.integers(0, 1))
    def fetch(self, data: st.DataObject, ahead: int) -> None:
        some = st.lists(st.sampled_from(self.ids), unique=True, max_size=BATCH_ROW_COUNT)
        ids = sorted(data.draw(some))
        message = asking(ids, self.model.version + ahead)
        if ahead and self.model.worker_count:
            with pytest.raises(WorkersMissingError):
                self.ask(message)
        else:
            values, version = self.ask(message)
            assert version == self.model.version
            expected = [self.model.value(row_id) for row_id in ids]
            np.testing.assert_allclose(
                values, np.array(expected).reshape(-1, DIM), rtol=1e-4, atol=1e-4
            )

    def ask(self, message: Any) -> tuple[np.ndarray, int]:
        payload = np.frombuffer(message.payload, np.uint8)
        ids = np.frombuffer(message.payload, "<i8").tolist()
        return answered(self.table.rows_message(message.fetch, payload, PATIENCE), DIM, ids)

    @invariant()
    def stands_where_the_model_does(self) -> None:
        if not hasattr(self, "table"):
            return
        status = self.table.describe(100)
        assert status.row_count == len(self.model.rows)
        assert status.version == self.model.version
        if self.model.worker_count:
            assert set(status.contributed_worker_ids) == self.model.ended
        assert status.learning_rate == self.model.rate()
        for worker in WORKERS:
            answer = (
                self.table.join("")
                if worker not in self.model.positions
                else self.table.join(worker)
            )
            if worker in self.model.positions:
                assert (answer.next_step, answer.counted_part_count) == self.model.next_part(worker)

    def teardown(self) -> None:
        with self.open:
            if hasattr(self, "table"):
                self.compare()

    def compare(self) -> None:
        found = {}
        for ids, values in self.table.scan.values(with_values=True):
            found.update(zip(ids.tolist(), values.tolist(), strict=True))
        assert found.keys() == self.model.rows.keys()
        for row_id, values in found.items():
            np.testing.assert_allclose(values, self.model.rows[row_id], rtol=1e-4, atol=1e-4)


def machine_of(worker_count: int, *, on_files: bool = False) -> type:
    fields = {"worker_count": worker_count, "on_files": on_files}
    kind = type(f"TableMachine{worker_count}{on_files}", (TableMachine,), fields)
    test: type = kind.TestCase  # type: ignore[attr-defined]
    test.settings = settings(  # type: ignore[attr-defined]
        max_examples=15 if on_files else 30, stateful_step_count=30, deadline=None
    )
    return test


TestAsynchronous = machine_of(0)
TestOneWorker = machine_of(1)
TestTwoWorkers = machine_of(2)
TestThreeWorkers = machine_of(3)
TestAsynchronousOnFiles = machine_of(0, on_files=True)
TestOneWorkerOnFiles = machine_of(1, on_files=True)
TestTwoWorkersOnFiles = machine_of(2, on_files=True)
