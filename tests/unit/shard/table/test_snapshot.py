"""Goal: a scan with state has every row as it was at one version, whatever happens to the table
meanwhile.

Method: tables of a Shard, in memory and in files; what was there is a dict copied at the version,
and messages are read by NumPy. Between any two messages of a scan, training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.table_states import (
    deadline,
    give,
    ones,
    scan,
    scanned,
    table_of,
    whole,
)
from shardwell.errors import (
    DeadlineError,
    LimitError,
    StepOrderError,
    StorageError,
    WorkersMissingError,
)
from shardwell.v1 import table_pb2 as pb
from shardwell_server.services import table_service


@pytest.fixture(params=["memory", "mmap"])
def directory(request, tmp_path) -> Path | None:
    return None if request.param == "memory" else tmp_path


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
