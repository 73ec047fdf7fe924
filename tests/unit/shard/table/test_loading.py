"""Goal: rows are loaded all or not at all.

Method: tables of a Shard, in memory and in files, and killed at any write; the rows are read by
NumPy.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.data.table_states import (
    CONFIG,
    SPEC,
    Rows,
    give,
    ones,
    scan,
    shard_of,
    table_of,
    whole,
)
from harness.stories.crash import SameMachine
from harness.stories.images import image_of, restore
from shardwell.errors import (
    ArgumentError,
    NotInitializedError,
    StepOrderError,
)
from shardwell.wire.row_state import RowState
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
