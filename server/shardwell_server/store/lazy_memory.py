"""Arrays of zeros as large as they may ever get, of which only what is written costs memory."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 names it; Linux's value
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def lazy_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns zeros: C-contiguous, writable, at the start of a page.

    Pages come with the first write, and none is promised before: `shape` may be far beyond the
    machine's memory. MemoryError: it is beyond the address space.
    """
    kind = np.dtype(dtype)
    size_bytes = math.prod(shape) * kind.itemsize
    if size_bytes == 0:
        return np.zeros(shape, kind)
    return np.frombuffer(lazy_mapping(size_bytes), kind).reshape(shape)


def lazy_mapping(size_bytes: int) -> mmap.mmap:
    """Returns the memory of `lazy_zeros`, for callers that give parts back before the whole."""
    try:
        return mmap.mmap(-1, size_bytes, flags=_FLAGS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no address space for {size_bytes} bytes") from error
