"""Goal: a full, read-only or failing disk fails the change that needed it, clearly, and only that.

Method: each call of the system that a table's story makes fails once, in turn; what failed is done
again. Then a real small disk (tmpfs, where this user may mount) is filled and emptied, and files
are forbidden to be large. Oracle: the story in memory, undisturbed.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.faults.disks import HINTS, FailingSystem, SmallDisk, small_disk
from harness.stories.crash import SameMachine
from harness.stories.images import image_of, restore
from harness.stories.table import LAYOUT, STORY, State, Step, apply, make, state_of, tell
from shardwell.errors import StorageError
from shardwell_server.store.contract import TableLayout, TableStorage
from shardwell_server.store.files.sparse import EXTENT_BYTES_MIN
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

DISK_BYTES = 4 * EXTENT_BYTES_MIN


def opened(path: Path) -> MmapStore:
    store = MmapStore(path, boot=SameMachine(path))
    store.recover()
    return store


def undisturbed() -> list[State]:
    states: list[State] = []
    storage = make(MemoryStore())
    tell(storage, answered=lambda: states.append(state_of(storage)))
    return states


STATES = undisturbed()


def refusal(call: Callable[[], object]) -> str:
    """What an error of storage says; nothing if there is none."""
    try:
        call()
    except StorageError as error:
        return str(error)
    return ""


def test_each_call_of_the_system_fails_once_for_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = FailingSystem(monkeypatch)
    tell(opened(restore({}, tmp_path / "store")).create(LAYOUT))
    call_count = system.call_count
    assert call_count > 40
    told_count = 0
    for number in range(1, call_count + 1):
        system.failing = -1
        path = restore({}, tmp_path / "store")
        store = opened(path)
        system.call_count, system.failing = 0, number
        system.error_number = list(HINTS)[number % len(HINTS)]
        message = story_that_is_told_again(store, path)
        if message:
            told_count += 1
            assert str(path) in message
            assert HINTS[system.error_number] in message
    # Where room for more rows than wanted fails, exactly as much is tried: 11 files, opened and
    # extended. Directories that exist need not be made. Rows that can't be kept are given up.
    kept_count = sum(step.values for step in STORY)
    assert call_count - told_count <= 2 * 11 + 2 + 2 * kept_count


def story_that_is_told_again(store: MmapStore, path: Path) -> str:
    """Tells it, again from where it failed; what the error said."""
    made: list[TableStorage] = []
    done: list[State] = []
    message = refusal(lambda: made.append(store.create(LAYOUT)))
    if message:
        assert [*path.glob("tables/*")] == []
        made.append(store.create(LAYOUT))
    (storage,) = made
    later = refusal(lambda: tell(storage, answered=lambda: done.append(state_of(storage))))
    if later:
        copy = restore(image_of(path), path.with_name("copy"))
        for found in (storage, make(MmapStore(copy, boot=SameMachine(copy)))):
            assert not done or state_of(found) == STATES[len(done) - 1]
        tell(storage)
    assert state_of(storage) == STATES[-1]
    assert state_of(make(MmapStore(path, boot=SameMachine(path)))) == STATES[-1]
    return message or later


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        yield disk


LARGE = TableLayout(
    name="large",
    dim=256,
    slot_widths=(256,),
    row_capacity=2**30,
    rows_per_change_max=64,
    with_sum=True,
)


def fill_rows(storage: TableStorage, count: int) -> None:
    """So many rows more, all of one value."""
    used = storage.record.row_used
    places = np.arange(used, used + count)
    storage.reserve(used + count)
    with storage.change(places, values=True, sums=False) as change:
        for array in (storage.keys, storage.update_counts, storage.last_steps):
            array[places] = 5
        storage.weights[places] = 5
        storage.slots[0][places] = 5
        change.commit(storage.record._replace(row_used=used + count), None)


def test_rows_are_made_until_the_disk_is_full(disk: SmallDisk) -> None:
    """In more than one table, of which neither dies of it, and existing rows go on."""
    store = opened(disk.path)
    small, large = store.create(LAYOUT), store.create(LARGE)
    tell(small)
    ballast = disk.path / "ballast"
    ballast.write_bytes(bytes(EXTENT_BYTES_MIN))
    while not (message := refusal(lambda: fill_rows(large, 64))):
        assert large.record.row_used < 10_000
    assert "taking disk space for more rows failed" in message
    assert HINTS[errno.ENOSPC] in message
    record = large.record
    assert record.row_used * LARGE.row_size_bytes > EXTENT_BYTES_MIN
    assert large.reserved_row_count >= record.row_used
    free = shutil.disk_usage(disk.path).free
    assert free < 64 * LARGE.row_size_bytes  # smaller extents were tried when large ones failed
    disk.fill()
    for _ in range(3):
        with pytest.raises(StorageError, match="free space"):
            large.reserve(record.row_used + 64)
        assert large.record == record
    ballast.unlink()  # room for some of the files
    free, reserved = shutil.disk_usage(disk.path).free, large.reserved_row_count
    for more in (600, 700):
        with pytest.raises(StorageError, match="free space"):
            large.reserve(reserved + more)
        assert large.reserved_row_count == reserved
        assert shutil.disk_usage(disk.path).free == free
    disk.fill()
    apply(small, Step([0, 1, 2], 9, sums=True), 77)
    with large.change(np.arange(64), values=True, sums=True) as change:
        large.weights[:64] = change.weights + 1
        change.commit(record, None)
    with pytest.raises(StorageError, match=r"'other' failed.*free space"):
        store.create(TableLayout(**{**vars(LAYOUT), "name": "other"}))
    disk.empty()
    fill_rows(large, 64)
    store.create(TableLayout(**{**vars(LAYOUT), "name": "other"}))
    state = state_of(small)
    again = opened(disk.path)
    (_, small), (_, large), _ = again.recover_tables()
    assert state_of(small) == state
    large.verify(np.arange(large.record.row_used))
    assert large.record.row_used == record.row_used + 64
    assert (large.weights[:64] == 6).all()
    assert (large.weights[64 : large.record.row_used] == 5).all()


def test_a_table_on_a_disk_that_is_read_only(disk: SmallDisk) -> None:
    tell(opened(disk.path).create(LAYOUT))
    disk.remount("ro")
    try:
        with pytest.raises(StorageError, match=r"tables.*remount the disk for writing"):
            opened(disk.path).recover_tables()
    finally:
        disk.remount("rw")
    ((_, storage),) = opened(disk.path).recover_tables()
    assert state_of(storage) == STATES[-1]


def test_files_may_not_be_so_large(tmp_path: Path) -> None:
    """As where `ulimit -f` is set, or a file system knows no larger ones."""
    store = opened(restore({}, tmp_path / "store"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match=r"'large' failed.*ulimit -f"):
            store.create(LARGE)
        tell(store.create(LAYOUT))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.create(LARGE)


def test_no_more_open_files_for_a_table(tmp_path: Path) -> None:
    store = opened(restore({}, tmp_path / "store"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(StorageError, match=r"ulimit -n"):
            store.create(LAYOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    tell(store.create(LAYOUT))
    assert len([*(tmp_path / "store" / "tables").iterdir()]) == 1
