"""Where everything is in the accumulator's memory, or file. Pure.

    offset
         0   head: see file.py
      4096   a word a row: 0, or what its sum is believed by
         .   sums: `dim` float32 a row
         .   undo: UNDO_ENTRY_COUNT entries, each with room for all rows

Parts begin at pages. It is as large as it may ever get; what is not written has no disk space.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwell_server.store.files.mapped import PAGE_SIZE_BYTES
from shardwell_server.store.mmap.row_undo import entry_bytes

UNDO_ENTRY_COUNT = 4
"""Calls that change rows at once; more wait. As many as threads that find a core."""


def page_aligned(size_bytes: int) -> int:
    """The size in whole pages."""
    return -(-size_bytes // PAGE_SIZE_BYTES) * PAGE_SIZE_BYTES


@dataclass(frozen=True, kw_only=True)
class SumLayout:
    """The layout for `row_count` rows of `dim` values."""

    dim: int
    row_count: int

    @property
    def row_size_bytes(self) -> int:
        """Bytes of a row's sum."""
        return 4 * self.dim

    @property
    def words_offset(self) -> int:
        """Where words begin."""
        return PAGE_SIZE_BYTES

    @property
    def sums_offset(self) -> int:
        """Where sums begin."""
        return self.words_offset + page_aligned(8 * self.row_count)

    @property
    def undo_offset(self) -> int:
        """Where undo begins, and a file that was closed ends."""
        return self.sums_offset + page_aligned(self.row_size_bytes * self.row_count)

    @property
    def undo_entry_size_bytes(self) -> int:
        """Of one entry, for words and sums."""
        arrays = (np.empty(0, np.uint64), np.empty((0, self.dim), np.float32))
        return entry_bytes(arrays, self.row_count)

    @property
    def size_bytes(self) -> int:
        """Of everything."""
        return self.undo_offset + UNDO_ENTRY_COUNT * self.undo_entry_size_bytes
