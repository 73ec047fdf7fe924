"""The shard of each row of a table. Pure arithmetic on whole arrays; stated in table.proto.

With `row_count`, ids are dealt to the shards in rounds of shard_count neighbours, each round turned
by a number that looks random, so that neighbours and strides alike are spread evenly, and every
shard's rows are numbered without gaps. Any 64-bit key is placed by a hash (the finalizer of
splitmix64: Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
"""(n,) int64: ids of rows, or keys."""
Words = npt.NDArray[np.uint64]


def mix(words: Words) -> Words:
    """A hash of each 64-bit word; a permutation of them all."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


class RowPlacement:
    """The places of one table's rows; without `row_count` any 64-bit integer is a key."""

    def __init__(self, row_count: int | None, shard_count: int) -> None:
        self.row_count = row_count
        self.shard_count = shard_count

    def shards_of(self, ids: Ids) -> Ids:
        """Returns (n,) int64: the shard of each id, which is in range."""
        words = ids.view(np.uint64)
        count = np.uint64(self.shard_count)
        if self.row_count is None:
            return _remainder(mix(words), count).view(np.int64)
        turned = _remainder(mix(words // count), count)
        turned += words
        return _remainder(turned, count).view(np.int64)

    def local_rows(self, ids: Ids) -> Ids:
        """Returns (n,) int64: each id's number among its shard's rows; with `row_count` only."""
        return ids // self.shard_count

    def local_row_count(self) -> int:
        """Numbers below it are used by `local_rows`; with `row_count` only."""
        assert self.row_count is not None
        return -(-self.row_count // self.shard_count)


def _remainder(words: Words, count: np.uint64) -> Words:
    """Words % count, written into `words`; half the time of NumPy's `%`, which has no SIMD."""
    words -= words // count * count
    return words
