"""Values as kernels read them: contiguous float32, and the magnitudes of what they wrote. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_SIGNED: dict[Any, Any] = {
    np.dtype(np.uint16): np.dtype(np.int16),
    np.dtype(np.uint32): np.dtype(np.int32),
}


def is_plain(values: npt.NDArray[Any]) -> bool:
    """Whether the kernels can read the values as they lie."""
    flags = values.flags
    return bool(values.dtype == np.float32 and flags.c_contiguous and flags.aligned)


def as_plain(block: npt.NDArray[Any], into: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The block as contiguous native float32: itself, or a view of `into`, which it is copied to.

    Args:
        block: (n,) float32, float64 or float16, any stride.
        into: At least (n,), contiguous.
    """
    if is_plain(block):
        return block
    values = into[: block.size]
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(values, block, casting="same_kind")
    return values


def magnitude_of_bits(bits: npt.NDArray[Any]) -> int:
    """Largest value of (n,) uint16 or uint32 without their signs: two maxima, no temporary."""
    sign = 1 << (8 * bits.itemsize - 1)
    unsigned = int(np.maximum.reduce(bits))
    if unsigned < sign:
        return unsigned
    signed = int(np.maximum.reduce(bits.view(_SIGNED[bits.dtype])))
    return max(unsigned - sign, signed)
