"""Files mapped into memory, without a descriptor each.

Python's `mmap` keeps a descriptor for as long as the memory is mapped. A parameter has five mapped
files, and a process has 1024 descriptors unless a user raises that, so that some hundred small
parameters would use all of them up. The kernel needs none once a file is mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np

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
