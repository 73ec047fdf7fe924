"""Each chunk's weights as they were encoded in the version before, for a worker that was restarted.

A place a chunk, of `Layout.kept_size_bytes` and a head, each rounded up to a page (where 0.2.0 cut
the parameter, with room for the exponents that fp16 has since):

    word 0   version of the weights
    word 1   length of the encoding
    16       the encoding: a message, whose own CRC covers it and the version

A place is written before its chunk leaves the version. A kill meanwhile leaves a place that is not
whole, and a chunk that still has the version, so that no call reads the place before it is written
again. A reader checks the CRC.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwell_server.store.contract import Layout
from shardwell_server.store.files.mapped import (
    MappedFile,
    failing,
    opened,
    reserve,
    whole_pages,
)

_HEAD_BYTES = 16
_VALUE_BYTES_PER_EXPONENT, _EXPONENTS_OF_SMALL_BYTES = 512, 64


def _place_bytes(layout: Layout) -> int:
    size = _HEAD_BYTES + layout.kept_size_bytes
    if _cuts_blocks(layout):
        size += layout.kept_size_bytes // _VALUE_BYTES_PER_EXPONENT + _EXPONENTS_OF_SMALL_BYTES
    return whole_pages(size)


def file_size(layout: Layout) -> int:
    """Returns the bytes of the file; 0 where nothing is kept."""
    return layout.chunk_count * _place_bytes(layout) if layout.kept_size_bytes else 0


def _cuts_blocks(layout: Layout) -> bool:
    return bool(layout.description.get("spec", {}).get("cutsBlocks"))


def make_room(path: Path, layout: Layout) -> None:
    """Replaces the file of 0.2.0, whose places are too small; StorageError: the disk failed."""
    size = file_size(layout)
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
        self._words = file.words(0, file_size(layout) // 8)
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
