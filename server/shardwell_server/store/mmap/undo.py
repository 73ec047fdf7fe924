"""The chunks before a change in place, so that a change that was cut off is taken back.

A few entries, used in turns, each as large as a chunk's weights and optimizer state:

    word 0   progress: how many elements have been saved, and so may have been written; 0: none
    word 1   chunk
    word 2   the chunk's sequence number before the change
    word 3   which arrays: 1 the sum, 2 weights and optimizer state
    word 4   check of words 1 to 3
    4096     the arrays

A block is saved, then progress moves on, then the block is written. The record that makes the
change stand has a higher sequence number, and so makes the entry void at the same instant.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell.numerics.codec import Float32
from shardwell_server.store.contract import Layout, Transition
from shardwell_server.store.files.layout import Home
from shardwell_server.store.files.mapped import PAGE_SIZE_BYTES, MappedFile, whole_pages

ENTRY_COUNT_MAX = 4
"""Chunks that change in place at once; more wait. As many as threads that find a core."""
_KINDS = {Transition.ADD: 1, Transition.CLOSE: 2}
_HEAD = struct.Struct("<QQQ")

Arrays: TypeAlias = Sequence[Float32]


def _array_bytes(layout: Layout) -> int:
    return whole_pages(4 * min(layout.chunk_element_count, layout.slice_size))


def _entry_bytes(layout: Layout) -> int:
    return PAGE_SIZE_BYTES + (1 + len(layout.initial_slots)) * _array_bytes(layout)


def file_size(layout: Layout) -> int:
    """Returns the bytes of the file."""
    return min(ENTRY_COUNT_MAX, layout.chunk_count) * _entry_bytes(layout)


class UndoEntry:
    """The entry of one chunk's change in place. One thread at a time."""

    def __init__(self, file: MappedFile, number: int, home: Home) -> None:
        start = number * _entry_bytes(home.layout)
        size = _array_bytes(home.layout)
        self.number = number
        self._file = file
        self._words = file.words(start, 5)
        self._saved = [
            file.data[offset : offset + size].view(np.float32)
            for offset in range(
                start + PAGE_SIZE_BYTES, start + _entry_bytes(home.layout), max(size, 1)
            )
        ]
        self._salt = home.salt
        self._reached = home.reached

    def begin(self, chunk_index: int, sequence: int, transition: Transition) -> None:
        words, kind = self._words, _KINDS[transition]
        words[0] = 0
        self._reached("undo voided")
        words[1], words[2], words[3] = chunk_index, sequence, kind
        self._reached("undo's head")
        words[4] = self._check(chunk_index, sequence, kind)
        self._reached("undo's check")

    def save(self, arrays: Arrays, start: int, stop: int) -> None:
        for saved, array in zip(self._saved, arrays, strict=False):
            np.copyto(saved[start:stop], array[start:stop])
            self._reached("undo saved")
        self._words[0] = stop
        self._reached("undo's progress")

    def roll_back(self, arrays: Arrays) -> None:
        progress = self._words[0]
        if progress > arrays[0].size:
            raise self._damaged()
        for saved, array in zip(self._saved, arrays, strict=False):
            np.copyto(array[:progress], saved[:progress])
            self._reached("taken back")
        self._words[0] = 0
        self._reached("undo done")

    def void(self) -> None:
        self._words[0] = 0
        self._reached("undo voided")

    def pending(self, chunk_count: int) -> tuple[int, int, Transition] | None:
        progress, chunk_index, sequence, kind, check = self._words
        if progress == 0:
            return None
        if (
            check != self._check(chunk_index, sequence, kind)
            or chunk_index >= chunk_count
            or progress > self._saved[0].size
        ):
            raise self._damaged()
        return chunk_index, sequence, Transition.ADD if kind == 1 else Transition.CLOSE

    def _damaged(self) -> StorageError:
        return StorageError(
            f"{self._file.path}: entry {self.number} was damaged; restore the directory from a "
            "copy or a checkpoint"
        )

    def _check(self, chunk_index: int, sequence: int, kind: int) -> int:
        return crc32.iscsi(_HEAD.pack(chunk_index, sequence, kind), self._salt)


class UndoArea:
    """The entries of a slice, handed out to threads."""

    def __init__(self, file: MappedFile, home: Home) -> None:
        count = min(ENTRY_COUNT_MAX, home.layout.chunk_count)
        self.entries = [UndoEntry(file, number, home) for number in range(count)]
        # The one used last is taken first, because it is in the cache.
        self._free = list(self.entries)
        self._free_count = threading.Semaphore(len(self.entries))

    def take(self) -> UndoEntry:
        """Takes an entry for one change; blocks while others, who wait for nothing, have all."""
        self._free_count.acquire()
        return self._free.pop()

    def give_back(self, entry: UndoEntry) -> None:
        self._free.append(entry)
        self._free_count.release()
