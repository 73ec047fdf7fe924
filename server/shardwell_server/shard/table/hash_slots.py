"""A hash table of rows, many at a time, of a size that stays.

A `HashRowIndex` has one, or two while it grows; it decides which rows are in which.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shardwell.placement.rows import Ids, Words, mix
from shardwell_server.store.contract import Places
from shardwell_server.store.lazy_memory import lazy_mapping

Flags = npt.NDArray[np.bool_]

_EMPTY, _REMOVED = 0, -1
"""Marks of slots without a row; others are the place plus 1."""
LINE = 8
"""Slots that are looked at together: 128 bytes, which memory hands over nearly as fast as 16."""
_LINE_BYTES = LINE * 16
_RELEASED_LINES = 2**14
"""Cleared lines whose memory is given back together: 2 MiB, which is a huge page. All at once, at
the end, would take the system 20 ms for 256 MiB."""


class SlotTable:
    """A table with open addressing in lines of slots; when a line is full, the next one is tried.

    A line fills from its start. A key takes the first slot that is empty when it comes, and stays
    there: a row that is removed leaves its key, and has its slot again if it comes back. The hash
    is the upper bits of `mix` of the key and a salt; so keys with the same `mix(key) %
    shard_count`, as those of one shard are, do not meet, and tables of any size have their keys in
    nearly the same order.

    The first lines may be cleared, one after the other. A caller finds the rows of the others with
    `first_line`, where those begin: ids whose own line was cleared are looked for from there, and
    the table goes on there after its last line. When a row was added, all lines on the way to it
    were full, and those that are left of them still are.
    """

    size: int
    line_count: int
    used_count: int
    """Slots that are not empty, or were before they were cleared."""
    count: int
    """Slots that have a row."""

    def __init__(self, size_bits: int, salt: np.uint64) -> None:
        self.size = 1 << size_bits
        self.line_count = self.size // LINE
        self.used_count = self.count = 0
        self._salt = salt
        self._shift = np.uint64(64 - (self.line_count.bit_length() - 1))
        self._memory = lazy_mapping(self.size * 16)
        self._slots: Ids = np.frombuffer(self._memory, np.int64).reshape(self.size, 2)
        """(key, mark) of each."""

    def homes(self, ids: Ids) -> Ids:
        """Returns the line of each id at which to look first."""
        words: Words = mix(ids.view(np.uint64) ^ self._salt)
        words >>= self._shift
        return words.view(np.int64)

    def find(self, ids: Ids, first_line: int = 0) -> Places:
        """Returns the place of each id, (n,) int64, -1 where there is none; ids may repeat."""
        places: Places = np.full(ids.size, -1)
        for which, slots in self._find(ids, first_line):
            places[which] = self._slots[slots, 1] - 1
        np.maximum(places, -1, out=places)
        return places

    def replace(self, ids: Ids, marks: Ids, first_line: int = 0) -> Flags:
        """Changes the marks of the rows that have a slot; returns (n,), True for those."""
        is_there = np.zeros(ids.size, np.bool_)
        for which, slots in self._find(ids, first_line):
            is_row = self._slots[slots, 1] > 0
            at, slots = which[is_row], slots[is_row]
            self._slots[slots, 1] = marks[at]
            is_there[at] = True
        return is_there

    def insert(self, ids: Ids, marks: Ids, *, is_ring: bool = True) -> tuple[Ids, Ids]:
        """Adds rows or changes their marks, each mark once; of an id that repeats, the last counts.

        A ring goes on at its first line after the last, and has room for all. If it is none, the
        rows that had no slot up to the last line are returned.
        """
        beyond = [(ids[:0], marks[:0])]
        flat, lines = self._slots.reshape(-1), self.homes(ids)
        while ids.size:
            found = self._lines(lines)
            slot = _used_counts(found)
            at = _matches(found, ids)
            slot[at // LINE] = at & (LINE - 1)
            is_full = slot == LINE
            keys = (lines * LINE + slot) * 2
            keys[is_full] = 0
            is_in = ~is_full
            flat[keys[is_in]] = ids[is_in]  # of several that want a slot, one has it then
            is_in &= flat[keys] == ids
            at, its_marks = keys[is_in] + 1, marks[is_in]
            before = flat[at]
            flat[at] = its_marks
            is_counted = flat[at] == its_marks  # an id that repeats is one
            self.count += int(np.count_nonzero(is_counted & (before <= 0)))
            self.used_count += int(np.count_nonzero(is_counted & (before == _EMPTY)))
            left = np.flatnonzero(~is_in)
            ids, marks, lines = ids[left], marks[left], lines[left] + is_full[left]
            if is_ring:
                lines &= self.line_count - 1
            elif (is_beyond := lines == self.line_count).any():
                beyond.append((ids[is_beyond], marks[is_beyond]))
                ids, marks, lines = ids[~is_beyond], marks[~is_beyond], lines[~is_beyond]
        all_ids, all_marks = zip(*beyond, strict=True)
        return np.concatenate(all_ids), np.concatenate(all_marks)

    def fill(self, ids: Ids, marks: Ids) -> None:
        """Inserts rows in a third of the time of `insert`. No row repeats, and none has a slot."""
        lines = self.homes(ids)
        order = np.argsort(lines, kind="stable")
        lines, ids, marks = lines[order], ids[order], marks[order]
        is_first = np.empty(lines.size, np.bool_)
        is_first[:1] = True
        np.not_equal(lines[1:], lines[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        slots = _used_counts(self._lines(lines[firsts])) - firsts
        slots = slots[np.cumsum(is_first) - 1] + np.arange(lines.size)
        is_in = slots < LINE
        slots += lines * LINE
        if is_in.all():
            rest = None
        else:
            rest = ids[~is_in], marks[~is_in]
            slots, ids, marks = slots[is_in], ids[is_in], marks[is_in]
        self._slots[slots, 0] = ids
        self._slots[slots, 1] = marks
        self.count += slots.size
        self.used_count += slots.size
        if rest is not None:
            self.insert(*rest)

    def remove(self, ids: Ids, first_line: int = 0) -> None:
        """Takes rows out; ids without a row change nothing. (n,), without repeats."""
        for _, slots in self._find(ids, first_line):
            self.count -= int(np.count_nonzero(self._slots[slots, 1] > 0))
            self._slots[slots, 1] = _REMOVED

    def rows(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """Copies keys and marks of the rows in lines [start, stop)."""
        slots = self._slots[start * LINE : stop * LINE]
        pairs = slots[slots[:, 1] > 0]
        return pairs[:, 0], pairs[:, 1]

    def clear(self, start: int, stop: int) -> None:
        """Empties the lines [start, stop), all before `start` being empty."""
        slots = self._slots[start * LINE : stop * LINE]
        count = int(np.count_nonzero(slots[:, 1] > 0))
        slots[:] = 0
        self.count -= count
        released, releasable = (line - line % _RELEASED_LINES for line in (start, stop))
        if released < releasable:
            with contextlib.suppress(OSError):  # of memory that is locked: it goes with the table
                self._memory.madvise(
                    mmap.MADV_DONTNEED,
                    released * _LINE_BYTES,
                    (releasable - released) * _LINE_BYTES,
                )

    def _lines(self, lines: Ids) -> Ids:
        """Copies the slots of some lines, as (n * LINE, 2)."""
        slots = self._slots.reshape(self.line_count, LINE * 2)
        return np.take(slots, lines, axis=0, mode="clip").reshape(-1, 2)

    def _find(self, ids: Ids, first_line: int) -> Iterator[tuple[Ids, Ids]]:
        """Yields which ids have a slot, and their slots: in each pass in a line further on."""
        lines, pending = self.homes(ids), np.arange(ids.size)
        if first_line:
            np.maximum(lines, first_line, out=lines)
        for _ in range(self.line_count - first_line):  # at most: all may be full
            found = self._lines(lines)
            at = _matches(found, ids)
            line = at // LINE
            yield pending[line], lines[line] * LINE + (at & (LINE - 1))
            is_open = found[LINE - 1 :: LINE, 1] != _EMPTY
            is_open[line] = False
            left = np.flatnonzero(is_open)
            pending, ids = pending[left], ids[left]
            if not left.size:
                return
            lines = lines[left] + 1
            lines[lines == self.line_count] = first_line


def _matches(lines: Ids, ids: Ids) -> Ids:
    """Finds the slots that have the id wanted of their line; a key has one slot at the most."""
    at = np.flatnonzero(lines[:, 0] == np.repeat(ids, LINE))
    is_real = lines[at, 1] != _EMPTY
    return at if is_real.all() else at[is_real]  # an empty slot looks like id 0


def _used_counts(lines: Ids) -> Ids:
    flags: Words = (lines[:, 1] != _EMPTY).view(np.uint64)  # eight bytes of 0 or 1 each
    flags *= np.uint64(0x0101010101010101)  # their sum is the uppermost byte then
    flags >>= np.uint64(56)
    return flags.view(np.int64)
