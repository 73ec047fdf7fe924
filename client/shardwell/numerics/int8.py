"""Arithmetic of the codec int8: a scale for each block of 4,096 elements, and a byte an element.

Pure. A payload of n elements is, one behind the other:

    scales   ceil(n / 4096) float32, little-endian
    values   n signed bytes, -127 to 127

A block's scale s is its largest magnitude / 127, and an element x is written as the integer nearest
to x / s, ties to even, so that |x - s * written| <= s / 2 * (1 + 2^-15). A block whose magnitudes
are all below 2^-100 is written as zeros: error feedback keeps what that loses. Blocks are counted
from the start of the parameter, and slices and chunks of such a parameter begin with a block: so
the bits depend on its values alone, and not on the number of shards.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwell.specs.parameter import BLOCK_SIZES

BLOCK_SIZE = BLOCK_SIZES["int8"]
_SCALE_BYTES = 4
_LEVEL_MAX = np.float32(127)
_PEAK_MIN = np.float32(2.0**-100)
"""A block below it is zeros: its scale's inverse could leave float32."""
_SCALE_MAX = np.nextafter(np.finfo(np.float32).max / _LEVEL_MAX, np.float32(0), dtype=np.float32)
"""The largest scale: 127 times it is finite."""
_RUN_SIZE = 32 * BLOCK_SIZE
"""Elements of one pass, which stay in a second-level cache."""


def encoded_bytes(count: int) -> int:
    """Returns the bytes of the payload of so many elements."""
    return count + _SCALE_BYTES * -(-count // BLOCK_SIZE)


def element_count(size_bytes: int) -> int:
    """Returns the elements of a payload; -1 where no payload has that size."""
    count = size_bytes - _SCALE_BYTES * -(-size_bytes // (BLOCK_SIZE + _SCALE_BYTES))
    return count if encoded_bytes(count) == size_bytes else -1


def _parts(
    payload: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int8]]:
    count = element_count(payload.size)
    split = payload.size - count
    return payload[:split].view("<f4"), payload[split:].view(np.int8)


def quantize(
    values: npt.NDArray[np.float32], payload: npt.NDArray[np.uint8], start: int = 0
) -> float:
    """Writes n contiguous float32 values, and returns their largest magnitude.

    `payload` is that of n elements or more, aligned to 4. `start` is the first one's place there:
    that of a block. They end with one, or are the payload's last. A magnitude that is infinite or
    NaN says that the payload is of no use.
    """
    scales, levels = _parts(payload)
    largest = np.float32(0)
    memory = np.empty(min(_RUN_SIZE, values.size), np.float32)
    with np.errstate(all="ignore"):
        for first, rows, row_size in _runs(values.size):
            block = values[first : first + rows * row_size].reshape(rows, row_size)
            scaled = memory[: block.size].reshape(rows, row_size)
            peaks = np.maximum(block.max(axis=1), -block.min(axis=1))
            largest = np.maximum(largest, peaks.max())
            scale = scales[(start + first) // BLOCK_SIZE :][:rows]
            np.minimum(peaks / _LEVEL_MAX, _SCALE_MAX, out=scale)
            scale[peaks < _PEAK_MIN] = 0
            inverse = np.zeros(rows, np.float32)
            np.divide(np.float32(1), scale, out=inverse, where=scale > 0)
            np.multiply(block, inverse[:, None], out=scaled)
            np.rint(scaled, out=scaled)
            written = levels[start + first :][: block.size].reshape(rows, row_size)
            np.copyto(written, scaled, casting="unsafe")
    return float(largest)


def dequantize(
    payload: npt.NDArray[np.uint8], values: npt.NDArray[np.float32], start: int = 0
) -> None:
    """Reads a payload's elements from `start` on, as of `quantize`, into values: (n,) float32."""
    scales, levels = _parts(payload)
    with np.errstate(all="ignore"):
        for first, rows, row_size in _runs(values.size):
            block = values[first : first + rows * row_size].reshape(rows, row_size)
            scale = scales[(start + first) // BLOCK_SIZE :][:rows, None]
            written = levels[start + first :][: block.size].reshape(rows, row_size)
            np.multiply(written, scale, out=block, dtype=np.float32)


def peak(payload: npt.NDArray[np.uint8]) -> float:
    """The largest magnitude of the values once read: infinite where one is not finite."""
    scales, written = _parts(payload)
    largest = np.float32(0)
    with np.errstate(all="ignore"):
        for start, rows, row_size in _runs(written.size):
            levels = written[start : start + rows * row_size].reshape(rows, row_size)
            most = np.maximum(levels.max(axis=1), -levels.min(axis=1).astype(np.float32))
            first = start // BLOCK_SIZE
            found = np.abs(scales[first : first + rows]) * most
            largest = np.maximum(largest, found.max())
    is_finite = np.isfinite(largest) and np.isfinite(scales).all()
    return float(abs(largest)) if is_finite else float("inf")


def _runs(count: int) -> list[tuple[int, int, int]]:
    whole = count // BLOCK_SIZE * BLOCK_SIZE
    found = [
        (start, min(_RUN_SIZE, whole - start) // BLOCK_SIZE, BLOCK_SIZE)
        for start in range(0, whole, _RUN_SIZE)
    ]
    return [*found, (whole, 1, count - whole)] if whole < count else found
