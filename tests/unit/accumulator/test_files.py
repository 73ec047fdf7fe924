"""Goal: the file of a gradient accumulator: where sums are, who may open it, what it takes.

Method: files in memory where there is room, opened again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.stories.images import in_memory
from shardwell.errors import ArgumentError, StorageError
from shardwell_server import MmapGradientAccumulator

ROW_COUNT = 300


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5), "dim must be an integer from 1 to 65536"),
        ((65537, 5), "dim must be"),
        ((2.0, 5), "dim must be"),
        ((2, 0), "max_rows must be"),
        ((2, True), "max_rows must be"),
        ((2, 5, 0), "rows_per_lock must be"),
        ((2, 5, "1"), "rows_per_lock must be"),
        ((65536, 2**40), "max_rows x dim is too large"),
    ],
)
def test_bad_sizes_are_refused(tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MmapGradientAccumulator(tmp_path / "sums", *arguments)
    assert not [*tmp_path.iterdir()]


def test_where_the_file_has_a_sum(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    with MmapGradientAccumulator(path, 5, ROW_COUNT) as accumulator:
        for row in (0, 1, ROW_COUNT - 1):
            values = np.arange(5, dtype=np.float32) + row
            accumulator.accumulate(row, values)
            offset = accumulator.grad_offset(np.int32(row))
            assert offset is not None
            with path.open("rb") as file:
                file.seek(offset)
                assert file.read(20) == values.tobytes()
        assert accumulator.grad_offset(-1) is None
        assert accumulator.grad_offset(ROW_COUNT) is None
        with pytest.raises(ArgumentError, match="row_id must be an integer"):
            accumulator.grad_offset(1.0)  # type: ignore[arg-type]
    with MmapGradientAccumulator(None, 5, ROW_COUNT) as accumulator:
        assert accumulator.grad_offset(1) is None


def test_a_file_that_was_closed_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "sums")
    for count in range(1, 4):
        with MmapGradientAccumulator(path, 3, 40, recover=False) as accumulator:
            assert not accumulator.was_recovered
            accumulator.accumulate_rows([39, 7], np.ones((2, 3), np.float32))
            assert accumulator.get_grad(39).tolist() == [count] * 3
            assert accumulator.touched_rows().tolist() == [7, 39]
            assert not accumulator.get_grad(8).any()


def test_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    MmapGradientAccumulator(path, 3, 40).close()
    before = path.read_bytes()
    for dim, max_rows in ((4, 40), (3, 41), (40, 3)):
        message = f"has 40 rows of 3 values; expected max_rows={max_rows}, dim={dim}"
        with pytest.raises(StorageError, match=message):
            MmapGradientAccumulator(path, dim, max_rows)
    assert path.read_bytes() == before


def test_a_file_is_one_accumulators_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    with MmapGradientAccumulator(path, 3, 40) as accumulator:
        with pytest.raises(StorageError, match="in use by another accumulator"):
            MmapGradientAccumulator(path, 3, 40)
        accumulator.accumulate(1, np.ones(3, np.float32))
    with MmapGradientAccumulator(path, 3, 40) as accumulator:
        assert accumulator.touched_rows().tolist() == [1]


def test_a_directory_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing is no directory; make it first"):
        MmapGradientAccumulator(tmp_path / "missing" / "sums", 3, 40)


def test_a_large_table_takes_what_it_touches(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    with MmapGradientAccumulator(path, 64, 10_000_000) as accumulator:
        accumulator.accumulate_rows(np.arange(0, 10_000_000, 1_000_000), np.ones((10, 64)))
        assert path.stat().st_size > 2**31
        assert path.stat().st_blocks * 512 < 2**21
    with MmapGradientAccumulator(path, 64, 10_000_000) as accumulator:
        assert accumulator.touched_rows().size == 10
        assert path.stat().st_blocks * 512 < 2**21
