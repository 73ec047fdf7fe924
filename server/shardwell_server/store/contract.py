"""The contract of all stores: what a shard keeps of parameters and tables, and how it changes.

A parameter's slice is arrays and records, changed chunk by chunk. A chunk has three kinds of
transitions, and nothing else ever changes it (first weights apart, which are not believed before
they are complete): see `Transition`.

A created row of a table has a *place* from 0 to `row_capacity` - 1, the same in all arrays. A row
changes only in a `change`, which holds whole or not at all, for all its rows, with the record and
the worker's position (docs/adr/0010-tables.md). Which id has which place is the caller's to know:
`keys` and `update_counts` say it.

A store that outlives its process makes each transition and each change happen whole or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from shardwell.errors import StorageError
from shardwell.numerics.codec import Bytes, Float32
from shardwell.numerics.elementwise import Operations

Event: TypeAlias = dict[str, Any]
"""A rare change as a JSON object; shard/parameter/register.py and its sibling have the kinds."""


class Named(Protocol):
    """Storage under a name, which may be given up."""

    is_retired: bool
    """True once it was given up: then its files are removed, or other storage has them, and calls
    that would change these raise StorageError. Its arrays may be read. Set by the shard."""

    @property
    def layout(self) -> Any:
        """The Layout or TableLayout that it was made for."""


class Storage(Named, Protocol):
    """The common part of a parameter's and a table's storage."""

    def events(self) -> Sequence[Event]:
        """The logged events, in order."""

    def log(self, event: Event) -> None:
        """Adds an event, kept when the call returns; StorageError: nothing changed."""

    def compact(self, events: Sequence[Event]) -> None:
        """Replaces what was logged by fewer events that say the same, where that saves much."""

    def add_seat(self) -> None:
        """Makes room for the marks of one seat more, before the caller logs its event.

        StorageError: there is no room; nothing changed.
        """

    def make_durable(self) -> None:
        """Returns when all that was committed may be acknowledged.

        Committed changes survive the process, where files are kept; a loss of power too, where they
        are journaled (`--durability step`; with SECONDS, those committed before a `sync`).

        Raises:
            StorageError: the disk failed; it must not be acknowledged.
        """

    def sync(self) -> None:
        """Writes to disk what was journaled; StorageError: the disk failed."""


# Parameters.


class ChunkRecord(NamedTuple):
    """A chunk's counters, beside its arrays; a transition replaces it as a whole."""

    version: int = 0
    """Updates applied so far, which is also the number of the open step."""
    contribution_count: int = 0
    sample_total: int = 0
    total_factor: float = 0.0
    """The open step's sum is total_factor * 2^shift * gradient_sum; 0: there is none."""
    shift: int = 0
    is_encoded: bool = False
    """True if gradient_sum holds the first contribution as it was written. Never on disk: see
    ParameterStorage.is_in_memory."""
    is_full: bool = False
    """True if the open step, whose set was open, takes no contributions any more: it closes when
    its norm is known."""


class Transition(enum.Enum):
    """The effect of a contribution on a chunk's arrays; or, for CLOSE, of the norm of all."""

    FIRST = enum.auto()
    """Overwrites the sum, which held nothing of meaning."""
    ADD = enum.auto()
    """Adds to the sum."""
    CLOSE = enum.auto()
    """Updates weights and optimizer state; the sum loses its meaning."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The description of storage; kept with it."""

    name: str
    slice_size: int
    """Elements of this shard's slice; 0 is possible."""
    chunk_element_count: int
    """Elements of a chunk; the last may be shorter."""
    with_sum: bool
    initial_slots: tuple[float, ...] = ()
    """First value of each array of optimizer state."""
    kept_size_bytes: int = 0
    """Room for what `ParameterStorage.keep` takes of a chunk; 0: nothing is kept."""
    description: dict[str, Any] = field(default_factory=dict)
    """A JSON object of which the shard makes the parameter again."""

    @property
    def chunk_count(self) -> int:
        return -(-self.slice_size // self.chunk_element_count)

    @property
    def size_bytes(self) -> int:
        return 4 * self.slice_size * (1 + self.with_sum + len(self.initial_slots))


NO_SEAT = -1
"""As `seat_index`: a transition without a contribution, which ends a step, or its set."""


class JournalEntry(NamedTuple):
    """One transition of one chunk, as a journal keeps it: a contribution, or a step's end."""

    chunk_index: int
    seat_index: int
    """Seat of the contributor; NO_SEAT: none."""
    sequence: int
    """Number of the chunk's transition that it was."""
    step: int
    sample_count: int
    learning_rate: float
    """Rate of the update, should it close the step."""
    payload: Bytes
    """The codec's bytes; nothing where a worker has given up an asynchronous step. Of NO_SEAT, a
    float64: the norm; or nothing, where an open set is decided without a contribution."""
    closes: bool = False
    exponent: int = 0
    """Of entries of format 2 and before: the power of two of all of the payload, of fp16."""


class ChunkChange(Protocol):
    """One transition of one chunk under way. The caller holds the chunk's lock."""

    def blocks(self, count: int) -> Iterable[tuple[int, int]]:
        """(start, stop) of each block of `count` elements, in ascending order, without gaps.

        A block may be written from the moment that the loop has it until the loop goes on. A
        change whose blocks are not asked for leaves the arrays as they are.
        """

    def commit(self, record: ChunkRecord, seat_index: int, step: int) -> None:
        """Commits the arrays as written, `record`, and that a seat gave `step`; NO_SEAT: none."""


class ParameterStorage(Storage, Protocol):
    """Storage of one slice. Different chunks may be changed at once, one chunk by one thread."""

    weights: Float32
    """Master weights: (slice_size,), C-contiguous, writable, from zero."""
    gradient_sum: Float32 | None
    """Sum of the open step's gradients, as large; None where one gradient makes an update."""
    slots: tuple[Float32, ...]
    """Optimizer state, one array a slot, each as large."""
    is_in_memory: bool
    """True if nothing of it is in a file: then no call waits for a disk, and gradient_sum may hold
    what is no sum yet (see ChunkRecord.is_encoded)."""

    def records(self) -> list[ChunkRecord]:
        """The record of each chunk."""

    def last_steps(self) -> list[list[int]]:
        """The last step of each seat for each chunk, -1 for none; by seat, then chunk."""

    def change(
        self, chunk_index: int, transition: Transition
    ) -> AbstractContextManager[ChunkChange]:
        """Begins a transition; when the block ends without `commit`, it never began."""

    def journal(
        self,
        chunk_index: int,
        seat_index: int,
        step: int,
        sample_count: int,
        learning_rate: float,
        payload: Bytes,
        *,
        closes: bool = False,
    ) -> None:
        """Notes a transition that is about to be made; the chunk's lock is held.

        StorageError: it can't be written; the contribution must not be counted.
        """

    def replay(self) -> Iterable[JournalEntry]:
        """Contributions that the arrays lack, in order, to be counted before anything else is."""

    @property
    def is_torn(self) -> bool:
        """True if the machine lost power, and only `verify` can tell what the arrays hold."""

    @property
    def wants_image(self) -> bool:
        """True if it is time for an image."""

    def imaging(self) -> AbstractContextManager[Callable[[int], None]]:
        """Makes an image on disk of every chunk that the block calls the result with, all of them.

        The chunk's lock is held at that call. When the block ends, the image is in force.
        StorageError: the one before stays in force.
        """

    def keep(self, chunk_index: int, version: int, encoded: bytes) -> None:
        """Keeps a chunk's encoded weights of a version, in place of what it kept before.

        Or, where sets are open, the seats of the version's set in order, two bytes each: those
        count that the chunk's record has contributions of. To be called before the transition that
        leaves the version, or adds a seat, is begun; the chunk's lock is held. The message
        survives the process where files do.
        """

    def kept(self, chunk_index: int, version: int) -> bytes | None:
        """The bytes that `keep` kept of a version, unchecked; None: another version, or nothing."""

    def settle(self, chunk_index: int, record: ChunkRecord) -> None:
        """Makes weights and optimizer state of a chunk stand as they lie: first weights.

        The caller has set all of them: afterwards damaged old values would look like new ones.
        """

    def verify(self, chunk_index: int) -> None:
        """Checks what an earlier process left of a chunk; StorageError names the damaged file."""


# Tables.


Places: TypeAlias = npt.NDArray[np.int64]
"""(n,) int64: places of rows, without repeats."""
Int64: TypeAlias = npt.NDArray[np.int64]
FREE = -1
"""In `update_counts`: the place has no row."""


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The description of storage; kept with it."""

    name: str
    dim: int
    slot_widths: tuple[int, ...]
    """Values that a row has of each array of optimizer state."""
    row_capacity: int
    """The most rows; disk and memory are those of existing rows."""
    rows_per_change_max: int
    with_sum: bool
    description: dict[str, Any] = field(default_factory=dict)
    """A JSON object of which the shard makes the table again."""

    @property
    def row_size_bytes(self) -> int:
        values = self.dim * (1 + self.with_sum) + sum(self.slot_widths)
        return 4 * values + 5 * 8 + self.with_sum * (8 + 1)


LOADING = -1
"""As `contribution_count`: the rows are those of a load that has not finished."""


class TableRecord(NamedTuple):
    """A table's counters, beside its rows; a change replaces it as a whole."""

    row_used: int = 0
    """Places below it have, or had, a row."""
    version: int = 0
    """Synchronous: steps that have closed. Asynchronous: steps that were counted."""
    contribution_count: int = 0
    """Synchronous: workers that have ended the open step; worker_count while it is closing, where
    they are a fixed crew. LOADING, in both modes: nothing here is committed."""
    sample_total: int = 0
    shift: int = 0
    """Synchronous: the open step's sums are those of gradients times 2^-shift."""
    is_closing: bool = False
    """With elastic members: whether the open step takes no contributions any more, as its set
    is decided, and its rows are being updated."""

    @property
    def is_loading(self) -> bool:
        return self.contribution_count == LOADING

    @staticmethod
    def unpacked(
        row_used: int, version: int, packed_count: int, sample_total: int, shift: int
    ) -> TableRecord:
        """The record that files have; its count is its complement while the step is closing."""
        is_closing = packed_count < LOADING  # no step closes without a contribution
        count = ~packed_count if is_closing else packed_count
        return TableRecord(row_used, version, count, sample_total, shift, is_closing)


class Position(NamedTuple):
    """The contributions of a worker."""

    seat_index: int
    """Seat of the worker."""
    step: int = 0
    part_count: int = 0
    """Parts of that step that are counted; below 2^16."""


class RowChange(Protocol):
    """One change under way. The caller is the table's only writer, and no thread reads meanwhile.

    The arrays may be written directly, at the places and in the arrays that the change was begun
    with, and at places from `row_used` on. Of new rows, those from `row_used` to below that of the
    record that is committed, all arrays must be written; except `has_sum`, which becomes False
    where the change is not of `sums`.
    """

    weights: Float32
    """(n, dim): a copy of the rows as they were, to compute with; may be written.

    C-contiguous; gone with `commit`. Without rows where the change is not of `values`. What
    it holds of new rows has no meaning.
    """
    slots: tuple[Float32, ...]
    """A copy of the optimizer state: (n, width) each."""
    sums: Float32 | None
    """A copy of the sums; without rows where the change is not of `sums`."""

    @property
    def weights_before(self) -> Float32:
        """(n, dim): the rows before the change, read-only, gone with `commit`; no new rows.

        To be asked after `write` or `update`, of a change of `values`.
        """

    def write(
        self,
        *,
        weights: Float32 | None = None,
        slots: Sequence[Float32] = (),
        sums: Float32 | None = None,
    ) -> None:
        """Writes rows of the change, all of them, new ones too; faster than the caller could.

        Given arrays need not be read again for the rows' checks, and are not to be altered before
        `commit`. The copies may be given. None: written directly, or not at all.
        """

    def update(self, operations: Operations, gradients: Float32) -> None:
        """Runs an optimizer's operations on the rows where they lie, of a change `in_place`.

        `gradients` is (n, dim), C-contiguous, and overwritten.
        """

    def commit(self, record: TableRecord, position: Position | None) -> None:
        """Commits rows, `record`, and what a worker has contributed.

        StorageError: it can't be journaled, as on a full disk; the change never began.
        """


class TableStorage(Storage, Protocol):
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
    updates_in_place: bool
    """True if a change can be `in_place`; where not, it is made of copies."""

    @property
    def record(self) -> TableRecord:
        """The table's record."""

    def positions(self) -> list[Position]:
        """The contributions of each seat, by seat."""

    def reserve(self, row_count: int, at_most: int | None = None) -> None:
        """Makes room for places below `row_count`, and for more if there is, up to `at_most`.

        LimitError: that is more than `row_capacity`. StorageError: the disk is full. Nothing
        changed.
        """

    @property
    def reserved_row_count(self) -> int:
        """Places that there is room for."""

    def keep_rows(self, step: int, ids: Int64, rows: Float32) -> bool:
        """Keeps rows as they were before a step, beside those that it kept of the same step.

        To be called before the change that writes them is committed. Kept rows survive the process
        where files do; False: the disk is full or failed, and they do not.
        """

    def kept_rows(self) -> Sequence[tuple[int, Int64, Float32]]:
        """The step, ids and rows that an earlier process kept; StorageError: it can't be read."""

    @property
    def undo_bytes(self) -> int:
        """The bytes on disk for taking changes back, taken when it is made; 0: there is no disk."""

    def change(
        self, places: Places, *, values: bool, sums: bool, in_place: bool = False
    ) -> AbstractContextManager[RowChange]:
        """Begins a change of rows that are reserved; without `commit`, it never began.

        Places from `row_used` on are new. `values` are keys, update_counts, last_steps, weights and
        slots; `sums` are sums and has_sum. With `in_place` and `values` there are no copies, and
        `update` alone changes weights and slots of rows below `row_used` that have not been free.
        State that others begin with is written before it. StorageError: a row that an earlier
        process left was damaged; nothing changed.
        """

    def verify(self, places: Places) -> None:
        """Checks rows that an earlier process has left; StorageError names the file and the row."""

    def make_image(self, is_stopping: Callable[[], bool]) -> None:
        """Writes an image that keeps the journal short, if it is time, while changes go on.

        To be called now and then by a thread of its own; takes long where there are many rows.
        StorageError: it can't be written, or a row was damaged; the one before stays in force.
        """


# Both.


Kind = TypeVar("Kind")
Begin = Callable[[Kind], None]
"""Takes over storage that was just made, before other code sees it."""


def check_not_retired(storage: Named) -> None:
    """Raises StorageError if the storage was given up."""
    if storage.is_retired:
        raise StorageError(f"{storage.layout.name!r} was given up meanwhile; open it again")


def nothing(storage: object) -> None:
    """Takes over nothing."""


class Store(Protocol):
    """Storage of one shard. Calls come from one thread at a time."""

    def recover(self) -> list[tuple[Layout, ParameterStorage]]:
        """Recovers an earlier process's parameters; to be called once, first.

        StorageError: something can't be believed; names the file, and what to do.
        """

    def recover_tables(self) -> list[tuple[TableLayout, TableStorage]]:
        """Recovers an earlier process's tables; to be called once, after `recover`."""

    def check_present(self) -> None:
        """Raises StorageError if `look` has found something missing."""

    def look(self) -> None:
        """Looks whether files still have their names; any thread may call it, one at a time.

        Raises:
            StorageError: one is gone. From then on nothing is acknowledged: `check_present` and
                every `make_durable` raise it, too.
        """

    def recovered(self) -> None:
        """To be called when all that `recover` and `recover_tables` gave was taken over."""

    def create(self, layout: Layout, begin: Begin[ParameterStorage] = nothing) -> ParameterStorage:
        """Makes the storage of a new parameter, whose name is unique in the store.

        `begin` takes it over; when that fails, the storage was never made.

        Raises:
            LimitError: there is no memory for it.
            StorageError: there is no room on the disk, or it can't be written to.
        """

    def create_table(
        self, layout: TableLayout, begin: Begin[TableStorage] = nothing
    ) -> TableStorage:
        """Makes the storage of a new table, whose name is unique among its tables: see `create`."""

    def rename(self, name: str, layout: Layout | TableLayout) -> Any:
        """Gives storage of an earlier process the name in `layout`; see `Registry.take_back`.

        The old storage is retired; no call changes it meanwhile. StorageError: it has its old name.
        """

    def remove(self, name: str) -> None:
        """Removes the storage of a parameter, with its files, whole or not at all.

        Its arrays stay valid for those who still use them; what they write is kept nowhere.
        StorageError: it can't be removed; nothing changed.
        """

    def remove_table(self, name: str) -> None:
        """Removes the storage of a table: see `remove`."""

    def name_events(self) -> Sequence[Event]:
        """The events that `log_name` noted, in order; to be called after `recover`."""

    def log_name(self, event: Event, compacted: Sequence[Event]) -> None:
        """Notes what became of a name; it survives a loss of power, removals before it too.

        `compacted` says the same as all events so far, with this one. StorageError: nothing is
        noted.
        """

    def close(self) -> None:
        """Lets go of everything. The arrays are not to be used afterwards."""
