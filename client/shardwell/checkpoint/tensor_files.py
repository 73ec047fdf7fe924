"""Tensors in a safetensors file: how each file of a checkpoint, and an export, is laid out.

The format (https://github.com/huggingface/safetensors): 8 bytes with the length of a JSON header,
the header, then the tensors one after another, little-endian. It is written here, because tensors
must go to the file piece by piece, in no order, and a table's rows from pieces without a copy of
the whole; it is read by the package `safetensors`.

A table's rows, as a shard has gathered them in memory; it has as many files as it needs:

    ids                 I64 (n,)
    weights             F32 (n, dim)
    exp_avg, ...        F32 (n, width), the optimizer's `slot_names`
    update_counts       I64 (n,)
    last_steps          I64 (n,)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from fastcrc import crc32
from safetensors import SafetensorError, safe_open

from shardwell.errors import StorageError
from shardwell.numerics.codec import Float32
from shardwell.process.connected import Closing
from shardwell.specs.table import TableSpec
from shardwell.wire.row_state import RowState

WEIGHTS_NAME = "weights"
"""The first tensor of a slice's file; the others are the optimizer's `slot_names`."""
Tensors: TypeAlias = Mapping[str, tuple[str, list[int]]]
"""Type, F32 or I64, and shape of each by name, in the order of the file."""
_open: Any = safe_open
_TYPES: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
_BLOCK_SIZE_BYTES = 2**20
_DATA_ALIGNMENT_BYTES = 64


def file_error(path: Path, error: OSError, doing: str) -> StorageError:
    """The error for a failed call of the operating system."""
    return StorageError(
        f"{path}: {doing} failed: {error.strerror}; check the disk's space and the permissions"
    )


def write_bytes(path: Path, data: bytes) -> int:
    """Writes a new file of plain bytes, to the disk; returns their CRC32C."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise file_error(path, error, "writing it") from None
    return int(crc32.iscsi(data))


def read_bytes(path: Path, size_bytes: int, crc: int) -> bytes:
    """Returns a file's bytes; StorageError: they are not those that were written."""
    try:
        with path.open("rb") as file:
            data = file.read(size_bytes + 1)
    except OSError as error:
        raise file_error(path, error, "reading it") from None
    if len(data) != size_bytes or crc32.iscsi(data) != crc:
        raise StorageError(f"{path} was damaged; take another copy of the checkpoint")
    return data


def crc_of(path: Path) -> int:
    """Returns the CRC32C of a file, which is read in blocks."""
    crc, block = 0, bytearray(_BLOCK_SIZE_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                crc = crc32.iscsi(memoryview(block)[:count], crc)
    except OSError as error:
        raise file_error(path, error, "reading it") from None
    return crc


def layout_of(tensors: Tensors, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Returns the bytes at the beginning of a file, and the place of each tensor in it."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    stop = 0
    for name, (kind, shape) in tensors.items():
        start, stop = stop, stop + math.prod(shape) * _TYPES[kind].itemsize
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _DATA_ALIGNMENT_BYTES)
    head = len(header).to_bytes(8, "little") + header
    return head, {name: len(head) + entries[name]["data_offsets"][0] for name in tensors}


class TensorsWriter(Closing):
    """A new file under construction, with what `metadata` adds to its header. A context manager."""

    def __init__(self, path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        self._path = path
        self._tensors = tensors
        self._crc = 0
        """Of all that was written, as long as that was in the order of the file."""
        self._in_order = True
        self._stop = 0
        head, self._offsets = layout_of(tensors, metadata)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise file_error(path, error, "making it") from None
        try:
            self._write(head, 0)
        except BaseException:
            self.close()
            raise

    def put(self, name: str, start: int, values: npt.NDArray[Any]) -> None:
        """Puts elements, or rows, where they belong, from number `start` of a tensor on."""
        kind, shape = self._tensors[name]
        plain = np.ascontiguousarray(values, _TYPES[kind]).reshape(-1)
        offset = start * math.prod(shape[1:]) * plain.itemsize
        self._write(plain.view(np.uint8).data, self._offsets[name] + offset)

    def put_values(self, start: int, values: Float32) -> None:
        """Puts elements from number `start` on of all tensors, as one vector of float32."""
        plain = np.ascontiguousarray(values, "<f4")
        self._write(plain.view(np.uint8).data, min(self._offsets.values()) + start * 4)

    def finish(self) -> tuple[int, int]:
        """Brings all of it to the disk; returns the file's bytes and their CRC32C."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise file_error(self._path, error, "writing it") from None
        size = os.fstat(self._file).st_size
        is_whole = self._in_order and self._stop == size
        return size, self._crc if is_whole else crc_of(self._path)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _write(self, what: bytes | memoryview, offset: int) -> None:
        view = memoryview(what)
        self._in_order = self._in_order and offset == self._stop
        if self._in_order:
            self._crc = crc32.iscsi(view, self._crc)
            self._stop += len(view)
        try:
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise file_error(self._path, error, "writing it") from None


class TensorsReader(Closing):
    """A safetensors file to read from, which must have just these tensors. A context manager."""

    def __init__(self, path: Path, tensors: Tensors) -> None:
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

    def read(self, name: str, start: int, stop: int) -> Any:
        """Copies elements, or rows, [start, stop) of a tensor."""
        try:
            return self._file.get_slice(name)[start:stop]
        except (SafetensorError, OSError) as error:
            raise StorageError(f"{self._path} can't be read: {error}; take another copy") from None

    def close(self) -> None:
        """Closes the file."""
        self._open.__exit__(None, None, None)


def slice_tensors(names: Sequence[str], size: int) -> Tensors:
    """The tensors of a file of a slice."""
    return {name: ("F32", [size]) for name in names}


def tensor_names(spec: TableSpec) -> tuple[str, ...]:
    """The names of each file's tensors, in the order of RowState.arrays."""
    return ("ids", WEIGHTS_NAME, *spec.optimizer.slot_names, "update_counts", "last_steps")


def row_tensors(spec: TableSpec, row_count: int) -> Tensors:
    """The tensors of a file of a table's rows."""
    whole, n = ("I64", [row_count]), row_count
    values = [("F32", [n, width]) for width in (spec.dim, *spec.slot_widths)]
    return dict(zip(tensor_names(spec), [whole, *values, whole, whole], strict=True))


def write_rows(path: Path, spec: TableSpec, states: Sequence[RowState]) -> tuple[int, int]:
    """Makes a file, and brings it to the disk; returns its bytes and their CRC32C."""
    row_count = sum(state.ids.size for state in states)
    metadata = {"format": "shardwell-rows", "table": spec.name, "dim": str(spec.dim)}
    with TensorsWriter(path, row_tensors(spec, row_count), metadata) as writer:
        for number, name in enumerate(tensor_names(spec)):
            start = 0
            for state in states:
                writer.put(name, start, state.arrays[number])
                start += state.ids.size
        return writer.finish()


def read_rows(reader: TensorsReader, spec: TableSpec, start: int, stop: int) -> RowState:
    """Copies rows [start, stop) of a file that `write_rows` made."""
    ids, weights, *slots, counts, steps = (
        reader.read(name, start, stop) for name in tensor_names(spec)
    )
    return RowState(ids, weights, tuple(slots), counts, steps)
