"""What a worker keeps of a table, with calls of several threads cut into their parts.

Goal: no row that is found is older than it may be, lacks a step that has ended, or has seen less
than the version that is said.

Method: a plain model of the shard: of each row, how often this worker moved it, and a version that
others move. Fetches and one step at a time are under way; each part of them (asked, read on the
shard, answered; begun, counted on the shard, ended or failed) comes in any order that it can.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from harness.machines import cases
from shardwell.table.cache import RowCache
from shardwell.table.view import TableView

DIM = 2
ID_COUNT = 6
IDS = st.lists(st.integers(0, ID_COUNT - 1), unique=True, min_size=1).map(
    lambda ids: np.array(ids, np.int64)
)


class ViewMachine(RuleBasedStateMachine):
    """A row's values are: how often this worker moved it, and the version at which it was read."""

    @initialize(staleness=st.integers(0, 3), row_count=st.sampled_from([1, 4, 100]))
    def make(self, staleness, row_count) -> None:
        self.staleness = staleness
        self.view = TableView(RowCache(row_count, DIM, staleness), is_sync=False)
        self.version = 0
        self.counted: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self.clock = 0
        self.has_put = False
        self.asked_at: dict[tuple[int, int, int], int] = {}
        self.fetches: list[list] = []
        self.step: list | None = None
        self.begun: np.ndarray | None = None
        self.clear_count = 0

    def _read(self, ids: np.ndarray) -> np.ndarray:
        own = [self.counted[key] for key in ids.tolist()]
        return np.array([own, [self.version] * ids.size], np.float32).T.copy()

    @rule()
    def others_move(self) -> None:
        self.version += 1

    @rule(ids=IDS)
    def ask(self, ids) -> None:
        self.fetches.append([ids, self.view.moment(), self.clock, None])

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def read_on_the_shard(self, data) -> None:
        fetch = data.draw(st.sampled_from(self.fetches))
        fetch[3] = (self._read(fetch[0]), self.version)

    @precondition(lambda self: any(fetch[3] is not None for fetch in self.fetches))
    @rule(data=st.data())
    def answer(self, data) -> None:
        ready = [n for n, fetch in enumerate(self.fetches) if fetch[3] is not None]
        ids, moment, clock, (rows, version) = self.fetches.pop(data.draw(st.sampled_from(ready)))
        self.view.keep(ids, rows, version, moment)
        self._note(ids, rows, clock)

    def _note(self, ids: np.ndarray, rows: np.ndarray, clock: int) -> None:
        for key, row in zip(ids.tolist(), rows.tolist(), strict=True):
            found = (key, int(row[0]), int(row[1]))
            self.asked_at[found] = max(self.asked_at.get(found, clock), clock)

    @precondition(lambda self: self.step is None)
    @rule(ids=IDS)
    def begin_step(self, ids) -> None:
        if self.begun is not None:  # the same rows again
            ids = self.begun
        self.step = [ids, self.view.begin_step(ids), self.clock, False, None]

    @precondition(lambda self: self.step is not None and not self.step[3])
    @rule()
    def count_on_the_shard(self) -> None:
        if self.begun is None or not self.counted_before:
            self.counted.update(self.step[0].tolist())
            self.version += 1
        self.step[3] = True
        self.step[4] = (self._read(np.arange(ID_COUNT)), self.version)

    @precondition(lambda self: self.step is not None and self.step[3])
    @rule(exchanges=st.booleans())
    def end_step(self, exchanges) -> None:
        ids, begun, clock, _, (rows, version) = self.step
        if exchanges:
            every = np.arange(ID_COUNT)
            self.view.end_step(begun, every, rows, version)
            self._note(every, rows, clock + 1)
        else:
            self.view.end_step(begun)
        self.ended.update(ids.tolist())
        self.clock += 1
        self.has_put = True
        self.step = self.begun = None

    @precondition(lambda self: self.step is not None)
    @rule()
    def fail_step(self) -> None:
        self.view.fail_step(self.view.next_step, is_begun=True)
        self.begun, self.counted_before = (
            self.step[0],
            self.step[3] or (self.begun is not None and self.counted_before),
        )
        self.step = None

    @precondition(lambda self: self.begun is not None and self.step is None)
    @rule()
    def a_late_message_of_the_failed_step_is_counted(self) -> None:
        if not self.counted_before:
            self.counted.update(self.begun.tolist())
            self.counted_before = True

    @precondition(lambda self: self.begun is not None and self.step is None)
    @rule()
    def abandon(self) -> None:
        self.view.end_step(self.view.begin_step(None))
        if self.counted_before:
            self.ended.update(self.begun.tolist())
        self.clock += 1
        self.has_put = True
        self.begun = None

    @rule()
    def clear(self) -> None:
        self.view.clear()

    @rule(ids=IDS)
    def get(self, ids) -> None:
        self.view.begin_get()
        self.clock += not self.has_put
        self.has_put = False
        rows = np.full((ids.size, DIM), np.nan, np.float32)
        missing, version = self.view.find(ids, rows)
        for place, key in enumerate(ids.tolist()):
            if place in missing:
                continue
            own, seen = (int(value) for value in rows[place])
            assert own >= self.ended[key]
            assert seen >= version
            assert self.clock - self.asked_at[(key, own, seen)] <= self.staleness


TestView, TestMoreOfView = cases(ViewMachine, max_examples=100, step_count=40)


def test_rows_of_a_version_without_the_last_step_are_not_kept() -> None:
    """Other workers have not ended it yet: a row may lack what this worker sent for it."""
    view = TableView(RowCache(8, DIM, 9), is_sync=True)
    ids, rows = np.array([1, 2]), np.zeros((2, DIM), np.float32)
    view.end_step(view.begin_step(ids[:1]))
    view.keep(ids, rows, 0, view.moment())
    assert view.find(ids, rows)[0].tolist() == [0, 1]
    view.keep(ids, rows, 1, view.moment())
    assert view.find(ids, rows)[0].tolist() == []


def test_rows_asked_for_before_a_step_are_not_kept_after_it() -> None:
    """They may lack what this worker sent meanwhile, whatever version they have."""
    view = TableView(RowCache(8, DIM, 9), is_sync=False)
    ids, rows = np.array([1, 2]), np.zeros((2, DIM), np.float32)
    for happens in (lambda: view.end_step(view.begin_step(ids[:1])), view.clear):
        asked = view.moment()
        happens()
        view.keep(ids, rows, 9, asked)
        assert view.find(ids, rows)[0].tolist() == [0, 1]
    view.keep(ids, rows, 9, view.moment())
    assert view.find(ids, rows)[0].tolist() == []


def test_a_step_that_nothing_was_sent_of_keeps_the_cache_in_use() -> None:
    view = TableView(RowCache(8, DIM, 9), is_sync=False)
    ids, rows = np.array([1, 2]), np.zeros((2, DIM), np.float32)
    view.begin_step(ids[:1])
    view.fail_step(0, is_begun=False)
    view.keep(ids, rows, 0, view.moment())
    assert view.find(ids, rows)[0].tolist() == []
