"""Mapped files as large as they may ever get, whose disk space is taken step by step.

The whole file is mapped from the start, so that growing moves nothing: addresses stay, and threads
that read go on. Bytes that were never reserved are a hole, which must not be written, because a
write to a mapped page that the full disk has no room for kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from shardwell.errors import StorageError
from shardwell_server.store.files.mapped import MappedFile, Mapping, failing, opened, whole_pages

EXTENT_BYTES_MIN = 1 << 20
"""Disk space is taken so much at a time at first, then as much as the file has already,"""
EXTENT_BYTES_MAX = 64 << 20
"""up to here: a call of the system now and then, and little that is not needed yet."""


def extended(reserved: int, wanted: int, capacity: int, unit_bytes: int = 1) -> int:
    """Returns more units than are wanted, so that more room is needed rarely."""
    extent_bytes = min(max(reserved * unit_bytes, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX)
    return min(max(wanted, reserved + extent_bytes // unit_bytes), capacity)


class SparseFile(MappedFile):
    """A mapped file with room for its first `reserved_bytes`. One thread at a time reserves."""

    reserved_bytes = 0

    @staticmethod
    def _make_room(file: int, size_bytes: int) -> None:
        os.ftruncate(file, size_bytes)

    def expect_random_access(self) -> None:
        if self._mapping is not None:
            self._mapping.advise(mmap.MADV_RANDOM, 0, self.data.size)

    def reserve(self, size_bytes: int) -> None:
        """Takes disk space for `size_bytes`, in whole pages; StorageError: nothing changed."""
        size_bytes = self._whole_pages(size_bytes)
        if size_bytes <= self.reserved_bytes:
            return
        doing = "taking disk space for more rows"
        with failing(self.path, doing), opened(self.path, os.O_RDWR) as file:
            os.posix_fallocate(file, self.reserved_bytes, size_bytes - self.reserved_bytes)
        self.reserved_bytes = size_bytes

    def give_back(self, kept_bytes: int, taken_bytes: int) -> None:
        """Makes a hole of what lies from `kept_bytes`, whole pages, to `taken_bytes`.

        A call that failed may have taken some of it. Where the file system takes nothing back, the
        space counts as reserved, and serves the next call.
        """
        end = self._whole_pages(taken_bytes)
        if self._mapping is None or end <= kept_bytes:
            return
        with contextlib.suppress(OSError):
            _remove(self._mapping, kept_bytes, end - kept_bytes)
            self.reserved_bytes = min(self.reserved_bytes, kept_bytes)

    def stands_reserved(self, size_bytes: int) -> None:
        """Notes that an earlier process has reserved that much; the disk has no work."""
        self.reserved_bytes = self._whole_pages(size_bytes)

    def _whole_pages(self, size_bytes: int) -> int:
        return min(whole_pages(size_bytes), self.data.size)


def _remove(mapping: Mapping, start: int, size_bytes: int) -> None:
    mapping.advise(mmap.MADV_REMOVE, start, size_bytes)


def reserve_all(
    files: list[tuple[SparseFile, int]], reserved: int, wanted: int, capacity: int
) -> int:
    """Reserves rows in all files; returns the number that is reserved now.

    More than is wanted where the disk has space, else exactly that. If one file can't grow, the
    others give back what they took. StorageError: no space for what is wanted.
    """
    row_bytes = sum(stride for _, stride in files)
    before = [file.reserved_bytes for file, _ in files]
    for row_count in (extended(reserved, wanted, capacity, row_bytes), wanted):
        try:
            for file, stride in files:
                file.reserve(row_count * stride)
        except StorageError:
            for (file, stride), kept_bytes in zip(files, before, strict=True):
                file.give_back(kept_bytes, row_count * stride)
            if row_count == wanted:
                raise
        else:
            return row_count
    raise AssertionError("wanted is tried last")


def copy_sparse(source: Path, target: Path) -> None:
    """Copies a file's bytes, and its holes as holes; replaces `target`."""
    with source.open("rb") as read, target.open("wb") as written:
        size = os.fstat(read.fileno()).st_size
        os.ftruncate(written.fileno(), size)
        end = 0
        while end < size:
            try:
                start = os.lseek(read.fileno(), end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                raise
            end = os.lseek(read.fileno(), start, os.SEEK_HOLE)
            os.lseek(written.fileno(), start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(written.fileno(), read.fileno(), start, end - start)
