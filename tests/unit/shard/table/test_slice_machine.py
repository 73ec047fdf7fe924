"""Goal: any order of calls, kills and restarts leaves a table on a shard where plain Python says;
whichever elastic members come, leave, are lost and come back, in the midst of steps too, each step
closes once, with the rows of its set.

Method: a hypothesis state machine drives a table of a Shard, in memory or on files, through
messages made by protobuf and NumPy; a kill is an image of the files after some write of a call
(harness/stories/images.py), with which it goes on. Oracle: rows in a dict, in float64, for a fixed
crew in harness/oracles/table.py, for elastic members here, by the words of docs/adr/0036 and
table.proto; placement and initial values are harness/wire_client/table.py's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import shardwell
from harness.data.sessions import contributor, enter, session_of
from harness.machines import KILLS, KilledMachine, case
from harness.oracles.table import ModelTable, adam, sgd
from harness.wire_client import crc as wire_crc
from harness.wire_client.row_messages import answered, asking, part
from harness.wire_client.table import owner, uniform
from shardwell.errors import LimitError, SeatsTakenError, StepOrderError, WorkersMissingError
from shardwell.specs.table import TableSpec
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.shard import registry
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.shard import Shard
from shardwell_server.store.memory import MemoryStore

ELASTIC_WORKERS = ["w0", "w1", "w2", "w3", "w4", "w5"]
WORKERS = ELASTIC_WORKERS[:3]
DIM, RATE = 2, 0.5
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


class SliceMachine(KilledMachine):
    """One table of a shard, and its model."""

    on_files = False
    ids: list[int]
    shard: Shard
    table: Any = None
    model: Any

    def __init__(self) -> None:
        super().__init__()
        # So that steps close in several batches, and a large table's files are small.
        self.open.enter_context(
            mock.patch.object(registry, "rows_per_message_max", return_value=BATCH_ROW_COUNT)
        )

    def start(self) -> None:
        self.shard = Shard(CONFIG, self.stored() if self.on_files else MemoryStore())

    def come_back(self) -> None:
        self.start()

    @precondition(lambda self: self.on_files)
    @rule()
    def be_killed(self) -> None:
        """While nothing is under way."""
        self.die()
        self.come_back()

    def gradients(self, data: st.DataObject) -> dict[int, np.ndarray]:
        ids = data.draw(st.lists(st.sampled_from(self.ids), unique=True, max_size=BATCH_ROW_COUNT))
        values = st.lists(st.integers(-4, 4), min_size=DIM, max_size=DIM)
        return {row_id: np.array(data.draw(values), np.float64) for row_id in sorted(ids)}

    def contributed(self, sender: Contributor[Any], message: Any) -> bool:
        wire_crc.seal(message, wire_crc.ROW_GRADIENTS, "t", sender.worker_id)
        payload = np.frombuffer(message.payload, np.uint8)
        found: bool = self.table.contribute(sender, message.gradient, payload, PATIENCE)
        return found

    def answer_to(self, message: Any) -> tuple[np.ndarray, int]:
        payload = np.frombuffer(message.payload, np.uint8)
        ids = np.frombuffer(message.payload, "<i8").tolist()
        return answered(self.table.rows_message(message.fetch, payload, PATIENCE), DIM, ids)

    def check_rows(self, message: Any, expected: list[np.ndarray]) -> None:
        """The answer is these rows, as of now."""
        values, version = self.answer_to(message)
        assert version == self.model.version
        of_model = np.array(expected).reshape(-1, DIM)
        np.testing.assert_allclose(values, of_model, rtol=1e-4, atol=1e-4)

    def teardown(self) -> None:
        with self.open:
            if self.table is None:
                return
            found = {}
            for ids, values in self.table.scan.values(with_values=True):
                found.update(zip(ids.tolist(), values.tolist(), strict=True))
            assert found.keys() == self.model.rows.keys()
            for row_id, values in found.items():
                np.testing.assert_allclose(values, self.model.rows[row_id], rtol=1e-4, atol=1e-4)
            self.die()


class FixedMachine(SliceMachine):
    """One table, its model, and all parts that were sent."""

    worker_count = 0

    @initialize(keyed=st.booleans(), optimizer=st.sampled_from("sa"))
    def begin(self, keyed: bool, optimizer: str) -> None:
        self.ids = KEYS if keyed else NUMBERED
        worker_count = self.worker_count
        self.spec = TableSpec(
            name="t",
            row_count=None if keyed else 24,
            dim=DIM,
            optimizer=shardwell.SGD(learning_rate=RATE)
            if optimizer == "s"
            else shardwell.Adam(learning_rate=RATE),
            initializer=shardwell.Uniform(low=-2, high=1, seed=SEED),
            worker_count=worker_count,
            mode="sync" if worker_count else "async",
            codec="fp32",
        )
        self.model = ModelTable(
            lambda row_id: uniform(-2, 1, SEED, row_id % 2**64, DIM),
            sgd if optimizer == "s" else adam,
            worker_count,
            RATE,
        )
        self.samples: dict[str, int] = {}
        self.sent: list[tuple[str, int, int, Any]] = []
        self.start()
        self.table, _ = self.shard.tables.open(self.spec)

    def come_back(self) -> None:
        super().come_back()
        self.table = self.shard.tables.get("t")

    @rule(
        worker=st.sampled_from(WORKERS),
        ends=st.booleans(),
        samples=st.integers(0, 3),
        data=st.data(),
        kill=KILLS,
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
            assert self.call(lambda: self.give(worker, message), kill) or kill is not None
            self.model.take(worker, gradients, samples=samples, ends=ends, first=count == 0)
            self.samples[worker] = samples
            self.sent.append((worker, step, count, message))

    @rule(samples=st.integers(0, 2), data=st.data(), kill=KILLS)
    def step(self, samples: int, data: st.DataObject, kill: float | None) -> None:
        """Everybody who has a seat, or may have one, sends something and ends its step."""
        for worker in WORKERS:
            if not self.model.is_full(worker) and not self.model.waits(worker):
                is_last = worker == WORKERS[max(self.worker_count, 1) - 1]
                self.send(worker, True, samples, data, kill if is_last else None)

    def give(self, worker: str, message: Any) -> bool:
        enter(self.table, worker)
        return self.contributed(contributor(worker), message)

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

    @rule(worker=st.sampled_from(WORKERS), back=st.integers(0, 1), kill=KILLS)
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
            assert self.call(lambda: self.give(worker, message), kill) or kill is not None
            self.model.take(worker, {}, samples=0, ends=True, first=False)
            assert self.model.next_part(worker) == (step + 1, 0)

    @rule(back=st.integers(-1, 1), kill=KILLS)
    def evict(self, back: int, kill: float | None) -> None:
        older = max(self.model.version - back, 0)
        found = self.call(lambda: self.table.evict(older), kill)
        expected = self.model.evict(older)
        assert found == expected or kill is not None

    @rule(rate=st.sampled_from([0.25, 1.0]), later=st.integers(0, 2), kill=KILLS)
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
                self.answer_to(message)
        else:
            self.check_rows(message, [self.model.value(row_id) for row_id in ids])

    @invariant()
    def stands_where_the_model_does(self) -> None:
        if self.table is None:
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


class ElasticMember:
    """A seat and its worker's last tenure."""

    def __init__(self, tenure: int, position: tuple[int, int] = (0, 0)) -> None:
        self.tenure = tenure
        self.position = position
        self.from_step: int | None = None
        self.is_over = False


class ElasticModel:
    """The table and its members. Rows are 0 at first, and learn by plain SGD."""

    def __init__(self, elastic: shardwell.Elastic) -> None:
        self.elastic = elastic
        self.version = 0
        self.rows: dict[int, np.ndarray] = {}
        self.sums: dict[int, np.ndarray] = {}
        self.sample_total = 0
        self.seats: dict[str, ElasticMember] = {}
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
            self.seats[worker] = ElasticMember(tenure, self.seats[worker].position)
        elif len(self.seats) < self.elastic.seat_count_max:
            self.seats[worker] = ElasticMember(tenure)
        else:
            spare = self.spare()
            self.seats = {
                (worker if old == spare else old): (
                    ElasticMember(tenure) if old == spare else member
                )
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


class ElasticMachine(SliceMachine):
    """One table, its model, and the tenures that are over."""

    ids = NUMBERED

    def __init__(self) -> None:
        super().__init__()
        self.tenure = 0
        self.old: list[tuple[str, int]] = []
        self.samples: dict[str, int] = {}
        self.was_killed = False
        self.known_from = 0
        """The first step whose set the shard has seen to its end."""

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
        self.model = ElasticModel(elastic)
        self.start()
        self.table, _ = self.shard.tables.open(self.spec)

    def die(self) -> None:
        self.shard.close()

    def come_back(self) -> None:
        super().come_back()
        self.table = self.shard.tables.get("t")
        self.was_killed = True
        self.known_from = self.model.version

    def call(self, make: Callable[[], Any], kill: float | None) -> Any:
        before = self.shard
        found = super().call(make, kill)
        if self.shard is not before:
            self.known_from = self.model.version + 2  # the call may have closed a step before
        return found

    # Members.

    def ask(self, worker: str, tenure: int, from_step: int | None = None) -> Any:
        asks: Contributor[Any] = Contributor(
            worker, session_of(worker), tenure, asks=True, from_step=from_step
        )
        return self.table.join(worker, session_of(worker).number, seat_for=asks)

    @rule(worker=st.sampled_from(ELASTIC_WORKERS), kill=KILLS, is_awaited=st.booleans())
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

    @rule(data=st.data(), kill=KILLS, ahead=st.integers(0, 2))
    def change_first_step(self, data: st.DataObject, kill: float | None, ahead: int) -> None:
        living = self.model.living()
        if living:
            worker = data.draw(st.sampled_from(living))
            self.await_from(worker, self.model.version + ahead, kill)

    @rule(data=st.data(), kill=KILLS)
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
        sender: Contributor[Any] = Contributor(worker, session_of(worker), tenure)
        is_new = self.contributed(sender, message)
        if sender.late:
            return "over" if sender.is_over else "late"
        return "counted" if is_new else "duplicate"

    @rule(data=st.data(), ends=st.booleans(), samples=st.integers(0, 3), kill=KILLS)
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

    @rule(data=st.data(), kill=KILLS)
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
            step = max(self.model.version - behind, 0)
            message = part(step, 9, {1: [8.0] * DIM} if 1 in NUMBERED else {})
            # A shard that was killed knows which steps were ended, and not with which parts.
            seat = self.model.seats.get(worker)
            has_ended = self.was_killed and seat is not None and (step, 9) < seat.position
            found = self.give(worker, tenure, message)
            assert found == "over" or (has_ended and found == "duplicate")

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
        ids = sorted(data.draw(st.lists(st.sampled_from(NUMBERED), unique=True, max_size=4)))
        expected = [self.model.rows.get(row_id, np.zeros(DIM)) for row_id in ids]
        self.check_rows(asking(ids, self.model.version), expected)

    @invariant()
    def stands_where_the_model_does(self) -> None:
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


def of_crew(worker_count: int, *, on_files: bool = False) -> Any:
    count = 15 if on_files else 30
    fields = {"worker_count": worker_count, "on_files": on_files}
    return case(FixedMachine, max_examples=count, step_count=30, **fields)


TestAsynchronous = of_crew(0)
TestOneWorker = of_crew(1)
TestTwoWorkers = of_crew(2)
TestThreeWorkers = of_crew(3)
TestAsynchronousOnFiles = of_crew(0, on_files=True)
TestOneWorkerOnFiles = of_crew(1, on_files=True)
TestTwoWorkersOnFiles = of_crew(2, on_files=True)
TestElasticInMemory = case(ElasticMachine, max_examples=40, step_count=40)
TestElasticOnFiles = case(ElasticMachine, max_examples=15, step_count=40, on_files=True)
