"""A store in plain memory: as fast as it gets, gone with the process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from shardwell.errors import LimitError
from shardwell.numerics import row_batches
from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import Operations
from shardwell_server.store.contract import (
    Begin,
    ChunkRecord,
    Event,
    Int64,
    Layout,
    ParameterStorage,
    Places,
    Position,
    Store,
    TableLayout,
    TableRecord,
    TableStorage,
    Transition,
)
from shardwell_server.store.lazy_memory import lazy_zeros
from shardwell_server.store.row_arrays import check_capacity, gather, make_arrays, scatter

_NUMBER_COUNT = 3


class MemoryStore(Store):
    """The store without files: it has no names to lose, and recovers nothing."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], ParameterStorage | TableStorage] = {}
        self._name_events: Sequence[Event] = ()

    def create(
        self, layout: Layout | TableLayout, begin: Begin = lambda storage: None
    ) -> ParameterStorage | TableStorage:
        key = (layout.kind, layout.name)
        if key in self._made:
            raise ValueError(f"storage of {layout.kind} {layout.name!r} exists")
        try:
            self._made[key] = made = (
                MemoryParameter(layout) if isinstance(layout, Layout) else MemoryTable(layout)
            )
            begin(made)
        except MemoryError:
            self._made.pop(key, None)
            where: dict[str, Any] = {layout.kind: layout.name}
            raise LimitError(
                f"no memory for {layout.contents}; add shards or memory", **where
            ) from None
        except BaseException:
            self._made.pop(key, None)
            raise
        return made

    def rename(self, name: str, layout: object) -> None:
        raise AssertionError(f"{name!r} is of this process, and no earlier one renamed it")

    def remove(self, layout: Layout | TableLayout) -> None:
        del self._made[layout.kind, layout.name]

    def name_events(self) -> Sequence[Event]:
        return self._name_events

    def log_name(self, event: Event, compacted: Sequence[Event]) -> None:
        self._name_events = list(compacted)

    def close(self) -> None:
        self._made.clear()


class MemoryParameter(ParameterStorage):
    """A parameter's arrays without files; an unused array costs nothing until its first write."""

    is_in_memory = True

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

        def zeros() -> Float32:
            return np.zeros(layout.slice_size, np.float32)

        self.weights = zeros()
        self.gradient_sum = zeros() if layout.with_sum else None
        self.slots = tuple(zeros() for _ in layout.initial_slots)
        for slot, value in zip(self.slots, layout.initial_slots, strict=True):
            if value:
                slot[:] = value
        self._change = _MemoryChange()
        self._kept: dict[int, tuple[int, bytes]] = {}
        self._pages: dict[int, bytes] = {}

    def change(self, chunk_index: int, transition: Transition) -> _MemoryChange:
        return self._change

    def keep(self, chunk_index: int, version: int, encoded: bytes) -> None:
        self._kept[chunk_index] = version, encoded

    def kept(self, chunk_index: int, version: int) -> bytes | None:
        found, encoded = self._kept.get(chunk_index, (-1, b""))
        return encoded if found == version else None

    def put_page(self, place: int, page: bytes) -> None:
        self._pages[place] = page

    def page(self, place: int, size_bytes: int) -> bytes:
        return self._pages.get(place, b"")[:size_bytes]


class _MemoryChange:
    def blocks(self, count: int) -> Iterable[tuple[int, int]]:
        return ((0, count),)

    def commit(self, record: ChunkRecord, seat_index: int, step: int) -> None:
        pass

    def __enter__(self) -> _MemoryChange:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class MemoryTable(TableStorage):
    """A table's rows without files."""

    updates_in_place = True

    def __init__(self, layout: TableLayout) -> None:
        self.layout = layout
        arrays = make_arrays(layout, layout.row_capacity, lambda _, *shape: lazy_zeros(*shape))
        self.keys, self.update_counts, self.last_steps, self.weights = arrays[:4]
        self.slots, self.sums, self.has_sum = arrays[4:]
        self._arrays = arrays
        self._kept_step = -1
        self._kept: list[tuple[int, Int64, Float32]] = []
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
        self.reserved_row_count = max(self.reserved_row_count, row_count)

    def change(
        self, places: Places, *, values: bool, sums: bool, in_place: bool = False
    ) -> MemoryRowChange:
        assert places.size <= self.layout.rows_per_change_max
        return MemoryRowChange(self, places, values=values, sums=sums, in_place=in_place)

    def keep_rows(self, step: int, ids: Int64, rows: Float32) -> bool:
        if step != self._kept_step:
            self._kept_step, self._kept = step, []
        self._kept.append((step, ids, rows))
        return True

    def kept_rows(self) -> Sequence[tuple[int, Int64, Float32]]:
        return list(self._kept)


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
