"""Small records on disk, each replaced by one instruction.

A record has two places and a word that says which one stands:

    offset  size
         0     8  word: sequence number, and its complement in the upper half
        16   112  record of even sequence numbers, and its CRC
       128   112  record of odd sequence numbers, and its CRC

`put` writes the place that does not stand, then the word. A process killed before the word leaves
the old record, after it the new one; a record that stands and has a wrong CRC was damaged. A CRC
starts from the owner's salt.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell_server.store.files.mapped import MappedFile

_STRIDE_BYTES = 256
_PLACES = (16, 128)
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")
PACKED_BYTES_MAX = 108
"""Bytes of a record without its CRC."""


def file_size(count: int) -> int:
    """Bytes of a file of records."""
    return count * _STRIDE_BYTES


class AtomicRecords:
    """Records of one file, by index. Different ones may be put at once.

    Args:
        file: Of `file_size(count)`.
        count: How many.
        packed_bytes: Of each, without CRC.
        what: What a record is of, in messages: "chunk 3" for index 3.
        salt: Drawn for the owner, so that no other's records fit.
        reached: Called after every write.
    """

    def __init__(
        self,
        file: MappedFile,
        count: int,
        packed_bytes: int,
        what: Callable[[int], str],
        salt: int,
        reached: Callable[[str], None],
    ) -> None:
        assert packed_bytes <= PACKED_BYTES_MAX
        self._file = file
        self._words = file.words(0, file_size(count) // 8)
        self._bytes = file.data.data
        self._packed_bytes = packed_bytes
        self._what = what
        self._salt = salt
        self._reached = reached

    def put(self, index: int, packed: bytes) -> None:
        """Makes a record stand: its sequence number, one more than the last, and what it says."""
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
        """The record that stands.

        Raises:
            StorageError: it was damaged.
        """
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
        """The error that says so."""
        return StorageError(
            f"{self._file.path}: the record of {self._what(index)} was damaged: {reason}; "
            "restore the directory from a copy or a checkpoint"
        )


def _word(sequence: int) -> int:
    low = sequence & 0xFFFFFFFF
    return low | (low ^ 0xFFFFFFFF) << 32
