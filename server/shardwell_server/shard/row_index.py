"""Where the rows of a table are: from ids to places, many at a time.

Two kinds. `DirectRowIndex` has a number for each row that there can be, of which only pages that
have rows cost memory. `HashRowIndex` takes any 64-bit integers, and 27 to 54 bytes for each.

Invariant: what `add` was told last of an id, and `remove` has not taken back, is what `find` tells.
One thread may change an index while no other uses it; any number may read at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardwell.row_placement import Ids, RowPlacement, Words, mix
from shardwell_server.store.lazy_memory import lazy_zeros
from shardwell_server.store.table_storage import Places


class RowIndex(Protocol):
    """What both kinds do."""

    def find(self, ids: Ids) -> Places:
        """(n,) int64: the place of each id, -1 where there is none; ids may repeat."""

    def add(self, ids: Ids, places: Places) -> None:
        """Notes where rows are; an id that is there already moves.

        Args:
            ids: (n,); of an id that repeats, the last counts.
            places: (n,), without repeats.
        """

    def make_room(self, count: int) -> None:
        """Grows once for so many more rows, which `add` would do time and again."""

    def remove(self, ids: Ids) -> None:
        """Forgets rows; ids that are not there change nothing. (n,), without repeats."""

    def __len__(self) -> int:
        """How many ids there are."""


class DirectRowIndex:
    """See RowIndex. Every id must be in range, and of the shard.

    Args:
        placement: With `row_count`.

    Raises:
        MemoryError: there is no address space for as many rows.
    """

    def __init__(self, placement: RowPlacement) -> None:
        row_count = placement.local_row_count()
        kind = np.int32 if row_count < 2**31 else np.int64
        self._local_rows = placement.local_rows
        # Of each row its place plus 1, so that memory that was never written to says "none".
        self._marks: npt.NDArray[np.signedinteger] = lazy_zeros((row_count,), kind)
        self._count = 0

    def find(self, ids: Ids) -> Places:
        """See RowIndex."""
        marks = np.take(self._marks, self._local_rows(ids), mode="clip")
        return np.subtract(marks, 1, dtype=np.int64)

    def add(self, ids: Ids, places: Places) -> None:
        """See RowIndex."""
        rows, marks = self._local_rows(ids), places + 1
        is_new = np.take(self._marks, rows, mode="clip") == 0
        self._marks[rows] = marks
        is_new &= np.take(self._marks, rows, mode="clip") == marks
        self._count += int(np.count_nonzero(is_new))

    def make_room(self, count: int) -> None:
        """See RowIndex: there is."""

    def remove(self, ids: Ids) -> None:
        """See RowIndex."""
        rows = self._local_rows(ids)
        self._count -= int(np.count_nonzero(np.take(self._marks, rows, mode="clip")))
        self._marks[rows] = 0

    def __len__(self) -> int:
        """See RowIndex."""
        return self._count


_EMPTY, _REMOVED = 0, -1
"""Marks of slots without a row; others are the place plus 1."""
_LINE = 8
"""Slots that are looked at together: 128 bytes, which memory hands over nearly as fast as 16."""
_SIZE_BITS_MIN = 10
_LOAD_MAX = 0.6
"""Of slots that are not empty. Nearly all rows are in their first line; each costs 16 bytes by
load."""
_LOAD_AFTER_REMOVALS = 0.45
"""When removed rows are cleared away, so much less that it is not soon necessary again."""
_LOAD_MIN = 1 / 16
"""When fewer rows remain, the table shrinks."""
_BATCH = 2**13
"""Rows that are added together, so that what is worked with stays in the cache."""
_SALT = 0x6A09E667F3BCC909


class HashRowIndex:
    """See RowIndex. Open addressing in lines of slots, the next line being tried when one is full.

    A line fills from its start. A key takes the first slot that is empty when it comes, and stays
    there: a row that is removed leaves its key, and has its slot again if it comes back. The hash
    is the upper bits of `mix` of the key and a salt; so keys with the same `mix(key) %
    shard_count`, as those of one shard are, do not meet.

    Args:
        salt: 64 bits. Drawn at random, it keeps anybody from choosing keys that meet.
    """

    def __init__(self, salt: int = _SALT) -> None:
        self._salt = np.uint64(salt)
        self._make(_SIZE_BITS_MIN)

    def _make(self, size_bits: int) -> None:
        self._slots: Ids = lazy_zeros((1 << size_bits, 2), np.int64)
        """(key, mark) of each."""
        self._size = 1 << size_bits
        self._line_count = self._size // _LINE
        self._shift = np.uint64(64 - (self._line_count.bit_length() - 1))
        self._used_count = 0
        self._count = 0

    def _homes(self, ids: Ids) -> Ids:
        """The line at which to look first."""
        words: Words = mix(ids.view(np.uint64) ^ self._salt)
        words >>= self._shift
        return words.view(np.int64)

    def _lines(self, lines: Ids) -> Ids:
        """(n * _LINE, 2): copies of the slots of some lines."""
        slots = self._slots.reshape(self._line_count, _LINE * 2)
        return np.take(slots, lines, axis=0, mode="clip").reshape(-1, 2)

    def _find(self, ids: Ids) -> Iterator[tuple[Ids, Ids]]:
        """Some of the ids that have a slot after others: which of them, and their slots."""
        lines, pending = self._homes(ids), np.arange(ids.size)
        while pending.size:
            found = self._lines(lines)
            at = _matches(found, ids)
            line = at // _LINE
            yield pending[line], lines[line] * _LINE + (at & (_LINE - 1))
            is_open = found[_LINE - 1 :: _LINE, 1] != _EMPTY
            is_open[line] = False
            left = np.flatnonzero(is_open)
            pending, ids = pending[left], ids[left]
            lines = self._after(lines[left])

    def _after(self, lines: Ids) -> Ids:
        """The lines to look at next."""
        return (lines + 1) & (self._line_count - 1)

    def find(self, ids: Ids) -> Places:
        """See RowIndex."""
        places: Places = np.full(ids.size, -1)
        for which, slots in self._find(ids):
            places[which] = self._slots[slots, 1] - 1
        np.maximum(places, -1, out=places)
        return places

    def add(self, ids: Ids, places: Places) -> None:
        """See RowIndex."""
        self.make_room(ids.size)
        for start in range(0, ids.size, _BATCH):
            batch = slice(start, start + _BATCH)
            self._insert(ids[batch], places[batch] + 1)

    def make_room(self, count: int) -> None:
        """See RowIndex."""
        if self._used_count + count > _LOAD_MAX * self._size:
            self._rebuild(count)

    def _insert(self, ids: Ids, marks: Ids) -> None:
        """Adds rows, for which there is room."""
        flat, lines = self._slots.reshape(-1), self._homes(ids)
        while ids.size:
            found = self._lines(lines)
            slot = _used_counts(found)
            at = _matches(found, ids)
            slot[at // _LINE] = at & (_LINE - 1)
            is_full = slot == _LINE
            keys = (lines * _LINE + slot) * 2
            keys[is_full] = 0
            is_in = ~is_full
            flat[keys[is_in]] = ids[is_in]  # of several that want a slot, one has it then
            is_in &= flat[keys] == ids
            at, its_marks = keys[is_in] + 1, marks[is_in]
            before = flat[at]
            flat[at] = its_marks
            is_counted = flat[at] == its_marks  # an id that repeats is one
            self._count += int(np.count_nonzero(is_counted & (before <= 0)))
            self._used_count += int(np.count_nonzero(is_counted & (before == _EMPTY)))
            left = np.flatnonzero(~is_in)
            ids, marks, is_full = ids[left], marks[left], is_full[left]
            lines = np.where(is_full, self._after(lines[left]), lines[left])

    def remove(self, ids: Ids) -> None:
        """See RowIndex."""
        for _, slots in self._find(ids):
            self._count -= int(np.count_nonzero(self._slots[slots, 1] > 0))
            self._slots[slots, 1] = _REMOVED
        if self._count < _LOAD_MIN * self._size and self._size > 1 << _SIZE_BITS_MIN:
            self._rebuild(0)

    def __len__(self) -> int:
        """See RowIndex."""
        return self._count

    def _rebuild(self, new_count: int) -> None:
        """Moves all rows into a table of the right size, with room for so many more."""
        old, needed = self._slots, self._count + new_count
        load = _LOAD_MAX if self._used_count == self._count else _LOAD_AFTER_REMOVALS
        size_bits = _SIZE_BITS_MIN
        while needed > load * (1 << size_bits):
            size_bits += 1
        before = dict(vars(self))
        try:
            self._make(size_bits)
            self._move(old)
        except BaseException:
            vars(self).update(before)  # nobody may find half of the rows
            raise

    def _move(self, old: Ids) -> None:
        """Adds the rows of other slots.

        Of some lines the first slots, then the second ones, and so on: the rows of one line want
        the same new one, and would get into each other's way.
        """
        for start in range(0, len(old), _BATCH * _LINE):
            lines = old[start : start + _BATCH * _LINE].reshape(-1, _LINE, 2)
            for column in range(_LINE):
                pairs = lines[lines[:, column, 1] > 0, column]
                self._insert(pairs[:, 0], pairs[:, 1])


def _matches(lines: Ids, ids: Ids) -> Ids:
    """Which slots have the id that is wanted of their line. A key is in one slot at the most."""
    at = np.flatnonzero(lines[:, 0] == np.repeat(ids, _LINE))
    is_real = lines[at, 1] != _EMPTY
    return at if is_real.all() else at[is_real]  # an empty slot looks like id 0


def _used_counts(lines: Ids) -> Ids:
    """How many slots of each line are not empty."""
    flags: Words = (lines[:, 1] != _EMPTY).view(np.uint64)  # eight bytes of 0 or 1 each
    flags *= np.uint64(0x0101010101010101)  # their sum is the uppermost byte then
    flags >>= np.uint64(56)
    return flags.view(np.int64)
