"""A worker's cache of rows against a dict that remembers when each row was fetched, and what of it.

Goal: what is found is what was added last, no older than the bound, and never from before a drop.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import shardwell
from harness.machines import cases
from shardwell.table.cache import CACHE_ROW_COUNT_MAX, WAY_COUNT, RowCache

IDS = st.lists(
    st.one_of(st.integers(0, 12), st.sampled_from([-1, 2**63 - 1, -(2**63)])),
    unique=True,
    max_size=12,
).map(lambda ids: np.array(ids, np.int64))
DIM = 3


class CacheMachine(RuleBasedStateMachine):
    """The model holds, of each id, the step at which it may have been added last, and its value."""

    @initialize(row_count=st.integers(1, 20), staleness=st.integers(0, 3))
    def make(self, row_count, staleness) -> None:
        self.cache = RowCache(row_count, DIM, staleness)
        self.staleness = staleness
        self.step = 0
        self.value = 0
        self.model: dict[int, tuple[int, int]] = {}
        self.asked = 0

    @rule(count=st.integers(1, 3))
    def step_on(self, count) -> None:
        self.step += count

    @rule(ids=IDS, age=st.integers(0, 3))
    def add(self, ids, age) -> None:
        self.value += 1  # its version, too
        rows = np.full((ids.size, DIM), self.value, np.float32)
        self.cache.add(ids, rows, self.step - age, self.value)
        self.model.update((key, (self.step - age, self.value)) for key in ids.tolist())

    @rule(ids=IDS)
    def drop(self, ids) -> None:
        self.cache.drop(ids)
        for key in ids.tolist():
            self.model.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()

    @rule(ids=IDS)
    def find(self, ids) -> None:
        self.asked += ids.size
        rows = np.full((ids.size, DIM), np.nan, np.float32)
        missing, version = self.cache.find(ids, self.step, rows)
        assert missing.tolist() == sorted(set(missing.tolist()))
        values = []
        for place, key in enumerate(ids.tolist()):
            if place in missing:
                assert np.isnan(rows[place]).all()
                continue
            step, value = self.model[key]
            assert self.step - step <= self.staleness
            assert rows[place].tolist() == [value] * DIM
            values.append(value)
        assert version == min(values, default=None)

    @invariant()
    def counts_add_up(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.hit_count + self.cache.miss_count == self.asked


TestCache, TestMoreOfCache = cases(CacheMachine, max_examples=60, step_count=30)


def _filled(cache: RowCache, ids: np.ndarray, step: int = 0) -> None:
    cache.add(ids, np.repeat(ids[:, np.newaxis], DIM, axis=1).astype(np.float32), step, 0)


def _found(cache: RowCache, ids: np.ndarray, step: int = 0) -> list[int]:
    rows = np.empty((ids.size, DIM), np.float32)
    missing, _ = cache.find(ids, step, rows)
    kept = np.delete(np.arange(ids.size), missing)
    expected = np.repeat(ids[kept, np.newaxis], DIM, axis=1).astype(np.float32)
    np.testing.assert_array_equal(rows[kept], expected)
    return ids[kept].tolist()


@pytest.mark.parametrize("row_count", [1, 4, 5, 4096])
def test_one_row_is_kept_for_as_long_as_was_asked(row_count) -> None:
    cache = RowCache(row_count, DIM, 2)
    _filled(cache, np.array([7]), step=10)
    assert [len(_found(cache, np.array([7]), step)) for step in (10, 12, 13)] == [1, 1, 0]
    _filled(cache, np.array([7]), step=13)
    assert _found(cache, np.array([7]), 15) == [7]
    assert (cache.hit_count, cache.miss_count) == (3, 1)


def test_rows_of_one_set_take_turns() -> None:
    cache = RowCache(WAY_COUNT, DIM, 9)
    _filled(cache, np.arange(3))
    _filled(cache, np.arange(2, 6))
    # 2 is cached; 3 takes the free place, 4 and 5 those of 0 and 1.
    assert _found(cache, np.arange(8)) == [2, 3, 4, 5]
    _filled(cache, np.arange(10, 17))
    assert len(_found(cache, np.arange(10, 17))) == WAY_COUNT


def test_a_working_set_of_the_caches_size_is_mostly_there() -> None:
    """Of random and of neighbouring ids, four fifths; of half as many, nearly all."""
    for ids in (np.arange(4000), np.unique(np.random.default_rng(0).integers(0, 2**40, 4000))):
        cache = RowCache(4000, DIM, 9)
        _filled(cache, ids)
        assert len(_found(cache, ids)) > 0.75 * ids.size
        cache.clear()
        _filled(cache, ids[::2].copy())
        assert len(_found(cache, ids[::2].copy())) > 0.93 * ids.size / 2


def test_more_than_there_is_memory_for() -> None:
    with pytest.raises(shardwell.ArgumentError, match="cache_row_count=4294967296 with dim 65536"):
        RowCache(CACHE_ROW_COUNT_MAX, 65536, 1)


def test_no_ids() -> None:
    cache = RowCache(8, DIM, 1)
    none = np.empty(0, np.int64)
    _filled(cache, none)
    cache.drop(none)
    assert _found(cache, none) == []
