"""Where each chunk stands, on disk, replaced by one instruction.

A chunk has two places for records and a word that says which one stands:

    offset  size
         0     8  word: sequence number, and its complement in the upper half
        16   112  record of even sequence numbers, and its CRC
       128   112  record of odd sequence numbers, and its CRC

`put` writes the place that does not stand, then the word. A process killed before the word leaves
the old record, after it the new one; a record that stands and has a wrong CRC was damaged.

The CRC covers the chunk's index and starts from the parameter's salt, so that a record is believed
only in its own place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell_server.store.mapped_file import MappedFile
from shardwell_server.store.store import ChunkRecord

_STRIDE_BYTES = 256
_PLACES = (16, 128)
# sequence, version, sample_total, step, total_factor; contribution_count, shift, seat_index,
# chunk_index; CRC32C of weights, sum and two slots.
_RECORD = struct.Struct("<QqqqdiiiI4I")
_CRC = struct.Struct("<I")
SLOT_COUNT_MAX = 2
"""Arrays of optimizer state that a record has CRCs for."""


class StoredRecord(NamedTuple):
    """A record with what only the store needs."""

    sequence: int
    """Transitions of the chunk so far."""
    record: ChunkRecord
    seat_index: int
    """Whose contribution it was, -1 for none."""
    step: int
    """Of which step."""
    crcs: tuple[int, ...]
    """CRC32C of weights, sum and slots; the sum's has no meaning while it has none."""


def file_size(chunk_count: int) -> int:
    """Bytes of a file of records."""
    return chunk_count * _STRIDE_BYTES


class ChunkRecords:
    """All records of a slice. Different chunks may be put at once."""

    def __init__(
        self, file: MappedFile, chunk_count: int, salt: int, reached: Callable[[str], None]
    ) -> None:
        self._file = file
        self._words = file.words(0, chunk_count * _STRIDE_BYTES // 8)
        self._bytes = file.data.data
        self._salt = salt
        self._reached = reached

    def put(self, chunk_index: int, stored: StoredRecord) -> None:
        """Makes a record stand."""
        start = chunk_index * _STRIDE_BYTES
        place = start + _PLACES[stored.sequence & 1]
        record, crcs = stored.record, (*stored.crcs, 0, 0, 0)
        packed = _RECORD.pack(
            stored.sequence,
            record.version,
            record.sample_total,
            stored.step,
            record.total_factor,
            record.contribution_count,
            record.shift,
            stored.seat_index,
            chunk_index,
            *crcs[: 2 + SLOT_COUNT_MAX],
        )
        self._bytes[place : place + _RECORD.size] = packed
        self._reached("record")
        _CRC.pack_into(self._bytes, place + _RECORD.size, crc32.iscsi(packed, self._salt))
        self._reached("record's crc")
        self._words[start // 8] = _word(stored.sequence)
        self._reached("record's word")

    def get(self, chunk_index: int) -> StoredRecord:
        """The record that stands.

        Raises:
            StorageError: it was damaged.
        """
        start = chunk_index * _STRIDE_BYTES
        word = self._words[start // 8]
        place = start + _PLACES[word & 1]
        packed = bytes(self._bytes[place : place + _RECORD.size])
        (crc,) = _CRC.unpack_from(self._bytes, place + _RECORD.size)
        if crc != crc32.iscsi(packed, self._salt):
            raise self._damaged(chunk_index, f"its CRC32C is not {crc:#010x}")
        sequence, version, samples, step, factor, count, shift, seat, index, *crcs = _RECORD.unpack(
            packed
        )
        if index != chunk_index or word != _word(sequence):
            raise self._damaged(chunk_index, f"word {word:#018x} does not fit it")
        record = ChunkRecord(version, count, samples, factor, shift)
        return StoredRecord(sequence, record, seat, step, tuple(crcs))

    @property
    def path(self) -> Path:
        """The file's."""
        return self._file.path

    def _damaged(self, chunk_index: int, reason: str) -> StorageError:
        return StorageError(
            f"{self._file.path}: the record of chunk {chunk_index} was damaged: {reason}; "
            "restore the directory from a copy or a checkpoint"
        )


def _word(sequence: int) -> int:
    low = sequence & 0xFFFFFFFF
    return low | (low ^ 0xFFFFFFFF) << 32
