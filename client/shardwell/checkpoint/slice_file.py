"""A slice of a parameter in a safetensors file: weights and optimizer state, as float32.

The format (https://github.com/huggingface/safetensors): 8 bytes with the length of a JSON header,
the header, then the tensors one after another, little-endian. It is written here, because tensors
must go to the file piece by piece, in no order; it is read by the package `safetensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fastcrc import crc32
from safetensors import SafetensorError, safe_open

from shardwell.errors import StorageError
from shardwell.numerics.codec import Float32
from shardwell.process.closeable import Closing

WEIGHTS_NAME = "weights"
"""The first tensor of a file; the others are the optimizer's `slot_names`."""
_open: Any = safe_open
_BLOCK_SIZE_BYTES = 2**20
_HEADER_ALIGNMENT_BYTES = 8


def file_error(path: Path, error: OSError, doing: str) -> StorageError:
    """What a caller is told of a failed call of the system."""
    return StorageError(
        f"{path}: {doing} failed: {error.strerror}; check the disk's space and the permissions"
    )


def crc_of(path: Path) -> int:
    """CRC32C of a file's bytes; the file is read in blocks.

    Raises:
        StorageError: it can't be read.
    """
    crc, block = 0, bytearray(_BLOCK_SIZE_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                crc = crc32.iscsi(memoryview(block)[:count], crc)
    except OSError as error:
        raise file_error(path, error, "reading it") from None
    return crc


class SliceWriter(Closing):
    """A new file under construction. A context manager that closes it.

    Args:
        path: Where; nothing may be there.
        names: Of the tensors.
        size: Elements of each.
        metadata: What the header says besides.

    Raises:
        StorageError: it can't be made or written to.
    """

    def __init__(
        self, path: Path, names: Sequence[str], size: int, metadata: Mapping[str, str]
    ) -> None:
        self._path = path
        self._size_bytes = 4 * size
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        for index, name in enumerate(names):
            start = index * self._size_bytes
            entries[name] = {
                "dtype": "F32",
                "shape": [size],
                "data_offsets": [start, start + self._size_bytes],
            }
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _HEADER_ALIGNMENT_BYTES)
        self._data_offset = 8 + len(header)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise file_error(path, error, "making it") from None
        try:
            self._write(len(header).to_bytes(8, "little") + header, 0)
        except BaseException:
            self.close()
            raise

    def write(self, array_index: int, start: int, values: Float32) -> None:
        """Puts values where they belong, from element `start` of a tensor on."""
        offset = self._data_offset + array_index * self._size_bytes + 4 * start
        self._write(values.astype("<f4", copy=False).view(np.uint8).data, offset)

    def finish(self) -> tuple[int, int]:
        """Brings all of it to the disk; returns the file's bytes and their CRC32C."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise file_error(self._path, error, "writing it") from None
        return os.fstat(self._file).st_size, crc_of(self._path)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _write(self, what: bytes | memoryview, offset: int) -> None:
        view = memoryview(what)
        try:
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise file_error(self._path, error, "writing it") from None


class TensorsReader(Closing):
    """A safetensors file to read from. A context manager that closes it.

    Args:
        path: The file.
        tensors: Type and shape of each by name.

    Raises:
        StorageError: it is no safetensors file, or not one with these tensors.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, list[int]]]) -> None:
        self._path = path
        try:
            self._open = _open(path, framework="numpy")
        except OSError as error:
            raise file_error(path, error, "opening it") from None
        except SafetensorError as error:
            raise StorageError(f"{path} is no safetensors file: {error}; take another copy") from (
                None
            )
        self._file: Any = self._open.__enter__()
        found = {
            name: (part.get_dtype(), part.get_shape())
            for name in self._file.keys()  # noqa: SIM118 (it is no mapping)
            for part in [self._file.get_slice(name)]
        }
        if found != tensors:
            self.close()
            raise StorageError(f"{path} has tensors {found}; expected {tensors}; take another copy")

    def read_part(self, name: str, start: int, stop: int) -> Any:
        """Elements, or rows, [start, stop) of a tensor, copied.

        Raises:
            StorageError: the file can't be read.
        """
        try:
            return self._file.get_slice(name)[start:stop]
        except (SafetensorError, OSError) as error:
            raise StorageError(f"{self._path} can't be read: {error}; take another copy") from None

    def close(self) -> None:
        """Closes the file."""
        self._open.__exit__(None, None, None)


class SliceReader(TensorsReader):
    """What a SliceWriter wrote. See TensorsReader."""

    def __init__(self, path: Path, names: Sequence[str], size: int) -> None:
        self._names = names
        super().__init__(path, {name: ("F32", [size]) for name in names})

    def read(self, array_index: int, start: int, stop: int) -> Float32:
        """Elements [start, stop) of a tensor, copied."""
        values: Float32 = self.read_part(self._names[array_index], start, stop)
        return values
