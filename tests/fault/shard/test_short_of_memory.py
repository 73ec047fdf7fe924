"""Goal: a shard without memory to open a table or parameter has made nothing of it, and says so.

Method: each part of a slice, in turn, finds no memory once, after the storage was made. Then it is
opened again, also with another spec, and the files are read as after a restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwell
from shardwell.errors import LimitError, StorageError
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell_server.config import Durability, ShardConfig
from shardwell_server.shard.parameter import state as parameter_state
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.table import slice as table_slice
from shardwell_server.shard.table import state as table_state
from shardwell_server.store.contract import Store
from shardwell_server.store.files import atomic_directory as numbered
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

SGD = shardwell.SGD(learning_rate=1.0)
TABLE = TableSpec(
    name="t", row_count=100, dim=2, optimizer=SGD, initializer=shardwell.Zeros(), worker_count=1
)
PARAMETER = ParameterSpec(name="p", size=100, optimizer=SGD, worker_count=1)
PARTS: dict[Any, list[str]] = {
    TABLE: ["TableStepTracker", "TableRegister", "RowSlots", "TableRows", "TableScan"],
    PARAMETER: ["StepTracker", "Register", "Snapshots", "EncodedWeights", "Chunk"],
}


def config(kind: str) -> ShardConfig:
    durability = Durability("step" if kind == "step" else "process")
    return ShardConfig(shard_index=0, shard_count=1, durability=durability)


def store_of(kind: str, path: Path) -> Store:
    if kind == "memory":
        return MemoryStore()
    return MmapStore(path, durability=config(kind).durability)


def without_memory(monkeypatch: pytest.MonkeyPatch, module: object, part: str) -> None:
    def failing(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, part, failing)


def once_then_no_memory(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, which finds no memory when it comes the second time."""
    call_count = 0

    def counted(*args: Any) -> Any:
        nonlocal call_count
        call_count += 1
        if call_count == 2:
            raise MemoryError
        return call(*args)

    return counted


def open_journals(path: Path) -> list[str]:
    """Those below `path`; what is mapped goes with the memory."""
    files = [link(file) for file in Path("/proc/self/fd").iterdir()]
    return [file for file in files if file.startswith(str(path)) and "journal" in file]


def link(file: Path) -> str:
    with contextlib.suppress(FileNotFoundError):  # the one that lists them
        return os.readlink(file)
    return ""


@pytest.mark.parametrize("kind", ["memory", "process", "step"])
@pytest.mark.parametrize(
    ("spec", "part"),
    [(spec, part) for spec, parts in PARTS.items() for part in parts],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_it_opens_when_there_is_memory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, spec: Any, part: str
) -> None:
    is_table = spec is TABLE
    folder, module = ("tables", table_state) if is_table else ("parameters", parameter_state)
    shard = Shard(config(kind), store_of(kind, tmp_path))
    kept = getattr(shard, folder)
    with monkeypatch.context() as patch:
        without_memory(patch, table_slice if part == "TableScan" else module, part)
        for tried in (spec, spec, *([dataclasses.replace(spec, dim=3)] if is_table else [])):
            with pytest.raises((StorageError, LimitError), match=f"'{spec.name}'") as refused:
                kept.open(tried)
            assert not is_table or refused.value.table == "t"
            assert kept.all() == []
            assert shard.stored_bytes == 0
            assert [*tmp_path.glob(f"{folder}/*")] == []
    assert open_journals(tmp_path) == []
    made, is_new = kept.open(spec)
    assert is_new
    assert kept.open(spec) == (made, False)
    assert shard.stored_bytes == (made.storage.undo_bytes if is_table else 4 * 100)
    if kind != "memory":
        assert [path.name for path in tmp_path.glob(f"{folder}/*")] == ["000001"]
        shard.close()
        again = Shard(config(kind), store_of(kind, tmp_path))
        assert [each.spec for each in getattr(again, folder).all()] == [spec]
        again.close()


@pytest.mark.parametrize("call", ["replace", "rmtree"])
def test_what_could_not_be_removed_is_removed_when_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """There is no memory for the way back either."""
    shard = Shard(config("process"), store_of("process", tmp_path))
    with monkeypatch.context() as patch:
        without_memory(patch, table_slice, "TableScan")
        if call == "rmtree":
            without_memory(patch, numbered.shutil, call)
        else:
            patch.setattr(numbered.os, call, once_then_no_memory(os.replace))
        with pytest.raises((StorageError, MemoryError)):
            shard.tables.open(TABLE)
    assert shard.tables.open(TABLE)[1]
    shard.close()
    again = Shard(config("process"), store_of("process", tmp_path))
    assert [table.spec for table in again.tables.all()] == [TABLE]
    again.close()
