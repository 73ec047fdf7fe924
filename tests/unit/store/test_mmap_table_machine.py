"""Goal: any order of changes, kills and restarts leaves a table on files where plain Python says.

Method: a hypothesis state machine drives a MmapTable as a shard would; a kill is an image of its
files after some write of a change, also of rows, with which it goes on. Oracle: a dict of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from harness.machines import KILLS, KilledMachine, cases
from harness.stories.table import Step, apply, make
from shardwell.errors import LimitError
from shardwell_server.store import FREE, Position, TableRecord, TableStorage

CAPACITY = 64
ROWS_MAX = 8
Row = dict[str, Any]


class Model:
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
        self.model = Model()
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
