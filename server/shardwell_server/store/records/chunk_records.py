"""Where each chunk stands, on disk: a twin record a chunk (atomic_records.py).

A record has its chunk's index, so that it is believed only in its own place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from shardwell_server.store.contract import ChunkRecord
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.records.atomic_records import AtomicRecords
from shardwell_server.store.records.atomic_records import file_size as file_size

# sequence, version, sample_total, step, total_factor; contribution_count, shift, seat_index,
# chunk_index; CRC32C of weights, sum and two slots.
_RECORD = struct.Struct("<QqqqdiiiI4I")
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


class ChunkRecords:
    """All records of a slice. Different chunks may be put at once."""

    def __init__(
        self, file: MappedFile, chunk_count: int, salt: int, reached: Callable[[str], None]
    ) -> None:
        self._records = AtomicRecords(
            file, chunk_count, _RECORD.size, lambda index: f"chunk {index}", salt, reached
        )

    def put(self, chunk_index: int, stored: StoredRecord) -> None:
        """Makes a record stand."""
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
        self._records.put(chunk_index, packed)

    def get(self, chunk_index: int) -> StoredRecord:
        """The record that stands.

        Raises:
            StorageError: it was damaged.
        """
        sequence, version, samples, step, factor, count, shift, seat, index, *crcs = _RECORD.unpack(
            self._records.get(chunk_index)
        )
        if index != chunk_index:
            raise self._records.damaged(chunk_index, f"it is that of chunk {index}")
        record = ChunkRecord(version, count, samples, factor, shift)
        return StoredRecord(sequence, record, seat, step, tuple(crcs))
