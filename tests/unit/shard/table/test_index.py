"""Goal: an index tells of each id what a dict would, many at a time.

Method: a hypothesis state machine drives both kinds beside a dict, with ids that collide on
purpose; then single ideas: bad keys, growth and shrinking, what remains of removed rows.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.data.row_keys import EXTREMES, colliding_keys
from harness.machines import cases
from shardwell.placement.rows import Ids, RowPlacement, mix
from shardwell_server.shard.table import index as row_index
from shardwell_server.shard.table.hash_slots import SlotTable
from shardwell_server.shard.table.index import DirectRowIndex, HashRowIndex, RowIndex

ROW_COUNT, SHARD_COUNT, SHARD = 10_007, 3, 1

starts, shares = st.floats(0, 0.99), st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])


def lines_of(index: HashRowIndex) -> SlotTable:
    return index._table


def ids_of_a_shard() -> Ids:
    ids = np.arange(ROW_COUNT)
    return ids[RowPlacement(ROW_COUNT, SHARD_COUNT).shards_of(ids) == SHARD]


def places_in(model: dict[int, int], ids: Ids) -> list[int]:
    return [model.get(key, -1) for key in ids.tolist()]


class IndexMachine(RuleBasedStateMachine):
    """A pool of ids, of which runs are added, moved, removed and looked for."""

    @initialize(
        kind=st.sampled_from(["direct", "random", "colliding", "stride", "run", "extremes"])
    )
    def open(self, kind: str) -> None:
        salt = 0x1234567890ABCDEF
        random = np.random.default_rng(7)
        pools = {
            "direct": lambda: random.permutation(ids_of_a_shard()),
            "random": lambda: random.integers(-(2**63), 2**63 - 1, 3000),
            "colliding": lambda: colliding_keys(200, salt),
            "stride": lambda: np.arange(3000) << 32,
            "run": lambda: np.arange(-1500, 1500),
            "extremes": lambda: np.array(EXTREMES),
        }
        self.pool = pools[kind]()
        assert len(set(self.pool.tolist())) == self.pool.size
        self.index: RowIndex = (
            DirectRowIndex(RowPlacement(ROW_COUNT, SHARD_COUNT))
            if kind == "direct"
            else HashRowIndex(salt)
        )
        self.model: dict[int, int] = {}
        self.places = itertools.count()

    def some(self, start: float, share: float) -> Ids:
        first = int(start * self.pool.size)
        return self.pool[first : first + max(int(share * self.pool.size), 1)]

    @rule(start=starts, share=shares)
    def add(self, start: float, share: float) -> None:
        """New ones, moved ones, and such as were removed."""
        ids = self.some(start, share)
        places = list(itertools.islice(self.places, ids.size))
        self.index.add(ids, np.array(places))
        self.model.update(zip(ids.tolist(), places, strict=True))

    @rule(count=st.integers(0, 3000))
    def make_room(self, count: int) -> None:
        """Changes nothing that can be seen."""
        self.index.make_room(count)

    @rule(start=starts, share=shares)
    def remove(self, start: float, share: float) -> None:
        ids = self.some(start, share)
        self.index.remove(ids)
        for key in ids.tolist():
            self.model.pop(key, None)

    @rule(start=starts, share=shares)
    def find(self, start: float, share: float) -> None:
        ids = np.repeat(self.some(start, share), 2)
        assert self.index.find(ids).tolist() == places_in(self.model, ids)

    @invariant()
    def all_are_there(self) -> None:
        assert len(self.index) == len(self.model)
        assert self.index.find(self.pool).tolist() == places_in(self.model, self.pool)


TestIndex, TestMoreOfIndex = cases(IndexMachine, max_examples=60, step_count=25)


def both_kinds() -> list[tuple[RowIndex, Ids]]:
    ids = ids_of_a_shard()
    return [(DirectRowIndex(RowPlacement(ROW_COUNT, SHARD_COUNT)), ids), (HashRowIndex(), ids)]


@pytest.mark.parametrize(("index", "ids"), both_kinds())
def test_no_ids_are_no_error(index: RowIndex, ids: Ids) -> None:
    none = np.empty(0, np.int64)
    index.add(none, none)
    index.remove(none)
    found = index.find(none)
    assert (found.size, found.dtype, len(index)) == (0, np.int64, 0)
    assert index.find(ids).tolist() == [-1] * ids.size


@pytest.mark.parametrize(("index", "ids"), both_kinds())
def test_an_id_that_repeats_is_one_row(index: RowIndex, ids: Ids) -> None:
    """A damaged file has it twice; then there are fewer ids than places."""
    index.add(np.repeat(ids[:100], 3), np.arange(300))
    assert len(index) == 100
    assert index.find(ids[:100]).tolist() == list(range(2, 300, 3))


@pytest.mark.parametrize(("index", "ids"), both_kinds())
def test_arrays_that_were_handed_over_stay_as_they_are(index: RowIndex, ids: Ids) -> None:
    ids = ids[:50].copy()
    places = np.arange(50)
    ids.flags.writeable = places.flags.writeable = False
    index.add(ids, places)
    assert index.find(ids).tolist() == places.tolist()
    index.remove(ids)
    assert len(index) == 0


def test_places_may_be_beyond_32_bits() -> None:
    index = HashRowIndex()
    index.add(np.array(EXTREMES), 2**40 + np.arange(len(EXTREMES)))
    assert index.find(np.array(EXTREMES)).tolist() == [2**40 + i for i in range(len(EXTREMES))]


def test_an_empty_slot_is_not_the_id_0() -> None:
    index = HashRowIndex()
    assert index.find(np.array([0])).tolist() == [-1]
    index.add(np.array([0]), np.array([5]))
    assert index.find(np.array([0])).tolist() == [5]
    index.remove(np.array([0]))
    assert index.find(np.array([0])).tolist() == [-1]


@pytest.mark.parametrize("shard_count", [2, 64, 1024])
def test_the_keys_of_one_shard_do_not_meet(shard_count: int) -> None:
    """All have the same hash modulo shard_count; lines fill as they do with random keys."""
    keys = np.arange(200_000 * min(shard_count, 20))
    keys = keys[mix(keys.view(np.uint64)) % np.uint64(shard_count) == 0][:4000]
    index = HashRowIndex()
    index.add(keys, np.arange(keys.size))
    homes = np.bincount(lines_of(index).homes(keys))
    assert homes.max() <= 8 + 12  # 4000 keys in 1024 lines: mean 4, standard deviation 2
    assert np.count_nonzero(homes) > 900


def test_rows_that_come_and_go_need_no_more_memory() -> None:
    index = HashRowIndex()
    sizes = set()
    for start in range(0, 200_000, 1000):
        keys = np.arange(start, start + 1000)
        index.add(keys, keys)
        index.remove(keys - 5000)
        sizes.add(lines_of(index).size)
        assert len(index) == min(start + 1000, 5000)
    assert max(sizes) <= 2**14
    assert index.find(np.arange(194_990, 195_010)).tolist() == [-1] * 10 + list(
        range(195_000, 195_010)
    )


def test_a_table_that_was_large_shrinks() -> None:
    index = HashRowIndex()
    keys = np.arange(100_000)
    index.add(keys, keys)
    large = lines_of(index).size
    index.remove(keys[10:])
    assert lines_of(index).size < large / 50
    assert index.find(keys[:20]).tolist() == [*range(10), *[-1] * 10]


@pytest.mark.parametrize("call_number", [1, 2])
def test_without_memory_to_grow_it_stays_as_it_was(monkeypatch, call_number) -> None:
    monkeypatch.setattr(row_index, "_MOVED_LINES", 100)  # so that there is a second block
    index, ids = HashRowIndex(), np.arange(600)
    index.add(ids, ids)
    calls = itertools.count(1)
    fill = SlotTable.fill

    def failing(self: SlotTable, *rows: Ids) -> None:
        if next(calls) == call_number:
            raise MemoryError
        fill(self, *rows)

    with monkeypatch.context() as patched:
        patched.setattr(SlotTable, "fill", failing)
        with pytest.raises(MemoryError):
            index.add(np.arange(600, 900), np.arange(600, 900))
    assert (index.find(np.arange(900)) == np.where(np.arange(900) < 600, np.arange(900), -1)).all()
    index.add(np.arange(600, 900), np.arange(600, 900))
    assert (index.find(np.arange(900)) == np.arange(900)).all()
    assert len(index) == 900


def test_a_direct_index_touches_memory_only_where_rows_are() -> None:
    """Address space for 2^36 rows, which no machine here has as memory."""
    placement = RowPlacement(2**36, 1)
    index = DirectRowIndex(placement)
    ids = np.array([0, 2**35, 2**36 - 1])
    index.add(ids, np.array([2, 1, 2**33]))
    assert index.find(ids).tolist() == [2, 1, 2**33]
    assert index.find(ids - 1 + (ids == 0) * 2).tolist() == [-1, -1, -1]
