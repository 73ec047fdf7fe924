"""Goal: any order of calls, kills and restarts leaves a shard on files where plain Python says.

Method: a hypothesis state machine drives a Shard on a MmapStore; a kill is an image of its files
after some write of a call (harness/stories/images.py), with which it goes on. Oracle: a dict of
integers in float64; values and rates are such that float32 is exact.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from harness.data.sessions import applicant, session_of
from harness.inside import register_of, tracker_of
from harness.machines import KILLS, KilledMachine, cases
from harness.stories import parameter as story
from harness.stories.parameter import CONFIG, contribute, short_blocks
from harness.stories.table import Step, apply, make
from shardwell import SGD, ParameterSpec
from shardwell.errors import LimitError, SeatsTakenError, StepOrderError
from shardwell_server.config import Limits
from shardwell_server.shard.shard import Shard
from shardwell_server.store.contract import FREE, Position, TableRecord, TableStorage

NAMES = ["first", "second"]
WORKERS = ["w0", "w1", "w2", "w3"]
PLACE_COUNT = 3
"""There are no more workers at once."""
SHARD_CONFIG = dataclasses.replace(CONFIG, limits=Limits(worker_count_max=PLACE_COUNT))
CHUNK_ELEMENT_COUNT = 16
RATES = [1.0, 0.5, 2.0]


class Model:
    """One parameter in plain Python. Weights are float64 lists, one a chunk."""

    def __init__(self, size: int, worker_count: int) -> None:
        self.worker_count = worker_count
        self.size = size
        self.sizes = [
            min(CHUNK_ELEMENT_COUNT, size - start) for start in range(0, size, CHUNK_ELEMENT_COUNT)
        ]
        self.is_initialized = False
        self.weights: list[np.ndarray] = []
        self.seats: list[str] = []
        self.versions = [0] * len(self.sizes)
        self.open_step: list[dict[str, float]] = [{} for _ in self.sizes]
        self.last: dict[str, list[int]] = {}
        self.tenures: dict[str, int] = {}
        self.ended: list[str] = []
        self.rates: dict[int, float] = {0: 1.0}

    def rate(self, version: int) -> float:
        return self.rates[max(step for step in self.rates if step <= version)]

    def next_step(self, worker: str, chunk: int) -> int:
        following = self.last[worker][chunk] + 1
        return max(following, self.versions[chunk]) if self.worker_count else following

    def takes(self, worker: str, chunk: int) -> bool:
        """Whether a worker's next gradient is counted at once."""
        return not self.worker_count or self.next_step(worker, chunk) == self.versions[chunk]

    def count(self, worker: str, chunk: int, value: float) -> None:
        self.last[worker][chunk] = self.next_step(worker, chunk)
        self.open_step[chunk][worker] = value
        if len(self.open_step[chunk]) >= max(self.worker_count, 1):
            mean = sum(self.open_step[chunk].values()) / len(self.open_step[chunk])
            self.weights[chunk] = self.weights[chunk] - self.rate(self.versions[chunk]) * mean
            self.versions[chunk] += 1
            self.open_step[chunk] = {}


class StoreMachine(KilledMachine):
    """Every rule is a call that is answered; `kill` decides after which of its writes it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.open.enter_context(short_blocks())
        self.models: dict[str, Model] = {}
        self.tenures = itertools.count(1)
        self.over: list[tuple[str, str, int]] = []
        """Parameter, worker and tenure of those that are over."""
        self.come_back()

    @rule()
    def come_back(self) -> None:
        self.shard = Shard(SHARD_CONFIG, self.stored())

    @initialize(worker_count=st.sampled_from([0, 0, 1, 2, 3]), seats=st.integers(0, 3))
    def begin(self, worker_count: int, seats: int) -> None:
        """One that contributions are taken for, so that few sequences come to nothing."""
        self.create(NAMES[0], 37, worker_count, None)
        self.set_first_weights(NAMES[0], 0, None)
        for worker in WORKERS[:seats]:
            self.take_seat(NAMES[0], worker, False, None)

    names = st.sampled_from(NAMES)
    workers = st.sampled_from(WORKERS)

    @rule(name=names, size=st.sampled_from([1, 16, 37]), worker_count=st.integers(0, 3), kill=KILLS)
    def create(self, name: str, size: int, worker_count: int, kill: float | None) -> None:
        if name in self.models:
            return
        spec = ParameterSpec(
            name=name,
            size=size,
            optimizer=SGD(learning_rate=1.0),
            worker_count=worker_count,
            mode="sync" if worker_count else "async",
            codec="fp32",
        )
        self.call(lambda: self.shard.parameters.open(spec), kill)
        self.models[name] = Model(size, worker_count)

    @precondition(lambda self: any(not model.is_initialized for model in self.models.values()))
    @rule(name=names, value=st.integers(-9, 9), kill=KILLS)
    def set_first_weights(self, name: str, value: int, kill: float | None) -> None:
        model = self.models.get(name)
        if model is None or model.is_initialized:
            return
        values = np.arange(model.size) + value
        self.call(
            lambda: story.initialize(
                self.shard.parameters.get(name), "w0", values.astype(np.float32)
            ),
            kill,
        )
        model.is_initialized = True
        starts = range(0, model.size, CHUNK_ELEMENT_COUNT)
        model.weights = [values[start : start + CHUNK_ELEMENT_COUNT] for start in starts]

    def standing(self, name: str) -> Model | None:
        model = self.models.get(name)
        return model if model is not None and model.is_initialized else None

    @rule(name=names, worker=workers, anew=st.booleans(), kill=KILLS)
    def take_seat(self, name: str, worker: str, anew: bool, kill: float | None) -> None:
        model = self.standing(name)
        if model is None:
            return

        tenure = next(self.tenures)
        anew = anew and not model.worker_count

        def join() -> None:
            asks = applicant(worker, 0, tenure, begins_anew=anew)
            self.shard.parameters.get(name).join(worker, seat_for=asks)

        if worker not in model.seats:
            if model.worker_count and len(model.seats) == model.worker_count:
                with pytest.raises(SeatsTakenError):
                    join()
                return
            if len(model.seats) < PLACE_COUNT:
                model.seats.append(worker)
            elif model.ended:
                model.seats[model.seats.index(model.ended[0])] = worker
                self.over.append((name, model.ended[0], model.tenures.pop(model.ended.pop(0))))
            else:
                with pytest.raises(LimitError, match="worker_count_max"):
                    join()
                return
        elif anew:
            self.over.append((name, worker, model.tenures.pop(worker)))
        if worker not in model.tenures:
            model.last[worker] = [-1] * len(model.sizes)
            model.tenures[worker] = 0 if model.worker_count else tenure
        if worker in model.ended:
            model.ended.remove(worker)
        self.call(join, kill)

    @rule(worker=workers, kill=KILLS)
    def end_session(self, worker: str, kill: float | None) -> None:
        """In order, for all parameters."""
        self.call(lambda: self.shard.end_session(session_of(worker).number), kill)
        for model in self.models.values():
            if worker in model.seats and worker not in model.ended:
                model.ended.append(worker)

    @rule(name=names, leaver=workers, comer=workers, value=st.integers(-3, 3), kill=KILLS)
    def pass_on(self, name: str, leaver: str, comer: str, value: int, kill: float | None) -> None:
        """All seats are taken, one is given to another worker, and everybody contributes."""
        model = self.standing(name)
        if model is not None and not model.worker_count:
            for worker in WORKERS[:PLACE_COUNT]:
                self.take_seat(name, worker, False, None)
            self.end_session(leaver, None)
            self.take_seat(name, comer, False, kill)
            self.contribute_all(name, value, kill)
            self.come_back()

    @precondition(lambda self: self.over)
    @rule(data=st.data(), chunk=st.integers(0, 2), step=st.integers(0, 3))
    def come_late(self, data: st.DataObject, chunk: int, step: int) -> None:
        """A gradient of a tenure that is over, counted or not, counts nothing."""
        name, worker, tenure = data.draw(st.sampled_from(self.over))
        model = self.models[name]
        if chunk < len(model.sizes):
            made, zeros = self.shard.parameters.get(name), np.zeros(model.sizes[chunk], np.float32)
            with pytest.raises(StepOrderError, match="given to a newcomer"):
                contribute(made, worker, chunk, step, zeros, tenure=tenure)

    @precondition(lambda self: any(model.seats for model in self.models.values()))
    @rule(data=st.data(), value=st.integers(-3, 3), kill=KILLS)
    def contribute(self, data: st.DataObject, value: int, kill: float | None) -> None:
        """The next gradient of one worker for one chunk that need not wait for others."""
        open_ones = [
            (name, worker, chunk)
            for name, model in self.models.items()
            for worker in model.seats
            if worker not in model.ended
            for chunk in range(len(model.sizes))
            if model.takes(worker, chunk)
        ]
        if open_ones:
            self.send(*data.draw(st.sampled_from(open_ones)), value, kill)

    @rule(name=names, value=st.integers(-3, 3), kill=KILLS)
    def contribute_all(self, name: str, value: int, kill: float | None) -> None:
        """What closes the open steps; the kill is at the end of the last one."""
        model = self.standing(name)
        for chunk in range(len(model.sizes) if model else 0):
            for worker in model.seats:
                if worker not in model.ended and model.takes(worker, chunk):
                    is_last = chunk == len(model.sizes) - 1 and worker == model.seats[-1]
                    self.send(name, worker, chunk, value, kill if is_last else None)

    def send(self, name: str, worker: str, chunk: int, value: int, kill: float | None) -> None:
        """One gradient; multiples of 6, so that means of 1 to 3 are integers."""
        model = self.models[name]
        step = model.next_step(worker, chunk)
        gradient = np.full(model.sizes[chunk], 6 * value, np.float32)

        def make() -> bool:
            made = self.shard.parameters.get(name)
            tenure = model.tenures[worker]
            return contribute(made, worker, chunk, step, gradient, tenure=tenure)

        self.call(make, kill)
        model.count(worker, chunk, 6 * value)
        assert not make()

    @rule(name=names, worker=workers, chunk=st.integers(0, 2), back=st.integers(0, 3))
    def repeat(self, name: str, worker: str, chunk: int, back: int) -> None:
        """An answered gradient is a duplicate for ever; a skipped one is refused.

        So is the last gradient with other values, unless the shard was started again since.
        """
        model = self.standing(name)
        if model is None or worker not in model.seats or chunk >= len(model.sizes):
            return
        if worker in model.ended:
            return
        last, tenure = model.last[worker][chunk], model.tenures[worker]
        made, zeros = self.shard.parameters.get(name), np.zeros(model.sizes[chunk], np.float32)
        if last >= back:
            refused = ""
            try:
                assert not contribute(made, worker, chunk, last - back, zeros, tenure=tenure)
            except StepOrderError as error:
                refused = error.message
            assert not refused or (not back and "another than was counted" in refused)
        skipped = max(last + 1, model.versions[chunk]) + 2 + back
        with pytest.raises(StepOrderError):
            contribute(made, worker, chunk, skipped, zeros, tenure=tenure)

    @rule(name=names, rate=st.sampled_from(RATES), ahead=st.integers(0, 3), kill=KILLS)
    def set_learning_rate(self, name: str, rate: float, ahead: int, kill: float | None) -> None:
        model = self.standing(name)
        if model is None:
            return
        from_step = max(model.versions) + ahead
        self.call(
            lambda: self.shard.parameters.get(name).change_learning_rate(from_step, rate), kill
        )
        kept = {step: old for step, old in model.rates.items() if step < from_step}
        model.rates = {**kept, from_step: rate}

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        found = {made.spec.name: made for made in self.shard.parameters.all()}
        assert sorted(found) == sorted(self.models)
        for name, model in self.models.items():
            made = found[name]
            assert register_of(made).is_initialized == model.is_initialized
            seats = tracker_of(made).crew.seats
            assert [(seat.worker_id, seat.tenure.number) for seat in seats] == [
                (worker, model.tenures[worker]) for worker in model.seats
            ]
            assert set(tracker_of(made).crew.done_worker_ids) == set(model.ended)
            for index in range(len(model.sizes)):
                made.verify(index)
                record, state = tracker_of(made).records[index], made._chunks[index].state
                assert record.version == model.versions[index]
                assert record.contribution_count == len(model.open_step[index])
                marks = [seat.last_step[index] for seat in tracker_of(made).crew._seats.values()]
                assert marks == [model.last[worker][index] for worker in model.seats]
                if model.is_initialized:
                    np.testing.assert_array_equal(state.weights, model.weights[index])
                    rate = register_of(made).rates.at(record.version)
                    assert rate == model.rate(record.version)
                if model.open_step[index]:
                    total = state.gradient_sum * np.float64(record.total_factor)
                    expected = sum(model.open_step[index].values())
                    np.testing.assert_array_equal(total * 2.0**record.shift, expected)


TestMmapStore, TestMoreOfMmapStore = cases(StoreMachine, max_examples=100, step_count=40)


# Any order of changes, kills and restarts leaves a table on files where plain Python says.


CAPACITY = 64
ROWS_MAX = 8
Row = dict[str, Any]


class TableModel:
    """A table in plain Python; what `apply` of the story writes, said again."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.record = TableRecord()
        self.positions: list[Position] = []

    def apply(self, step: Step, version: int) -> None:
        used = len(self.rows)
        blank: Row = {"sum": None}
        self.rows += [dict(blank) for _ in range(max([used, *(p + 1 for p in step.places)]) - used)]
        for place in step.places:
            row = self.rows[place]
            is_new = place >= used
            if step.values or is_new:
                old = row.get("weight")
                row["weight"] = place + step.value if is_new else old + step.value
                row["slot"] = place * 10 + step.value
                row["key"] = place + 1000 * step.value
                row["count"] = FREE if step.is_free else step.value
                row["step"] = step.value + 50
            if step.sums:
                row["sum"] = place * 100 + step.value if step.has_sum else None
        v = step.value
        self.record = TableRecord(len(self.rows), version, v % 3, v * 10, -v, is_closing=v % 3 == 1)
        if step.position is not None:
            self.positions[step.position[0]] = Position(*step.position)


class TableMachine(KilledMachine):
    """Every rule is a change; `kill` decides after which of its writes it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TableModel()
        self.come_back()

    @rule()
    def come_back(self) -> None:
        self.table: TableStorage = make(self.stored())

    def change(self, step: Step, kill: float | None) -> None:
        version = self.model.record.version + 1

        def make_it() -> None:
            if self.table.record.version < version:
                apply(self.table, step, version, self.reached)

        self.call(make_it, kill)
        self.model.apply(step, version)

    @rule(
        data=st.data(),
        new_count=st.integers(0, 4),
        kind=st.sampled_from(["values", "sums", "close", "evict"]),
        value=st.integers(1, 99),
        kill=KILLS,
    )
    def change_rows(
        self, data: st.DataObject, new_count: int, kind: str, value: int, kill: float | None
    ) -> None:
        used = len(self.model.rows)
        new_count = min(new_count, CAPACITY - used) if kind in ("values", "sums") else 0
        old = data.draw(
            st.lists(st.integers(0, used - 1), unique=True, max_size=ROWS_MAX - new_count)
            if used
            else st.just([])
        )
        places = data.draw(st.permutations([*old, *range(used, used + new_count)]))
        position = None
        if self.model.positions:
            seat = data.draw(st.integers(0, len(self.model.positions) - 1))
            position = (seat, value, value % 7)
        step = Step(
            places,
            value,
            values=kind != "sums",
            sums=kind in ("sums", "close"),
            is_free=kind == "evict",
            has_sum=kind != "close",
            position=position,
        )
        self.change(step, kill)

    @precondition(lambda self: len(self.model.positions) < 4)
    @rule(kill=KILLS)
    def add_seat(self, kill: float | None) -> None:
        count = len(self.model.positions)

        def make_it() -> None:
            if len(self.table.positions()) == count:
                self.table.add_seat()
                self.table.log({"kind": "seat", "worker_id": f"w{count}"})

        self.call(make_it, kill)
        self.model.positions.append(Position(count))

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), fails=st.booleans())
    def give_up(self, data: st.DataObject, fails: bool) -> None:
        """A change that is never committed."""
        used = len(self.model.rows)
        drawn = st.lists(st.integers(0, used - 1), unique=True, max_size=ROWS_MAX)
        places = np.array(data.draw(drawn), np.int64)

        def begin() -> None:
            with self.table.change(places, values=True, sums=True):
                self.table.weights[places] = 12345
                self.table.has_sum[places] = ~self.table.has_sum[places]
                if fails:
                    raise RuntimeError("half way")

        if fails:
            with pytest.raises(RuntimeError, match="half way"):
                begin()
        else:
            begin()

    @rule(row_count=st.integers(0, CAPACITY + 9), kill=KILLS)
    def reserve(self, row_count: int, kill: float | None) -> None:
        if row_count > CAPACITY:
            with pytest.raises(LimitError):
                self.table.reserve(row_count)
        else:
            self.call(lambda: self.table.reserve(row_count), kill)
            assert self.table.reserved_row_count >= row_count

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        drawn = data.draw(st.lists(st.integers(0, CAPACITY - 1), unique=True))
        self.table.verify(np.array(drawn, np.int64))

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        table, rows = self.table, self.model.rows
        assert table.record == self.model.record
        assert table.positions() == self.model.positions
        used = len(rows)
        np.testing.assert_array_equal(table.keys[:used], [row["key"] for row in rows])
        np.testing.assert_array_equal(table.update_counts[:used], [row["count"] for row in rows])
        np.testing.assert_array_equal(table.last_steps[:used], [row["step"] for row in rows])
        weights = np.array([row["weight"] for row in rows]).reshape(used, 1)
        np.testing.assert_array_equal(table.weights[:used], np.repeat(weights, 3, axis=1))
        slots = np.array([row["slot"] for row in rows]).reshape(used, 1)
        np.testing.assert_array_equal(table.slots[0][:used], np.repeat(slots, 3, axis=1))
        np.testing.assert_array_equal(table.slots[1][:used], slots + 1)
        flags = [row["sum"] is not None for row in rows]
        np.testing.assert_array_equal(table.has_sum[:used], flags)
        assert table.sums is not None
        for place in np.flatnonzero(flags):
            assert (table.sums[place] == rows[place]["sum"]).all()


TestMmapTable, TestMoreOfMmapTable = cases(TableMachine, max_examples=80, step_count=30)
