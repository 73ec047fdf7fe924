"""Goal: every kind of store keeps the one contract of store/contract.py.

Method: one suite, inherited by a class for each kind. Oracle: plain arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from harness.data.stored_rows import (
    add_seat,
    arrays_of,
    assert_rows,
    layout,
    places_of,
    put_rows,
    put_sums,
    reopened,
    rows_of,
)
from harness.stories.images import in_memory
from shardwell.errors import LimitError, ShardwellError, StorageError
from shardwell.numerics.elementwise import Code, Operation
from shardwell_server.store.contract import FREE, Layout, Position, Store, TableRecord, TableStorage
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

TOO_LARGE = 2**60
"""Rows that no address space has room for."""


class TableStoreContract:
    """What holds for every store; not collected by itself."""

    no_room_error: ClassVar[type[ShardwellError]]

    def make(self, path: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def tmp_path(self, tmp_path: Path) -> Iterator[Path]:
        with in_memory(tmp_path) as path:
            yield path

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        made = self.make(tmp_path)
        assert made.recover() == []
        assert made.recover_tables() == []
        made.recovered()
        yield made
        made.close()

    @pytest.mark.parametrize("slot_widths", [(), (5,), (5, 1)])
    @pytest.mark.parametrize("with_sum", [False, True])
    @pytest.mark.parametrize("dim", [1, 5])
    @pytest.mark.parametrize("row_capacity", [1, 7, 2**30])
    def test_arrays_of_rows_are_as_promised(
        self,
        store: Store,
        slot_widths: tuple[int, ...],
        with_sum: bool,
        dim: int,
        row_capacity: int,
    ) -> None:
        asked = layout(
            dim=dim, slot_widths=slot_widths, with_sum=with_sum, row_capacity=row_capacity
        )
        made = store.create(asked)
        for array in (made.keys, made.update_counts, made.last_steps):
            assert array.shape == (row_capacity,)
            assert array.dtype == np.int64
        assert made.has_sum.shape == (row_capacity,)
        assert made.has_sum.dtype == np.bool_
        assert made.weights.shape == (row_capacity, dim)
        assert (made.sums is not None) == with_sum
        assert [slot.shape for slot in made.slots] == [(row_capacity, w) for w in slot_widths]
        for array in arrays_of(made):
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert array.flags.aligned
            assert array.dtype.isnative

    def test_a_new_table_has_no_past(self, store: Store) -> None:
        made = store.create(layout())
        assert made.record == TableRecord()
        assert made.positions() == []
        assert list(made.events()) == []
        assert made.reserved_row_count == 0

    def test_a_name_is_used_once_but_parameters_have_their_own(self, store: Store) -> None:
        store.create(layout("t"))
        store.create(layout("T"))
        with pytest.raises(ValueError, match="'t' exists"):
            store.create(layout("t"))

    def test_a_table_without_room_is_an_error_and_its_name_stays_free(self, store: Store) -> None:
        with pytest.raises(self.no_room_error, match="'t'") as caught:
            store.create(layout(row_capacity=TOO_LARGE))
        assert caught.value.table == "t"
        store.create(layout())

    def test_committed_rows_are_as_they_were_written(self, store: Store) -> None:
        made = store.create(layout())
        for worker_id in ("w0", "w1"):
            add_seat(made, worker_id)
        position = Position(1, 7, 3)
        put_rows(made, places_of(0, 1, 2, 3), 5, record=TableRecord(version=9), position=position)
        put_rows(made, places_of(3, 1), 6)
        assert made.record == TableRecord(row_used=4, version=9)
        assert made.positions() == [Position(0), position]
        assert_rows(made, places_of(0, 2), 5)
        assert_rows(made, places_of(3, 1), 6)
        put_sums(made, places_of(2, 1), 4)
        assert made.sums is not None
        np.testing.assert_array_equal(made.sums[:4, 0], [0, 4, 4, 0])
        np.testing.assert_array_equal(made.has_sum[:4], [False, True, True, False])
        made.verify(places_of(0, 1, 2, 3))
        made.make_durable()
        made.sync()

    def test_a_change_hands_out_copies_of_rows(self, store: Store) -> None:
        made = store.create(layout())
        put_rows(made, places_of(*range(10)), 5)
        put_rows(made, places_of(4), 7)
        put_sums(made, places_of(4, 5), 3)
        before = rows_of(made, places_of(*range(10)))
        with made.change(places_of(9, 4), values=True, sums=True) as change:
            np.testing.assert_array_equal(change.weights, [[5, 5, 5], [7, 7, 7]])
            np.testing.assert_array_equal(change.slots[0], [[6, 6, 6], [8, 8, 8]])
            np.testing.assert_array_equal(change.slots[1], [[7], [9]])
            assert change.sums is not None
            np.testing.assert_array_equal(change.sums, [[0, 0, 0], [3, 3, 3]])
            for copy in (change.weights, *change.slots, change.sums):
                assert copy.flags.c_contiguous
                copy[:] = 99
        for one, other in zip(rows_of(made, places_of(*range(10))), before, strict=True):
            np.testing.assert_array_equal(one, other)
        with made.change(places_of(9), values=False, sums=True) as change:
            assert change.weights.shape == (0, 3)
            assert [slot.shape for slot in change.slots] == [(0, 3), (0, 1)]
        with made.change(places_of(9), values=True, sums=False) as change:
            assert change.sums is not None
            assert change.sums.shape == (0, 3)

    @pytest.mark.parametrize(("values", "sums"), [(True, False), (False, True), (True, True)])
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_change_of_rows_without_a_commit_never_began(
        self, store: Store, values: bool, sums: bool, fails: bool
    ) -> None:
        made = store.create(layout())
        add_seat(made, "w0")
        some = places_of(*range(20))
        put_rows(made, some, 5)
        put_sums(made, places_of(3, 4, 5), 8)
        before, record = rows_of(made, some), made.record
        changing = places_of(19, 3, 7, 4)

        def begin() -> None:
            with made.change(changing, values=values, sums=sums) as change:
                change.weights[:] = 77
                for array in arrays_of(made) if values and sums else []:
                    array[changing] = 1
                if values:
                    made.weights[changing] = change.weights
                    made.update_counts[changing] = FREE
                if sums and made.sums is not None:
                    made.sums[changing] = 9
                    made.has_sum[changing] = True
                if fails:
                    raise RuntimeError("half way")

        if fails:
            with pytest.raises(RuntimeError, match="half way"):
                begin()
        else:
            begin()
        for one, other in zip(rows_of(made, some), before, strict=True):
            np.testing.assert_array_equal(one, other)
        assert made.record == record
        assert made.positions() == [Position(0)]
        made.verify(some)
        put_rows(made, changing, 6)
        assert_rows(made, changing, 6)

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_change_in_place_is_whole_or_never_was(self, store: Store, fails: bool) -> None:
        made = store.create(layout(slot_widths=(3,)))
        if not made.updates_in_place:
            return
        some, changing = places_of(*range(20)), places_of(19, 3, 7, 4)
        put_rows(made, some, 5)
        before = rows_of(made, some)
        operations = (Operation(Code.ADD_SCALED, 0, 1), Operation(Code.COPY, 3, 1))

        def update() -> None:
            with made.change(changing, values=True, sums=False, in_place=True) as change:
                change.update(operations, np.full((4, 3), 2, np.float32))
                made.update_counts[changing] = 8
                if fails:
                    raise RuntimeError("half way")
                change.commit(made.record, None)

        if fails:
            with pytest.raises(RuntimeError, match="half way"):
                update()
            for one, other in zip(rows_of(made, some), before, strict=True):
                np.testing.assert_array_equal(one, other)
            return
        update()
        np.testing.assert_array_equal(made.weights[changing], 7)
        np.testing.assert_array_equal(made.slots[0][changing], 2)
        np.testing.assert_array_equal(made.weights[places_of(0, 18)], 5)

    def test_a_new_row_has_no_sum_of_a_change_that_never_was(self, store: Store) -> None:
        made = store.create(layout())
        put_rows(made, places_of(0), 5)
        made.reserve(3)
        with made.change(places_of(1, 2), values=False, sums=True):
            made.has_sum[1:3] = True
        put_rows(made, places_of(1, 2), 5)
        assert not made.has_sum[:3].any()
        put_sums(made, places_of(1), 3)
        made.verify(places_of(0, 1, 2))

    @pytest.mark.parametrize("slot_widths", [(), (3, 1)])
    @pytest.mark.parametrize("is_committed", [False, True])
    def test_rows_that_the_storage_writes(
        self, store: Store, slot_widths: tuple[int, ...], is_committed: bool
    ) -> None:
        """Old rows and new ones, in no order; what is given is what the rows are."""
        made = store.create(layout(slot_widths=slot_widths))
        put_rows(made, np.arange(5), 5)
        put_sums(made, places_of(1, 2), 6)
        before = rows_of(made, np.arange(5))
        places = places_of(6, 1, 5, 3)
        made.reserve(7)
        rng = np.random.default_rng(1)
        with made.change(places, values=True, sums=True) as change:
            change.weights[:] = rng.standard_normal(change.weights.shape)
            for slot in change.slots:
                slot[:] = rng.standard_normal(slot.shape)
            sums = rng.standard_normal((4, 3)).astype(np.float32)
            written = [change.weights.copy(), *(slot.copy() for slot in change.slots)]
            change.write(weights=change.weights, slots=change.slots)
            change.write(sums=sums)
            for array in (made.keys, made.update_counts, made.last_steps, made.has_sum):
                array[places] = 1
            if is_committed:
                change.commit(TableRecord(row_used=7), None)
        if not is_committed:
            for one, other in zip(rows_of(made, np.arange(5)), before, strict=True):
                np.testing.assert_array_equal(one, other)
            return
        for array, rows in zip(
            (made.weights, *made.slots, made.sums), [*written, sums], strict=True
        ):
            assert array is not None
            np.testing.assert_array_equal(array[places], rows)
        assert (made.weights[places_of(0, 2, 4)] == 5).all()
        self.look_again(store, made, np.arange(7))

    def look_again(self, store: Store, made: TableStorage, places: np.ndarray) -> None:
        """Whatever a kind of store can do to see that rows are whole."""
        made.verify(places)

    def test_a_change_of_no_rows(self, store: Store) -> None:
        made = store.create(layout(slot_widths=(), with_sum=False))
        add_seat(made, "w0")
        with made.change(places_of(), values=True, sums=True) as change:
            assert change.weights.shape == (0, 3)
            change.commit(TableRecord(version=1), Position(0, 1, 0))
        assert made.record.version == 1
        assert made.positions() == [Position(0, 1, 0)]

    def test_room_is_reserved_up_to_the_capacity(self, store: Store) -> None:
        made = store.create(layout(row_capacity=100))
        made.reserve(40)
        assert 40 <= made.reserved_row_count <= 100
        made.reserve(10)
        assert made.reserved_row_count >= 40
        made.reserve(100)
        assert made.reserved_row_count == 100
        with pytest.raises(LimitError, match=r"'t' can't have 101 rows .* capacity is 100"):
            made.reserve(101)
        assert made.reserved_row_count == 100
        put_rows(made, places_of(99), 3)
        assert_rows(made, places_of(99), 3)

    def test_the_largest_change(self, store: Store) -> None:
        made = store.create(layout())
        put_rows(made, np.arange(64), 1)
        put_rows(made, np.arange(64)[::-1].copy(), 2)
        assert_rows(made, np.arange(64), 2)

    def test_closing_a_table_may_be_repeated(self, store: Store) -> None:
        store.create(layout())
        store.close()
        store.close()


class TestMemoryStore(TableStoreContract):
    no_room_error = LimitError

    def make(self, path: Path) -> Store:
        return MemoryStore()

    def test_memory_is_that_of_rows(self, store: Store) -> None:
        """2^29 rows of 128 KiB in a test that would not survive having them."""
        made = store.create(layout(row_capacity=2**29, dim=2**14, slot_widths=()))
        put_rows(made, places_of(0, 2**29 - 1), 3)
        assert_rows(made, places_of(2**29 - 1), 3)


class TestMmapStore(TableStoreContract):
    no_room_error = StorageError

    def make(self, path: Path) -> Store:
        return MmapStore(path)

    def look_again(self, store: Store, made: TableStorage, places: np.ndarray) -> None:
        again = reopened(made.home.path.parent.parent)
        again.verify(places)
        for one, other in zip(rows_of(again, places), rows_of(made, places), strict=True):
            np.testing.assert_array_equal(one, other)


# A new process finds a table's rows again in its files, which cost what rows do. Method: the store
# is opened again on the same files while the first still has them. Oracle: what was written.


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MmapStore]:
    made = MmapStore(tmp_path)
    made.recover()
    made.recover_tables()
    made.recovered()
    yield made
    made.close()


@pytest.mark.parametrize("slot_widths", [(), (7,), (7, 1)])
@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize("dim", [1, 7])
def test_a_reopened_table_has_all_rows(
    store: MmapStore,
    tmp_path: Path,
    slot_widths: tuple[int, ...],
    with_sum: bool,
    dim: int,
) -> None:
    asked = layout(
        dim=dim,
        slot_widths=slot_widths,
        with_sum=with_sum,
        description={"any": ["thing", 1, 0.1]},
    )
    made = store.create(asked)
    for worker_id in ("w0", "w1", "w2"):
        add_seat(made, worker_id)
    made.log({"kind": "other", "number": 0.1})
    rng = np.random.default_rng(dim)
    for number in range(5):
        used = made.record.row_used
        places = rng.permutation(used + 10)[: 20 + number]
        places = np.union1d(places, np.arange(used, places.max(initial=used) + 1))
        record = TableRecord(version=2**40 + number, sample_total=7, shift=-3)
        position = Position(number % 2, 2**40 + number, number)
        put_rows(made, places, number + 1, record=record, position=position)
        made_rows = np.arange(made.record.row_used)
        weights = rng.standard_normal((made_rows.size, dim)).astype(np.float32)
        for start in range(0, made_rows.size, 64):
            part = made_rows[start : start + 64]
            with made.change(part, values=True, sums=with_sum) as change:
                made.weights[part] = weights[part]
                if made.sums is not None:
                    made.sums[part] = -weights[part]
                    made.has_sum[part] = part % 3 == number % 3
                change.commit(made.record, None)
    again = reopened(tmp_path)
    again.verify(made_rows[::-1].copy())
    again.verify(made_rows)
    assert again.record == made.record
    assert again.positions() == made.positions()
    assert again.positions()[0] == Position(0, 2**40 + 4, 4)
    assert list(again.events()) == list(made.events())
    assert again.reserved_row_count == made.record.row_used
    for one, other in zip(rows_of(again, made_rows), rows_of(made, made_rows), strict=True):
        np.testing.assert_array_equal(one, other)
    put_rows(again, places_of(0, made_rows.size), 9)
    assert_rows(reopened(tmp_path), places_of(0, made_rows.size), 9)


def test_a_reopened_store_has_its_layout(store: MmapStore, tmp_path: Path) -> None:
    asked = [layout("t"), layout("T", dim=2, slot_widths=(), with_sum=False, row_capacity=9)]
    for one in asked:
        store.create(one)
    again = MmapStore(tmp_path)
    again.recover()
    assert [found for found, _ in again.recover_tables()] == asked
    with pytest.raises(ValueError, match="'T' exists"):
        again.create(layout("T"))
    again.create(layout("u"))
    third = MmapStore(tmp_path)
    third.recover()
    assert [found.name for found, _ in third.recover_tables()] == ["t", "T", "u"]


def test_files_cost_what_rows_do(store: MmapStore, tmp_path: Path) -> None:
    """2^34 rows, 16 TiB of files on a disk that has no such room."""
    asked = layout(dim=250, slot_widths=(), with_sum=False, row_capacity=2**34)
    made = store.create(asked)
    put_rows(made, np.arange(64), 3)
    weights = tmp_path / "tables" / "000001" / "weights"
    assert weights.stat().st_size == 2**34 * 1000
    files = list(weights.parent.iterdir())
    assert sum(path.stat().st_blocks * 512 for path in files) < 4 << 20
    assert_rows(reopened(tmp_path), np.arange(64), 3)


def test_rows_of_an_earlier_process_are_verified_once(store: MmapStore, tmp_path: Path) -> None:
    put_rows(store.create(layout()), np.arange(50), 3)
    again = reopened(tmp_path)
    again.weights[7, 1] = 4  # as damage would
    again.verify(np.arange(7))
    again.verify(np.arange(8, 50))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"weights: the row at place 7 \(id 1007\) .*'t'"):
            again.verify(np.arange(50))
        with pytest.raises(StorageError, match="place 7"):
            again.change(places_of(3, 7), values=False, sums=True)
    again.weights[7, 1] = 3
    again.verify(places_of(7))
    again.weights[7, 1] = 4  # no call looks again
    again.verify(np.arange(50))
    with pytest.raises(StorageError, match="place 7"):
        reopened(tmp_path).verify(np.arange(50))


def test_a_table_that_was_never_made_is_removed(store: MmapStore, tmp_path: Path) -> None:
    store.create(layout())
    left = tmp_path / "tables" / "000002.new"
    left.mkdir()
    (left / "weights").write_bytes(b"half")
    reopened(tmp_path)
    assert not left.exists()


def test_tables_and_parameters_have_their_own_names(store: MmapStore, tmp_path: Path) -> None:
    store.create(layout("t"))
    parameter = Layout(name="t", slice_size=5, chunk_element_count=16, with_sum=False)
    store.create(parameter)
    again = MmapStore(tmp_path)
    assert [found.name for found, _ in again.recover()] == ["t"]
    assert [found.name for found, _ in again.recover_tables()] == ["t"]
