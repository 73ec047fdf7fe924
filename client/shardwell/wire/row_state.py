"""Rows with all that is known of them: what ScanRows and LoadRows of table.proto carry.

What rows.py is for rows as workers see them; everything here is as the shard keeps it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from shardwell.errors import ArgumentError, CorruptChunkError, NonFiniteError
from shardwell.numerics.codec import Bytes, Float32, canonical_nans
from shardwell.placement.rows import Ids
from shardwell.specs.parameter import STEP_MAX
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2
from shardwell.wire import checksum
from shardwell.wire.messages import OutgoingMessage
from shardwell.wire.rows import rows_per_scan_message_max

Int64 = npt.NDArray[np.int64]


class RowState(NamedTuple):
    """The state of n rows: their ids, values, optimizer slots, update counts and last steps."""

    ids: Ids
    weights: Float32
    """(n, dim)."""
    slots: tuple[Float32, ...]
    """(n, width) each."""
    update_counts: Int64
    """(n,): gradients that were applied."""
    last_steps: Int64
    """(n,): the step that the last gradient joined."""

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int64] | Float32, ...]:
        """Returns all, in the order of the wire."""
        return (self.ids, self.weights, *self.slots, self.update_counts, self.last_steps)

    def take(self, which: slice | npt.NDArray[np.bool_] | Ids) -> RowState:
        """Returns some of the rows."""
        return RowState(
            self.ids[which],
            self.weights[which],
            tuple(slot[which] for slot in self.slots),
            self.update_counts[which],
            self.last_steps[which],
        )

    def pieces(self, size: int) -> list[RowState]:
        """Cuts it into pieces of `size` rows at the most."""
        return [self.take(slice(at, at + size)) for at in range(0, self.ids.size, size)]


def empty_state(spec: TableSpec, row_count: int) -> RowState:
    """Returns room for so many rows."""
    return RowState(
        np.empty(row_count, np.int64),
        np.empty((row_count, spec.dim), np.float32),
        tuple(np.empty((row_count, width), np.float32) for width in spec.slot_widths),
        np.empty(row_count, np.int64),
        np.empty(row_count, np.int64),
    )


class RowStateCodec:
    """The form of one table's rows with state. Stateless; any thread may use it."""

    def __init__(self, spec: TableSpec) -> None:
        self.row_count_max = rows_per_scan_message_max(spec)
        self._spec = spec

    def encode(
        self, header: Message, rows: table_pb2.Rows, state: RowState, *, start: int
    ) -> bytes:
        """Returns a sealed message of the state; `rows` lie inside `header`, and are filled in."""
        assert state.ids.size <= self.row_count_max
        rows.row_count = state.ids.size
        message = OutgoingMessage(header, sum(array.nbytes for array in state.arrays))
        at = 0
        for array in state.arrays:
            message.payload[at : at + array.nbytes] = _bytes(array)
            at += array.nbytes
        rows.crc32c = checksum.of_rows(start, rows, message.payload)
        return message.seal()

    def open(self, rows: table_pb2.Rows, payload: Bytes, *, start: int) -> RowState:
        """Checks rows that came, and copies them; raises as `RowCodec.open` and `check` do."""
        checksum.check(rows, payload, checksum.of_rows(start, rows, payload))
        count = rows.row_count
        if count > self.row_count_max or rows.lz4:
            raise ArgumentError(
                f"rows with state come {self.row_count_max} in a message at the most, without "
                f"lz4; got {count} and {rows.lz4}"
            )
        state = empty_state(self._spec, count)
        expected = sum(array.nbytes for array in state.arrays)
        if payload.size != expected:
            raise CorruptChunkError(
                f"rows with state: {count} rows are {expected} bytes; the payload has "
                f"{payload.size}; check row_count, dim and optimizer"
            )
        at = 0
        for array in state.arrays:
            _bytes(array)[:] = payload[at : at + array.nbytes]
            at += array.nbytes
        self.check(state)
        if self._spec.allow_non_finite:
            for values in (state.weights, *state.slots):
                canonical_nans(values)
        return state

    def check(self, state: RowState) -> None:
        """Refuses counts, steps, weights and state that no row can have; names the first row."""
        for what, values, low in (
            ("count of updates", state.update_counts, 1),
            ("last step", state.last_steps, 0),
        ):
            is_bad = (values < low) | (values > STEP_MAX)
            if is_bad.any():
                row = int(np.argmax(is_bad))
                raise ArgumentError(
                    f"table {self._spec.name!r}: row id {state.ids[row]} has {what} {values[row]}; "
                    f"expected {low} to {STEP_MAX}",
                    table=self._spec.name,
                )
        if self._spec.allow_non_finite:
            return
        slot_names = [f" of the optimizer's {name!r}" for name in self._spec.optimizer.slot_names]
        for what, array in zip(("", *slot_names), (state.weights, *state.slots), strict=True):
            if not np.isfinite(array).all():
                row, column = np.argwhere(~np.isfinite(array))[0]
                raise NonFiniteError(
                    f"table {self._spec.name!r}: column {column}{what} of row id {state.ids[row]} "
                    "is not finite; restore a checkpoint from before, and lower the learning rate "
                    "or clip gradients",
                    element_index=int(row) * self._spec.dim + int(column),
                    table=self._spec.name,
                )


def _bytes(array: npt.NDArray[np.int64] | Float32) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
