"""Training in int8, replayed in NumPy from the .proto and ADR 0039 alone: whole vectors, float32.

It knows no slices, chunks, versions or messages. Update rules are the caller's, or those of a
parameter in fp32 that is given what the shards of an int8 one add up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
BLOCK = 4096
LEVELS = np.float32(127)


def rounded(values: npt.NDArray[np.floating]) -> Float32:
    """Values as they are read after writing in int8: one block at a time."""
    plain = values.astype(np.float32)
    found = np.zeros(plain.size, np.float32)
    for start in range(0, plain.size, BLOCK):
        block = plain[start : start + BLOCK]
        peak = np.abs(block).max()
        if peak < 2.0**-100:
            continue
        scale = np.float32(peak / LEVELS)
        levels = np.rint(block * (np.float32(1) / scale)).astype(np.int8)
        found[start : start + BLOCK] = levels.astype(np.float32) * scale
    return found


class Int8Worker:
    """What one worker sends, and keeps of it."""

    def __init__(self, size: int) -> None:
        self.residual: Float32 = np.zeros(size, np.float32)

    def sent(self, gradient: npt.NDArray[np.floating]) -> Float32:
        """What the shards read of a gradient, all of which counts."""
        offered: Float32 = gradient.astype(np.float32) + self.residual
        found = rounded(offered)
        self.residual = offered - found
        return found


class Int8Weights:
    """What shards keep of weights, and what all workers have."""

    def __init__(self, first: Float32) -> None:
        self.weights = first.copy()
        self.image = first.copy()

    def update(self, weights: Float32) -> Float32:
        """The image after an update to these weights."""
        self.weights = weights.copy()
        self.image = self.image + rounded(self.weights - self.image)
        return self.image


class Int8Means:
    """The same of an Average."""

    def __init__(self, size: int) -> None:
        self.rest: Float32 = np.zeros(size, np.float32)

    def update(self, mean: Float32) -> Float32:
        """What all have of a mean."""
        wanted = mean + self.rest
        found = rounded(wanted)
        self.rest = wanted - found
        return found


def sgd(rate: float) -> Callable[[Float32, Float32], Float32]:
    """Plain SGD; a rate that is a power of two makes it exact but for one rounding."""
    return lambda weights, gradient: weights - np.float32(rate) * gradient
