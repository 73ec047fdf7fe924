"""Rows of a table in a safetensors file: ids, weights, optimizer state, counts and steps.

    ids                 I64 (n,)
    weights             F32 (n, dim)
    exp_avg, ...        F32 (n, width), the optimizer's `slot_names`
    update_counts       I64 (n,)
    last_steps          I64 (n,)

A file is written whole, from memory; a shard has as many as it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwell.checkpoint.tensor_files import WEIGHTS_NAME, Tensors, TensorsReader, TensorsWriter
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell.specs.table import TableSpec
from shardwell.wire.row_state import RowState


def tensor_names(spec: TableSpec) -> tuple[str, ...]:
    """Of each file, in the order of RowState.arrays."""
    return ("ids", WEIGHTS_NAME, *spec.optimizer.slot_names, "update_counts", "last_steps")


def _tensors(spec: TableSpec, row_count: int) -> Tensors:
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
    with TensorsWriter(path, _tensors(spec, row_count), metadata) as writer:
        for number, name in enumerate(tensor_names(spec)):
            start = 0
            for state in states:
                writer.put(name, start, state.arrays[number])
                start += state.ids.size
        return writer.finish()


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
