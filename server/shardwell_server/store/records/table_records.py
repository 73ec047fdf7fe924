"""Where a table stands, on disk: one twin record (atomic_records.py)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from shardwell_server.store.contract import Position, TableRecord
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.records.atomic_records import AtomicRecords, file_size

# sequence, row_used, version, sample_total, step; contribution_count, shift, seat_index, part_count
_RECORD = struct.Struct("<Qqqqqiiii")
RECORDS_BYTES = file_size(1)
"""Bytes of the file."""


class StoredTableRecord(NamedTuple):
    """A record with what only the store needs."""

    sequence: int
    """Changes of the table so far."""
    record: TableRecord
    position: Position | None
    """Whose contribution the last change was, and how far its worker has come."""


class TableRecords:
    """The file."""

    def __init__(self, file: MappedFile, salt: int, reached: Callable[[str], None]) -> None:
        self._records = AtomicRecords(file, 1, _RECORD.size, lambda _: "the table", salt, reached)

    def put(self, stored: StoredTableRecord) -> None:
        """Makes a record stand."""
        record, position = stored.record, stored.position or Position(-1)
        packed = _RECORD.pack(
            stored.sequence,
            record.row_used,
            record.version,
            record.sample_total,
            position.step,
            record.contribution_count,
            record.shift,
            position.seat_index,
            position.part_count,
        )
        self._records.put(0, packed)

    def get(self, row_capacity: int) -> StoredTableRecord:
        """The record that stands.

        Raises:
            StorageError: it was damaged.
        """
        sequence, row_used, version, samples, step, count, shift, seat, parts = _RECORD.unpack(
            self._records.get(0)
        )
        if not 0 <= row_used <= row_capacity:
            raise self._records.damaged(0, f"{row_used} rows of at most {row_capacity}")
        position = None if seat < 0 else Position(seat, step, parts)
        record = TableRecord(row_used, version, count, samples, shift)
        return StoredTableRecord(sequence, record, position)
