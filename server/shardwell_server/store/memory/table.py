"""A table in plain memory: of the size that its rows have, gone with the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from shardwell.numerics import row_batches
from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import Operations
from shardwell_server.store.contract import (
    Event,
    Int64,
    Places,
    Position,
    TableLayout,
    TableRecord,
)
from shardwell_server.store.lazy_memory import lazy_zeros
from shardwell_server.store.row_arrays import (
    check_capacity,
    gather,
    make_arrays,
    scatter,
)

_NUMBER_COUNT = 3


class MemoryStorage:
    """The common part of a parameter and a table in memory. Nothing outlives the process."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.is_retired = False

    def events(self) -> Sequence[Event]:
        return ()

    def log(self, event: Event) -> None:
        pass

    def compact(self, events: Sequence[Event]) -> None:
        pass

    def make_durable(self) -> None:
        pass

    def sync(self) -> None:
        pass


class MemoryTable(MemoryStorage):
    """A table's rows without files."""

    record = TableRecord()
    undo_bytes = 0
    updates_in_place = True

    def __init__(self, layout: TableLayout) -> None:
        super().__init__(layout)
        arrays = make_arrays(layout, layout.row_capacity, lambda _, *shape: lazy_zeros(*shape))
        self.keys, self.update_counts, self.last_steps, self.weights = arrays[:4]
        self.slots, self.sums, self.has_sum = arrays[4:]
        self._arrays = arrays
        self._kept_step = -1
        self._kept: list[tuple[int, Int64, Float32]] = []
        self._reserved_row_count = 0
        self._positions: list[Position] = []
        batch = (layout, layout.rows_per_change_max, lambda _, *shape: lazy_zeros(*shape))
        self._saved = make_arrays(*batch)
        self._copies = make_arrays(*batch)

    def positions(self) -> list[Position]:
        return list(self._positions)

    def add_seat(self) -> None:
        self._positions.append(Position(len(self._positions)))

    def reserve(self, row_count: int, at_most: int | None = None) -> None:
        check_capacity(self.layout, row_count)
        self._reserved_row_count = max(self._reserved_row_count, row_count)

    @property
    def reserved_row_count(self) -> int:
        return self._reserved_row_count

    def change(
        self, places: Places, *, values: bool, sums: bool, in_place: bool = False
    ) -> MemoryRowChange:
        assert places.size <= self.layout.rows_per_change_max
        return MemoryRowChange(self, places, values=values, sums=sums, in_place=in_place)

    def verify(self, places: Places) -> None:
        pass

    def keep_rows(self, step: int, ids: Int64, rows: Float32) -> bool:
        if step != self._kept_step:
            self._kept_step, self._kept = step, []
        self._kept.append((step, ids, rows))
        return True

    def kept_rows(self) -> Sequence[tuple[int, Int64, Float32]]:
        return list(self._kept)

    def make_image(self, is_stopping: Callable[[], bool]) -> None:
        pass


class MemoryRowChange:
    """A change that copies rows twice, so that a failed one can be taken back; in place, once."""

    def __init__(
        self, of: MemoryTable, places: Places, *, values: bool, sums: bool, in_place: bool
    ) -> None:
        self._of = of
        self._places = places
        self._is_committed = False
        self._writes_sums = sums
        arrays, saved = of._arrays, of._saved
        of_values = list(zip(arrays.of_values, saved.of_values, strict=True)) if values else []
        pairs = [
            *(of_values[:_NUMBER_COUNT] if in_place else of_values),
            *(zip(arrays.of_sums, saved.of_sums, strict=True) if sums else ()),
        ]
        self._changing = [array for array, _ in pairs]
        self._saved = [gather(array, places, into) for array, into in pairs]
        n, copies = places.size * (not in_place), of._copies
        self.weights: Float32 = copies.weights[: n * values]
        self.slots: tuple[Float32, ...] = tuple(slot[: n * values] for slot in copies.slots)
        self.sums: Float32 | None = None if copies.sums is None else copies.sums[: n * sums]
        if values and not in_place:
            for copy, rows in zip(
                (self.weights, *self.slots), self._saved[_NUMBER_COUNT:], strict=False
            ):
                np.copyto(copy, rows)
        if sums and self.sums is not None:
            np.copyto(self.sums, self._saved[-2])

    @property
    def weights_before(self) -> Float32:
        return self._of._saved.weights[: self._places.size]

    def write(
        self,
        *,
        weights: Float32 | None = None,
        slots: Sequence[Float32] = (),
        sums: Float32 | None = None,
    ) -> None:
        of = self._of
        if weights is not None:
            row_batches.scatter(of.weights, self._places, weights)
        for array, rows in zip(of.slots, slots, strict=bool(slots)):
            row_batches.scatter(array, self._places, rows)
        if sums is not None and of.sums is not None:
            row_batches.scatter(of.sums, self._places, sums)

    def update(self, operations: Operations, gradients: Float32) -> None:
        of, count = self._of, self._places.size
        arrays, saved = (of.weights, *of.slots), (of._saved.weights, *of._saved.slots)
        row_batches.update(operations, gradients, self._places, arrays, saved)
        self._changing += arrays
        self._saved += [rows[:count] for rows in saved]

    def commit(self, record: TableRecord, position: Position | None) -> None:
        of = self._of
        if not self._writes_sums:
            of.has_sum[of.record.row_used : record.row_used] = False
        of.record = record
        if position is not None:
            of._positions[position.seat_index] = position
        self._is_committed = True

    def __enter__(self) -> MemoryRowChange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_committed:
            scatter(self._changing, self._places, self._saved)
