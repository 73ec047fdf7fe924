"""The weights and rows of the version before, for a worker that was restarted.

Of a parameter, each chunk's weights as they were encoded: a place a chunk, of
`Layout.kept_size_bytes` and a head, each rounded up to a page (where 0.2.0 cut the parameter, with
room for the exponents that fp16 has since):

    word 0   version of the weights
    word 1   length of the encoding
    16       the encoding: a message, whose own CRC covers it and the version

A place is written before its chunk leaves the version. A kill meanwhile leaves a place that is not
whole, and a chunk that still has the version, so that no call reads the place before it is written
again. A reader checks the CRC.

Of a table, the rows of the last step as they were before it (see RowsBefore): entries one behind
the other, from the start of the file, to which the first of another step goes again. An entry is
written before the change that it is of is committed, so a kill leaves one too many at the most, of
rows that are still the same:

    0    CRC32C of what follows, from the table's salt
    4    number of rows
    8    step
    16   ids, 8 bytes each; then the rows

What does not fit its CRC, or is of another step than the first, ends the entries.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fastcrc import crc32

from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell_server.store.contract import Layout
from shardwell_server.store.files.layout import Home
from shardwell_server.store.files.mapped import (
    MappedFile,
    failing,
    opened,
    reserve,
    whole_pages,
)

_HEAD_BYTES = 16
_VALUE_BYTES_PER_EXPONENT, _EXPONENTS_OF_SMALL_BYTES = 512, 64
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<IQ")
_SIZE_BYTES = _CRC.size + _HEAD.size


def _place_bytes(layout: Layout) -> int:
    size = _HEAD_BYTES + layout.kept_size_bytes
    if _cuts_blocks(layout):
        size += layout.kept_size_bytes // _VALUE_BYTES_PER_EXPONENT + _EXPONENTS_OF_SMALL_BYTES
    return whole_pages(size)


def kept_size(layout: Layout) -> int:
    """Returns the bytes of the file; 0 where nothing is kept."""
    return layout.chunk_count * _place_bytes(layout) if layout.kept_size_bytes else 0


def _cuts_blocks(layout: Layout) -> bool:
    return bool(layout.description.get("spec", {}).get("cutsBlocks"))


def make_room(path: Path, layout: Layout) -> None:
    """Replaces the file of 0.2.0, whose places are too small; StorageError: the disk failed."""
    size = kept_size(layout)
    if not _cuts_blocks(layout) or not path.exists() or path.stat().st_size >= size:
        return
    with failing(path, "enlarging it"), opened(path, os.O_RDWR | os.O_TRUNC) as file:
        reserve(file, size)


class KeptWeights:
    """The places of a slice. Different chunks may be written at once."""

    def __init__(self, file: MappedFile, layout: Layout, reached: Callable[[str], None]) -> None:
        self._file = file
        self._place_bytes = _place_bytes(layout)
        self._size_max_bytes = self._place_bytes - _HEAD_BYTES
        self._words = file.words(0, kept_size(layout) // 8)
        self._reached = reached

    def put(self, chunk_index: int, version: int, encoded: bytes) -> None:
        assert len(encoded) <= self._size_max_bytes
        start = chunk_index * self._place_bytes
        self._words[start // 8] = version
        self._words[start // 8 + 1] = len(encoded)
        self._reached("head of what is kept")
        first = start + _HEAD_BYTES
        np.copyto(self._file.data[first : first + len(encoded)], np.frombuffer(encoded, np.uint8))
        self._reached("what is kept")

    def get(self, chunk_index: int, version: int) -> bytes | None:
        start = chunk_index * self._place_bytes
        found, length = self._words[start // 8], self._words[start // 8 + 1]
        if found != version or not 0 < length <= self._size_max_bytes:
            return None
        first = start + _HEAD_BYTES
        return self._file.data[first : first + length].tobytes()

    def copy(self, source: KeptWeights, chunk_index: int) -> None:
        place = slice(chunk_index * self._place_bytes, (chunk_index + 1) * self._place_bytes)
        np.copyto(self._file.data[place], source._file.data[place])


class KeptRows:
    """The file of one table, made with its first entry. One thread at a time."""

    def __init__(self, home: Home) -> None:
        self._path = home.path / "kept"
        self._dim = home.layout.dim
        self._row_count_max = home.layout.rows_per_change_max
        self._salt = home.salt
        self._step = -1
        self._end = 0

    def put(self, step: int, ids: Ids, rows: Float32) -> bool:
        """Writes an entry; False: the disk is full, which is no reason to fail the step."""
        if step != self._step:
            self._step, self._end = step, 0
        elif self._end < 0:
            return False
        body = b"".join((_HEAD.pack(ids.size, step), ids.tobytes(), rows.tobytes()))
        entry = _CRC.pack(crc32.iscsi(body, self._salt)) + body
        try:
            # Not kept open: a file system with such a file can't be remounted read-only.
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                is_whole = os.pwrite(file, entry, self._end) == len(entry)
            finally:
                os.close(file)
        except OSError:
            is_whole = False
        if is_whole:
            self._end += len(entry)
            return True
        self._end = -1
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)
        return False

    def read(self) -> list[tuple[int, Ids, Float32]]:
        if self._end < 0:
            return []
        if not self._path.exists():
            return []
        with failing(self._path, "reading it"):
            content = self._path.read_bytes()
        self._end = 0
        found: list[tuple[int, Ids, Float32]] = []
        while (entry := self._entry(content, self._end)) is not None:
            if found and entry[0] != found[0][0]:
                break
            found.append(entry)
            self._step = entry[0]
            self._end += _SIZE_BYTES + entry[1].nbytes + entry[2].nbytes
        return found

    def _entry(self, content: bytes, start: int) -> tuple[int, Ids, Float32] | None:
        if len(content) < start + _SIZE_BYTES:
            return None
        (crc,) = _CRC.unpack_from(content, start)
        count, step = _HEAD.unpack_from(content, start + _CRC.size)
        stop = start + _SIZE_BYTES + count * (8 + 4 * self._dim)
        if count > self._row_count_max or stop > len(content):
            return None
        if crc != crc32.iscsi(content[start + _CRC.size : stop], self._salt):
            return None
        ids = np.frombuffer(content, np.int64, count, start + _SIZE_BYTES)
        rows = np.frombuffer(content, np.float32, count * self._dim, stop - 4 * count * self._dim)
        return step, ids, rows.reshape(count, self._dim)
