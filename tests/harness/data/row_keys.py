"""Keys of rows that are a trouble to a hash table."""

from __future__ import annotations

import numpy as np

from shardwell.placement.rows import Ids

EXTREMES = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1]


def colliding_keys(count: int, salt: int, first_hash: int = 0xFFFFFFFFFFFF0000) -> Ids:
    """Keys that all want the same line, whatever the size of the table is; by default the last."""
    hashes = np.arange(count, dtype=np.uint64) + np.uint64(first_hash)
    return (_unmix(hashes) ^ np.uint64(salt)).view(np.int64)


def _unmix(words: np.ndarray) -> np.ndarray:
    """What `mix` makes these words of."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        shifted = words ^ (words >> np.uint64(shift))
        words = shifted ^ (words >> np.uint64(2 * shift))
        words = words * np.uint64(pow(factor, -1, 2**64))
    return words
