"""The layout of an accumulator's file, or memory; and its first page. Pure.

    offset
         0   head
      4096   a word a row: 0, or what its sum is believed by
         .   sums: `dim` float32 a row
         .   undo: UNDO_ENTRY_COUNT entries, each with room for all rows

Parts begin at pages. It is as large as it may ever get; what is not written has no disk space. The
head says what it is, and whether it was closed:

    offset  size
         0    48  magic, format version, byte order, dim, rows, salt
        48     4  CRC32C of these
       128     8  state, and its complement in the upper half
       136    44  which start of the machine opened it, and CRC32C
       184    20  what was in it when it was closed: number of sums, total of their words, CRC32C

CRCs start from the salt, except the first. Everything is in the machine's byte order.
"""

from __future__ import annotations

import enum
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell.specs.formats import SUMS
from shardwell_server.store.files.mapped import PAGE_SIZE_BYTES, MappedFile
from shardwell_server.store.row_undo import entry_bytes

UNDO_ENTRY_COUNT = 4
"""Calls that change rows at once; more wait. As many as threads that find a core."""
MAGIC = b"shardwell sums\r\n"
_BYTE_ORDER = 0x01020304
_HEAD = struct.Struct("=16sIIQQQ")
_CRC = struct.Struct("=I")
_STATE_WORD = 128 // 8
_BOOT = struct.Struct("=40s")
_BOOT_OFFSET = 136
_SUMMARY = struct.Struct("=QQ")
_SUMMARY_OFFSET = 184
HEAD_SIZE_BYTES = _HEAD.size + _CRC.size


def _page_aligned(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_SIZE_BYTES) * PAGE_SIZE_BYTES


class SumLayout:
    """The offsets of the parts for `row_count` rows of `dim` values, and their sizes in bytes."""

    words_offset = PAGE_SIZE_BYTES

    def __init__(self, *, dim: int, row_count: int) -> None:
        self.dim, self.row_count = dim, row_count
        self.row_size_bytes = 4 * dim
        self.sums_offset = self.words_offset + _page_aligned(8 * row_count)
        self.undo_offset = self.sums_offset + _page_aligned(self.row_size_bytes * row_count)
        """The end of a file that was closed."""
        arrays = (np.empty(0, np.uint64), np.empty((0, dim), np.float32))
        self.undo_entry_size_bytes = entry_bytes(arrays, row_count)
        self.size_bytes = self.undo_offset + UNDO_ENTRY_COUNT * self.undo_entry_size_bytes


class State(enum.IntEnum):
    """The state of the file. Numbers are those in it."""

    CLOSED = 1
    """The disk has everything, as the summary says."""
    OPEN = 2
    """A process has it, or was killed."""
    CLEARING = 3
    """A process is taking away all sums, or was killed while it did; nothing else is under way."""


class Summary(NamedTuple):
    """The sums in two numbers."""

    row_count: int
    total: int
    """Sum of their words modulo 2^64."""


def new_head(layout: SumLayout, salt: int) -> bytes:
    """The first page of a new file, which is closed and has no sums."""
    page = bytearray(PAGE_SIZE_BYTES)
    packed = _HEAD.pack(MAGIC, SUMS.newest, _BYTE_ORDER, layout.dim, layout.row_count, salt)
    page[:HEAD_SIZE_BYTES] = packed + _CRC.pack(crc32.iscsi(packed))
    struct.pack_into("=Q", page, 8 * _STATE_WORD, _word(State.CLOSED))
    _put(page, _BOOT, _BOOT_OFFSET, salt, b"")
    _put(page, _SUMMARY, _SUMMARY_OFFSET, salt, 0, 0)
    return bytes(page)


def check_head(path: Path, head: bytes, layout: SumLayout) -> int:
    """The salt of a file for that layout; StorageError: damaged, or for something else."""
    remedy = "give the path of another file, or remove it"
    if not head.startswith(MAGIC):
        raise StorageError(f"{path} is no file of a gradient accumulator, or damaged; {remedy}")
    SUMS.check(path, int.from_bytes(head[len(MAGIC) :][:4], sys.byteorder))
    if len(head) < HEAD_SIZE_BYTES or head[_HEAD.size :] != _CRC.pack(
        crc32.iscsi(head[: _HEAD.size])
    ):
        raise StorageError(f"{path}: its head was damaged; restore it from a copy, or remove it")
    _, _, order, dim, row_count, salt = _HEAD.unpack(head[: _HEAD.size])
    if order != _BYTE_ORDER:
        raise StorageError(
            f"{path} has byte order {order:#010x}; expected {_BYTE_ORDER:#010x}: open it on such "
            "a machine as wrote it, or remove it"
        )
    if (dim, row_count) != (layout.dim, layout.row_count):
        raise StorageError(
            f"{path} has {row_count} rows of {dim} values; expected max_rows={layout.row_count}, "
            f"dim={layout.dim}: {remedy}"
        )
    return int(salt)


class FileState:
    """The changing part of the head; a part that was damaged raises StorageError."""

    def __init__(self, file: MappedFile, salt: int) -> None:
        self._path = file.path
        self._words = file.words(0, _STATE_WORD + 1)
        self._bytes = file.data.data
        self._salt = salt

    def get(self) -> State:
        """The state."""
        word = self._words[_STATE_WORD]
        for state in State:
            if word == _word(state):
                return state
        raise self._damaged(f"its state is {word:#018x}")

    def set(self, state: State) -> None:
        """Changes it, with one store."""
        words, place, word = self.store(state)
        words[place] = word

    def store(self, state: State) -> tuple[memoryview[int], int, int]:
        """The stores of `set`: words, the place of one of them, and its new value."""
        return self._words, _STATE_WORD, _word(state)

    @property
    def boot_id(self) -> str:
        """The id of the machine's start that opened the file last; "": unknown."""
        found: bytes = self._checked(_BOOT, _BOOT_OFFSET, "what opened it")[0]
        return found.rstrip(b"\0").decode()

    @boot_id.setter
    def boot_id(self, boot_id: str) -> None:
        _put(self._bytes, _BOOT, _BOOT_OFFSET, self._salt, boot_id.encode())

    @property
    def summary(self) -> Summary:
        """The sums of a file that was closed, in two numbers."""
        return Summary(*self._checked(_SUMMARY, _SUMMARY_OFFSET, "its summary"))

    @summary.setter
    def summary(self, summary: Summary) -> None:
        _put(self._bytes, _SUMMARY, _SUMMARY_OFFSET, self._salt, *summary)

    def _checked(self, form: struct.Struct, offset: int, what: str) -> tuple[Any, ...]:
        packed = bytes(self._bytes[offset : offset + form.size])
        (crc,) = _CRC.unpack_from(self._bytes, offset + form.size)
        if crc != crc32.iscsi(packed, self._salt):
            raise self._damaged(what)
        return form.unpack(packed)

    def _damaged(self, what: str) -> StorageError:
        return StorageError(
            f"{self._path}: {what} was damaged; restore it from a copy, or remove it"
        )


def _put(
    into: bytearray | memoryview, form: struct.Struct, offset: int, salt: int, *values: int | bytes
) -> None:
    packed = form.pack(*values)
    packed += _CRC.pack(crc32.iscsi(packed, salt))
    into[offset : offset + len(packed)] = packed


def _word(state: State) -> int:
    return state | (state ^ 0xFFFFFFFF) << 32
