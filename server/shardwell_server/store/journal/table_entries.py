"""The writes of a table's change, as journals of tables keep them (journal.py).

    magic, flags, payload length, sequence, rows, first new place, record, position, CRC of the
    payload, CRC of all these  |  places, old rows array by array, new rows array by array

An entry has its rows as they are after the change, so that going through a journal is writing them
again, in order. Each segment begins with a mark: the sequence number of the change before it.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell.numerics.codec import Bytes
from shardwell_server.store.files.layout import Home
from shardwell_server.store.journal.journal import (
    HEAD_BYTES,
    Buffer,
    NotWholeError,
    cut_off,
    read_head,
    read_segment,
    segments,
)
from shardwell_server.store.records.atomic_records import StoredTableRecord
from shardwell_server.store.row_arrays import RowArrays, Rows, WrittenRows

_MAGIC = 0x31545753  # "SWT1"
_VALUES, _SUMS, _CLEARS, _MARK = 1, 2, 4, 8
# magic, flags, payload length, sequence, rows, first new place; row_used, version, sample_total,
# contribution_count, shift; seat_index, part_count, step; CRC of the payload.
_HEAD = struct.Struct("<IIQQQQqqqiiiiqI")
_CRC = struct.Struct("<I")


class TableEntry(NamedTuple):
    """A change of a table."""

    stored: StoredTableRecord
    rows: WrittenRows


def pack_entry(entry: TableEntry, salt: int) -> list[Buffer]:
    """Returns the bytes of an entry."""
    rows = entry.rows
    flags = _VALUES * bool(rows.values) | _SUMS * bool(rows.sums) | _CLEARS * rows.clears
    arrays = [rows.places, *rows.values, *rows.sums, *rows.new_rows]
    payload = [_bytes(array).data for array in arrays if array.size]
    return [*_heads(flags, entry.stored, rows.places.size, rows.new_start, payload, salt), *payload]


def pack_mark(stored: StoredTableRecord, salt: int) -> list[Buffer]:
    """Returns the mark that begins a segment."""
    return _heads(_MARK, stored, 0, stored.record.row_used, [], salt)


def _bytes(array: Rows) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _heads(
    flags: int,
    stored: StoredTableRecord,
    row_count: int,
    new_start: int,
    payload: list[memoryview[int]],
    salt: int,
) -> list[Buffer]:
    crc = 0
    for part in payload:
        crc = crc32.iscsi(part, crc)
    length = sum(len(part) for part in payload)
    rows = (stored.sequence, row_count, new_start)
    head = _HEAD.pack(_MAGIC, flags, length, *rows, *stored.numbers, crc)
    return [head, _CRC.pack(crc32.iscsi(head, salt))]


class _Found(NamedTuple):
    path: Path
    payload_start: int
    payload_end: int
    flags: int
    row_count: int
    new_start: int
    stored: StoredTableRecord


class TableJournal:
    """The segments of one table's directory, whose arrays have the kinds of `arrays`."""

    def __init__(self, home: Home, arrays: RowArrays) -> None:
        self._directory = home.path
        self._of = f"table {home.layout.name!r}"
        self._values = arrays.of_values
        self._sums = () if arrays.sums is None else arrays.of_sums
        self._capacity = arrays.keys.size
        self._salt = home.salt

    def entries(self, first_segment: int, at_least: int) -> Iterator[TableEntry]:
        """Yields committed changes in order; StorageError: a gap, or an end before `at_least`."""
        found: list[_Found] = []
        for number, path in segments(self._directory).items():
            if number >= first_segment:
                read = functools.partial(self._head, path)
                whole = list(read_segment(path, self._of, read))
                found += [each for each, _ in whole]
                cut_off(path, whole[-1][1] if whole else HEAD_BYTES)
        if not found or not found[0].flags & _MARK:
            raise self._gone(f"journal-{first_segment:06d} does not begin with a mark")
        sequence = found[0].stored.sequence
        for each in _committed(found):
            if each.stored.sequence != sequence + 1:
                raise self._gone(
                    f"{each.path} goes on with change {each.stored.sequence}; expected "
                    f"{sequence + 1}"
                )
            sequence += 1
            yield self._entry(each)
        if sequence < at_least:
            raise self._gone(f"it ends with change {sequence}; the image has {at_least}")

    def _head(self, path: Path, data: Bytes, start: int) -> tuple[_Found, int]:
        fields, begin = read_head(_HEAD, (_MAGIC,), self._salt, data, start)
        _, flags, length, sequence, row_count, new_start, *numbers, crc = fields
        end = begin + length
        if crc != crc32.iscsi(data[begin:end].data, 0):
            raise NotWholeError(f"change {sequence}", is_cut=end > data.size)
        stored = StoredTableRecord.of(sequence, numbers)
        return _Found(path, begin, end, flags, row_count, new_start, stored), end

    def _entry(self, found: _Found) -> TableEntry:
        data = np.memmap(found.path, np.uint8, "r")[found.payload_start : found.payload_end]
        start, n, row_used = 0, found.row_count, found.stored.record.row_used

        def rows(like: Rows, count: int) -> Rows:
            nonlocal start
            part = np.empty((count, *like.shape[1:]), like.dtype)
            data_part = data[start : start + part.nbytes]
            if data_part.size != part.nbytes:
                raise self._gone(f"{found.path}: change {found.stored.sequence} is too short")
            _bytes(part)[:] = data_part
            start += part.nbytes
            return part

        flags, new_count = found.flags, row_used - found.new_start
        if not 0 <= found.new_start <= row_used <= self._capacity:
            raise self._gone(f"{found.path}: change {found.stored.sequence} is of other rows")
        places = rows(np.empty(0, np.int64), n)
        values = [rows(like, n) for like in self._values] if flags & _VALUES else []
        sums = [rows(like, n) for like in self._sums] if flags & _SUMS else []
        every = (*self._values, *self._sums)
        new_rows = [rows(like, new_count) for like in every] if new_count else []
        if n and not 0 <= places.min() <= places.max() < found.new_start:
            raise self._gone(f"{found.path}: change {found.stored.sequence} is of other rows")
        written = WrittenRows(
            places, values, sums, bool(flags & _CLEARS), found.new_start, new_rows
        )
        return TableEntry(found.stored, written)

    def _gone(self, what: str) -> StorageError:
        return StorageError(
            f"{self._directory}: {what}: a part of the journal is gone, or was damaged; restore a "
            "checkpoint"
        )


def _committed(found: list[_Found]) -> list[_Found]:
    """Drops an entry without a record: the next has a lower sequence number, or an equal one."""
    committed: list[_Found] = []
    limit = 2**64
    for each in reversed(found):
        sequence = each.stored.sequence
        if each.flags & _MARK:
            limit = min(limit, sequence + 1)
        elif sequence < limit:
            committed.append(each)
            limit = sequence
    return committed[::-1]
