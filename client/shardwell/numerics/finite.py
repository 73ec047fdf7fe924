"""A look at an array for values that are not finite. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import is_plain, peak_of

CANONICAL_NAN = np.uint32(0x7FC00000).view(np.float32)
"""Every NaN that reaches a program: which bits arithmetic leaves in one depends on the order of
operands that a compiler chose."""
_BLOCK_ELEMENT_COUNT = 256 * 1024
"""1 MiB of float32: fetched from memory once, read twice."""


def first_non_finite(values: npt.NDArray[Any]) -> int | None:
    """The index of the first of (n,) values that is no finite float32; None if all are."""
    if is_plain(values) and math.isfinite(peak_of(values)):
        return None
    for first in range(0, values.size, _BLOCK_ELEMENT_COUNT):
        block = values[first : first + _BLOCK_ELEMENT_COUNT]
        if block.dtype.itemsize > 4:
            with np.errstate(over="ignore"):
                block = block.astype(np.float32)
        # Two reductions without a temporary; NaN and infinity survive one of them.
        low, high = float(np.minimum.reduce(block)), float(np.maximum.reduce(block))
        if not (math.isfinite(low) and math.isfinite(high)):
            return first + int(np.argmin(np.isfinite(block)))
    return None


def canonical_nans(values: npt.NDArray[np.float32]) -> bool:
    """Gives every NaN of an array the bits of CANONICAL_NAN, in place; whether there was one."""
    is_nan = np.isnan(values)
    found = bool(is_nan.any())
    if found:
        values[is_nan] = CANONICAL_NAN
    return found
