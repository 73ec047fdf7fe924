"""Goal: a shard killed at any write of a deletion has it whole or not; a repeat ends it.

Method: a real shard on real files, whose writes stop it one after another; the directory is then
opened anew, as a process that was killed leaves it.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.stories.crash import SameMachine
from shardwell.errors import OtherIncarnationError, SpecMismatchError, StorageError
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell_server.config import ShardConfig
from shardwell_server.shard.deletions import REMEMBERED_MAX, Deletions
from shardwell_server.shard.shard import Shard
from shardwell_server.store.contract import Event, Store
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap import storage as storage_module
from shardwell_server.store.mmap.store import MmapStore

SGD = shardwell.SGD(learning_rate=1.0)
PARAMETER = ParameterSpec(name="m", size=100, optimizer=SGD, worker_count=1, codec="fp32")
TABLE = TableSpec(
    name="t",
    row_count=100,
    dim=2,
    optimizer=SGD,
    initializer=shardwell.Zeros(),
    worker_count=1,
    codec="fp32",
)
KINDS = ["parameter", "table"]


class KilledError(Exception):
    """The process ends here."""


def shard_on(path: Path, shard_index: int, stop_at: int | None = None) -> Shard:
    """A shard on the files of a directory, which is killed at its write of that number."""
    numbers = itertools.count()

    def reached(point: str) -> None:
        if stop_at is not None and next(numbers) == stop_at:
            raise KilledError(point)

    store = MmapStore(path, boot=SameMachine(path), reached=reached)
    return Shard(ShardConfig(shard_index=shard_index, shard_count=2), store, path)


def made(shard: Shard, kind: str) -> int:
    """Makes one of a kind and what tells it from others."""
    registry = shard.parameters if kind == "parameter" else shard.tables
    spec = PARAMETER if kind == "parameter" else TABLE
    part, created = registry.open(spec)
    assert created
    part.join("w0", incarnation=7)
    return part.incarnation


def registry_of(shard: Shard, kind: str):
    return shard.parameters if kind == "parameter" else shard.tables


def name_of(kind: str) -> str:
    return "m" if kind == "parameter" else "t"


def delete(shard: Shard, kind: str, incarnation: int) -> int:
    """All that a shard has to do; how many bytes it had."""
    registry, name = registry_of(shard, kind), name_of(kind)
    if shard.config.shard_index == 0 and registry.find(name) is not None:
        assert registry.mark(name, incarnation, "ops", force=True, but=0)
    return registry.remove(name, incarnation, incarnation, "ops") or 0


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_write(tmp_path: Path, kind: str, shard_index: int) -> None:
    name = name_of(kind)
    points = []
    for number in itertools.count():
        path = tmp_path / str(number)
        path.mkdir()
        first = shard_on(path, shard_index)
        incarnation = made(first, kind)
        first.close()
        shard = shard_on(path, shard_index)
        writes = itertools.count()

        def reached(point: str, at: int = number, count: itertools.count[int] = writes) -> None:
            if next(count) == at:
                raise KilledError(point)

        store = shard._store
        assert isinstance(store, MmapStore)
        for part in (
            store,
            store._names,
            store._parameters.directories,
            store._tables.directories,
        ):
            part._reached = reached
        try:
            delete(shard, kind, incarnation)
            was_killed = False
        except KilledError as killed:
            points.append(str(killed))
            was_killed = True
        del shard, store

        again = shard_on(path, shard_index)
        registry = registry_of(again, kind)
        part = registry.find(name)
        if part is None:  # gone, and everything of it
            assert again.stored_bytes == 0
        else:  # whole
            assert part.incarnation == incarnation
        if not was_killed:
            assert part is None
        delete(again, kind, incarnation)
        assert registry.find(name) is None
        with pytest.raises(shardwell.ShardwellError, match="was deleted by 'ops'"):
            registry.get(name)
        with pytest.raises(shardwell.ShardwellError, match="was deleted by 'ops'"):
            registry.check_opened(name, incarnation)
        assert not list((path / f"{kind}s").iterdir())
        again.close()

        last = shard_on(path, shard_index)
        assert again.stored_bytes == last.stored_bytes == 0
        assert registry_of(last, kind).find(name) is None
        made(last, kind)  # the name is free
        last.close()
        if not was_killed:
            break
    assert "removed files' name" in points
    assert len(points) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_earlier_version_renamed_gets_its_name_back(tmp_path: Path, kind: str) -> None:
    """The incarnation that had it, whatever has its new name since, and not twice."""
    name, spec = name_of(kind), PARAMETER if kind == "parameter" else TABLE
    store = MmapStore(tmp_path, boot=SameMachine(tmp_path))
    store.recover()
    for incarnation in (7, 8):
        Deletions(store).finish(kind, name, {incarnation}, "ops", "new")
    shard = shard_on(tmp_path, 1)
    registry = registry_of(shard, kind)
    registry.open(dataclasses.replace(spec, name="new"))
    registry.get("new").join("w0", incarnation=7)
    stored_bytes = shard.stored_bytes
    for other in (0, 8, 9):
        registry.take_back(name, other)
        assert registry.find(name) is None
    registry.get("new").storage.log({"kind": "learning_rate", "from_step": 0, "learning_rate": 0.5})
    old = registry.get("new").storage
    registry.take_back(name, 7)
    for _ in range(2):
        assert [each.spec.name for each in registry.all()] == [name]
        registry.check_opened(name, 7)
        assert registry.get(name).incarnation == 7
        assert registry.get(name).storage.events()[-1]["learning_rate"] == 0.5
        assert shard.stored_bytes == stored_bytes
        registry.take_back("new", 7)  # shard 0 has that name for it, after all
        assert registry.get("new").incarnation == 7
        registry.take_back(name, 7)
        if old is not None:
            with pytest.raises(StorageError, match="was given up meanwhile"):
                old.log({"kind": "learning_rate", "from_step": 1, "learning_rate": 1.0})
        shard.close()
        shard, old = shard_on(tmp_path, 1), None
        registry = registry_of(shard, kind)
    shard.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_can_t_be_written_back_stays(tmp_path: Path, monkeypatch, kind: str) -> None:
    name, spec = name_of(kind), PARAMETER if kind == "parameter" else TABLE
    store = MmapStore(tmp_path, boot=SameMachine(tmp_path))
    store.recover()
    Deletions(store).finish(kind, name, {7}, "ops", "new")
    shard = shard_on(tmp_path, 1)
    registry = registry_of(shard, kind)
    registry.open(dataclasses.replace(spec, name="new"))
    registry.get("new").join("w0", incarnation=7)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "write_layout", full)
        with pytest.raises(StorageError, match="No space left"):
            registry.take_back(name, 7)
    registry.get("new").storage.log({"kind": "learning_rate", "from_step": 0, "learning_rate": 0.5})
    registry.take_back(name, 7)
    assert [each.spec.name for each in registry.all()] == [name]
    shard.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_used_is_free(kind: str) -> None:
    shard = Shard(ShardConfig(shard_index=1, shard_count=2), MemoryStore())
    counted = f"{kind}s"
    registry = registry_of(shard, kind)
    part, _ = registry.open(PARAMETER if kind == "parameter" else TABLE, "ci")
    part.join("w0", incarnation=7)
    usage = shard.usages.of("ci")
    assert usage.count(counted) == 1
    before = shard.stored_bytes
    assert registry.remove(name_of(kind), 7, 7, "ops") == before
    assert shard.stored_bytes == usage.count("stored_bytes") == usage.count(counted) == 0
    assert registry.remove(name_of(kind), 7, 7, "ops") is None  # again
    assert usage.count(counted) == 0


def test_room_that_is_asked_for_too_late_is_not_counted() -> None:
    shard = Shard(ShardConfig(shard_index=1, shard_count=2), MemoryStore())
    table, _ = shard.tables.open(TABLE, "ci")
    table.join("w0", incarnation=7)
    shard.tables.remove("t", 7, 7, "ops")
    assert table._places.plan(8).size == 8  # a call that was under way
    assert shard.stored_bytes == 0


def test_only_what_was_asked_about_is_removed() -> None:
    shard = Shard(ShardConfig(shard_index=1, shard_count=2), MemoryStore())
    made(shard, "parameter")
    with pytest.raises(OtherIncarnationError, match="another one on shard 1"):
        shard.parameters.remove("m", 8, 9, "ops")
    assert shard.parameters.get("m").incarnation == 7
    assert shard.parameters.remove("m", 8, 7, "ops")
    assert shard.parameters.remove("m", 8, 7, "ops") is None


def test_shard_0_removes_what_it_has_marked_alone() -> None:
    shard = Shard(ShardConfig(shard_index=0, shard_count=2), MemoryStore())
    made(shard, "parameter")
    with pytest.raises(OtherIncarnationError, match="its deletion is not decided"):
        shard.parameters.remove("m", 7, 7, "ops")
    with pytest.raises(OtherIncarnationError, match="another one"):
        shard.parameters.mark("m", 8, "ops", force=True, but=0)
    assert shard.parameters.mark("m", 7, "ops", force=True, but=0)
    assert shard.parameters.mark("m", 7, "ops", force=False, but=0)  # again
    for refused in (lambda: shard.parameters.get("m"), lambda: shard.parameters.open(PARAMETER)):
        with pytest.raises(shardwell.UnknownParameterError, match="is being deleted by 'ops'"):
            refused()
    assert shard.parameters.remove("m", 7, 7, "ops")
    assert shard.parameters.open(PARAMETER)[1]
    shard.parameters.get("m").join("w0", incarnation=9)
    # The same requests, whose answers were lost: they are done, and what came since stays.
    assert shard.parameters.mark("m", 7, "ops", force=True, but=0)
    assert shard.parameters.remove("m", 7, 7, "ops") is None
    assert shard.parameters.get("m").incarnation == 9


@pytest.mark.parametrize("first", KINDS)
def test_a_name_is_a_parameter_s_or_a_table_s(first: str) -> None:
    shard = Shard(ShardConfig(shard_index=1, shard_count=2), MemoryStore())
    table = dataclasses.replace(TABLE, name="m")
    calls = [lambda: shard.parameters.open(PARAMETER), lambda: shard.tables.open(table)]
    if first == "table":
        calls.reverse()
    calls[0]()
    stored = shard.stored_bytes
    with pytest.raises(SpecMismatchError, match=f"'m' is a {first} on this cluster"):
        calls[1]()
    assert shard.stored_bytes == stored
    assert len(shard.parameters.all()) + len(shard.tables.all()) == 1


@pytest.mark.parametrize("kind", ["memory", "mmap"])
def test_the_oldest_deletions_are_forgotten(tmp_path: Path, kind: str) -> None:
    def opened() -> Store:
        store = MmapStore(tmp_path, boot=SameMachine(tmp_path))
        store.recover()
        return store

    store: Store = MemoryStore() if kind == "memory" else opened()
    deletions = Deletions(store)
    deletions.mark("table", "last", 5, "ops")
    for number in range(REMEMBERED_MAX + 2):
        deletions.finish("parameter", f"p{number}", {number + 1, 0}, "ops")
    for found in (deletions, Deletions(store if kind == "memory" else opened())):
        assert found.gone("parameter", "p1") is None
        assert found.gone("parameter", "p2") == (("parameter", "p2"), (3,), "ops", "")
        assert found.gone("parameter", "p2", 3) == found.gone("parameter", "p2")
        assert found.gone("parameter", "p2", 4) is None
        assert found.gone("table", "p2") is None
        assert found.mark_of("table", "last") == (5, "ops", "")


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    store = MmapStore(tmp_path, boot=SameMachine(tmp_path))
    store.recover()
    Deletions(store).finish("parameter", "m", {1}, "ops")
    file = tmp_path / "names"
    data = bytearray(file.read_bytes())
    place = data.index(b'"m"') + 1
    data[place] ^= 1
    file.write_bytes(data)
    again = MmapStore(tmp_path, boot=SameMachine(tmp_path))
    again.recover()
    with pytest.raises(StorageError, match="was damaged"):
        Deletions(again)


def test_arrays_that_are_read_stay_as_they_are(tmp_path: Path) -> None:
    store = MmapStore(tmp_path)
    shard = Shard(ShardConfig(shard_index=1, shard_count=2), store, tmp_path)
    made(shard, "parameter")
    weights = shard.parameters.get("m").storage.weights
    weights[:] = 3.0
    shard.parameters.remove("m", 7, 7, "ops")
    np.testing.assert_array_equal(weights, 3.0)
    shard.look_at_files()  # misses nothing
    shard.make_images()
    shard.sync()
    shard.end_session(5)
    shard.close()


def test_a_full_disk_does_not_keep_users_from_making_room(tmp_path: Path, monkeypatch) -> None:
    shard = shard_on(tmp_path, 0)
    made(shard, "parameter")
    written = shard._store.log_name

    def full(event: Event, compacted: Sequence[Event]) -> None:
        if event["kind"] == "marked":
            raise StorageError("No space left on device")
        written(event, compacted)

    monkeypatch.setattr(shard._store, "log_name", full)
    assert delete(shard, "parameter", 7) > 0
    assert shard.stored_bytes == 0
    shard.close()
    again = shard_on(tmp_path, 0)
    with pytest.raises(shardwell.UnknownParameterError, match="was deleted by 'ops'"):
        again.parameters.get("m")
    again.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_t_be_removed_stays_as_it_was(tmp_path: Path, monkeypatch, kind: str) -> None:
    shard = shard_on(tmp_path, 1)
    made(shard, kind)
    before = shard.stored_bytes

    def failing(directory: Path) -> None:
        raise StorageError("the disk failed")

    registry = registry_of(shard, kind)
    with monkeypatch.context() as patch:
        for each in (shard._store._parameters, shard._store._tables):
            patch.setattr(each.directories, "remove", failing)
        with pytest.raises(StorageError, match="the disk failed"):
            delete(shard, kind, 7)
    assert registry.get(name_of(kind)).incarnation == 7
    assert shard.stored_bytes == before
    delete(shard, kind, 7)
    assert registry.find(name_of(kind)) is None
    shard.close()
