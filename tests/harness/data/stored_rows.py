"""Rows of a table as a store keeps them: written, read, and compared with what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwell_server.store.contract import Position, TableLayout, TableRecord, TableStorage
from shardwell_server.store.mmap.store import MmapStore


def layout(name: str = "t", **changed: Any) -> TableLayout:
    asked: dict[str, Any] = {
        "name": name,
        "dim": 3,
        "slot_widths": (3, 1),
        "row_capacity": 2**28,
        "rows_per_change_max": 64,
        "with_sum": True,
    }
    return TableLayout(**{**asked, **changed})


def places_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def add_seat(storage: TableStorage, worker_id: str) -> None:
    storage.add_seat()
    storage.log({"kind": "seat", "worker_id": worker_id})


def put_rows(
    storage: TableStorage,
    places: np.ndarray,
    value: float,
    *,
    record: TableRecord | None = None,
    position: Position | None = None,
) -> None:
    """Fills values of rows, new or not: weights with `value`, the others with numbers near it."""
    used = max(storage.record.row_used, int(places.max(initial=-1)) + 1)
    storage.reserve(used)
    with storage.change(places, values=True, sums=False) as change:
        storage.keys[places] = places + 1000
        storage.update_counts[places] = int(value)
        storage.last_steps[places] = int(value) + 1
        storage.weights[places] = value
        for number, slot in enumerate(storage.slots, start=1):
            slot[places] = value + number
        change.commit((record or storage.record)._replace(row_used=used), position)


def put_sums(storage: TableStorage, places: np.ndarray, value: float) -> None:
    with storage.change(places, values=False, sums=True) as change:
        assert storage.sums is not None
        storage.sums[places] = value
        storage.has_sum[places] = True
        change.commit(storage.record, None)


def arrays_of(storage: TableStorage) -> list[np.ndarray]:
    sums = [] if storage.sums is None else [storage.sums]
    whole = [storage.keys, storage.update_counts, storage.last_steps, storage.weights]
    return [*whole, *storage.slots, *sums, storage.has_sum]


def rows_of(storage: TableStorage, places: np.ndarray) -> list[np.ndarray]:
    return [array[places] for array in arrays_of(storage)]


def assert_rows(storage: TableStorage, places: np.ndarray, value: float) -> None:
    """They are what `put_rows` wrote."""
    np.testing.assert_array_equal(storage.keys[places], places + 1000)
    np.testing.assert_array_equal(storage.update_counts[places], int(value))
    np.testing.assert_array_equal(storage.last_steps[places], int(value) + 1)
    np.testing.assert_array_equal(storage.weights[places], np.float32(value))
    for number, slot in enumerate(storage.slots, start=1):
        np.testing.assert_array_equal(slot[places], np.float32(value + number))


def reopened(path: Path) -> TableStorage:
    """The one table that a new process finds there, where no parameter is."""
    store = MmapStore(path)
    assert store.recover() == []
    ((_, storage),) = store.recover_tables()
    return storage
