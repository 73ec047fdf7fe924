"""Files of fixed size, mapped into memory: made with all their disk space, checked when opened."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Self

import numpy as np

from shardwell.errors import StorageError
from shardwell.numerics.codec import Bytes
from shardwell_server.store.files.mapping import Mapping

PAGE_SIZE_BYTES = 4096
"""Parts that grow, or are mapped alone, begin at multiples of it."""


def storage_error(path: Path, error: OSError, doing: str) -> StorageError:
    """Returns the error of a failed system call."""
    hints = {
        errno.ENOSPC: "free space on that disk, then call again",
        errno.EDQUOT: "raise the quota, then call again",
        errno.EROFS: "remount the disk for writing, then call again",
        errno.EACCES: "let the shard's user write there, then call again",
        errno.EPERM: "let the shard's user write there, then call again",
        errno.EFBIG: "let it have files so large (file system, ulimit -f), then call again",
        errno.ENOMEM: "more than this machine can map: lower the limit of rows, or add shards",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    hint = hints.get(error.errno or 0, "check the disk")
    return StorageError(f"{path}: {doing} failed: {error.strerror}; {hint}")


def reserve(file: int, size_bytes: int) -> None:
    """Makes a file that large and takes its disk space now; OSError: it may have grown.

    A write to a mapped page without space would kill the process when the disk is full.
    """
    if size_bytes:
        os.posix_fallocate(file, 0, size_bytes)


def sync_directory(path: Path) -> None:
    """Makes names in a directory survive a loss of power."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_file(path: Path) -> None:
    """Makes a file's contents survive a loss of power."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


NO_WORDS: memoryview[int] = memoryview(bytearray(8)).cast("Q")[:0]


class MappedFile:
    """A file whose memory is the kernel's: writes survive the process."""

    def __init__(self, path: Path, file: int, size_bytes: int) -> None:
        self.path = path
        found = os.fstat(file)
        self.identity = (found.st_dev, found.st_ino)
        self._mapping = Mapping(file, size_bytes) if size_bytes else None
        self.data: Bytes = np.empty(0, np.uint8) if self._mapping is None else self._mapping.data

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> Self:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            reserve(file, size_bytes)
            return cls(path, file, size_bytes)
        finally:
            os.close(file)

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> Self:
        """Opens a file; StorageError: it is missing, can't be opened, or has another size."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(path, error, "opening it") from None
        try:
            found = os.fstat(file).st_size
            if found != size_bytes:
                raise StorageError(
                    f"{path} has {found} bytes; expected {size_bytes}: it was truncated or "
                    "replaced; restore the directory from a copy or a checkpoint"
                )
            return cls(path, file, size_bytes)
        except OSError as error:
            raise storage_error(path, error, "mapping it") from None
        finally:
            os.close(file)

    def words(self, offset: int, count: int) -> memoryview[int]:
        """Returns a view of `count` words of 8 bytes; each is stored whole or not at all."""
        if count == 0:
            return NO_WORDS
        part: memoryview[int] = self.data[offset : offset + 8 * count].data.cast("Q")
        return part

    def sync(self) -> None:
        if self._mapping is not None:
            self._mapping.sync()
