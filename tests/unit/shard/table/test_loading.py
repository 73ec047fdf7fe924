"""Goal: rows are loaded all or not at all.

Method: tables of a Shard, in memory and in files, and killed at any write; the rows are read by
NumPy.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.table_states import (
    CONFIG,
    SPEC,
    Rows,
    deadline,
    give,
    ones,
    scan,
    scanned,
    shard_of,
    table_of,
    whole,
)
from harness.stories.crash import SameMachine
from harness.stories.images import image_of, restore
from shardwell.errors import (
    ArgumentError,
    DeadlineError,
    LimitError,
    NotInitializedError,
    StepOrderError,
    StorageError,
    WorkersMissingError,
)
from shardwell.v1 import table_pb2 as pb
from shardwell.wire.row_state import RowState
from shardwell_server.services import table_service
from shardwell_server.shard.shard import Shard
from shardwell_server.store.mmap.store import MmapStore


@pytest.fixture(params=["memory", "mmap"])
def directory(request, tmp_path) -> Path | None:
    return None if request.param == "memory" else tmp_path


def state(*ids: int, update_count: int = 3, weight: float = 1.5) -> RowState:
    n = len(ids)
    return RowState(
        np.array(ids, np.int64),
        np.full((n, 2), weight, np.float32),
        (np.full((n, 2), 0.25, np.float32),),
        np.full(n, update_count),
        np.full(n, 4),
    )


def test_rows_stand_when_the_load_is_finished(directory) -> None:
    table = table_of(directory)
    number = table.loading.begin()
    table.loading.add(number, state(5, 2))
    table.loading.add(number, state(9))
    with pytest.raises(NotInitializedError, match="restored"):
        give(table, ones(1))
    with pytest.raises(NotInitializedError):
        next(scan(table, 0))
    assert table.describe(1).loading
    assert table.loading.finish(number, 7, 0.5) == 3
    assert (table.version, table.learning_rate, table.describe(1).loading) == (7, 0.5, False)
    expected = ((1.5, 1.5), (0.25, 0.25), 3, 4)
    assert whole(table) == dict.fromkeys((2, 5, 9), expected)
    give(table, ones(2))
    assert whole(table)[2] == ((1.5 - 0.5 * 1.125, 1.5 - 0.5 * 2.125), (1.125, 2.125), 4, 7)
    if directory is not None:
        again = shard_of(directory).tables.get("t")
        assert (again.version, again.learning_rate) == (8, 0.5)
        assert whole(again) == whole(table)


def test_a_load_that_is_cut_off_leaves_an_empty_table(tmp_path) -> None:
    table = table_of(tmp_path)
    table.loading.begin()
    table.loading.add(1, state(5, 2))
    again = shard_of(tmp_path).tables.get("t")
    assert again.describe(1).loading
    assert (again.describe(1).row_count, again.version) == (0, 0)
    with pytest.raises(NotInitializedError):
        give(again, ones(1))
    number = again.loading.begin()
    again.loading.add(number, state(2, weight=2.5))
    again.loading.finish(number, 1, None)
    assert whole(again) == {2: ((2.5, 2.5), (0.25, 0.25), 3, 4)}


def test_the_newest_load_counts(directory) -> None:
    table = table_of(directory)
    first = table.loading.begin()
    table.loading.add(first, state(5))
    second = table.loading.begin()
    with pytest.raises(StepOrderError, match="another client"):
        table.loading.add(first, state(6))
    with pytest.raises(StepOrderError, match="another client"):
        table.loading.finish(first, 1, None)
    table.loading.add(second, state(7))
    table.loading.finish(second, 1, 0.125)
    third = table.loading.begin()  # it is loaded, and no worker has trained: another shard is not
    table.loading.add(third, state(8))
    table.loading.finish(third, 1, None)
    assert set(whole(table)) == {8}
    assert table.learning_rate == 1.0
    give(table, ones(8))
    with pytest.raises(StepOrderError, match="has counted gradients"):
        table.loading.begin()


def test_a_load_that_is_killed_at_any_write(tmp_path) -> None:
    """It has not begun, or refuses gradients and is empty, or is whole; twice over."""
    path, target = tmp_path / "a", tmp_path / "b"
    path.mkdir()
    images: list[Any] = []
    store = MmapStore(path, boot=SameMachine(path), reached=lambda _: images.append(image_of(path)))
    table = Shard(CONFIG, store).tables.open(SPEC)[0]
    loads = [({5, 2}, 1.5, 7, 0.5), ({2}, 2.5, 3, None)]
    expected: dict[int, Rows] = {0: {}}
    images.clear()
    for ids, weight, version, rate in loads:
        number = table.loading.begin()
        for row_id in ids:
            table.loading.add(number, state(row_id, weight=weight))
        table.loading.finish(number, version, rate)
        expected[version] = whole(table)
    seen = []
    for image in images:
        again = shard_of(restore(image, target)).tables.get("t")
        status = again.describe(1)
        if status.loading:
            assert (status.row_count, status.version) == (0, 0)
            with pytest.raises(NotInitializedError):
                give(again, ones(1))
        else:
            assert whole(again) == expected[again.version]
            assert again.learning_rate == (0.5 if again.version == 7 else 1.0)
        seen.append((status.loading, status.version))
    order = [(False, 0), (True, 0), (False, 7), (True, 0), (False, 3)]
    assert [each for each, _ in itertools.groupby(seen)] == order


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (state(200), "row id 200 is out of range"),
        (state(-1), "row id -1 is out of range"),
        (state(3, 3), "id 3 at place 1 follows 3"),
        (state(1), "row id 1 was loaded before"),
    ],
)
def test_impossible_rows_are_not_loaded(bad, message) -> None:
    table = table_of()
    number = table.loading.begin()
    table.loading.add(number, state(1))
    with pytest.raises(ArgumentError, match=message):
        table.loading.add(number, bad)


# A scan with state has every row as it was at one version, whatever happens to the table
# meanwhile.


@pytest.mark.parametrize("worker_count", [1, 2])
def test_rows_are_those_of_the_version(directory, worker_count) -> None:
    """Steps, creations and evictions between the first message and the others."""
    table = table_of(directory, worker_count=worker_count)
    workers = [f"w{index}" for index in range(worker_count)]
    for _ in range(3):
        for worker in workers:
            give(table, ones(*range(0, 60, 3)), worker)
    for worker in workers:
        give(table, ones(1), worker)
    before = whole(table)
    assert before[3] == ((-4.25, -8.5), (1.75, 3.5), 3, 2)
    assert before[1] == ((-1.0, -2.0), (1.0, 2.0), 1, 3)
    table.scan._batch = 4
    messages = scan(table, 4)
    first = pb.ScanRowsResponse.FromString(next(messages))
    assert (first.version, first.learning_rate, first.rows.row_count) == (4, 1.0, 0)
    got = [next(messages)]
    for number, ids in enumerate([range(0, 200, 7), range(60), range(0, 200, 2)]):
        for worker in workers:
            give(table, ones(*ids), worker)
        if number == 1:
            assert table.evict(table.version - 1) > 0
        got.append(next(messages))
    got += messages
    assert scanned(iter(got)) == before
    assert {pb.ScanRowsResponse.FromString(message).version for message in got} == {4}
    assert table.scan.snapshots.pending == ()
    assert whole(table) != before


@settings(max_examples=60, deadline=None)
@given(data=st.data(), worker_count=st.sampled_from([1, 2]))
def test_whatever_is_written_between_messages(data, worker_count) -> None:
    """Any interleaving of a scan's messages with parts, steps and evictions."""
    table = table_of(worker_count=worker_count)
    table.scan._batch = 3
    workers = [f"w{index}" for index in range(worker_count)]
    some_ids = st.sets(st.integers(0, 30), min_size=1, max_size=8)

    def step() -> None:
        for worker in workers:
            for index, ends in enumerate([False, True]):
                give(table, ones(*data.draw(some_ids)), worker, index=index, ends=ends)
                take()

    def take() -> None:
        if messages is not None and data.draw(st.booleans()):
            got.extend([m for m in [next(messages, None)] if m is not None])

    messages: Iterator[bytes] | None = None
    got: list[bytes] = []
    for _ in range(data.draw(st.integers(0, 4))):
        step()
    version = table.version
    before = whole(table)
    messages = scan(table, version)
    got.append(next(messages))
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            table.evict(data.draw(st.integers(0, table.version)))
            take()
        step()
    got += messages
    assert scanned(iter(got)) == before


def test_a_version_to_come_begins_when_it_is_reached(directory) -> None:
    table = table_of(directory)
    give(table, ones(1, 2))
    messages = scan(table, 2)
    assert pb.ScanRowsResponse.FromString(next(messages)).version == 2
    give(table, ones(2), ends=False)
    give(table, ones(3), index=1)
    give(table, ones(2, 3, 4))
    found = scanned(messages)
    assert {row_id: row[2] for row_id, row in found.items()} == {1: 1, 2: 2, 3: 1}


@pytest.mark.parametrize("worker_count", [1, 2])
def test_what_is_too_late_or_too_early(worker_count) -> None:
    table = table_of(worker_count=worker_count)
    for step in range(2):
        for index in range(worker_count):
            give(table, ones(step), f"w{index}")
    with pytest.raises(StepOrderError, match="at 2 already"):
        next(scan(table, 1))
    waiting = scan(table, 3)
    next(waiting)
    with pytest.raises(WorkersMissingError, match="'w0'"):
        next(waiting)
    give(table, ones(7), ends=False)
    if worker_count == 1:
        with pytest.raises(StepOrderError, match="in the middle of the step"):
            next(scan(table, 2))
    else:
        messages = scan(table, 2)
        next(messages)
        give(table, ones(8), index=1)
        give(table, ones(8), "w1")
        assert whole(table)[7][2] == 1
        assert set(scanned(messages)) == {0, 1}, "row 7 is of the open step"


def test_asynchronous_rows_come_as_they_are() -> None:
    table = table_of(mode="async", worker_count=0)
    table.scan._batch = 1
    give(table, ones(1, 2, 3), step=0)
    messages = scan(table, 2**60)
    got = [next(messages), next(messages)]
    give(table, ones(1, 3), step=1)
    found = scanned(iter([*got, *messages]))
    assert [found[row_id][2] for row_id in (1, 2, 3)] == [1, 1, 2]


def test_as_many_scans_as_the_limit_allows() -> None:
    table = table_of()
    give(table, ones(1))
    several = [scan(table, 1) for _ in range(5)]
    for each in several[:4]:
        next(each)
    with pytest.raises(LimitError, match="snapshot_count_max=4"):
        next(several[4])
    several[0].close()  # type: ignore[attr-defined]
    assert len(list(scan(table, 1))) == 2


def test_a_reader_that_is_late_costs_training_nothing() -> None:
    table = table_of()
    give(table, ones(1))
    messages = table_service.state_messages(table, 1, deadline(), lambda: False, lambda size: None)
    next(messages)
    give(table, ones(1))
    assert table.version == 2
    with pytest.raises(DeadlineError, match="not read before its deadline"):
        next(messages)


def test_a_full_disk_fails_the_scan_and_not_the_training(directory, monkeypatch) -> None:
    table = table_of(directory)
    give(table, ones(1))
    messages = scan(table, 1)
    next(messages)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shardwell_server.shard.snapshots.os.pwrite", full)
        give(table, ones(1))
    assert table.version == 2
    with pytest.raises(StorageError, match="No space left on device"):
        next(messages)
    assert whole(table)[1][2] == 2


def test_a_damaged_copy_fails_the_scan(directory, monkeypatch) -> None:
    table = table_of(directory)
    give(table, ones(1))
    messages = scan(table, 1)
    next(messages)
    give(table, ones(1))  # its row is copied before
    read = os.preadv

    def damaged(file: int, views: list[memoryview], offset: int) -> int:
        count = read(file, views, offset)
        views[0][0] ^= 1
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", damaged)
        with pytest.raises(StorageError, match=r"a copy of rows of table 't' was damaged"):
            list(messages)
    assert whole(table)[1][2] == 2
