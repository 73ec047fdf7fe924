"""Goal: every kind of store keeps the one contract of store.py.

Method: one suite, inherited by a class for each kind; a new kind adds a class that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shardwell.errors import LimitError
from shardwell_server.store import Layout, MemoryStore, ParameterStorage, Store

TOO_LARGE = 2**48
"""Elements of a slice that no machine has room for: 1 PiB, more than an address space."""


def layout(name: str, slice_size: int, *, slot_count: int, with_sum: bool) -> Layout:
    return Layout(
        name=name,
        slice_size=slice_size,
        chunk_element_count=512,
        with_sum=with_sum,
        initial_slots=(0.0,) * slot_count,
    )


def arrays_of(storage: ParameterStorage) -> list[np.ndarray]:
    total = [] if storage.gradient_sum is None else [storage.gradient_sum]
    return [storage.weights, *total, *storage.slots]


class StoreContract:
    """What holds for every store; not collected by itself."""

    def make(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        made = self.make()
        yield made
        made.close()

    @pytest.mark.parametrize("slice_size", [0, 1, 7, 1024, 100_003])
    @pytest.mark.parametrize("slot_count", [0, 1, 2])
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

    def test_without_room_the_limit_is_an_error_and_the_name_stays_free(self, store: Store) -> None:
        with pytest.raises(LimitError, match=f"{TOO_LARGE} elements of 'p'") as caught:
            store.create(layout("p", TOO_LARGE, slot_count=2, with_sum=True))
        assert caught.value.parameter == "p"
        assert store.create(layout("p", 10, slot_count=0, with_sum=False)).weights.size == 10

    def test_many_parameters(self, store: Store) -> None:
        made = [
            store.create(layout(f"p{size}", size, slot_count=size % 3, with_sum=size % 2 == 1))
            for size in range(200)
        ]
        for number, storage in enumerate(made):
            storage.weights[:] = number
        assert [storage.weights.sum() for storage in made] == [n * n for n in range(200)]

    def test_closing_may_be_repeated(self, store: Store) -> None:
        store.create(layout("p", 10, slot_count=1, with_sum=True))
        store.close()
        store.close()


class TestMemoryStore(StoreContract):
    def make(self) -> Store:
        return MemoryStore()

    def test_nothing_is_left_after_closing(self, store: Store) -> None:
        store.create(layout("p", 10, slot_count=0, with_sum=False)).weights[:] = 3
        store.close()
        assert not store.create(layout("p", 10, slot_count=0, with_sum=False)).weights.any()
