"""Goal: every kind of store keeps the one contract of store/contract.py.

Method: one suite, inherited by a class for each kind; a new kind adds a class that makes it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from shardwell.errors import LimitError, ShardwellError, StorageError
from shardwell.numerics import elementwise
from shardwell_server.store.contract import ChunkRecord, Layout, ParameterStorage, Store, Transition
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

CHUNK_ELEMENT_COUNT = 512
TOO_LARGE = 2**48
"""Elements of a slice that no machine has room for: 1 PiB, more than an address space."""


def layout(name: str, slice_size: int, *, slot_count: int, with_sum: bool) -> Layout:
    return Layout(
        name=name,
        slice_size=slice_size,
        chunk_element_count=CHUNK_ELEMENT_COUNT,
        with_sum=with_sum,
        initial_slots=(0.0,) * slot_count,
    )


def arrays_of(storage: ParameterStorage) -> list[np.ndarray]:
    total = [] if storage.gradient_sum is None else [storage.gradient_sum]
    return [storage.weights, *total, *storage.slots]


def change(
    storage: ParameterStorage,
    chunk_index: int,
    transition: Transition,
    value: float,
    *,
    version: int = 0,
    total_factor: float = 0.0,
    seat_index: int = 0,
    step: int = 0,
    is_committed: bool = True,
) -> ChunkRecord:
    """Fills what a transition writes of a chunk with `value`, a slot with one more."""
    start = chunk_index * CHUNK_ELEMENT_COUNT
    if transition is Transition.CLOSE:
        arrays = [storage.weights, *storage.slots]
    else:
        assert storage.gradient_sum is not None
        arrays = [storage.gradient_sum]
    parts = [array[start : start + CHUNK_ELEMENT_COUNT] for array in arrays]
    record = ChunkRecord(version, 1, 2, total_factor, 3)
    with storage.change(chunk_index, transition) as changing:
        for begin, end in changing.blocks(parts[0].size):
            for number, part in enumerate(parts):
                part[begin:end] = value + number
        if is_committed:
            changing.commit(record, seat_index, step)
    return record


def add_seat(storage: ParameterStorage, worker_id: str) -> None:
    storage.add_seat()
    storage.log({"kind": "seat", "worker_id": worker_id})


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is written in several blocks."""
    monkeypatch.setattr(elementwise, "BLOCK_ELEMENT_COUNT", 100)


class StoreContract:
    """What holds for every store; not collected by itself."""

    no_room_error: ClassVar[type[ShardwellError]]

    def make(self, path: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        made = self.make(tmp_path)
        assert made.recover() == []
        yield made
        made.close()

    @pytest.mark.parametrize("slice_size", [0, 1, 7, 1024, 100_003])
    @pytest.mark.parametrize("slot_count", [0, 1, 2, 3])
    @pytest.mark.parametrize("with_sum", [False, True])
    def test_arrays_are_as_promised(
        self, store: Store, slice_size: int, slot_count: int, with_sum: bool
    ) -> None:
        asked = layout("p", slice_size, slot_count=slot_count, with_sum=with_sum)
        storage = store.create(asked)
        assert (storage.gradient_sum is not None) == with_sum
        assert len(storage.slots) == slot_count
        arrays = arrays_of(storage)
        for array in arrays:
            assert array.shape == (slice_size,)
            assert array.dtype == np.float32
            assert array.dtype.isnative
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert array.flags.aligned
            assert not array.any()
        assert asked.size_bytes == 4 * slice_size * len(arrays)

    def test_arrays_share_no_memory(self, store: Store) -> None:
        first = store.create(layout("p", 1000, slot_count=2, with_sum=True))
        second = store.create(layout("q", 1000, slot_count=2, with_sum=True))
        arrays = arrays_of(first) + arrays_of(second)
        for number, array in enumerate(arrays, start=1):
            array[:] = number
        for number, array in enumerate(arrays, start=1):
            assert (array == number).all()

    def test_a_name_is_used_once(self, store: Store) -> None:
        first = store.create(layout("p", 10, slot_count=0, with_sum=False))
        first.weights[:] = 3
        with pytest.raises(ValueError, match="'p' exists"):
            store.create(layout("p", 10, slot_count=0, with_sum=False))
        assert (first.weights == 3).all()

    @pytest.mark.parametrize("name", ["a", "A", "a.b", "0", "a" * 128, "lock", "shard.json", "a."])
    def test_every_allowed_name_has_its_own_storage(self, store: Store, name: str) -> None:
        other = store.create(layout("other", 4, slot_count=0, with_sum=False))
        storage = store.create(layout(name, 4, slot_count=1, with_sum=True))
        for array in arrays_of(storage):
            array[:] = 5
        assert not other.weights.any()

    def test_names_that_differ_in_case_are_two(self, store: Store) -> None:
        lower = store.create(layout("model", 4, slot_count=0, with_sum=False))
        upper = store.create(layout("MODEL", 4, slot_count=0, with_sum=False))
        lower.weights[:] = 1
        assert not upper.weights.any()

    def test_a_parameter_without_room_is_an_error_and_its_name_stays_free(
        self, store: Store
    ) -> None:
        with pytest.raises(self.no_room_error, match="of 'p'"):
            store.create(layout("p", TOO_LARGE, slot_count=2, with_sum=True))
        assert store.create(layout("p", 10, slot_count=0, with_sum=False)).weights.size == 10

    def test_many_parameters(self, store: Store) -> None:
        made = [
            store.create(layout(f"p{size}", size, slot_count=size % 3, with_sum=size % 2 == 1))
            for size in range(200)
        ]
        for number, storage in enumerate(made):
            storage.weights[:] = number
        assert [storage.weights.sum() for storage in made] == [n * n for n in range(200)]

    def test_what_was_removed_is_gone_and_its_name_free(self, store: Store) -> None:
        kept = store.create(layout("kept", 8, slot_count=0, with_sum=False))
        removed = store.create(layout("m", 8, slot_count=1, with_sum=True))
        kept.weights[:], removed.weights[:] = 1.0, 2.0
        store.remove(removed.layout)
        np.testing.assert_array_equal(removed.weights, 2.0)  # of a call that is under way
        again = store.create(layout("m", 9, slot_count=0, with_sum=False))
        np.testing.assert_array_equal(again.weights, np.zeros(9))
        np.testing.assert_array_equal(kept.weights, 1.0)

    def test_what_became_of_names(self, store: Store) -> None:
        assert [*store.name_events()] == []
        first, second = {"kind": "marked", "name": "m"}, {"kind": "deleted", "name": "m"}
        store.log_name(first, [first])
        store.log_name(second, [second])
        assert [*store.name_events()][-1] == second

    def test_closing_may_be_repeated(self, store: Store) -> None:
        store.create(layout("p", 10, slot_count=1, with_sum=True))
        store.close()
        store.close()

    @pytest.mark.parametrize("slice_size", [0, 1, 512, 1300])
    def test_a_new_parameter_has_no_past(self, store: Store, slice_size: int) -> None:
        storage = store.create(layout("p", slice_size, slot_count=1, with_sum=True))
        chunk_count = -(-slice_size // CHUNK_ELEMENT_COUNT)
        assert storage.records() == [ChunkRecord()] * chunk_count
        assert storage.last_steps() == []
        assert list(storage.events()) == []
        for chunk_index in range(chunk_count):
            storage.verify(chunk_index)

    @pytest.mark.parametrize("slot_count", [0, 1, 2, 3])
    def test_what_is_committed_is_as_it_was_written(self, store: Store, slot_count: int) -> None:
        storage = store.create(layout("p", 1300, slot_count=slot_count, with_sum=True))
        assert storage.gradient_sum is not None
        add_seat(storage, "w0")
        change(storage, 2, Transition.FIRST, 5, total_factor=1.0)
        assert (storage.gradient_sum[1024:] == 5).all()
        change(storage, 2, Transition.ADD, 7, total_factor=1.0, step=1)
        assert (storage.gradient_sum[1024:] == 7).all()
        change(storage, 2, Transition.CLOSE, 9, version=1, step=2)
        storage.verify(2)
        for number, array in enumerate((storage.weights, *storage.slots)):
            assert (array[1024:] == 9 + number).all()
            assert not array[:1024].any()
        assert not storage.gradient_sum[:1024].any()

    def test_first_weights_settle(self, store: Store) -> None:
        storage = store.create(layout("p", 1300, slot_count=1, with_sum=False))
        storage.weights[:] = np.arange(1300)
        storage.slots[0][:] = 7
        for chunk_index in range(3):
            storage.settle(chunk_index, ChunkRecord(5))
            storage.verify(chunk_index)
        np.testing.assert_array_equal(storage.weights, np.arange(1300))
        np.testing.assert_array_equal(storage.slots[0], 7)

    def test_seats_and_events_of_an_empty_slice(self, store: Store) -> None:
        storage = store.create(layout("p", 0, slot_count=2, with_sum=True))
        for number in range(70):
            add_seat(storage, f"w{number}")
        storage.compact([{"kind": "seat", "worker_id": f"w{number}"} for number in range(70)])

    def test_chunks_are_changed_at_once(self, store: Store) -> None:
        """By more threads than there is room for at a time; chunk by chunk the last one counts."""
        chunk_count, step_count, seat_count = 12, 20, 3
        storage = store.create(
            layout("p", chunk_count * CHUNK_ELEMENT_COUNT - 5, slot_count=1, with_sum=True)
        )
        for number in range(seat_count):
            add_seat(storage, f"w{number}")

        def work(chunk_index: int) -> None:
            for step in range(step_count):
                given = {"version": step, "step": step, "seat_index": step % seat_count}
                change(storage, chunk_index, Transition.FIRST, step, total_factor=1.0, **given)
                change(storage, chunk_index, Transition.ADD, -step, total_factor=1.0, **given)
                value = 100 * chunk_index + step
                change(storage, chunk_index, Transition.CLOSE, value, **given)
                storage.verify(chunk_index)

        with ThreadPoolExecutor(chunk_count) as threads:
            list(threads.map(work, range(chunk_count)))
        last = 100 * (np.arange(storage.weights.size) // CHUNK_ELEMENT_COUNT) + step_count - 1
        np.testing.assert_array_equal(storage.weights, last)
        np.testing.assert_array_equal(storage.slots[0], last + 1)


class TestMemoryStore(StoreContract):
    no_room_error = LimitError

    def make(self, path: Path) -> Store:
        return MemoryStore()

    def test_without_room_the_parameter_is_named(self, store: Store) -> None:
        with pytest.raises(LimitError, match=f"{16 * TOO_LARGE} bytes of 'p'") as caught:
            store.create(layout("p", TOO_LARGE, slot_count=2, with_sum=True))
        assert caught.value.parameter == "p"

    def test_nothing_is_left_after_closing(self, store: Store) -> None:
        store.create(layout("p", 10, slot_count=0, with_sum=False)).weights[:] = 3
        store.close()
        assert not store.create(layout("p", 10, slot_count=0, with_sum=False)).weights.any()


class TestMmapStore(StoreContract):
    no_room_error = StorageError

    def make(self, path: Path) -> Store:
        return MmapStore(path)

    def reopened(self, path: Path) -> ParameterStorage:
        ((_, storage),) = self.make(path).recover()
        for chunk_index in range(len(storage.records())):
            storage.verify(chunk_index)
        return storage

    def test_storage_under_its_old_name_keeps_everything(self, store: Store) -> None:
        asked = layout("m", 1300, slot_count=1, with_sum=True)
        old = store.create(asked)
        add_seat(old, "w0")
        add_seat(old, "w1")
        first = change(old, 2, Transition.FIRST, 5, total_factor=1.0, seat_index=1, step=4)
        closed = change(old, 1, Transition.CLOSE, 9, version=1, step=2)
        old.settle(0, ChunkRecord(7))
        old.log({"kind": "learning_rate", "from_step": 3})
        new = store.rename("m", dataclasses.replace(asked, name="n"))
        old.is_retired = True
        assert (new.layout.name, new.is_retired) == ("n", False)
        assert new.records() == [ChunkRecord(7), closed, first]
        assert new.last_steps() == [[-1, 2, -1], [-1, -1, 4]]
        assert [event["kind"] for event in new.events()] == ["seat", "seat", "learning_rate"]
        for before, after in zip(arrays_of(old), arrays_of(new), strict=True):
            assert np.shares_memory(before, after)
        for refused in (
            lambda: change(old, 2, Transition.ADD, 7, total_factor=1.0),
            lambda: old.log({"kind": "seat"}),
            lambda: old.settle(0, ChunkRecord(8)),
        ):
            with pytest.raises(StorageError, match="'m' was given up meanwhile"):
                refused()
        change(new, 2, Transition.ADD, 8, total_factor=1.0, step=5)
        assert new.last_steps()[0] == [-1, 2, 5]
        store.create(asked)  # the name is free
        with pytest.raises(ValueError, match="exists"):
            store.create(dataclasses.replace(asked, name="n"))
        store.remove(new.layout)

    @pytest.mark.parametrize("slice_size", [0, 1, 512, 1300])
    @pytest.mark.parametrize("slot_count", [0, 1, 2, 3])
    def test_a_reopened_store_has_everything(
        self, store: Store, tmp_path: Path, slice_size: int, slot_count: int
    ) -> None:
        asked = Layout(
            name="p",
            slice_size=slice_size,
            chunk_element_count=CHUNK_ELEMENT_COUNT,
            with_sum=True,
            initial_slots=(0.0, 0.1, 0.2)[:slot_count],
            description={"any": ["thing", 1, 0.1]},
        )
        storage = store.create(asked)
        ((layout_again, fresh),) = self.make(tmp_path).recover()
        assert layout_again == asked
        for value, slot in zip((0.0, 0.1, 0.2), fresh.slots, strict=False):
            assert (slot == np.float32(value)).all()
        for number in range(3):
            add_seat(storage, f"w{number}")
        storage.log({"kind": "other", "text": '\n\r\u2028\x00\ud800 "\\', "number": 0.1})
        events = list(storage.events())
        assert len(events) == 4
        records = storage.records()
        marks = [[-1] * len(records) for _ in range(3)]
        for chunk_index in range(len(records)):
            change(storage, chunk_index, Transition.CLOSE, 4, version=1, seat_index=1)
            records[chunk_index] = change(
                storage, chunk_index, Transition.FIRST, 6, version=1, total_factor=0.5, step=5
            )
            marks[0][chunk_index], marks[1][chunk_index] = 5, 0
        again = self.reopened(tmp_path)
        assert again.records() == records
        assert again.last_steps() == marks
        assert list(again.events()) == events
        for one, other in zip(arrays_of(again), arrays_of(storage), strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("transition", list(Transition))
    def test_a_change_that_writes_nothing_leaves_the_arrays(
        self, store: Store, tmp_path: Path, transition: Transition
    ) -> None:
        """As a step does in which no worker has weight."""
        storage = store.create(layout("p", 1300, slot_count=2, with_sum=True))
        add_seat(storage, "w0")
        change(storage, 1, Transition.CLOSE, 3, version=1)
        arrays = [array.copy() for array in arrays_of(storage)]
        record = ChunkRecord(version=2)
        with storage.change(1, transition) as begun:
            begun.commit(record, 0, 1)
        again = self.reopened(tmp_path)
        again.verify(1)
        assert again.records()[1] == record
        for one, other in zip(arrays_of(again), arrays, strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("transition", list(Transition))
    def test_a_change_without_a_commit_never_began(
        self, store: Store, tmp_path: Path, transition: Transition
    ) -> None:
        storage = store.create(layout("p", 1300, slot_count=2, with_sum=True))
        add_seat(storage, "w0")
        change(storage, 1, Transition.CLOSE, 3, version=1)
        if transition is not Transition.FIRST:  # which overwrites what has no meaning
            change(storage, 1, Transition.FIRST, 4, version=1, total_factor=1.0, step=1)
        records, arrays = storage.records(), [array.copy() for array in arrays_of(storage)]
        change(storage, 1, transition, 99, is_committed=False)
        array = storage.weights if transition is Transition.CLOSE else arrays_of(storage)[1]

        def fail_half_way() -> None:
            with storage.change(1, transition) as begun:
                for start, stop in begun.blocks(CHUNK_ELEMENT_COUNT):
                    array[512:][start:stop] = 99
                    if start:
                        raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            fail_half_way()
        for found in (storage, self.reopened(tmp_path)):
            assert found.records() == records
            found.verify(1)
            for number, array in enumerate(arrays_of(found)):
                if transition is not Transition.FIRST or number != 1:
                    np.testing.assert_array_equal(array, arrays[number])
        total_factor = 0.0 if transition is Transition.CLOSE else 1.0
        change(storage, 1, transition, 5, version=2, total_factor=total_factor, step=2)
        self.reopened(tmp_path)

    def test_room_for_a_seat_that_was_cut_off(self, store: Store, tmp_path: Path) -> None:
        """A row of marks is longer than a page here, and file systems may grow by pages."""
        storage = store.create(layout("p", 600 * CHUNK_ELEMENT_COUNT, slot_count=0, with_sum=False))
        add_seat(storage, "w0")
        change(storage, 599, Transition.CLOSE, 1, version=1)
        (path,) = tmp_path.glob("parameters/*/marks")
        whole = path.stat().st_size
        os.truncate(path, whole + 4096)
        assert self.reopened(tmp_path).last_steps() == [[-1] * 599 + [0]]
        os.truncate(path, whole - 4096)
        with pytest.raises(StorageError, match=r"marks has 0 rows for 1 seats"):
            self.reopened(tmp_path)

    def test_a_seat_that_was_not_logged_is_none(self, store: Store, tmp_path: Path) -> None:
        storage = store.create(layout("p", 600, slot_count=0, with_sum=False))
        for _ in range(100):
            storage.add_seat()
        (path,) = tmp_path.glob("parameters/*/marks")
        assert path.stat().st_size == 4096
        assert self.reopened(tmp_path).last_steps() == []
        add_seat(storage, "w0")
        assert self.reopened(tmp_path).last_steps() == [[-1, -1]]

    def test_what_was_never_made_is_removed(self, store: Store, tmp_path: Path) -> None:
        store.create(layout("p", 10, slot_count=0, with_sum=False))
        left = tmp_path / "parameters" / "000002.new"
        left.mkdir()
        (left / "weights").write_bytes(b"half")
        again = self.make(tmp_path)
        assert [found.name for found, _ in again.recover()] == ["p"]
        assert not left.exists()
        again.create(layout("q", 10, slot_count=0, with_sum=False))
        assert sorted(found.name for found, _ in self.make(tmp_path).recover()) == ["p", "q"]
