"""Goal: the tables that a shard's files hold are gone on with as they are, or refused by name.

Method: storage in memory, spoiled by hand, plays what an earlier process left.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwell
from harness.data.sessions import shared_parts
from harness.stories.crash import SameMachine
from shardwell.errors import LimitError, SpecMismatchError, StorageError, UnknownTableError
from shardwell.specs.table import TableSpec
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.shard.deletions import Deletions
from shardwell_server.shard.quotas import ByteBudget, Usages
from shardwell_server.shard.registry import Tables
from shardwell_server.store.contract import Store, TableLayout, TableStorage
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

SPEC = TableSpec(
    name="t",
    row_count=1000,
    dim=2,
    optimizer=shardwell.SGD(learning_rate=1.0),
    initializer=shardwell.Zeros(),
    worker_count=1,
    codec="fp32",
)
CONFIG = ShardConfig(shard_index=0, shard_count=2)


def tables_of(
    config: ShardConfig = CONFIG, store: Store | None = None, stored: ByteBudget | None = None
) -> Tables:
    limit = stored or ByteBudget(config.limits.stored_bytes_max)
    kept = store or MemoryStore()
    tables = Tables(shared_parts(config), kept, threading.Lock(), limit, Usages(), Deletions(kept))
    tables.recover(kept.recover_tables())
    return tables


def opened(path: Path) -> MmapStore:
    store = MmapStore(path, boot=SameMachine(path))
    store.recover()
    return store


@pytest.mark.parametrize(
    ("row_count", "limits", "capacity", "batch"),
    [
        (1000, {}, 500, 500),
        (10**9, {}, 2**28, 65536),
        (None, {}, 2**28, 65536),
        (None, {"table_row_count_max": 7}, 7, 65536),
        (None, {"stored_bytes_max": 48 * 10}, 10, 65536),
        (1, {}, 1, 1),
        (None, {"stored_bytes_max": 1}, 1, 65536),
    ],
)
def test_capacities_are_what_limits_and_ids_allow(row_count, limits, capacity, batch) -> None:
    tables = tables_of(ShardConfig(shard_index=0, shard_count=2, limits=Limits(**limits)))
    made, created = tables.open(dataclasses.replace(SPEC, row_count=row_count))
    assert created
    assert made.layout.row_capacity == capacity
    assert made.layout.rows_per_change_max == batch
    assert made.rows_per_message_max == 65536


def test_a_table_is_made_once() -> None:
    tables = tables_of(ShardConfig(shard_index=0, shard_count=1, limits=Limits(table_count_max=1)))
    made, _ = tables.open(SPEC)
    assert tables.open(SPEC) == (made, False)
    assert tables.get("t") is made
    with pytest.raises(SpecMismatchError, match="dim: 2 exists, 3 was asked for") as mismatch:
        tables.open(dataclasses.replace(SPEC, dim=3))
    with pytest.raises(UnknownTableError, match="no table 'u'; open it first") as unknown:
        tables.get("u")
    with pytest.raises(LimitError, match="table_count_max=1") as limit:
        tables.open(dataclasses.replace(SPEC, name="u"))
    assert [e.value.table for e in (mismatch, unknown, limit)] == ["t", "u", "u"]
    assert tables.all() == [made]


def test_the_undo_file_of_a_table_counts(tmp_path: Path) -> None:
    """Of an existing one, too, whatever the limit has become."""
    size = 1 << 20
    config = dataclasses.replace(CONFIG, limits=Limits(stored_bytes_max=size))
    stored = ByteBudget(size)
    tables = tables_of(config, opened(tmp_path), stored)
    large, small = (dataclasses.replace(SPEC, name=str(n), row_count=n) for n in (10**6, 10))
    for _ in range(2):
        with pytest.raises(LimitError, match=rf"stored_bytes_max={size}: .*'{10**6}'.* undo") as no:
            tables.open(large)
        assert no.value.table == large.name
        assert stored.count == 0
        assert [*tmp_path.glob("tables/*")] == []
    tables.open(small)
    undo_bytes = (tmp_path / "tables" / "000001" / "undo").stat().st_size
    assert stored.count == undo_bytes > 0
    for limit in (size, 1):
        again = ByteBudget(limit)
        tables_of(config, opened(tmp_path), again)
        assert again.count == undo_bytes


@contextlib.contextmanager
def recovering(storage: TableStorage, layout: TableLayout) -> Iterator[Tables]:
    """Tables of a shard whose store kept one, with that layout."""
    storage = copy.copy(storage)
    storage.layout = layout  # type: ignore[misc]

    class Store(MemoryStore):
        def recover_tables(self) -> list[tuple[TableLayout, TableStorage]]:
            return [(layout, storage)]

    yield tables_of(store=Store())


@pytest.mark.parametrize(
    ("keys", "text"), [([0, 0], "an id twice"), ([0, 1000], "id 1000"), ([0, -1], "id -1")]
)
def test_ids_that_can_not_be_here_are_refused(keys, text) -> None:
    made, _ = tables_of().open(SPEC)
    storage = made.storage
    storage.reserve(2)
    storage.keys[:2] = keys
    storage.record = storage.record._replace(row_used=2)
    with (
        pytest.raises(StorageError, match=f"{text}.*can't be on shard 0 of 2.*restore"),
        recovering(storage, made.layout),
    ):
        pass


def test_a_table_of_another_version_is_refused() -> None:
    made, _ = tables_of().open(SPEC)
    other = dataclasses.replace(made.layout, row_capacity=7, rows_per_change_max=600)
    with recovering(made.storage, other) as found:  # of a process with other limits
        assert found.get("t").layout == other
    for changes in (
        {"with_sum": True},
        {"dim": 3},
        {"description": {"spec": {"dim": "x"}}},
        {"rows_per_change_max": 499},
    ):
        other = dataclasses.replace(made.layout, **changes)
        with pytest.raises(StorageError, match="version"), recovering(made.storage, other):
            pass


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "something new"},
        {"no kind": 1},
        {"kind": "seat"},
        {"kind": "seat", "worker_id": "w0"},  # and no room for it
        {"kind": "learning_rate", "from_step": None, "learning_rate": 0.5},
    ],
)
def test_events_of_another_version_are_refused(monkeypatch, event) -> None:
    made, _ = tables_of().open(SPEC)
    monkeypatch.setattr(made.storage, "events", lambda: [event])
    with (
        pytest.raises(StorageError, match=r"table 't': its events hold .*can't read") as caught,
        recovering(made.storage, made.layout),
    ):
        pass
    assert caught.value.table == "t"
