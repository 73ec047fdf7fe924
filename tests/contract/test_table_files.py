"""Goal: a new process finds a table's rows again in its files, which cost what rows do.

Method: the store is opened again on the same files while the first still has them. Oracle: what
was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.data.stored_rows import (
    add_seat,
    assert_rows,
    layout,
    places_of,
    put_rows,
    reopened,
    rows_of,
)
from harness.stories.images import in_memory
from shardwell.errors import StorageError
from shardwell_server.store import Layout, Position, TableRecord
from shardwell_server.store.mmap.store import MmapStore


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
    made = store.create_table(asked)
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
        store.create_table(one)
    again = MmapStore(tmp_path)
    again.recover()
    assert [found for found, _ in again.recover_tables()] == asked
    with pytest.raises(ValueError, match="'T' exists"):
        again.create_table(layout("T"))
    again.create_table(layout("u"))
    third = MmapStore(tmp_path)
    third.recover()
    assert [found.name for found, _ in third.recover_tables()] == ["t", "T", "u"]


def test_files_cost_what_rows_do(store: MmapStore, tmp_path: Path) -> None:
    """2^34 rows, 16 TiB of files on a disk that has no such room."""
    asked = layout(dim=250, slot_widths=(), with_sum=False, row_capacity=2**34)
    made = store.create_table(asked)
    put_rows(made, np.arange(64), 3)
    weights = tmp_path / "tables" / "000001" / "weights"
    assert weights.stat().st_size == 2**34 * 1000
    files = list(weights.parent.iterdir())
    assert sum(path.stat().st_blocks * 512 for path in files) < 4 << 20
    assert_rows(reopened(tmp_path), np.arange(64), 3)


def test_rows_of_an_earlier_process_are_verified_once(store: MmapStore, tmp_path: Path) -> None:
    put_rows(store.create_table(layout()), np.arange(50), 3)
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
    store.create_table(layout())
    left = tmp_path / "tables" / "000002.new"
    left.mkdir()
    (left / "weights").write_bytes(b"half")
    reopened(tmp_path)
    assert not left.exists()


def test_tables_and_parameters_have_their_own_names(store: MmapStore, tmp_path: Path) -> None:
    store.create_table(layout("t"))
    parameter = Layout(name="t", slice_size=5, chunk_element_count=16, with_sum=False)
    store.create(parameter)
    again = MmapStore(tmp_path)
    assert [found.name for found, _ in again.recover()] == ["t"]
    assert [found.name for found, _ in again.recover_tables()] == ["t"]
