"""Goal: an index tells of each id what a dict would, many at a time.

Method: a hypothesis state machine drives both kinds beside a dict, with ids that collide on
purpose; then single ideas: bad keys, growth and shrinking, what remains of removed rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.data.row_keys import EXTREMES, colliding_keys
from harness.machines import cases
from shardwell.placement.rows import Ids, RowPlacement, mix
from shardwell_server.shard.table import index as row_index
from shardwell_server.shard.table.hash_slots import LINE, SlotTable
from shardwell_server.shard.table.index import DirectRowIndex, HashRowIndex

ROW_COUNT, SHARD_COUNT, SHARD = 10_007, 3, 1

starts = st.floats(0, 0.99)
shares = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])


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


RowIndex = DirectRowIndex | HashRowIndex


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


# A hash index tells what a dict would while it grows, which is little work at a time. Method: a
# hypothesis state machine beside a dict, with tables of two lines and more, of which a change
# moves as few as one, keys that meet, and memory that is refused anywhere in a move. Then single
# ideas, and a count of the lines that are moved.


SALT = 0x1234567890ABCDEF
LOAD_MAX, ROWS_MIN = 0.6, 64

growing_shares = st.sampled_from([0.0, 0.0, 0.003, 0.01, 0.03, 0.1, 0.4])
points = st.sampled_from(["begin", "rows", "fill", "clear"])


def without_memory(patched: pytest.MonkeyPatch, point: str, call_number: int) -> None:
    """From that call on there is none for new tables or for moving, at one point of it."""
    calls = itertools.count(1)

    def refused(work: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any) -> Any:
            if next(calls) < call_number:
                return work(*arguments)
            before(*arguments)
            raise MemoryError

        return replacement

    def fill_half(table: SlotTable, ids: Ids, marks: Ids) -> None:
        table.insert(ids[::2], marks[::2])

    if point == "begin":
        patched.setattr(row_index, "SlotTable", refused(SlotTable, lambda *_: None))
    else:
        before = fill_half if point == "fill" else lambda *_: None
        patched.setattr(SlotTable, point, refused(getattr(SlotTable, point), before))


def make_tiny(patched: pytest.MonkeyPatch) -> None:
    """Two lines at first; a row moves a line; blocks of three."""
    patched.setattr(row_index, "_SIZE_BITS_MIN", 4)
    patched.setattr(row_index, "_MOVED_ROWS_MIN", 1)
    patched.setattr(row_index, "_MOVED_LINES", 3)


def old_lines(index: HashRowIndex) -> SlotTable | None:
    """The lines that have not all been moved yet."""
    return index._old


def moved_count(index: HashRowIndex) -> int:
    return index._moved


def live_keys(table: SlotTable) -> set[int]:
    return set(table.rows(0, table.line_count)[0].tolist())


def check_state(index: HashRowIndex) -> None:
    """What HashRowIndex says of itself."""
    table, old = lines_of(index), old_lines(index)
    if old is None:
        assert table.used_count <= LOAD_MAX * table.size
        return
    assert 0 <= moved_count(index) < old.line_count
    assert not old._slots[: moved_count(index) * LINE].any()
    if moved_count(index) < index._filled:
        return
    assert not live_keys(old) & live_keys(table)
    lines_per_row = max(old.size // table.size, 1)
    rows_left = (old.line_count - moved_count(index)) / lines_per_row
    assert table.used_count + old.count + rows_left <= LOAD_MAX * table.size


class GrowingMachine(RuleBasedStateMachine):
    """Runs of a pool of ids are added, moved, removed and looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = pytest.MonkeyPatch()
        make_tiny(self.tiny)

    def teardown(self) -> None:
        self.tiny.undo()

    @initialize(kind=st.sampled_from(["random", "last", "middle", "first", "lines", "extremes"]))
    def open(self, kind: str) -> None:
        random = np.random.default_rng(7)
        pools = {
            "random": lambda: random.integers(-(2**63), 2**63 - 1, 1000),
            "last": lambda: colliding_keys(200, SALT),
            "middle": lambda: colliding_keys(200, SALT, 1 << 63),
            "first": lambda: colliding_keys(200, SALT, 0),
            "lines": lambda: random.permutation(
                np.concatenate([colliding_keys(60, SALT, (n << 61) + 2**60) for n in range(8)])
            ),
            "extremes": lambda: np.array(EXTREMES),
        }
        self.pool = pools[kind]()
        self.index = HashRowIndex(SALT)
        self.model: dict[int, int] = {}
        self.places = itertools.count()

    def some(self, start: float, share: float) -> Ids:
        first = int(start * self.pool.size)
        return self.pool[first : first + max(int(share * self.pool.size), 1)]

    def some_places(self, ids: Ids) -> Ids:
        return np.array(list(itertools.islice(self.places, ids.size)))

    @rule(start=starts, share=growing_shares, times=st.sampled_from([1, 1, 3]))
    def add(self, start: float, share: float, times: int) -> None:
        """New ones, moved ones, such as were removed, and some several times."""
        ids = np.tile(self.some(start, share), times)
        places = self.some_places(ids)
        self.index.add(ids, places)
        self.model.update(zip(ids.tolist(), places.tolist(), strict=True))

    @rule(start=starts, share=growing_shares, point=points, call_number=st.integers(1, 3))
    def add_without_memory(self, start: float, share: float, point: str, call_number: int) -> None:
        """All or nothing."""
        ids = self.some(start, share)
        places = self.some_places(ids)
        with pytest.MonkeyPatch.context() as patched:
            without_memory(patched, point, call_number)
            try:
                self.index.add(ids, places)
            except MemoryError:
                return
        self.model.update(zip(ids.tolist(), places.tolist(), strict=True))

    @rule(start=starts, share=growing_shares)
    def remove(self, start: float, share: float) -> None:
        ids = self.some(start, share)
        self.index.remove(ids)
        for key in ids.tolist():
            self.model.pop(key, None)

    @rule(start=starts, share=growing_shares, point=points, call_number=st.integers(1, 3))
    def remove_without_memory(
        self, start: float, share: float, point: str, call_number: int
    ) -> None:
        """It needs none to forget rows."""
        with pytest.MonkeyPatch.context() as patched:
            without_memory(patched, point, call_number)
            self.remove(start, share)

    @rule(count=st.sampled_from([0, 0, 1, 10, 300]))
    def make_room(self, count: int) -> None:
        """Changes nothing that can be seen."""
        self.index.make_room(count)

    @rule(start=starts, share=growing_shares)
    def find(self, start: float, share: float) -> None:
        ids = np.repeat(self.some(start, share), 2)
        assert self.index.find(ids).tolist() == [self.model.get(key, -1) for key in ids.tolist()]

    @invariant()
    def all_are_there(self) -> None:
        found = self.index.find(self.pool).tolist()
        assert found == [self.model.get(key, -1) for key in self.pool.tolist()]

    @precondition(lambda self: moved_count(self.index) >= self.index._filled)
    @invariant()
    def they_are_counted(self) -> None:
        assert len(self.index) == len(self.model)

    @invariant()
    def the_state_is_what_it_says(self) -> None:
        check_state(self.index)


TestGrowing, TestMoreGrowing = cases(GrowingMachine, max_examples=100, step_count=40)


class MovedLines:
    """Counts those that are moved."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.count = 0
        rows = SlotTable.rows

        def counted(table: SlotTable, start: int, stop: int) -> tuple[Ids, Ids]:
            self.count += stop - start
            return rows(table, start, stop)

        patched.setattr(SlotTable, "rows", counted)

    def of(self, call: Callable[[], None]) -> int:
        """In one call."""
        before = self.count
        call()
        return self.count - before


@pytest.mark.parametrize("row_count", [1, 50, 1000, 8192])
def test_an_add_moves_no_more_lines_than_it_has_rows(monkeypatch, row_count) -> None:
    moved, index = MovedLines(monkeypatch), HashRowIndex()
    keys, line_count, moving_count = np.arange(10_000 if row_count <= 50 else 100_000), 0, 0
    index.add(keys[:600], keys[:600])
    for start in range(600, keys.size, row_count):
        new = keys[start : start + row_count]
        lines = moved.of(lambda new=new: index.add(new, new))
        assert lines <= max(new.size, ROWS_MIN)
        line_count += lines
        moving_count += old_lines(index) is not None
        check_state(index)
    assert moving_count
    assert line_count >= lines_of(index).line_count / 4  # several growths, each of which moves all
    assert (index.find(keys) == keys).all()
    assert len(index) == keys.size


def test_after_removals_an_add_moves_four_times_as_many_at_the_most(monkeypatch) -> None:
    moved, index = MovedLines(monkeypatch), HashRowIndex()
    keys, lines = np.arange(400_000), []
    for start in range(0, keys.size, 500):
        new = keys[start : start + 500]
        lines.append(moved.of(lambda new=new: index.add(new, new)))
        if start >= 50_000 and len(index) > 4000:
            old = keys[start - 50_000 :][: 3 * 500]
            lines.append(moved.of(lambda old=old: index.remove(old)))
        check_state(index)
    assert 500 < max(lines) <= 4 * 1500
    where = index.find(keys)
    assert np.count_nonzero(where >= 0) == len(index)
    assert (where[where >= 0] == keys[where >= 0]).all()


def test_new_room_can_be_used_at_once(monkeypatch) -> None:
    """As at a shard's start: one table, and nothing is moved."""
    index, keys = HashRowIndex(), np.arange(100_000)
    index.make_room(keys.size)
    moved, table = MovedLines(monkeypatch), lines_of(index)
    assert old_lines(index) is None
    for start in range(0, keys.size, 9000):
        index.add(keys[start : start + 9000], keys[start : start + 9000])
    assert (moved.count, lines_of(index) is table) == (0, True)


def test_rows_that_stay_are_found_while_cleared_lines_are_given_back() -> None:
    """Two pieces of 2 MiB, each while others are still there."""
    index, keys = HashRowIndex(), np.random.default_rng(3).permutation(400_000)
    index.make_room(150_000)
    assert lines_of(index).line_count == 2 * 2**14
    index.add(keys[:150_000], keys[:150_000])
    added, states = 150_000, set()
    while added < keys.size:
        new = keys[added : added + 5000]
        index.add(new, new)
        added += 5000
        states.add((moved_count(index) // 2**14, old_lines(index) is None))
        assert (index.find(keys[:added]) == keys[:added]).all()
    assert {(0, False), (1, False), (2, True)} <= states


def test_each_growth_goes_on_after_memory_was_refused(monkeypatch) -> None:
    make_tiny(monkeypatch)
    index, keys = HashRowIndex(), np.random.default_rng(4).permutation(3000)
    added, refusal_count = 0, 0
    while added < keys.size:
        new = keys[added : added + 7]
        for point in ("begin", "rows", "fill", "clear"):
            with monkeypatch.context() as patched:
                without_memory(patched, point, 1)
                try:
                    index.add(new, new)
                except MemoryError:
                    refusal_count += 1
                    assert (index.find(new) == -1).all()
                else:
                    added += new.size
                    break
            assert (index.find(keys[:added]) == keys[:added]).all()
        else:
            index.add(new, new)
            added += new.size
        check_state(index)
    assert refusal_count > 8
    assert (index.find(keys) == keys).all()
    index.make_room(lines_of(index).size)  # moves what is left
    assert len(index) == keys.size


def test_without_memory_to_shrink_it_stays_as_large_as_it_was(monkeypatch) -> None:
    index, keys = HashRowIndex(), np.arange(20_000)
    index.make_room(keys.size)
    index.add(keys, keys)
    size = lines_of(index).size
    with monkeypatch.context() as patched:
        without_memory(patched, "begin", 1)
        index.remove(keys[10:])
    assert (len(index), lines_of(index).size) == (10, size)
    index.remove(keys[9:10])
    assert lines_of(index).size < size
    assert index.find(keys[:11]).tolist() == [*range(9), -1, -1]
