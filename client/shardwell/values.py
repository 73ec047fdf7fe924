"""What callers pass as gradients and weights: accepted, converted or refused with a reason."""

from __future__ import annotations

import operator
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwell.codec import Float32
from shardwell.errors import ArgumentError, NonFiniteError

_ACCEPTED = (np.float32, np.float64, np.float16)
_CHECK_ELEMENT_COUNT = 256 * 1024
"""1 MiB of float32: fetched from memory once, read twice."""


def as_flat(what: str, values: Any, size: int) -> npt.NDArray[Any]:
    """The values as one dimension of floating point numbers, uncopied where they are contiguous.

    Args:
        what: What they are, for messages ("gradient of 'model'").
        values: A NumPy array (or what offers one, such as a CPU tensor) of any shape and layout
            with `size` elements, float32, or float64 or float16, which are converted.
        size: How many elements there must be.

    Raises:
        ArgumentError: another type, dtype or number of elements.
    """
    if type(values) is np.ndarray and values.shape == (size,) and values.dtype == np.float32:
        return values
    if not hasattr(values, "__array__"):
        raise ArgumentError(f"{what} must be a NumPy array of float32; got {type(values).__name__}")
    array = np.asarray(values)
    if array.dtype.type not in _ACCEPTED:
        raise ArgumentError(
            f"{what} must be float32 (float64 and float16 are converted); got {array.dtype}; "
            "convert it with .astype(np.float32)"
        )
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ArgumentError(f"{what} has masked elements; fill them with .filled(0)")
    if array.size != size:
        raise ArgumentError(
            f"{what} must have {size} elements; got {array.size} in shape {array.shape}"
        )
    return array.reshape(-1)


def as_output(out: Any, size: int, what: str = "out") -> Float32:
    """The caller's `out=`, or `what` it is called, as one dimension that can be written in place.

    Raises:
        ArgumentError: no writable C-contiguous float32 array of `size` elements.
    """
    if (
        not isinstance(out, np.ndarray)
        or out.dtype != np.float32
        or not out.dtype.isnative
        or out.size != size
        or not out.flags.c_contiguous
        or not out.flags.aligned
        or not out.flags.writeable
    ):
        found = (
            f"{out.dtype} of shape {out.shape}, contiguous={out.flags.c_contiguous}, "
            f"writeable={out.flags.writeable}"
            if isinstance(out, np.ndarray)
            else type(out).__name__
        )
        raise ArgumentError(
            f"{what} must be a writable C-contiguous float32 array of {size} elements; got {found}"
        )
    return np.asarray(out).reshape(-1)


def as_writable(what: str, array: Any) -> Float32:
    """An array of any size that is to be written in place, as one dimension.

    Raises:
        ArgumentError: as `as_output`.
    """
    return as_output(array, getattr(array, "size", 0), what)


def finite_peak(
    what: str,
    values: npt.NDArray[Any],
    parameter: str | None,
    start: int = 0,
    stop: int | None = None,
    remedy: str = "skip or mend the step, or open the parameter with allow_non_finite=True",
) -> float:
    """Largest magnitude of values[start:stop] as float32.

    Raises:
        NonFiniteError: one is NaN or infinite; with the index of the first.
    """
    stop = values.size if stop is None else stop
    peak = 0.0
    for first in range(start, stop, _CHECK_ELEMENT_COUNT):
        block = values[first : min(first + _CHECK_ELEMENT_COUNT, stop)]
        if block.dtype.itemsize > 4:
            with np.errstate(over="ignore"):
                block = block.astype(np.float32)
        # Two reductions without a temporary; NaN and infinity survive one of them.
        low, high = float(np.minimum.reduce(block)), float(np.maximum.reduce(block))
        if not (isfinite(low) and isfinite(high)):
            index = first + int(np.argmin(np.isfinite(block)))
            raise NonFiniteError(
                f"{what}: element {index} is {values[index]}, which is not a finite float32; "
                f"{remedy}",
                element_index=index,
                parameter=parameter,
            )
        peak = max(peak, -low, high)
    return peak


def check_timeout(timeout_s: Any) -> float:
    """Returns a timeout that can be used: above 0, at most 30 days.

    Raises:
        ArgumentError: it is not.
    """
    good = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not good or not 0 < timeout_s <= 30 * 86400:
        raise ArgumentError(f"timeout_s must be above 0 and at most 30 days; got {timeout_s!r}")
    return float(timeout_s)


def check_integer(what: str, value: Any, low: int, high: int) -> int:
    """Returns an integer, of any integer type, from `low` to `high`.

    Raises:
        ArgumentError: it is none.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or not low <= number <= high:
        raise ArgumentError(f"{what} must be an integer from {low} to {high}; got {value!r:.80}")
    return number


def milliseconds(seconds: float) -> int:
    """A timeout as it travels: at least 1, because 0 would mean none."""
    return max(int(seconds * 1000), 1)
