"""Small records on disk, each replaced by one instruction: counters of each chunk and each table.

A record has two places and a word that says which one is current:

    offset  size
         0     8  word: sequence number, and its complement in the upper half
        16   112  record of even sequence numbers, and its CRC
       128   112  record of odd sequence numbers, and its CRC

`put` writes the place that does not stand, then the word. A process killed before the word leaves
the old record, after it the new one; a current record that has a wrong CRC was damaged. A CRC
starts from the owner's salt. A chunk's record has the chunk's index, so that it is believed only in
its own place.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell_server.store.contract import ChunkRecord, Position, TableRecord
from shardwell_server.store.files.layout import Home
from shardwell_server.store.files.mapped import MappedFile

_STRIDE_BYTES = 256
_PLACES = (16, 128)
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")
PACKED_BYTES_MAX = 108
# sequence, version, sample_total, step, total_factor; contribution_count, shift, seat_index,
# chunk_index; then CRC32C of weights, sum, and two slots or as many as there are.
_CHUNK = struct.Struct("<QqqqdiiiI")
_SLOT_COUNT_MIN = 2
# sequence, row_used, version, sample_total, step; contribution_count, shift, seat_index, part_count
_TABLE = struct.Struct("<Qqqqqiiii")


def file_size(count: int) -> int:
    """Returns the bytes of a file of records."""
    return count * _STRIDE_BYTES


class AtomicRecords:
    """The records of one file. Different ones may be put at once."""

    def __init__(self, file: MappedFile, home: Home, packed_bytes: int) -> None:
        assert packed_bytes <= PACKED_BYTES_MAX
        self._file = file
        self._words = file.words(0, file.data.size // 8)
        self._bytes = file.data.data
        self._packed_bytes = packed_bytes
        self._home = home
        self._salt = home.salt
        self._reached = home.reached

    def put(self, index: int, packed: bytes) -> None:
        start = index * _STRIDE_BYTES
        (sequence,) = _SEQUENCE.unpack_from(packed)
        place = start + _PLACES[sequence & 1]
        self._bytes[place : place + self._packed_bytes] = packed
        self._reached("record")
        _CRC.pack_into(self._bytes, place + self._packed_bytes, crc32.iscsi(packed, self._salt))
        self._reached("record's crc")
        self._words[start // 8] = _word(sequence)
        self._reached("record's word")

    def get(self, index: int) -> bytes:
        start = index * _STRIDE_BYTES
        word = self._words[start // 8]
        place = start + _PLACES[word & 1]
        packed = bytes(self._bytes[place : place + self._packed_bytes])
        (crc,) = _CRC.unpack_from(self._bytes, place + self._packed_bytes)
        if crc != crc32.iscsi(packed, self._salt):
            raise self.damaged(index, f"its CRC32C is not {crc:#010x}")
        if word != _word(*_SEQUENCE.unpack_from(packed)):
            raise self.damaged(index, f"word {word:#018x} does not fit it")
        return packed

    def damaged(self, index: int, reason: str) -> StorageError:
        of = f"chunk {index}" if self._home.layout.kind == "parameter" else "the table"
        return StorageError(
            f"{self._file.path}: the record of {of} was damaged: {reason}; "
            "restore the directory from a copy or a checkpoint"
        )


def _word(sequence: int) -> int:
    low = sequence & 0xFFFFFFFF
    return low | (low ^ 0xFFFFFFFF) << 32


class StoredChunkRecord(NamedTuple):
    """A chunk's record with the store's own fields."""

    sequence: int
    record: ChunkRecord
    seat_index: int
    step: int
    crcs: tuple[int, ...]
    """CRC32C of weights, sum and slots; the sum's has no meaning without a sum."""


class ChunkRecords:
    """The records of a slice. Different chunks may be put at once."""

    def __init__(self, file: MappedFile, home: Home) -> None:
        slot_count = max(len(home.layout.initial_slots), _SLOT_COUNT_MIN)
        self._crcs = struct.Struct(f"<{2 + slot_count}I")
        self._crc_count = self._crcs.size // _CRC.size
        self._records = AtomicRecords(file, home, _CHUNK.size + self._crcs.size)
        self.stored = [StoredChunkRecord(0, ChunkRecord(), -1, -1, ())] * home.layout.chunk_count

    def put(self, chunk_index: int, stored: StoredChunkRecord) -> None:
        record, crcs = stored.record, (*stored.crcs, 0, 0, 0)
        assert not record.is_encoded  # which a file does not tell
        packed = _CHUNK.pack(
            stored.sequence,
            record.version,
            record.sample_total,
            stored.step,
            record.total_factor,
            ~record.contribution_count if record.is_full else record.contribution_count,
            record.shift,
            stored.seat_index,
            chunk_index,
        )
        packed += self._crcs.pack(*crcs[: self._crc_count])
        self._records.put(chunk_index, packed)
        self.stored[chunk_index] = stored

    def read(self) -> None:
        self.stored[:] = map(self._get, range(len(self.stored)))

    def _get(self, chunk_index: int) -> StoredChunkRecord:
        packed = self._records.get(chunk_index)
        sequence, version, samples, step, factor, count, shift, seat, index = _CHUNK.unpack_from(
            packed
        )
        crcs = self._crcs.unpack_from(packed, _CHUNK.size)
        if index != chunk_index:
            raise self._records.damaged(chunk_index, f"it is that of chunk {index}")
        is_full = count < 0  # and its complement is the count
        record = ChunkRecord(
            version, ~count if is_full else count, samples, factor, shift, is_full=is_full
        )
        return StoredChunkRecord(sequence, record, seat, step, crcs)


class StoredTableRecord(NamedTuple):
    """A table's record with the store's own fields."""

    sequence: int
    record: TableRecord
    position: Position | None

    @property
    def numbers(self) -> tuple[int, ...]:
        record, position = self.record, self.position or Position(-1)
        return (
            record.row_used,
            record.version,
            record.sample_total,
            ~record.contribution_count if record.is_closing else record.contribution_count,
            record.shift,
            position.seat_index,
            position.part_count,
            position.step,
        )

    @staticmethod
    def of(sequence: int, numbers: Sequence[int]) -> StoredTableRecord:
        used, version, samples, count, shift, seat, parts, step = numbers
        record = TableRecord.unpacked(used, version, count, samples, shift)
        return StoredTableRecord(
            sequence, record, None if seat < 0 else Position(seat, step, parts)
        )


class TableRecords:
    """The record of a table, in a file."""

    def __init__(self, file: MappedFile, home: Home) -> None:
        self._records = AtomicRecords(file, home, _TABLE.size)

    def put(self, stored: StoredTableRecord) -> None:
        *totals, count, shift, seat, parts, step = stored.numbers
        self._records.put(0, _TABLE.pack(stored.sequence, *totals, step, count, shift, seat, parts))

    def get(self, row_capacity: int) -> StoredTableRecord:
        sequence, *totals, step, count, shift, seat, parts = _TABLE.unpack(self._records.get(0))
        if not 0 <= totals[0] <= row_capacity:
            raise self._records.damaged(0, f"{totals[0]} rows of at most {row_capacity}")
        return StoredTableRecord.of(sequence, [*totals, count, shift, seat, parts, step])
