"""Goal: a full, read-only or failing disk fails the call that needed it, clearly, and only that.

Method: each call of the system that a story makes fails once, in turn; the call is sent again. Then
real small disks (tmpfs, where this user may mount) are filled and emptied, under a shard and under
a whole cluster. Oracle: the story in memory, undisturbed.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.sessions import applicant
from harness.faults.disks import HINTS, FailingSystem, SmallDisk, small_disk
from harness.stories.crash import Undisturbed, recovered, state_at, undisturbed_story
from harness.stories.images import image_of, restore
from harness.stories.parameter import (
    CONFIG,
    SYNC,
    State,
    contribute,
    deadline,
    initialize,
    short_blocks,
    state_of,
    story,
)
from shardwell.errors import StorageError
from shardwell_server.shard.shard import Shard
from shardwell_server.store.files.data_dir import DataDir, DataDirError
from shardwell_server.store.mmap.store import MmapStore
from shardwell_server.store.records import event_log

DISK_BYTES = 2**20
STORY = story()


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return undisturbed_story()


def test_each_call_of_the_system_fails_once(
    tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = FailingSystem(monkeypatch)
    with short_blocks(), recovered(tmp_path) as shard:
        system.call_count = 0
        for call in STORY:
            call.make(shard)
    call_count = system.call_count
    assert call_count > 60
    compaction_failure_count = 0
    for number in range(1, call_count + 1):
        path = restore({}, tmp_path)
        system.failing = -1
        errors: list[str] = []
        with short_blocks(), recovered(path) as shard:
            system.call_count, system.failing = 0, number
            system.error_number = list(HINTS)[number % len(HINTS)]
            for index, call in enumerate(STORY):
                try:
                    result = call.make(shard)
                except StorageError as error:
                    errors.append(str(error))
                    assert state_of(shard) == undisturbed.states[index], call.name
                    copy = restore(image_of(path), tmp_path.with_name("copy"))
                    assert state_at(copy) == undisturbed.states[index], call.name
                    result = call.make(shard)
                assert result == undisturbed.results[index]
            assert state_of(shard) == undisturbed.states[-1]
        with short_blocks():
            assert state_at(path) == undisturbed.states[-1]
        assert not [*path.rglob("*.new")]
        if errors:
            (refused,) = errors
            assert str(path) in refused
            assert HINTS[system.error_number] in refused
        else:
            compaction_failure_count += 1
    assert 0 < compaction_failure_count < 30


def test_a_log_that_stays_open_is_opened_anew_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_COMPACT_BYTES", 300)
    system = FailingSystem(monkeypatch)
    events = [{"number": number} for number in range(12)]
    number, was_failing, reason = 0, True, ""
    while was_failing:
        number += 1
        path = tmp_path / str(number)
        log = event_log.EventLog(path, 0, lambda _: None, keeps_open=True)
        log.begin()
        open_count = len(os.listdir("/proc/self/fd"))
        system.call_count, system.failing, was_failing = 0, number, False
        for index, event in enumerate(events, start=1):
            try:
                log.append(event)
            except StorageError as error:
                was_failing, reason = True, str(error)
                assert len(os.listdir("/proc/self/fd")) == open_count
                assert event_log.EventLog(path, 0, lambda _: None).read() == events[: index - 1]
                log.append(event)
                assert str(path) in reason
            log.compact(events[:index])
            assert log.has_name
        was_failing |= system.call_count >= number
        assert event_log.EventLog(path, 0, lambda _: None).read() == events
        log.close()
        assert len(os.listdir("/proc/self/fd")) == open_count
    assert number > 2 * len(events)
    system.failing = -1


def test_no_more_open_files(tmp_path: Path) -> None:
    """The limit of this process, lowered to what is open, and raised again."""
    store = MmapStore(tmp_path)
    with contextlib.closing(store):
        shard = Shard(CONFIG, store)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        for spare in range(3):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
            try:
                with (
                    pytest.raises(StorageError, match=r"ulimit -n")
                    if spare == 0
                    else (contextlib.suppress(StorageError))
                ):
                    shard.parameters.open(SYNC)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        made, _ = shard.parameters.open(SYNC)
        assert initialize(made, "w0", np.zeros(37, np.float32))
        assert len([*(tmp_path / "parameters").iterdir()]) == 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        yield disk


def test_a_parameter_on_a_full_disk(disk: SmallDisk) -> None:
    with recovered(disk.path) as shard:
        first, _ = shard.parameters.open(SYNC)
        disk.fill()
        before = image_of(disk.path / "parameters")
        other = shardwell.ParameterSpec(
            name="other", size=1000, optimizer=SYNC.optimizer, worker_count=1, codec="fp32"
        )
        for _ in range(3):
            with pytest.raises(StorageError, match=r"of 'other' failed.*free space") as caught:
                shard.parameters.open(other)
            assert str(disk.path) in str(caught.value)
            assert image_of(disk.path / "parameters") == before
        assert shard.parameters.open(SYNC) == (first, False)
        assert [made.spec.name for made in shard.parameters.all()] == ["sync"]
        disk.empty()
        assert shard.parameters.open(other)[1]
        state = state_of(shard)
    assert state_at(disk.path) == state


def test_a_parameter_larger_than_the_disk(disk: SmallDisk) -> None:
    with recovered(disk.path) as shard:
        large = shardwell.ParameterSpec(
            name="large", size=DISK_BYTES, optimizer=SYNC.optimizer, worker_count=1
        )
        free = shutil.disk_usage(disk.path).free
        with pytest.raises(StorageError, match=r"of 'large' failed.*free space"):
            shard.parameters.open(large)
        assert free - shutil.disk_usage(disk.path).free <= 4096  # the directory
        assert shard.parameters.open(SYNC)[1]


def test_what_a_full_disk_lets_go_on(disk: SmallDisk) -> None:
    """Gradients of those who sit, and reads: their space was taken when there was some."""
    with short_blocks(), recovered(disk.path) as shard:
        made, _ = shard.parameters.open(SYNC)
        initialize(made, "w0", np.zeros(37, np.float32))
        for worker in ("w0", "w1"):
            made.join(worker, seat_for=applicant(worker))
        disk.fill()
        state = state_of(shard)
        with pytest.raises(StorageError, match=r"marks.*making room.*free space"):
            made.join("w2", seat_for=applicant("w2"))
        with pytest.raises(StorageError, match=r"marks.*free space"):
            contribute(made, "w2", 0, 0, np.zeros(16, np.float32))
        assert state_of(shard) == state
        refused, state = until_refused(lambda: made.change_learning_rate(7, 0.5), shard)
        assert "events: writing an event failed" in refused
        assert HINTS[errno.ENOSPC] in refused
        assert state_of(shard) == state
        for worker in ("w0", "w1"):
            assert contribute(made, worker, 0, 0, np.full(16, 6, np.float32))
            assert not contribute(made, worker, 0, 0, np.full(16, 6, np.float32))
        assert made.weights_message(0, 0, deadline())
        assert state_at(disk_copy(disk)) == state_of(shard)
        disk.empty()
        assert contribute(made, "w2", 0, 0, np.full(16, 6, np.float32))
        assert (made.storage.weights[:16] == -6).all()
        made.change_learning_rate(8, 0.25)
        state = state_of(shard)
    assert state_at(disk.path) == state


def until_refused(call: Callable[[], object], shard: Shard) -> tuple[str, State]:
    """Calls while there is room left; what the first error says, and the state before that call."""
    for _ in range(200):
        state = state_of(shard)
        try:
            call()
        except StorageError as error:
            return str(error), state
    raise AssertionError("it was never refused")


def disk_copy(disk: SmallDisk) -> Path:
    """Its files elsewhere, as a new process would find them."""
    image = image_of(disk.path)
    del image["filler"]
    return restore(image, disk.path.with_name("copy"))


def test_a_cluster_on_a_full_disk(disk: SmallDisk, cluster: Any, connect: Any) -> None:
    optimizer = shardwell.SGD(learning_rate=0.5)
    running = cluster(2, data_dir=disk.path)
    client = connect(running, "w0")
    model = client.parameter("model", size=1000, optimizer=optimizer)
    model.init(np.zeros(1000, np.float32))
    model.exchange(np.ones(1000, np.float32))
    disk.fill()
    with pytest.raises(shardwell.StorageError, match="free space"):
        client.parameter("other", size=5000, optimizer=optimizer)
    for step in range(1, 4):
        weights = model.exchange(np.ones(1000, np.float32))
        np.testing.assert_array_equal(weights, -0.5 * (step + 1))
    np.testing.assert_array_equal(model.get_weights(), -2.0)
    with pytest.raises(shardwell.StorageError, match="free space"):
        client.parameter("other", size=5000, optimizer=optimizer)
    disk.empty()
    other = client.parameter("other", size=5000, optimizer=optimizer)
    other.init(np.ones(5000, np.float32))
    np.testing.assert_array_equal(other.get_weights(), 1.0)
    running.close()
    with shardwell.connect(cluster(2, data_dir=disk.path).target, worker_id="w0") as again:
        model = again.parameter("model", size=1000, optimizer=optimizer)
        np.testing.assert_array_equal(model.get_weights(), -2.0)
        assert model.next_step == 4


def test_a_full_disk_at_the_first_start(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(DataDirError, match=r"free space|can write to"):
        DataDir(disk.path / "shard", CONFIG)
    disk.empty()
    DataDir(disk.path / "shard", CONFIG).close()


def test_a_disk_that_is_read_only(disk: SmallDisk) -> None:
    DataDir(disk.path, CONFIG).close()
    with recovered(disk.path) as shard:
        shard.parameters.open(SYNC)
        del shard
    gc.collect()  # a shard and what it is made of refer to each other
    disk.remount("ro")
    try:
        with pytest.raises(DataDirError, match="Read-only"):
            DataDir(disk.path, CONFIG)
        with pytest.raises(StorageError, match=r"weights.*remount the disk for writing"):
            state_at(disk.path)
    finally:
        disk.remount("rw")
    with DataDir(disk.path, CONFIG):
        state_at(disk.path)
