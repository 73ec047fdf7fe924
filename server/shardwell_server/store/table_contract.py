"""The contract of all storage of tables: rows by place, changed batch by batch.

A created row has a *place* from 0 to `row_capacity` - 1, the same in all arrays. A row changes only
in a `change`, which holds whole or not at all, for all its rows, with the record and the worker's
position (docs/adr/0010-tables.md). Which id has which place is the caller's to know: it is told by
`keys` and `update_counts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwell.numerics.codec import Float32
from shardwell_server.store.event import Event

Places: TypeAlias = npt.NDArray[np.int64]
"""(n,) int64: places of rows, without repeats."""
Int64: TypeAlias = npt.NDArray[np.int64]
FREE = -1
"""In `update_counts`: the place has no row."""


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """What storage is made for; kept with it."""

    name: str
    """The table; checked by `shardwell.specs.names`."""
    dim: int
    """Values of a row."""
    slot_widths: tuple[int, ...]
    """Values that a row has of each array of optimizer state."""
    row_capacity: int
    """Rows that there can be; disk and memory are those of rows that there are."""
    rows_per_change_max: int
    """Rows of one change at the most."""
    with_sum: bool
    """Whether gradients are summed before they are applied."""
    description: dict[str, Any] = field(default_factory=dict)
    """What the shard needs to make the table again: a JSON object."""

    @property
    def row_size_bytes(self) -> int:
        """Bytes of one row in all arrays, with key, counts and checks."""
        values = self.dim * (1 + self.with_sum) + sum(self.slot_widths)
        return 4 * values + 5 * 8 + self.with_sum * (8 + 1)


LOADING = -1
"""As `contribution_count`: the rows are those of a load that has not finished."""


class TableRecord(NamedTuple):
    """Where the table stands, beside its rows; a change replaces it as a whole."""

    row_used: int = 0
    """Places from 0 to below it have, or had, a row."""
    version: int = 0
    """Synchronous: steps that have closed. Asynchronous: steps that were counted."""
    contribution_count: int = 0
    """Synchronous: workers that have ended the open step; worker_count while it is closing.
    LOADING, in both modes: nothing here stands."""
    sample_total: int = 0
    """Synchronous: their samples."""
    shift: int = 0
    """Synchronous: the open step's sums are those of gradients times 2^-shift."""

    @property
    def is_loading(self) -> bool:
        """Whether the rows are those of a load that has not finished."""
        return self.contribution_count == LOADING


class Position(NamedTuple):
    """What a worker has contributed."""

    seat_index: int
    """Which worker."""
    step: int = 0
    """Its open step."""
    part_count: int = 0
    """Parts of that step that are counted; below 2^16."""


class RowChange(Protocol):
    """One change under way. The caller is the table's only writer, and nobody reads meanwhile.

    The arrays may be written directly, at the places and in the arrays that the change was begun
    with, and at places from `row_used` on. Of new rows, those from `row_used` to below that of the
    record that is committed, all arrays must be written; but for `has_sum`, which becomes False
    where the change is not of `sums`.
    """

    weights: Float32
    """(n, dim): a copy of the rows as they were, to compute with; may be written.

    C-contiguous; gone with `commit`. Without rows where the change is not of `values`. What
    it holds of new rows has no meaning.
    """
    slots: tuple[Float32, ...]
    """The same of optimizer state: (n, width) each."""
    sums: Float32 | None
    """The same of the sums; without rows where the change is not of `sums`."""

    def write(
        self,
        *,
        weights: Float32 | None = None,
        slots: Sequence[Float32] = (),
        sums: Float32 | None = None,
    ) -> None:
        """Writes rows of the change, all of them, new ones too; faster than the caller could.

        What is given need not be read again for the rows' checks. The copies may be given.

        Args:
            weights: (n, dim), C-contiguous; not to be altered before `commit`. None: written
                directly, or not at all.
            slots: (n, width) each, the same; empty or all.
            sums: (n, dim), the same.
        """

    def commit(self, record: TableRecord, position: Position | None) -> None:
        """Makes it all stand: the rows as written, `record`, and what a worker has contributed.

        Raises:
            StorageError: it can't be journaled, as on a full disk; the change never began.
        """


class TableStorage(Protocol):
    """Storage of one table on one shard. Calls that change come from one thread at a time."""

    keys: Int64
    """(row_capacity,): the id of each place that has a row."""
    update_counts: Int64
    """(row_capacity,): gradients that were applied to the row, or FREE."""
    last_steps: Int64
    """(row_capacity,): the step that the row's last gradient joined."""
    weights: Float32
    """(row_capacity, dim), C-contiguous."""
    slots: tuple[Float32, ...]
    """Optimizer state: (row_capacity, width), one array a slot."""
    sums: Float32 | None
    """(row_capacity, dim): sums of the open step's gradients."""
    has_sum: npt.NDArray[np.bool_]
    """(row_capacity,): whether the row's sum has a meaning."""

    @property
    def record(self) -> TableRecord:
        """Where the table stands."""

    def positions(self) -> list[Position]:
        """What each seat has contributed, by seat."""

    def events(self) -> Sequence[Event]:
        """See ParameterStorage."""

    def log(self, event: Event) -> None:
        """See ParameterStorage."""

    def compact(self, events: Sequence[Event]) -> None:
        """See ParameterStorage."""

    def add_seat(self) -> None:
        """See ParameterStorage."""

    def reserve(self, row_count: int) -> None:
        """Makes room for places from 0 to below `row_count`.

        Raises:
            LimitError: that is more than `row_capacity`; nothing changed.
            StorageError: there is no disk space; nothing changed.
        """

    @property
    def reserved_row_count(self) -> int:
        """Places that there is room for."""

    @property
    def undo_bytes(self) -> int:
        """Bytes on disk for taking changes back, taken when it is made; 0: there is no disk."""

    def change(
        self, places: Places, *, values: bool, sums: bool
    ) -> AbstractContextManager[RowChange]:
        """Begins a change of rows that are reserved; without `commit`, it never began.

        Args:
            places: Which rows; those from `row_used` on are new.
            values: Whether keys, update_counts, last_steps, weights and slots are to be written.
            sums: Whether sums and has_sum are.

        Raises:
            StorageError: a row that an earlier process left was damaged; nothing changed.
        """

    def verify(self, places: Places) -> None:
        """Checks rows that an earlier process has left, before they are believed.

        Raises:
            StorageError: one was damaged; names the file and the row.
        """

    def make_durable(self) -> None:
        """Returns when all that was committed may be acknowledged.

        What is committed survives the process, where files are kept; a loss of power too, where
        they are journaled (`--durability step`; with SECONDS, what was committed before a `sync`).

        Raises:
            StorageError: the disk failed; it must not be acknowledged.
        """

    def sync(self) -> None:
        """Writes to disk what was journaled.

        Raises:
            StorageError: the disk failed.
        """

    def make_image(self, is_stopping: Callable[[], bool]) -> None:
        """Writes an image that keeps the journal short, if it is time, while changes go on.

        To be called now and then by a thread of its own; takes long where there are many rows.

        Args:
            is_stopping: Whether to give up.

        Raises:
            StorageError: it can't be written, or a row was damaged; the image before stands.
        """
