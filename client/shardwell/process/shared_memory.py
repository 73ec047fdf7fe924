"""Memory that two processes of one user have mapped: a sealed memfd, handed over a Unix socket.

It has no name, so nothing is left of it when both have ended, however they end. Its size is sealed,
and its pages are there before it is used, so that no access fails for want of memory (unless the
other process punches holes into it, and there is none by then); see arena.proto for how it is
handed over. What the other process writes there may change at any time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import struct
import sys

import numpy as np
import numpy.typing as npt

if sys.platform == "linux":
    import fcntl

# Pythons for Linux have been built without memfd_create, against an old C library.
IS_SUPPORTED = (
    sys.platform == "linux"
    and hasattr(fcntl, "F_ADD_SEALS")
    and all(hasattr(os, name) for name in ("memfd_create", "posix_fallocate", "eventfd"))
)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if IS_SUPPORTED else 0
_MADV_POPULATE_READ = 22
_LIBC = ctypes.CDLL(None)
HEAD_BYTES = 64
"""At the start, for the two that share it to know each other by."""
_NUMBER = struct.Struct("<Q")


class SharedMemoryError(Exception):
    """An error about memory that is not to be used; says why."""


class SharedMemory:
    """The mapped memory, unmapped when the last reference to it, or to a view of it, is gone."""

    def __init__(self, file: int, size_bytes: int) -> None:
        mapped = mmap.mmap(file, size_bytes)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        # Other threads run meanwhile, as they would not with MAP_POPULATE. Where a kernel can't,
        # each page is mapped when it is touched.
        address = ctypes.c_void_p(self._bytes.ctypes.data)
        _LIBC.madvise(address, ctypes.c_size_t(size_bytes), _MADV_POPULATE_READ)
        self.size_bytes = size_bytes

    def view(self, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """A part of it, which may change at any time; SharedMemoryError: there is no such part."""
        stop = offset + size_bytes
        if offset % 16 or not HEAD_BYTES <= offset <= stop <= self.size_bytes:
            raise SharedMemoryError(
                f"{size_bytes} bytes at {offset} of an arena of {self.size_bytes}; expected a "
                f"multiple of 16 from {HEAD_BYTES} on, within it"
            )
        return self._bytes[offset:stop]

    def number(self, index: int) -> int:
        """One of the numbers in its head."""
        start = index * _NUMBER.size
        return int(_NUMBER.unpack(self._bytes[start : start + _NUMBER.size].tobytes())[0])

    def set_number(self, index: int, number: int) -> None:
        """Writes one of the numbers in its head."""
        start = index * _NUMBER.size
        self._bytes[start : start + _NUMBER.size] = np.frombuffer(_NUMBER.pack(number), np.uint8)


class OwnMemory:
    """The memory of this process that is handed over."""

    def __init__(self, size_bytes: int) -> None:
        self.file = os.memfd_create("shardwell", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, size_bytes)
            os.posix_fallocate(self.file, 0, size_bytes)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = SharedMemory(self.file, size_bytes)
            """The mapping in this process."""
        except BaseException:
            os.close(self.file)
            raise

    def close(self) -> None:
        """Lets go of the descriptor; what is mapped, here and elsewhere, stays. Once."""
        os.close(self.file)


def received_memory(file: int, size_bytes: int) -> SharedMemory:
    """Maps memory of another process, of that size and sealed; the caller closes the descriptor."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
        raise SharedMemoryError(f"the file has {status.st_size} bytes; expected {size_bytes}")
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise SharedMemoryError("the memory's size is not sealed")
    os.posix_fallocate(file, 0, size_bytes)  # a page that is not there could fail when touched
    return SharedMemory(file, size_bytes)
