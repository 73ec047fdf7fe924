"""Arrays at any address, as those that callers have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def at_byte(offset: int, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy, so many bytes behind the beginning of a cache line."""
    memory = np.zeros(offset + array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
