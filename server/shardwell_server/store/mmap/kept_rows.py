"""The rows of the last step as they were before it, in a file: see RowsBefore.

Entries one behind the other, from the start of the file, to which the first of another step goes
again. An entry is written before the change that it is of is committed, so a kill leaves one too
many at the most, of rows that are still the same:

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

import numpy as np
from fastcrc import crc32

from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell_server.store.files.layout import Home
from shardwell_server.store.files.mapped import failing

_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<IQ")
_SIZE_BYTES = _CRC.size + _HEAD.size


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
