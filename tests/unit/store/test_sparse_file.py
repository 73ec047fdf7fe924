"""Goal: a sparse file takes its disk space in steps, and a full disk changes nothing.

Method: files of which most is a hole; calls of the system that fail on purpose. Oracle: the
kernel's count of blocks.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import StorageError
from shardwell_server.store.files import sparse as sparse_file
from shardwell_server.store.files.mapped import PAGE_SIZE_BYTES
from shardwell_server.store.files.sparse import (
    EXTENT_BYTES_MAX,
    EXTENT_BYTES_MIN,
    SparseFile,
    extended,
    reserve_all,
)

LARGE = 1 << 40
"""More than any disk that tests run on has."""


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_large_file_costs_what_is_reserved(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    made = SparseFile.create(path, LARGE)
    assert path.stat().st_size == LARGE
    assert disk_bytes(path) == 0
    made.reserve(10_000)
    assert made.reserved_bytes == 12_288
    assert 12_288 <= disk_bytes(path) < EXTENT_BYTES_MIN
    made.data[:12_288] = 7
    made.reserve(12_288)
    made.reserve(5)
    assert made.reserved_bytes == 12_288
    made.reserve(3 * EXTENT_BYTES_MIN)
    assert (made.data[:12_288] == 7).all()
    again = SparseFile.open(path, LARGE)
    assert (again.data[:12_288] == 7).all()
    assert not again.data[12_288 : 2 * EXTENT_BYTES_MIN].any()
    assert again.reserved_bytes == 0
    again.stands_reserved(12_000)
    assert again.reserved_bytes == 12_288
    again.reserve(20_000)
    assert (again.data[:12_288] == 7).all()


def test_the_last_page_is_not_whole(tmp_path: Path) -> None:
    made = SparseFile.create(tmp_path / "rows", 5_000)
    made.reserve(4_097)
    assert made.reserved_bytes == 5_000
    assert (tmp_path / "rows").stat().st_size == 5_000


def test_another_size_is_refused(tmp_path: Path) -> None:
    SparseFile.create(tmp_path / "rows", 5_000)
    with pytest.raises(StorageError, match=r"rows has 5000 bytes; expected 6000"):
        SparseFile.open(tmp_path / "rows", 6_000)


@given(
    reserved=st.integers(0, 2**40),
    more=st.integers(0, 2**30),
    left=st.integers(0, 2**40),
    unit_bytes=st.integers(1, 300_000),
)
def test_extents_grow_within_bounds(reserved: int, more: int, left: int, unit_bytes: int) -> None:
    wanted, capacity = reserved + more, reserved + more + left
    found = extended(reserved, wanted, capacity, unit_bytes)
    assert wanted <= found <= capacity
    ahead = (found - reserved) * unit_bytes
    if found > wanted:
        assert ahead <= EXTENT_BYTES_MAX
        assert found == capacity or ahead > EXTENT_BYTES_MIN - unit_bytes
        if reserved * unit_bytes >= EXTENT_BYTES_MAX and found < capacity:
            assert ahead > EXTENT_BYTES_MAX - unit_bytes


class FullDisk:
    """`posix_fallocate`, which refuses what ends beyond a limit of its file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.limit = limit
        self.refused_count = 0
        self._real = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self._reserve)

    def _reserve(self, file: int, offset: int, length: int) -> None:
        if offset + length > self.limit:
            self.refused_count += 1
            if offset < self.limit:  # as file systems do that take what there is
                self._real(file, offset, self.limit - offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._real(file, offset, length)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SparseFile.create(tmp_path / "rows", LARGE)
    made.reserve(8_192)
    made.data[:8_192] = 3
    disk = FullDisk(monkeypatch, 8_192)
    with pytest.raises(StorageError, match=r"rows: taking disk space .* free space"):
        made.reserve(8_193)
    assert made.reserved_bytes == 8_192
    disk.limit = 2 * EXTENT_BYTES_MIN
    made.reserve(8_193)
    assert made.reserved_bytes == 12_288
    assert (made.data[:8_192] == 3).all()


CAPACITY = 1 << 30


def files_of_rows(path: Path) -> list[tuple[SparseFile, int]]:
    """Three, with the bytes that each has of a row."""
    strides = (8, 1, 256)
    return [(SparseFile.create(path / str(each), CAPACITY * each), each) for each in strides]


def test_all_files_have_room_for_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of_rows(tmp_path)
    count = reserve_all(files, 0, 10, CAPACITY)
    assert count == EXTENT_BYTES_MIN // 265
    assert all(file.reserved_bytes >= count * stride for file, stride in files)
    disk = FullDisk(monkeypatch, files[2][0].reserved_bytes + 8_192)
    wanted = count + 20
    assert reserve_all(files, count, wanted, CAPACITY) == wanted  # there is no room for more
    assert disk.refused_count == 1
    before = [file.reserved_bytes for file, _ in files]
    with pytest.raises(StorageError, match="256: taking disk space"):
        reserve_all(files, wanted, wanted + 100, CAPACITY)
    assert files[2][0].reserved_bytes == before[2]
    disk.limit = LARGE
    assert reserve_all(files, wanted, wanted + 100, wanted + 100) == wanted + 100


def test_what_a_full_disk_refused_for_one_file_is_given_back_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of_rows(tmp_path)

    def taken() -> list[tuple[int, int]]:
        return [(file.reserved_bytes, disk_bytes(file.path)) for file, _ in files]

    count = reserve_all(files, 0, 10, CAPACITY)
    for file, _ in files:
        file.data[: file.reserved_bytes] = 5
    before = taken()
    disk = FullDisk(monkeypatch, files[2][0].reserved_bytes + 8_192)
    for wanted in (count + 1_000, count + 2_000, count + 200_000):
        with pytest.raises(StorageError, match="taking disk space"):
            reserve_all(files, count, wanted, CAPACITY)
        assert taken() == before
    assert reserve_all(files, count, count + 20, CAPACITY) == count + 20
    for (file, stride), (reserved, _) in zip(files, before, strict=True):
        assert file.reserved_bytes < (count + 20) * stride + PAGE_SIZE_BYTES
        assert disk_bytes(file.path) <= file.reserved_bytes + PAGE_SIZE_BYTES
        assert (file.data[:reserved] == 5).all()
        assert not file.data[reserved : file.reserved_bytes].any()
    disk.limit = LARGE
    assert reserve_all(files, count + 20, count + 2_000, CAPACITY) >= count + 2_000
    assert all((f.data[:size] == 5).all() for (f, _), (size, _) in zip(files, before, strict=True))


def test_a_file_system_that_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken space stays known, so that it is not asked for again."""

    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    made = SparseFile.create(tmp_path / "rows", LARGE)
    made.reserve(8_192)
    monkeypatch.setattr(sparse_file, "_remove", refused)
    made.give_back(4_096, 8_192)
    assert made.reserved_bytes == 8_192


def test_a_file_system_that_forbids_the_size(tmp_path: Path) -> None:
    with pytest.raises((OSError, OverflowError)):
        SparseFile.create(tmp_path / "rows", 2**62)


def test_data_is_plain_bytes(tmp_path: Path) -> None:
    made = SparseFile.create(tmp_path / "rows", LARGE)
    made.reserve(4_096)
    rows = made.data.view(np.float32).reshape(-1, 4)
    rows[3] = 1.5
    made.sync()
    with (tmp_path / "rows").open("rb") as file:
        assert file.read(64)[48:] == np.full(4, 1.5, np.float32).tobytes()
