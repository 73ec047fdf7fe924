"""The entries of parameters' journals (journal.py): a contribution to a chunk, or a step's end.

    magic, payload length, chunk, seat, sequence, step, samples, exponent, learning
    rate, CRC of the payload, CRC of all these  |  the codec's bytes, or the norm

Where groups of tensors have rates of their own, the magic is another, and behind the payload lie
their factors, float32, and how many they are, uint32; the payload's length and CRC are with these.

Bit 62 of `samples` says that the entry decides an open set (shard/step_tracker.py).

An entry is appended before the chunk's record is committed. So the last of several entries with
the same chunk and sequence is the one that counted: the shard was killed before the others'
records were.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fastcrc import crc32

from shardwell.numerics.codec import Bytes
from shardwell.specs.grouped_rate import factors_of, rate_of
from shardwell_server.store.contract import JournalEntry
from shardwell_server.store.journal.journal import Buffer, NotWholeError, read_head, read_segment

_MAGIC = 0x314A5753  # "SWJ1"
_GROUPED_MAGIC = 0x324A5753  # "SWJ2"
_HEAD = struct.Struct("<IIIiQQqidI")
_CRC = struct.Struct("<I")
_CLOSES = 1 << 62


def pack_entry(entry: JournalEntry, salt: int) -> list[Buffer]:
    """Returns the bytes of an entry."""
    factors = factors_of(entry.learning_rate)
    rest = struct.pack(f"<{len(factors)}fI", *factors, len(factors)) if factors else b""
    head = _HEAD.pack(
        _GROUPED_MAGIC if factors else _MAGIC,
        entry.payload.size + len(rest),
        entry.chunk_index,
        entry.seat_index,
        entry.sequence,
        entry.step,
        entry.sample_count | (_CLOSES if entry.closes else 0),
        entry.exponent,
        entry.learning_rate,
        crc32.iscsi(rest, crc32.iscsi(entry.payload.data)),
    )
    return [head, _CRC.pack(crc32.iscsi(head, salt)), entry.payload.data, rest]


def read_entries(path: Path, name: str, salt: int) -> Iterator[tuple[JournalEntry, int]]:
    """Yields the whole entries of a parameter's segment, and the end of each."""

    def read(data: Bytes, start: int) -> tuple[JournalEntry, int]:
        fields, begin = read_head(_HEAD, (_MAGIC, _GROUPED_MAGIC), salt, data, start)
        magic, length, chunk, seat, sequence, step, samples, exponent, rate, crc = fields
        end = begin + length
        payload = np.array(data[begin:end])  # aligned for the codecs
        if crc != crc32.iscsi(payload.data):
            what = f"a gradient of step {step} for chunk {chunk}"
            raise NotWholeError(what, is_cut=end > data.size)
        if magic == _GROUPED_MAGIC:
            (count,) = payload[-4:].view("<u4")
            size = payload.size - 4 * (int(count) + 1)
            rate = rate_of(rate, payload[size:-4].view("<f4").tolist())
            payload = payload[:size]
        closes, samples = bool(samples & _CLOSES), samples & ~_CLOSES
        of = (chunk, seat, step, samples)
        return JournalEntry(*of, rate, payload, closes, sequence, exponent), end

    return read_segment(path, f"parameter {name!r}", read)
