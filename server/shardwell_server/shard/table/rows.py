"""Moves the bytes of a table's rows: out of the storage, and changed back into it.

The caller alone changes rows; it decides what counts, and gives the record to commit. A change is
computed on copies, or in place where that takes no longer than to write them; readers are kept out
only while rows are written, so that they see each row before or after it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from shardwell.errors import ArgumentError
from shardwell.numerics import row_batches
from shardwell.numerics.codec import Float32, peak_of
from shardwell.numerics.initial_rows import initial_rows
from shardwell.numerics.row_sums import Cell, add_rows, first_bad_cell, touched_rows
from shardwell.numerics.row_update_rules import RowUpdateRule
from shardwell.numerics.update_rules import decay_into_state
from shardwell.numerics.weighted_mean import divide
from shardwell.placement.rows import Ids, RowPlacement
from shardwell.specs.table import TableSpec
from shardwell.wire.row_state import RowState
from shardwell_server.shard.table.index import rebuild_index
from shardwell_server.shard.table.reading_lock import ReadingLock
from shardwell_server.shard.table.row_slots import RowSlots
from shardwell_server.shard.table.snapshot import TableSnapshots
from shardwell_server.store.contract import (
    FREE,
    Int64,
    Places,
    Position,
    RowChange,
    TableRecord,
    TableStorage,
)

_LOG = logging.getLogger("shardwell_server")
_NO_PLACES: Places = np.empty(0, np.int64)
Flags = npt.NDArray[np.bool_]


class NonFiniteSumError(ArithmeticError):
    """A row's sum is beyond float32; `cell` says which value of the batch."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(f"row {cell.row}, column {cell.column}")
        self.cell = cell


class TableRows:
    """The rows of one table on one shard.

    `read` and `scan` may be called from any thread, the others from one at a time.
    """

    def __init__(
        self,
        spec: TableSpec,
        placement: RowPlacement,
        shard_index: int,
        storage: TableStorage,
        places: RowSlots,
        *,
        batch_row_count_max: int,
        snapshots: TableSnapshots,
    ) -> None:
        self._spec = spec
        self._snapshots = snapshots
        self._storage = storage
        self._places = places
        self._rule = RowUpdateRule(spec.optimizer)
        self._decay = decay_into_state(spec.optimizer)
        self._lock = ReadingLock()
        self._batch_row_count_max = batch_row_count_max
        self._index = rebuild_index(spec, storage, places, placement, shard_index)
        self._before = RowsBefore()
        self._keeps = spec.mode == "sync"
        self._unkept_step = -1
        version = storage.record.version
        for step, ids, rows in storage.kept_rows():
            if version - 1 <= step <= version:  # a loss of power may have taken later ones back
                self._before.add(step, ids, rows)
        # Rows that have a sum, so that no call has to look for them.
        self._touched = [touched_rows(storage.has_sum, places.used)] if spec.sums_gradients else []

    # Reading.

    def read(self, ids: Ids, into: Float32, max_version: int | None = None) -> int:
        """Copies rows to `into`, (n, dim); returns their version. RowsFetch has `max_version`."""
        storage = self._storage
        with self._lock.reading:
            places, missing_count = self._index.locate(ids)
            storage.verify(places[places >= 0] if missing_count else places)
            may_wait = bool(storage.undo_bytes)
            row_batches.gather(storage.weights, places, into, may_wait=may_wait)
            version = storage.record.version
            if missing_count:
                is_missing = places < 0
                first = initial_rows(self._spec.initializer, ids[is_missing], self._spec.dim)
                into[is_missing] = first
            if max_version is not None and max_version == self._before.step:
                self._before.put_back(ids, into)
                return max_version
        return version

    def scan(self, start: int, stop: int, *, with_values: bool) -> tuple[Ids, Float32 | None]:
        """Copies ids of the rows at places [start, stop), and values if they are wanted."""
        storage = self._storage
        with self._lock.reading:
            counts = storage.update_counts[start : min(stop, storage.record.row_used)]
            places = start + np.flatnonzero(counts != FREE)
            storage.verify(places)
            values = np.take(storage.weights, places, axis=0) if with_values else None
            return storage.keys[places], values

    def states(
        self, start: int, stop: int, claim: Callable[[Places], Places] | None = None
    ) -> RowState:
        """Copies rows with state at places [start, stop): of the updated ones, those of `claim`."""
        storage = self._storage
        with self._lock.reading:
            counts = storage.update_counts[start : min(stop, storage.record.row_used)]
            places = start + np.flatnonzero(counts > 0)
            if claim is not None:
                places = claim(places)
            storage.verify(places)
            return self._gather(places)

    def _gather(self, places: Places) -> RowState:
        storage = self._storage
        return RowState(
            storage.keys[places],
            np.take(storage.weights, places, axis=0),
            tuple(np.take(slot, places, axis=0) for slot in storage.slots),
            storage.update_counts[places],
            storage.last_steps[places],
        )

    def verify(self, start: int, stop: int) -> None:
        """Checks the rows at places [start, stop)."""
        with self._lock.reading:
            self._storage.verify(np.arange(start, min(stop, self._storage.record.row_used)))

    def decay_peak(self, ids: Ids) -> float:
        """Returns the largest magnitude that weight decay adds to a gradient, as state sees it."""
        if not self._decay or not ids.size:
            return 0.0
        places = self._index.find(ids)
        old = places[places >= 0]
        self._storage.verify(old)
        peak = peak_of(np.take(self._storage.weights, old, axis=0).reshape(-1))
        if old.size < ids.size:
            new = initial_rows(self._spec.initializer, ids[places < 0], self._spec.dim)
            peak = max(peak, peak_of(new.reshape(-1)))
        return self._decay * peak

    def state_overflow(
        self, ids: Ids, gradients: Float32, learning_rate: float
    ) -> tuple[str, Cell] | None:
        """Finds the first value of optimizer state that gradients would make infinite or NaN.

        Computes on copies, for the thread that changes rows; ids do not repeat. Returns the array's
        name and the place.
        """
        places = self._index.find(ids)
        is_new = places < 0
        weights, slots = self._new_rows(ids)
        old = places[~is_new]
        weights[~is_new] = self._storage.weights[old]
        for slot, stored in zip(slots, self._storage.slots, strict=True):
            slot[~is_new] = stored[old]
        counts = self._update_counts(places, is_new)
        self._rule.apply(weights, gradients.copy(), slots, counts, learning_rate)
        for name, slot in zip(self._spec.optimizer.slot_names, slots, strict=True):
            if (bad := first_bad_cell(slot)) is not None:
                return name, bad
        return None

    # Changing.

    def settle(self, record: TableRecord, position: Position | None) -> None:
        """Commits a record, and changes no row."""
        with self._changing(_NO_PLACES, values=False, sums=False) as (change, alone):
            alone()
            change.commit(record._replace(row_used=self._places.used), position)

    def apply(
        self,
        ids: Ids,
        gradients: Float32,
        learning_rate: float,
        record: TableRecord,
        position: Position,
    ) -> None:
        """Updates rows with their gradients; creates those that do not exist.

        Ids do not repeat, and `gradients`, (n, dim), is overwritten. A failure changes nothing.
        """
        step = self._storage.record.version
        places, is_new = self._located(ids)
        operations = self._rule.operations(learning_rate)
        in_place = operations is not None and self._storage.updates_in_place
        with self._changing(places, values=True, sums=False, in_place=in_place) as (change, alone):
            counts = self._update_counts(places, is_new)
            if operations is not None and in_place:
                first = self._new_rows(ids[is_new]) if is_new.any() else None
                alone()
                if first is not None:
                    self._write_new(places[is_new], *first)
                change.update(operations, gradients)
            else:
                self._begin(change.weights, change.slots, ids, is_new)
                self._rule.apply(change.weights, gradients, change.slots, counts, learning_rate)
                alone()
                change.write(weights=change.weights, slots=change.slots)
            self._note(places, counts, step)
            self._keep(step, ids, is_new, change)
            self._commit(change, ids, places, is_new, record, position)

    def load(self, state: RowState, record: TableRecord) -> None:
        """Creates rows with all that is known of them; a failure changes nothing."""
        places, is_new = self._located(state.ids)
        if not is_new.all():
            raise ArgumentError(
                f"table {self._spec.name!r}: row id {state.ids[~is_new][0]} was loaded before",
                table=self._spec.name,
            )
        with self._changing(places, values=True, sums=False) as (change, alone):
            alone()
            change.write(weights=state.weights, slots=state.slots)
            self._note(places, state.update_counts, state.last_steps)
            self._commit(change, state.ids, places, is_new, record, None)

    def add(
        self,
        ids: Ids,
        gradients: Float32,
        factor: float,
        record: TableRecord,
        position: Position,
    ) -> None:
        """Adds factor * gradients to the rows' sums; creates those that do not exist.

        Ids do not repeat, `gradients`, (n, dim), is overwritten, and `factor` is a float32. A
        failure changes nothing; a sum beyond float32 is one, unless the spec allows it.
        """
        storage, step = self._storage, self._storage.record.version
        places, is_new = self._located(ids)
        # A place that had a row before has values that a change must be able to take back.
        has_old_values = bool((places[is_new] < self._places.used).any())
        with self._changing(places, values=has_old_values, sums=True) as (change, alone):
            assert change.sums is not None
            assert storage.sums is not None
            has_sum = np.take(storage.has_sum, places, mode="clip")
            has_sum[is_new] = False
            sums = add_rows(change.sums, has_sum, gradients, factor)
            if not self._spec.allow_non_finite and (bad := first_bad_cell(sums)) is not None:
                raise NonFiniteSumError(bad)
            new_places = places[is_new]
            weights, slots = self._new_rows(ids[is_new])
            alone()
            self._write_new(new_places, weights, slots)
            self._note(new_places, np.zeros(new_places.size, np.int64), step)
            change.write(sums=sums)
            storage.has_sum[places] = True
            self._commit(change, ids, places, is_new, record, position)
        self._touched.append(places[~has_sum])

    def close(
        self, sample_total: int, shift: int, learning_rate: float, record: TableRecord
    ) -> None:
        """Updates all rows that have a sum with their mean, batch by batch; then commits `record`.

        It may be cut off after any batch, and begun again: rows that are closed stay so.
        """
        storage = self._storage
        step, closing = storage.record.version, storage.record
        divisor = math.ldexp(float(sample_total or 1), -shift if sample_total else 0)
        touched = np.concatenate([*self._touched, _NO_PLACES])
        touched.sort()
        while touched.size:
            places, rest = np.split(touched, [self._batch_row_count_max])
            with self._changing(places, values=True, sums=True) as (change, alone):
                assert change.sums is not None
                means = np.empty_like(change.sums)
                divide(change.sums, divisor, means)
                counts = self._update_counts(places, None)
                self._rule.apply(change.weights, means, change.slots, counts, learning_rate)
                alone()
                change.write(weights=change.weights, slots=change.slots)
                self._note(places, counts, step)
                storage.has_sum[places] = False
                self._keep(step, storage.keys[places], None, change)
                committed = closing if rest.size else record
                change.commit(committed._replace(row_used=self._places.used), None)
            touched = rest
            self._touched = [touched]
        if storage.record.version == step:
            self.settle(record, None)

    def evict(self, start: int, stop: int, older_than_step: int) -> int:
        """Removes old rows without a sum at places [start, stop); returns how many."""
        storage, part = self._storage, slice(start, min(stop, self._places.used))
        is_old = storage.update_counts[part] != FREE
        is_old &= storage.last_steps[part] < older_than_step
        is_old &= ~storage.has_sum[part]
        old = start + np.flatnonzero(is_old)
        for first in range(0, old.size, self._batch_row_count_max):
            places = old[first : first + self._batch_row_count_max]
            with self._changing(places, values=True, sums=False) as (change, alone):
                alone()
                storage.update_counts[places] = FREE
                change.commit(storage.record, None)
                self._index.remove(storage.keys[places])
            self._places.give_back(places)
        return old.size

    # Parts of a change.

    def _keep(self, step: int, ids: Ids, is_new: Flags | None, change: RowChange) -> None:
        """Keeps a synchronous change's rows as they were before it; no call reads meanwhile."""
        if not self._keeps:
            return
        rows = change.weights_before.copy()
        if is_new is not None and is_new.any():
            rows[is_new] = initial_rows(self._spec.initializer, ids[is_new], self._spec.dim)
        self._before.add(step, ids, rows)
        if not self._storage.keep_rows(step, ids, rows) and step != self._unkept_step:
            self._unkept_step = step
            _LOG.warning(
                "rows of a step can't be kept in a file: a worker that is killed in the middle of "
                "it together with this shard will read rows of two versions",
                extra={"table": self._spec.name, "step": step},
            )

    @contextlib.contextmanager
    def _changing(
        self, places: Places, *, values: bool, sums: bool, in_place: bool = False
    ) -> Iterator[tuple[RowChange, Callable[[], None]]]:
        """Yields a change, and a call that keeps readers out until it is committed or undone."""

        def be_alone() -> None:
            if values and self._snapshots.pending:
                self._snapshots.before_write(places, self._gather)
            alone.enter_context(self._lock.writing)

        with (
            contextlib.ExitStack() as alone,
            self._storage.change(places, values=values, sums=sums, in_place=in_place) as change,
        ):
            yield change, be_alone

    def _located(self, ids: Ids) -> tuple[Places, Flags]:
        places, count = self._index.locate(ids)
        is_new = places < 0
        if count:
            places[is_new] = self._places.plan(count)
        return places, is_new

    def _new_rows(self, ids: Ids) -> tuple[Float32, tuple[Float32, ...]]:
        slots = [
            np.full((ids.size, width), value, np.float32)
            for width, value in zip(self._spec.slot_widths, self._rule.initial_slots, strict=True)
        ]
        return initial_rows(self._spec.initializer, ids, self._spec.dim), tuple(slots)

    def _write_new(self, places: Places, weights: Float32, slots: tuple[Float32, ...]) -> None:
        row_batches.scatter(self._storage.weights, places, weights)
        for array, rows in zip(self._storage.slots, slots, strict=True):
            row_batches.scatter(array, places, rows)

    def _begin(self, weights: Float32, slots: tuple[Float32, ...], ids: Ids, is_new: Flags) -> None:
        if is_new.all():
            initial_rows(self._spec.initializer, ids, self._spec.dim, out=weights)
        elif is_new.any():
            weights[is_new] = initial_rows(self._spec.initializer, ids[is_new], self._spec.dim)
        else:
            return
        for slot, value in zip(slots, self._rule.initial_slots, strict=True):
            slot[is_new] = value

    def _update_counts(self, places: Places, is_new: Flags | None) -> npt.NDArray[np.int64]:
        counts = np.take(self._storage.update_counts, places, mode="clip")
        if is_new is not None:
            counts[is_new] = 0
        counts += 1
        return counts

    def _note(self, places: Places, counts: Int64, step: int | Int64) -> None:
        self._storage.update_counts[places] = counts
        self._storage.last_steps[places] = step

    def _commit(
        self,
        change: RowChange,
        ids: Ids,
        places: Places,
        is_new: Flags,
        record: TableRecord,
        position: Position | None,
    ) -> None:
        new_places, used = places[is_new], self._places.used
        try:
            if new_places.size:
                self._storage.keys[new_places] = ids[is_new]
                used = max(used, int(new_places.max()) + 1)
                self._index.add(ids[is_new], new_places)
            change.commit(record._replace(row_used=used), position)
        except BaseException:
            self._index.remove(ids[is_new])
            raise
        self._places.take(new_places)


class RowsBefore:
    """The rows before the newest step, for a worker that was started again.

    A synchronous step changes each row once. Rows of the newest step that has changed any are kept,
    by id, as a place may be given to another row meanwhile. The caller changes it while no call
    reads.
    """

    def __init__(self) -> None:
        self.step = -1
        """The step; -1: no row was changed."""
        self._ids: list[Ids] = []
        self._rows: list[Float32] = []
        self._sorted: tuple[Ids, Float32] | None = None

    def add(self, step: int, ids: Ids, rows: Float32) -> None:
        """Keeps rows, (n, dim), as they were before a step; drops those of an earlier step.

        Nothing is copied. A change that is made again brings its ids again; the first rows count.
        """
        if step != self.step:
            self.step, self._ids, self._rows = step, [], []
        self._ids.append(ids)
        self._rows.append(rows)
        self._sorted = None

    def put_back(self, ids: Ids, into: Float32) -> None:
        """Makes rows in `into`, (n, dim), what they were before the step that changed them."""
        if self._sorted is None:
            every, first = np.unique(np.concatenate(self._ids), return_index=True)
            self._sorted = every, np.concatenate(self._rows)[first]
        changed, rows = self._sorted
        places = np.searchsorted(changed, ids)
        places[places == changed.size] = 0
        found = changed[places] == ids if changed.size else np.zeros(ids.size, np.bool_)
        into[found] = rows[places[found]]
