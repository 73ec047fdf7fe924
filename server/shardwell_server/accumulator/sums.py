"""Sums of gradients by row in one piece of memory, a file's or not: each batch whole or not at all.

A row has a word: 0, or, where it has a sum, a check of the sum and the row's number, which no other
file shares (store/row_checks.py). A batch is added in these writes; those of the undo are in
store/row_undo.py:

    undo: rows' numbers, words and sums as they were; valid     killed before: nothing was touched
    sums, words                                                 killed before: taken back
    undo: void, one store of 8 bytes                            the batch is committed

The caller holds the locks of the rows. A row without disk space is never touched, not even read: on
some file systems that takes a page.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwell.errors import NonFiniteError, StorageError
from shardwell.numerics.codec import Float32
from shardwell.numerics.row_sums import Flags, Rows, add_rows, first_bad_cell
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT, thread_scratch
from shardwell_server.accumulator.file_layout import UNDO_ENTRY_COUNT, SumLayout, Summary
from shardwell_server.accumulator.stripe_locks import Stripes
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.lazy_memory import lazy_zeros
from shardwell_server.store.row_arrays import gather
from shardwell_server.store.row_checks import Checks, SumChecks
from shardwell_server.store.row_undo import RowUndo

RESERVED_SIZE_BYTES = 64 * 1024
"""Disk space is taken for so many bytes of neighbouring rows at a time: a call of the system costs
as much as writing them, and rows far apart take little more than their pages."""
_UNDO_ROW_COUNT_MIN = 64
_NUMBERS = (0, 1)


class SumMemory(MappedFile):
    """A piece of memory, of which only what is written costs something; gone with the process."""

    def __init__(self, size_bytes: int) -> None:
        self.path = Path("memory")
        self.data = lazy_zeros((size_bytes,), "uint8")

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Makes room; bytes that it has stay as they are. StorageError: nothing changed."""

    def ranges(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """The offset and size of each part that may hold what another process has written."""
        return iter(())


class TouchedRows:
    """A flag a row, and one a stripe. Callers hold the stripes' locks, except of `stripes`.

    A flag is set before its row gets a sum, and cleared after the row has lost it; so rows without
    a sum may have one.
    """

    def __init__(self, row_count: int, rows_per_stripe: int) -> None:
        self._rows_per_stripe = rows_per_stripe
        self.row_count = row_count
        self.stripe_count = -(-row_count // rows_per_stripe)
        shape = (self.stripe_count, rows_per_stripe)
        self._of_rows: npt.NDArray[np.bool_] = lazy_zeros(shape, np.bool_)
        self._of_stripes: npt.NDArray[np.bool_] = lazy_zeros(shape[:1], np.bool_)

    def stripes_of(self, rows: Rows) -> Stripes:
        """Returns the stripes of rows that ascend: ascending, without repeats."""
        stripes = rows // self._rows_per_stripe
        if stripes.size > 1:
            is_first = stripes[1:] != stripes[:-1]
            if not is_first.all():
                stripes = stripes[np.concatenate(([True], is_first))]
        return stripes

    def touch(self, rows: Rows, stripes: Stripes) -> None:
        """Sets the flags of rows, and of their stripes."""
        self._of_rows.reshape(-1)[rows] = True
        self._of_stripes[stripes] = True

    def clear(self, rows: Rows, stripes: Stripes | None) -> None:
        """Clears the flags of rows that are all touched rows of these stripes; None: of all."""
        self._of_rows.reshape(-1)[rows] = False
        self._of_stripes[self.stripes() if stripes is None else stripes] = False

    def stripes(self) -> Stripes:
        """Returns the stripes that may have touched rows; all of them that no call holds."""
        return np.flatnonzero(self._of_stripes)

    def rows_of(self, stripes: Stripes | None) -> Rows:
        """Returns the touched rows of stripes, which ascend; None: of all."""
        if stripes is None:
            return np.flatnonzero(self._of_rows.reshape(-1))
        flags = np.flatnonzero(self._of_rows[stripes].reshape(-1))
        places, numbers = np.divmod(flags, self._rows_per_stripe)
        rows: Rows = stripes[places] * self._rows_per_stripe + numbers
        return rows


class _Undo(RowUndo):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lock = threading.Lock()
        self.room_row_count = 0
        self.is_changing = False


class StoredSums:
    """The sums of an accumulator."""

    def __init__(
        self, memory: SumMemory, layout: SumLayout, salt: int, reached: Callable[[str], None]
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._reached = reached
        row_count, dim = layout.row_count, layout.dim
        self._block_row_count = BLOCK_ELEMENT_COUNT // dim
        data, start = memory.data, layout.sums_offset
        self._words: Checks = data[layout.words_offset :][: 8 * row_count].view(np.uint64)
        sums = data[start : start + layout.row_size_bytes * row_count].view(np.float32)
        self._sums: Float32 = sums.reshape(row_count, dim)
        self._checks = SumChecks(dim, salt)
        self._rows_per_extent = -(-RESERVED_SIZE_BYTES // layout.row_size_bytes)
        extent_count = -(-row_count // self._rows_per_extent)
        self._is_reserved = lazy_zeros((extent_count,), np.bool_)
        self._reserving = threading.Lock()
        arrays = (self._words, self._sums)
        size = layout.undo_entry_size_bytes
        self._undo = [
            _Undo(memory, layout.undo_offset + n * size, arrays, row_count, salt, reached)
            for n in range(UNDO_ENTRY_COUNT)
        ]
        self.is_torn = False
        """True after a batch that was interrupted while it was taken back: a part of it counts.
        `take_back` mends its rows; no other call may run beside it."""

    def add(self, rows: Rows, gradients: Float32) -> None:
        """Adds a batch of ascending rows without repeats: all of it, or nothing when it raises."""
        undo = self._taken_undo()
        try:
            self.check_whole()  # one who held rows already may have taken the entry
            self._make_room(undo, rows.size)
            undo.is_changing = True
            try:
                words, sums = undo.save(0, rows, _NUMBERS)
                has_sum = words != 0
                for start in range(0, rows.size, self._block_row_count):
                    part = slice(start, start + self._block_row_count)
                    self._add_block(rows[part], sums[part], has_sum[part], gradients[part])
                undo.void()
            except BaseException:
                if undo.pending() is not None:  # else it was not saved yet, or is committed already
                    undo.roll_back()  # where Ctrl-C may come, too
                undo.is_changing = False
                raise
            undo.is_changing = False
        finally:
            # Before another gets the entry, or the rows; and in no call, where Ctrl-C may come.
            self.is_torn |= undo.is_changing
            undo.lock.release()

    def check_whole(self) -> None:
        """Raises StorageError if `is_torn`."""
        if self.is_torn:
            raise StorageError(
                "a call was interrupted, and again while it was taken back: some of its rows are "
                "changed; close the accumulator, which takes it back in its file, and open another"
            )

    def _add_block(self, rows: Rows, sums: Float32, has_sum: Flags, gradients: Float32) -> None:
        added = thread_scratch().values[: sums.size].reshape(sums.shape)
        add_rows(sums, has_sum, gradients, out=added)
        bad = first_bad_cell(added)
        if bad is not None:
            raise NonFiniteError(
                f"the sum of row {rows[bad.row]} would be {added[bad]} in column {bad.column}, "
                "beyond float32; apply or clear the sums more often, or scale the gradients down"
            )
        self._sums[rows] = added
        self._reached("sums")
        self._words[rows] = self._words_of(rows, added)
        self._reached("words")

    def with_sum(self, rows: Rows) -> Rows:
        """The rows that have a sum; all are reserved."""
        words = self._words[rows]
        return rows if np.count_nonzero(words) == rows.size else rows[words != 0]

    def get(self, row: int) -> Float32:
        """Returns (dim,) float32, a copy: the sum of a row, or zeros."""
        found = np.zeros(self._layout.dim, np.float32)
        if self._is_reserved[row // self._rows_per_extent] and self._words[row]:
            np.copyto(found, self._sums[row])
        return found

    def blocks(self, rows: Rows) -> Iterator[tuple[Rows, Float32]]:
        """Yields rows that have a sum, in blocks, with a copy of their sums in scratch memory."""
        for start in range(0, rows.size, self._block_row_count):
            part = rows[start : start + self._block_row_count]
            yield part, self._gathered(part)

    def clear(self, rows: Rows) -> None:
        """Takes the rows' sums from them, one row after the other."""
        self._words[rows] = 0
        self._reached("words cleared")

    def summary(self, rows: Rows) -> Summary:
        """The summary of rows that are all that have a sum."""
        return Summary(rows.size, int(self._words[rows].sum(dtype=np.uint64)))

    def take_back(self) -> int:
        """Takes back batches that a killed process, or this one, left; returns how many."""
        for undo in self._undo:
            self._memory.reserve(*undo.room(0)[0])
        # All are looked at before anything is written.
        try:
            pending = [undo for undo in self._undo if undo.pending() is not None]
        except StorageError:
            raise StorageError(
                f"{self._memory.path}: what takes back an unfinished call was damaged; restore it "
                "from a copy, or remove it"
            ) from None
        for undo in pending:
            undo.roll_back()
        return len(pending)

    def find(self) -> Rows:
        """Finds the rows that have a sum in memory that another process has left, ascending."""
        found = [np.arange(0)]
        size = 8 * self._layout.row_count
        for offset, length in self._memory.ranges(self._layout.words_offset, size):
            first = -(-(offset - self._layout.words_offset) // 8)
            last = (offset + length - self._layout.words_offset) // 8
            found.append(np.flatnonzero(self._words[first:last]) + first)
        rows: Rows = np.concatenate(found)
        self._is_reserved[rows // self._rows_per_extent] = True
        return rows

    def first_damaged(self, rows: Rows) -> int | None:
        """The first of the rows whose sum does not fit its word; None if all do."""
        for start in range(0, rows.size, self._block_row_count):
            part = rows[start : start + self._block_row_count]
            bad = np.flatnonzero(self._words_of(part, self._gathered(part)) != self._words[part])
            if bad.size:
                return int(part[bad[0]])
        return None

    def _gathered(self, rows: Rows) -> Float32:
        dim = self._layout.dim
        into = thread_scratch().gradient[: rows.size * dim].reshape(rows.size, dim)
        return gather(self._sums, rows, into)

    def _words_of(self, rows: Rows, sums: Float32) -> Checks:
        found = self._checks.of_sums(rows, np.ones(rows.size, np.bool_), sums)
        return np.maximum(found, np.uint64(1), out=found)

    def reserve(self, rows: Rows) -> None:
        """Makes room for rows; StorageError: nothing changed."""
        extents = rows // self._rows_per_extent
        if np.count_nonzero(self._is_reserved[extents]) == rows.size:
            return
        with self._reserving:
            missing = np.unique(extents[~self._is_reserved[extents]])
            # Neighbours with one call of the system.
            for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
                if run.size:
                    first = int(run[0]) * self._rows_per_extent
                    last = min((int(run[-1]) + 1) * self._rows_per_extent, self._layout.row_count)
                    for start, size in (
                        (self._layout.words_offset, 8),
                        (self._layout.sums_offset, self._layout.row_size_bytes),
                    ):
                        self._memory.reserve(start + first * size, (last - first) * size)
                    self._is_reserved[run] = True

    def _taken_undo(self) -> _Undo:
        """Locks an entry; waits while others, who wait for nothing, use all."""
        for undo in self._undo:  # the first are in the cache
            if undo.lock.acquire(blocking=False):
                return undo
        undo = self._undo[threading.get_ident() % UNDO_ENTRY_COUNT]
        undo.lock.acquire()
        return undo

    def _make_room(self, undo: _Undo, row_count: int) -> None:
        if row_count > undo.room_row_count:
            wanted = max(1 << (row_count - 1).bit_length(), _UNDO_ROW_COUNT_MIN)
            wanted = min(wanted, self._layout.row_count)
            for offset, size in undo.room(wanted):
                self._memory.reserve(offset, size)
            undo.room_row_count = wanted
