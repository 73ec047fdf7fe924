"""Goal: any sequence of calls, kills and reopenings leaves the sums that a dict has.

Method: hypothesis draws calls, each perhaps killed at one of its writes: the files are put back to
what they were there, and opened again. Oracle: harness/stories/accumulator.py, in plain Python.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from harness.machines import KILLS, KilledMachine, cases
from harness.stories.accumulator import (
    BLOCK_ROW_COUNT,
    DIM,
    RATE,
    ROW_COUNT,
    Call,
    Sums,
    Telling,
    gradients_of,
)
from harness.stories.images import Image, restore
from shardwell.errors import ArgumentError

ROWS = st.integers(0, ROW_COUNT - 1)
BATCHES = st.lists(ROWS, max_size=3 * BLOCK_ROW_COUNT)
VALUES = st.integers(-9, 9)


class AccumulatorMachine(KilledMachine):
    """Every rule is a call; `kill` decides after which of its writes its process ends."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.path
        self.numbers = itertools.count()
        self.sums: Sums = {}
        self.rows = np.zeros((ROW_COUNT, DIM))
        self.start({})

    def teardown(self) -> None:
        self.telling.die()
        super().teardown()

    def start(self, image: Image) -> None:
        """A new process, and nothing but these files."""
        self.path = restore(image, self.root / str(next(self.numbers)))
        self.telling = Telling(self.path, self.reached)

    def make(self, call: Call, kill: float | None) -> None:
        before = self.sums
        self.images = [] if kill is not None else None
        self.telling.make(call)
        images, self.images = self.images, None
        if not images or kill is None:
            self.note(call, call.change(before))
            return
        self.telling.die()
        self.start(images[int(kill * len(images))])
        found = self.telling.sums()
        assert call.may_leave(before, found)
        self.note(call, found)
        if call.kind == "apply":  # a block may have been applied, and have its sums
            lost = [row for row in before if row not in found]
            np.testing.assert_array_equal(self.telling.rows[lost], self.rows[lost])
            self.rows = self.telling.rows.astype(np.float64)

    def note(self, call: Call, after: Sums) -> None:
        if call.kind == "apply":
            for row in self.sums.keys() - after.keys():
                self.rows[row] -= RATE * np.array(self.sums[row])
        self.sums = after

    @rule(row=ROWS, value=VALUES, kill=KILLS)
    def accumulate(self, row: int, value: int, kill: float | None) -> None:
        self.make(Call("accumulate", [row], value), kill)

    @rule(rows=BATCHES, value=VALUES, kill=KILLS)
    def accumulate_rows(self, rows: list[int], value: int, kill: float | None) -> None:
        self.make(Call("accumulate_rows", rows, value), kill)

    @rule(kill=KILLS)
    def apply(self, kill: float | None) -> None:
        self.make(Call("apply"), kill)

    @rule(kill=KILLS)
    def zero_grad(self, kill: float | None) -> None:
        self.make(Call("zero_grad"), kill)

    @rule(kill=KILLS)
    def reopen(self, kill: float | None) -> None:
        self.make(Call("reopen"), kill)

    @rule(rows=BATCHES.filter(len), bad=st.sampled_from([np.nan, np.inf]), data=st.data())
    def refuse(self, rows: list[int], bad: float, data: st.DataObject) -> None:
        gradients = gradients_of(rows, 1)
        gradients.reshape(-1)[data.draw(st.integers(0, gradients.size - 1))] = bad
        with pytest.raises(ArgumentError):
            self.telling.accumulator.accumulate_rows(rows, gradients)
        with pytest.raises(ArgumentError):
            self.telling.accumulator.accumulate_rows(
                [*rows, ROW_COUNT], gradients_of([*rows, 0], 1)
            )

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        assert self.telling.sums() == self.sums
        np.testing.assert_array_equal(self.telling.rows, self.rows)


TestAccumulator, TestMoreOfAccumulator = cases(AccumulatorMachine, max_examples=40, step_count=25)
