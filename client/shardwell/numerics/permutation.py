"""An order of n samples that needs no table: place to sample by arithmetic alone. Pure.

A Feistel network over [0, 2^(2b)), the least such range that has n, permutes it; a place that it
sends beyond n goes through it again until it comes below. The bits depend on length, seed and epoch
alone: all is arithmetic of 64-bit integers.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64: TypeAlias = npt.NDArray[np.int64]
_ROUND_COUNT = 6
_MASK = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def permuted(places: Int64, length: int, seed: int, epoch: int) -> Int64:
    """Returns the samples at `places` of an epoch's order.

    Args:
        places: (n,) int64, from 0 to `length` - 1.
        length: Samples of the dataset; at least 1, below 2^62.
        seed: Any number of 64 bits.
        epoch: The number of the order; below 2^62.
    """
    half = max((length - 1).bit_length() + 1, 2) // 2
    keys = [
        _mixed((seed + _mixed(epoch * _ROUND_COUNT + index + 1)) & _MASK)
        for index in range(_ROUND_COUNT)
    ]
    found = places.astype(np.uint64)
    beyond = np.arange(found.size)
    while beyond.size:
        found[beyond] = _through(found[beyond], half, keys)
        beyond = beyond[found[beyond] >= length]
    return found.astype(np.int64)


def samples_at(positions: Int64, length: int, seed: int, *, shuffles: bool) -> Int64:
    """Returns the samples at positions in the sequence of all epochs, each in its order.

    Args:
        positions: (n,) int64, position g being one of epoch g // length.
        length: See `permuted`.
        seed: See `permuted`.
        shuffles: False: position g is sample g % length.
    """
    epochs, found = np.divmod(positions, length)
    for epoch in np.unique(epochs).tolist() if shuffles else ():
        here = epochs == epoch
        found[here] = permuted(found[here], length, seed, epoch)
    return found


def _through(values: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = right + np.uint64(key)  # wraps, as do the products
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << shift) | right


def _mixed(value: int) -> int:
    """Returns 64 bits that all depend on all of the value's (splitmix64)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
