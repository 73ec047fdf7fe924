"""One contribution to one chunk, as journals of parameters keep it (journal.py).

    magic, payload length, chunk, seat, sequence, step, samples, exponent, learning
    rate, CRC of the payload, CRC of all these  |  the codec's bytes

An entry is appended before the chunk's record stands. So the last of several entries with the same
chunk and sequence is the one that counted: the shard was killed before the others' records stood.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fastcrc import crc32

from shardwell_server.store.journal import Part
from shardwell_server.store.store import JournalEntry

_MAGIC = 0x314A5753  # "SWJ1"
_HEAD = struct.Struct("<IIIIQQqidI")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CRC.size


def pack_entry(entry: JournalEntry, salt: int) -> list[Part]:
    """What is appended for an entry."""
    head = _HEAD.pack(
        _MAGIC,
        entry.payload.size,
        entry.chunk_index,
        entry.seat_index,
        entry.sequence,
        entry.step,
        entry.sample_count,
        entry.exponent,
        entry.learning_rate,
        crc32.iscsi(entry.payload.data),
    )
    return [head, _CRC.pack(crc32.iscsi(head, salt)), entry.payload.data]


def read_entries(path: Path, salt: int) -> Iterator[tuple[JournalEntry, int]]:
    """The whole entries of a segment, and where each ends."""
    if not path.stat().st_size:
        return
    data = np.memmap(path, np.uint8, "r")
    start = 0
    while start + _HEAD_BYTES <= data.size:
        head = data[start : start + _HEAD.size].tobytes()
        magic, length, chunk, seat, sequence, step, samples, exponent, rate, crc = _HEAD.unpack(
            head
        )
        (head_crc,) = _CRC.unpack(data[start + _HEAD.size : start + _HEAD_BYTES].tobytes())
        end = start + _HEAD_BYTES + length
        if magic != _MAGIC or head_crc != crc32.iscsi(head, salt) or end > data.size:
            return
        payload = np.array(data[start + _HEAD_BYTES : end])  # aligned for the codecs
        if crc != crc32.iscsi(payload.data):
            return
        yield JournalEntry(chunk, seat, sequence, step, samples, exponent, rate, payload), end
        start = end
