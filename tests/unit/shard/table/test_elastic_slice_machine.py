"""Goal: whichever elastic members come, leave, are lost and come back, in the midst of steps too,
and wherever a shard is killed, each step of a table closes once, with the rows of its set.

Method: a hypothesis state machine drives a table of a Shard, in memory or on files, as the machine
of test_slice_machine.py does. Oracle: `Model`, in plain Python and float64, by the words of
docs/adr/0036 and table.proto.
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
from harness.data.sessions import session_of
from harness.stories.crash import SameMachine
from harness.stories.images import Image, image_of, in_memory, restore
from harness.wire_client import crc as wire_crc
from harness.wire_client.row_messages import answered, asking, part
from harness.wire_client.table import owner
from shardwell.errors import LimitError, SeatsTakenError, WorkersMissingError
from shardwell.specs.table import TableSpec
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.shard import registry
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.shard import Shard
from shardwell_server.store.memory.store import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

WORKERS = ["w0", "w1", "w2", "w3", "w4", "w5"]
workers = st.sampled_from(WORKERS)
DIM = 2
CONFIG = ShardConfig(shard_index=1, shard_count=2, limits=Limits(table_row_count_max=40))
IDS = [i for i in range(24) if owner(i, 24, 2) == 1]
BATCH_ROW_COUNT = 5
PATIENCE = RequestDeadline(0.0)
RATE = 0.5


class Member:
    """A seat and its worker's last tenure."""

    def __init__(self, tenure: int, position: tuple[int, int] = (0, 0)) -> None:
        self.tenure = tenure
        self.position = position
        self.from_step: int | None = None
        self.is_over = False


class Model:
    """The table and its members. Rows are 0 at first, and learn by plain SGD."""

    def __init__(self, elastic: shardwell.Elastic) -> None:
        self.elastic = elastic
        self.version = 0
        self.rows: dict[int, np.ndarray] = {}
        self.sums: dict[int, np.ndarray] = {}
        self.sample_total = 0
        self.seats: dict[str, Member] = {}
        """In the order of their indexes."""
        self.sets: list[set[str]] = []
        """Whose rows are in the sums of a step, or who ended it, by step."""
        self.open_set: set[str] = set()
        self.ended: set[str] = set()

    def living(self) -> list[str]:
        return [worker for worker, member in self.seats.items() if not member.is_over]

    def next_part(self, worker: str) -> tuple[int, int]:
        seat = self.seats.get(worker)
        return max((self.version, 0), (0, 0) if seat is None else seat.position)

    def awaited(self) -> list[str]:
        found = []
        for worker in self.living():
            member = self.seats[worker]
            begun = (self.version, 0) < member.position
            is_due = member.from_step is not None and member.from_step <= self.version
            if worker not in self.ended and (begun or is_due):
                found.append(worker)
        return found

    def lacking(self, but: str = "") -> int:
        coming = [worker for worker in self.awaited() if worker != but]
        return self.elastic.min_count - len(self.ended) - len(coming)

    def end_tenure(self, worker: str) -> None:
        """Counted parts of the open step stay, and end it."""
        self.seats[worker].is_over = True
        if (self.version, 0) < self.seats[worker].position < (self.version + 1, 0):
            self.end_step(worker)

    def end_step(self, worker: str) -> None:
        self.seats[worker].position = (self.version + 1, 0)
        self.ended.add(worker)
        self.open_set.add(worker)

    def spare(self) -> str | None:
        """Whose seat is given on, where all are taken."""
        for worker, member in self.seats.items():
            if member.is_over and member.position <= (self.version, 0):
                return worker
        return None

    def sit(self, worker: str, tenure: int) -> None:
        if worker in self.seats:
            if not self.seats[worker].is_over:
                self.end_tenure(worker)
            self.seats[worker] = Member(tenure, self.seats[worker].position)
        elif len(self.seats) < self.elastic.seat_count_max:
            self.seats[worker] = Member(tenure)
        else:
            spare = self.spare()
            self.seats = {
                (worker if old == spare else old): (Member(tenure) if old == spare else member)
                for old, member in self.seats.items()
            }

    def take(
        self, worker: str, gradients: dict[int, np.ndarray], samples: int, *, ends: bool
    ) -> None:
        step, count = self.next_part(worker)
        self.sample_total += samples * (count == 0)
        for row_id, gradient in gradients.items() if samples else ():
            self.rows.setdefault(row_id, np.zeros(DIM))
            self.sums[row_id] = self.sums.get(row_id, np.zeros(DIM)) + samples * gradient
        self.open_set.add(worker)
        self.seats[worker].position = (step, count + 1)
        if ends:
            self.end_step(worker)

    def settle(self) -> None:
        """Closes the open step, if it is complete."""
        if len(self.ended) < self.elastic.min_count or self.awaited():
            return
        reference = self.elastic.reference_count
        rate = RATE * len(self.ended) / reference if reference else RATE
        for row_id, total in self.sums.items():
            self.rows[row_id] = self.rows[row_id] - rate * total / (self.sample_total or 1)
        self.sums, self.sample_total = {}, 0
        self.sets.append(self.open_set)
        self.open_set, self.ended = set(), set()
        self.version += 1


class ElasticTableMachine(RuleBasedStateMachine):
    """One table, its model, and the tenures that are over."""

    on_files = False
    kills = st.none() | st.floats(0, 1, exclude_max=True)

    def __init__(self) -> None:
        super().__init__()
        self.open = contextlib.ExitStack()
        self.images: list[Image] | None = None
        self.shard: Shard | None = None
        self.tenure = 0
        self.old: list[tuple[str, int]] = []
        self.samples: dict[str, int] = {}
        self.known_from = 0
        """The first step whose set the shard has seen to its end."""
        self.open.enter_context(
            mock.patch.object(registry, "rows_per_message_max", return_value=BATCH_ROW_COUNT)
        )
        if self.on_files:
            path = self.open.enter_context(in_memory(Path(tempfile.gettempdir())))
            self.path = Path(tempfile.mkdtemp(dir=path))
            self.open.callback(shutil.rmtree, self.path)

    @initialize(
        min_count=st.integers(1, 2), max_count=st.integers(2, 3), reference_count=st.integers(0, 2)
    )
    def begin(self, min_count: int, max_count: int, reference_count: int) -> None:
        elastic = shardwell.Elastic(
            min_count=min_count,
            max_count=max_count,
            reference_count=reference_count,
            member_return_s=3000.0,
            member_lease_s=3000.0,
        )
        self.spec = TableSpec(
            name="t",
            row_count=24,
            dim=DIM,
            optimizer=shardwell.SGD(learning_rate=RATE),
            initializer=shardwell.Zeros(),
            worker_count=max_count,
            members=elastic,
            codec="fp32",
        )
        self.model = Model(elastic)
        self.start()
        self.table, _ = self.shard_now.tables.open(self.spec)

    @property
    def shard_now(self) -> Shard:
        assert self.shard is not None
        return self.shard

    def start(self) -> None:
        self.shard = Shard(
            CONFIG,
            MmapStore(self.path, boot=SameMachine(self.path), reached=self.reached)
            if self.on_files
            else MemoryStore(),
        )

    def reached(self, point: str) -> None:
        if self.images is not None:
            self.images.append(image_of(self.path))

    def call(self, make: Callable[[], Any], kill: float | None) -> Any:
        """Makes a call; killed at one of its writes, the shard comes back and it is made again."""
        if kill is None or not self.on_files:
            return make()
        self.images = []
        found = make()
        images, self.images = self.images, None
        if images:
            self.shard_now.close()
            restore(images[int(kill * len(images))], self.path)
            self.come_back()
            self.known_from = self.model.version + 2  # the call may have closed a step before
            found = make()
        return found

    @precondition(lambda self: self.on_files)
    @rule()
    def be_killed(self) -> None:
        """While nothing is under way."""
        self.shard_now.close()
        self.come_back()

    def come_back(self) -> None:
        self.start()
        self.table = self.shard_now.tables.get("t")
        self.known_from = self.model.version

    # Members.

    def ask(self, worker: str, tenure: int, from_step: int | None = None) -> Any:
        asks: Contributor[Any] = Contributor(
            worker, session_of(worker), tenure, asks=True, from_step=from_step
        )
        return self.table.join(worker, session_of(worker).number, seat_for=asks)

    @rule(worker=workers, kill=kills, is_awaited=st.booleans())
    def join(self, worker: str, kill: float | None, is_awaited: bool) -> None:
        """Takes a seat in a tenure of its own, and mostly says from when on it is awaited."""
        model = self.model
        self.tenure += 1
        tenure, before = self.tenure, model.seats.get(worker)
        if len(set(model.living()) - {worker}) >= model.elastic.max_count:
            with pytest.raises(SeatsTakenError):
                self.ask(worker, tenure)
            return
        is_full = len(model.seats) >= model.elastic.seat_count_max
        if before is None and is_full and model.spare() is None:
            with pytest.raises(LimitError):
                self.ask(worker, tenure)
            return
        if before is not None:
            self.old.append((worker, before.tenure))
        self.call(lambda: self.ask(worker, tenure), kill)
        model.sit(worker, tenure)
        model.settle()
        answer = self.ask(worker, tenure)
        assert answer.tenure == tenure
        assert answer.HasField("needed_step") == (model.lacking(worker) > 0)
        if is_awaited:
            self.await_from(worker, answer.needed_step if model.lacking(worker) > 0 else -1, kill)

    def await_from(self, worker: str, step: int, kill: float | None) -> None:
        step = self.model.version + 1 if step < 0 else step
        tenure = self.model.seats[worker].tenure
        self.call(lambda: self.ask(worker, tenure, step), kill)
        self.model.seats[worker].from_step = step
        self.model.settle()

    @rule(data=st.data(), kill=kills, ahead=st.integers(0, 2))
    def change_first_step(self, data: st.DataObject, kill: float | None, ahead: int) -> None:
        living = self.model.living()
        if living:
            worker = data.draw(st.sampled_from(living))
            self.await_from(worker, self.model.version + ahead, kill)

    @rule(data=st.data(), kill=kills)
    def end(self, data: st.DataObject, kill: float | None) -> None:
        """It leaves, or is lost: in the middle of a step, say."""
        living = self.model.living()
        if living:
            worker = data.draw(st.sampled_from(living))
            tenure = self.model.seats[worker].tenure
            self.call(lambda: self.table.end_tenure(worker, tenure), kill)
            self.old.append((worker, tenure))
            self.model.end_tenure(worker)
            self.model.settle()

    # Gradients.

    def give(self, worker: str, tenure: int, message: Any) -> str:
        wire_crc.seal(message, wire_crc.ROW_GRADIENTS, "t", worker)
        payload = np.frombuffer(message.payload, np.uint8)
        sender: Contributor[Any] = Contributor(worker, session_of(worker), tenure)
        is_new = self.table.contribute(sender, message.gradient, payload, PATIENCE)
        if sender.late:
            return "over" if sender.is_over else "late"
        return "counted" if is_new else "duplicate"

    def gradients(self, data: st.DataObject) -> dict[int, np.ndarray]:
        ids = data.draw(st.lists(st.sampled_from(IDS), unique=True, max_size=BATCH_ROW_COUNT))
        values = st.lists(st.integers(-4, 4), min_size=DIM, max_size=DIM)
        return {row_id: np.array(data.draw(values), np.float64) for row_id in sorted(ids)}

    @rule(data=st.data(), ends=st.booleans(), samples=st.integers(0, 3), kill=kills)
    def send(self, data: st.DataObject, ends: bool, samples: int, kill: float | None) -> None:
        """The next part of a member, or the end of its step."""
        living = self.model.living()
        if not living:
            return
        worker = data.draw(st.sampled_from(living))
        step, count = self.model.next_part(worker)
        samples = self.samples.get(worker, samples) if count else samples
        gradients = self.gradients(data)
        message = part(step, count, gradients, ends=ends, samples=samples)
        tenure = self.model.seats[worker].tenure
        if step > self.model.version:
            with pytest.raises(WorkersMissingError) as caught:
                self.give(worker, tenure, message)
            assert set(caught.value.missing_worker_ids) == set(self.model.awaited())
            return
        found = self.call(lambda: self.give(worker, tenure, message), kill)
        assert found == "counted" or (kill is not None and found == "duplicate")
        self.samples[worker] = samples
        self.model.take(worker, gradients, samples, ends=ends)
        self.model.settle()
        assert self.give(worker, tenure, message) == "duplicate" or ends

    @rule(data=st.data(), kill=kills)
    def abandon(self, data: st.DataObject, kill: float | None) -> None:
        """Ends a step with what is counted of it."""
        living = [
            worker
            for worker in self.model.living()
            if self.model.next_part(worker)[0] == self.model.version
        ]
        if living:
            worker = data.draw(st.sampled_from(living))
            message = part(self.model.version, 7, {}, samples=9, abandons=True)
            tenure = self.model.seats[worker].tenure
            self.call(lambda: self.give(worker, tenure, message), kill)
            self.model.end_step(worker)
            self.model.settle()

    @rule(data=st.data(), behind=st.integers(0, 1))
    def send_in_a_tenure_that_is_over(self, data: st.DataObject, behind: int) -> None:
        living = {(worker, member.tenure) for worker, member in self.model.seats.items()}
        old = [each for each in self.old if each not in living or self.model.seats[each[0]].is_over]
        if old:
            worker, tenure = data.draw(st.sampled_from(old))
            message = part(
                max(self.model.version - behind, 0), 9, {1: [8.0] * DIM} if 1 in IDS else {}
            )
            assert self.give(worker, tenure, message) == "over"

    @rule(data=st.data())
    def send_late(self, data: st.DataObject) -> None:
        """Of a step that has closed without the member."""
        late = [
            worker
            for worker in self.model.living()
            if self.model.version
            and self.model.seats[worker].position <= (self.model.version - 1, 0)
        ]
        if late:
            worker = data.draw(st.sampled_from(late))
            message = part(self.model.version - 1, 0, self.gradients(data))
            assert self.give(worker, self.model.seats[worker].tenure, message) == "late"

    # Invariants.

    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        ids = sorted(data.draw(st.lists(st.sampled_from(IDS), unique=True, max_size=4)))
        message = asking(ids, self.model.version)
        payload = np.frombuffer(message.payload, np.uint8)
        values, version = answered(
            self.table.rows_message(message.fetch, payload, PATIENCE), DIM, ids
        )
        assert version == self.model.version
        expected = [self.model.rows.get(row_id, np.zeros(DIM)) for row_id in ids]
        np.testing.assert_allclose(
            values, np.array(expected).reshape(-1, DIM), rtol=1e-4, atol=1e-4
        )

    @invariant()
    def stands_where_the_model_does(self) -> None:
        if self.shard is None:
            return
        model, status = self.model, self.table.describe(100)
        assert status.version == model.version
        assert status.row_count == len(model.rows)
        assert set(status.contributed_worker_ids) == model.ended
        assert set(self.table.contributors(model.version)) == model.open_set
        for step in range(max(self.known_from, model.version - 3), model.version):
            assert set(self.table.contributors(step)) == model.sets[step]
        for worker in model.seats:
            answer = self.table.join(worker)
            assert (answer.next_step, answer.counted_part_count) == model.next_part(worker)

    def teardown(self) -> None:
        with self.open:
            if self.shard is None:
                return
            found = {}
            for ids, values in self.table.scan.values(with_values=True):
                assert values is not None
                found.update(zip(ids.tolist(), values.tolist(), strict=True))
            assert found.keys() == self.model.rows.keys()
            for row_id, values in found.items():
                np.testing.assert_allclose(values, self.model.rows[row_id], rtol=1e-4, atol=1e-4)
            self.shard.close()


def machine_of(*, on_files: bool) -> type:
    kind = type(f"ElasticTable{on_files}", (ElasticTableMachine,), {"on_files": on_files})
    test: type = kind.TestCase  # type: ignore[attr-defined]
    test.settings = settings(  # type: ignore[attr-defined]
        max_examples=15 if on_files else 40, stateful_step_count=40, deadline=None
    )
    return test


TestInMemory = machine_of(on_files=False)
TestOnFiles = machine_of(on_files=True)
