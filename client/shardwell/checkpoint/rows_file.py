"""Rows of a table in a safetensors file: ids, weights, optimizer state, counts and steps.

    ids                 I64 (n,)
    weights             F32 (n, dim)
    exp_avg, ...        F32 (n, width), the optimizer's `slot_names`
    update_counts       I64 (n,)
    last_steps          I64 (n,)

A file is written whole, from memory; a shard has as many as it needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fastcrc import crc32

from shardwell.checkpoint.slice_file import WEIGHTS_NAME, TensorsReader, file_error
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell.specs.table import TableSpec
from shardwell.wire.row_state import RowState

_HEADER_ALIGNMENT_BYTES = 8


def tensor_names(spec: TableSpec) -> tuple[str, ...]:
    """Of each file, in the order of RowState.arrays."""
    return ("ids", WEIGHTS_NAME, *spec.optimizer.slot_names, "update_counts", "last_steps")


def _tensors(spec: TableSpec, row_count: int) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of each."""
    whole, n = ("I64", [row_count]), row_count
    values = [("F32", [n, width]) for width in (spec.dim, *spec.slot_widths)]
    return dict(zip(tensor_names(spec), [whole, *values, whole, whole], strict=True))


def write_rows(path: Path, spec: TableSpec, states: Sequence[RowState]) -> tuple[int, int]:
    """Makes a file, and brings it to the disk; returns its bytes and their CRC32C.

    Raises:
        StorageError: it can't be made or written to.
    """
    row_count = sum(state.ids.size for state in states)
    metadata = {"format": "shardwell-rows", "table": spec.name, "dim": str(spec.dim)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, (dtype, shape) in _tensors(spec, row_count).items():
        stop = start + int(np.prod(shape)) * (8 if dtype == "I64" else 4)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT_BYTES)
    head = len(header).to_bytes(8, "little") + header
    crc = crc32.iscsi(head)
    try:
        with path.open("xb") as file:
            file.write(head)
            for arrays in zip(*(state.arrays for state in states), strict=True):
                for array in arrays:
                    values = np.ascontiguousarray(array).astype(
                        array.dtype.newbyteorder("<"), copy=False
                    )
                    view = values.reshape(-1).view(np.uint8).data
                    crc = crc32.iscsi(view, crc)
                    file.write(view)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise file_error(path, error, "writing it") from None
    return len(head) + start, crc


class RowsReader(TensorsReader):
    """What `write_rows` wrote. See TensorsReader."""

    def __init__(self, path: Path, spec: TableSpec, row_count: int) -> None:
        self._spec = spec
        super().__init__(path, _tensors(spec, row_count))

    def read(self, start: int, stop: int) -> RowState:
        """Rows [start, stop), copied."""
        ids, weights, *slots, counts, steps = (
            self.read_part(name, start, stop) for name in tensor_names(self._spec)
        )
        return RowState(ids, weights, tuple(slots), counts, steps)

    def read_ids(self, start: int, stop: int) -> Ids:
        """The ids of rows [start, stop), copied."""
        ids: Ids = self.read_part("ids", start, stop)
        return ids

    def read_weights(self, start: int, stop: int) -> Float32:
        """The weights of rows [start, stop), copied."""
        weights: Float32 = self.read_part(WEIGHTS_NAME, start, stop)
        return weights
