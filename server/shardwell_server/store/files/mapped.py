"""Files of fixed size, mapped into memory: made with all their disk space, checked when opened.

Python's `mmap` keeps a descriptor for as long as the memory is mapped. A parameter has five mapped
files, and a process has 1024 descriptors unless a user raises that, so that some hundred small
parameters would use all of them up. The kernel needs none once a file is mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from shardwell.errors import StorageError
from shardwell.numerics.codec import Bytes

_LIBC = ctypes.CDLL(None, use_errno=True)
_MAP = _LIBC.mmap
_MAP.restype = ctypes.c_void_p
_MAP.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_UNMAP, _SYNC, _ADVISE = _LIBC.munmap, _LIBC.msync, _LIBC.madvise
_UNMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_SYNC.argtypes = _ADVISE.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MS_SYNC = 0x4 if sys.platform == "linux" else 0x10
"""MS_SYNC of <sys/mman.h>, which Python does not name."""
PAGE_SIZE_BYTES = 4096
"""Parts that grow, or are mapped alone, begin at multiples of it."""


def whole_pages(size_bytes: int) -> int:
    """Returns the bytes of as many pages as that needs."""
    return -(-size_bytes // PAGE_SIZE_BYTES) * PAGE_SIZE_BYTES


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


@contextlib.contextmanager
def failing(path: Path, doing: str) -> Iterator[None]:
    """Raises StorageError where a call of the system fails in the block."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, doing) from None


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Opens a file for the block."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def reserve(file: int, size_bytes: int) -> None:
    """Makes a file that large and takes its disk space now; OSError: it may have grown.

    A write to a mapped page without space would kill the process when the disk is full.
    """
    if size_bytes:
        os.posix_fallocate(file, 0, size_bytes)


def sync_path(path: Path) -> None:
    """Makes a file's contents, or the names in a directory, survive a loss of power."""
    with opened(path, os.O_RDONLY) as file:
        os.fsync(file)


def replace_file(path: Path, text: str) -> None:
    """Writes a file, which is on disk before it has its name; OSError: the old one stays."""
    written = path.with_name(f"{path.name}.new")
    with written.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)
    sync_path(path.parent)


def identity_of(found: os.stat_result) -> tuple[int, int]:
    """Returns the identity of a file, whatever its name."""
    return (found.st_dev, found.st_ino)


def is_at(identity: tuple[int, int], path: Path) -> bool:
    """Returns True if a path leads to the file of an identity."""
    try:
        return identity_of(os.stat(path)) == identity
    except OSError:
        return False


class _Pages:
    def __init__(self, address: int, size_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
        }


class Mapping:
    """A file's bytes in memory; unmapped with the last view. `file` may be closed then."""

    def __init__(self, file: int, size_bytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _MAP(None, size_bytes, access, mmap.MAP_SHARED, file, 0)
        if address == _MAP_FAILED:
            raise _failed()
        pages = _Pages(address, size_bytes)
        # At the interpreter's end other threads may still write there: the system unmaps it then.
        weakref.finalize(pages, _UNMAP, address, size_bytes).atexit = False
        self._address = address
        self.data: Bytes = np.asarray(pages)

    def sync(self, size_bytes: int | None = None) -> None:
        if _SYNC(self._address, self.data.size if size_bytes is None else size_bytes, _MS_SYNC):
            raise _failed()

    def advise(self, advice: int, start: int, size_bytes: int) -> None:
        if _ADVISE(self._address + start, size_bytes, advice):
            raise _failed()


def _failed() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


NO_WORDS: memoryview[int] = memoryview(bytearray(8)).cast("Q")[:0]


class MappedFile:
    """A file whose memory is the kernel's: writes survive the process."""

    def __init__(self, path: Path, file: int, size_bytes: int) -> None:
        self.path = path
        self.identity = identity_of(os.fstat(file))
        self._mapping = Mapping(file, size_bytes) if size_bytes else None
        self.data: Bytes = np.empty(0, np.uint8) if self._mapping is None else self._mapping.data

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> Self:
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
            cls._make_room(file, size_bytes)
            return cls(path, file, size_bytes)

    @staticmethod
    def _make_room(file: int, size_bytes: int) -> None:
        reserve(file, size_bytes)

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> Self:
        """Opens a file; StorageError: it is missing, can't be opened, or has another size."""
        with failing(path, "opening it"), opened(path, os.O_RDWR) as file:
            found = os.fstat(file).st_size
            if found != size_bytes:
                raise StorageError(
                    f"{path} has {found} bytes; expected {size_bytes}: it was truncated or "
                    "replaced; restore the directory from a copy or a checkpoint"
                )
            return cls(path, file, size_bytes)

    def words(self, offset: int, count: int) -> memoryview[int]:
        """Returns a view of `count` words of 8 bytes; each is stored whole or not at all."""
        if count == 0:
            return NO_WORDS
        part: memoryview[int] = self.data[offset : offset + 8 * count].data.cast("Q")
        return part

    @property
    def has_name(self) -> bool:
        """True if its path leads to it."""
        return is_at(self.identity, self.path)

    def sync(self) -> None:
        if self._mapping is not None:
            self._mapping.sync()
