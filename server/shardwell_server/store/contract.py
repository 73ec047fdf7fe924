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

import contextlib
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwell.errors import StorageError
from shardwell.numerics.codec import Bytes, Float32
from shardwell.numerics.elementwise import Operations

Event: TypeAlias = dict[str, Any]
"""A rare change as a JSON object; shard/parameter/register.py and its sibling have the kinds."""

LogName: TypeAlias = Literal["samples", "states"]
PAGE_ROOM_BYTES = 2**20
"""The room of a page of a state."""
"""A log of its own beside a parameter's events."""


class Storage(ABC):
    """The common part of a parameter's and a table's storage.

    Here and below, what has a body does what a storage without files does.
    """

    layout: Any
    """Its Layout or TableLayout."""
    is_retired = False
    """True once given up: calls that would change its files raise StorageError; reads go on."""

    def events(self) -> Sequence[Event]:
        """Returns the logged events, in order."""
        return ()

    def log(self, event: Event) -> None:
        """Adds an event, kept when the call returns; StorageError: nothing changed."""

    def compact(self, events: Sequence[Event]) -> None:
        """Replaces the log by fewer events that say as much, where that saves a lot."""

    def add_seat(self) -> None:
        """Makes room for another seat's marks before its event is logged, or raises an error."""

    def make_durable(self) -> None:
        """Returns when commits may be acknowledged; StorageError: they must not be.

        Committed changes survive the process, where files are kept; a loss of power too, where they
        are journaled (`--durability step`; with SECONDS, those committed before a `sync`).
        """

    def sync(self) -> None:
        """Writes the journal to disk; StorageError: the disk failed."""


# Parameters.


class ChunkRecord(NamedTuple):
    """A chunk's counters, beside its arrays; a transition replaces it as a whole."""

    version: int = 0
    contribution_count: int = 0
    sample_total: int = 0
    total_factor: float = 0.0
    """The open step's sum is total_factor * 2^shift * gradient_sum; 0: it has none."""
    shift: int = 0
    is_encoded: bool = False
    """True if gradient_sum holds the first contribution as written; only without files."""
    is_full: bool = False
    """True if the open step's set is decided: it closes when its norm is known."""


class Transition(enum.Enum):
    """The effect of a contribution on a chunk's arrays; or, for CLOSE, of the norm of all."""

    FIRST = enum.auto()
    """Overwrites the sum, which had no meaning."""
    ADD = enum.auto()
    CLOSE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parameter's storage as it was made; kept with it."""

    name: str
    slice_size: int
    chunk_element_count: int
    with_sum: bool
    initial_slots: tuple[float, ...] = ()
    kept_size_bytes: int = 0
    """Room that `ParameterStorage.keep` has for a chunk; 0: nothing is kept."""
    description: dict[str, Any] = field(default_factory=dict)
    """A JSON object from which the shard makes the parameter again."""
    kind: ClassVar = "parameter"

    @property
    def chunk_count(self) -> int:
        return -(-self.slice_size // self.chunk_element_count)

    @property
    def size_bytes(self) -> int:
        return 4 * self.slice_size * (1 + self.with_sum + len(self.initial_slots))

    @property
    def contents(self) -> str:
        return f"the {self.size_bytes} bytes of {self.name!r}"


NO_SEAT = -1
"""A `seat_index` without a contribution: the transition ends a step, or decides its set."""


class JournalEntry(NamedTuple):
    """A chunk's transition in the journal: a contribution, or a step's end."""

    chunk_index: int
    seat_index: int
    step: int
    sample_count: int
    learning_rate: float
    payload: Bytes
    """The codec's bytes; empty for an asynchronous step given up. With NO_SEAT a float64, the norm,
    or nothing where an open set is decided."""
    closes: bool = False
    sequence: int = 0
    """The chunk's transitions up to this one, which the storage counts."""
    exponent: int = 0
    """Format 2 and before: the power of two of a payload in fp16."""


class ChunkChange(Protocol):
    """A transition of one chunk under way. The caller holds the chunk's lock."""

    def blocks(self, count: int) -> Iterable[tuple[int, int]]:
        """Yields (start, stop) of blocks, ascending; each may be written while the loop has it."""

    def commit(self, record: ChunkRecord, seat_index: int, step: int) -> None:
        """Commits arrays, `record` and a seat's `step`; NO_SEAT: no step."""


class ParameterStorage(Storage):
    """The storage of a slice. Chunks may change at once, each by one thread."""

    weights: Float32
    """(slice_size,), C-contiguous, writable, zeros at first."""
    gradient_sum: Float32 | None
    """(slice_size,): the open step's sum; None where one gradient makes an update."""
    slots: tuple[Float32, ...]
    is_in_memory = False
    """True if no part has a file: no call waits for a disk, and a chunk may be `is_encoded`."""
    is_torn = False
    """True if the machine lost power, and only `verify` knows what the arrays hold."""

    def records(self) -> list[ChunkRecord]:
        """Returns the record of each chunk."""
        return [ChunkRecord()] * self.layout.chunk_count

    def last_steps(self) -> list[list[int]]:
        """Returns each seat's last step for each chunk, -1 for none; by seat, then chunk."""
        return []

    @abstractmethod
    def change(
        self, chunk_index: int, transition: Transition
    ) -> AbstractContextManager[ChunkChange]:
        """Begins a transition; without `commit` in the block it never began."""

    def journal(self, entry: JournalEntry) -> None:
        """Notes a transition, under the chunk's lock; after StorageError it must not be made."""

    def replay(self) -> Iterable[JournalEntry]:
        """Yields contributions that the arrays lack, in order, to be counted first of all."""
        return ()

    @property
    def wants_image(self) -> bool:
        """True if an image is due."""
        return False

    @contextlib.contextmanager
    def imaging(self) -> Iterator[Callable[[int], None]]:
        """Makes an image of chunks that the block passes, locked; in force after the block."""
        yield lambda chunk_index: None

    @abstractmethod
    def keep(self, chunk_index: int, version: int, encoded: bytes) -> None:
        """Keeps a chunk's encoded weights of a version, in place of another; survives the process.

        With open sets: the version's seats in order, two bytes each, of which as many count as the
        record has contributions. Called under the chunk's lock, before the transition that leaves
        the version or adds a seat.
        """

    @abstractmethod
    def kept(self, chunk_index: int, version: int) -> bytes | None:
        """Returns the kept bytes of a version, unchecked; None: it has none."""

    def noted(self, log: LogName) -> Sequence[Event]:
        """Returns the events of a log of its own, in order."""
        return ()

    def note(self, log: LogName, event: Event) -> None:
        """Adds an event to a log of its own, as `log` does; its callers take turns."""

    def compact_notes(self, log: LogName, events: Callable[[], Sequence[Event]]) -> None:
        """Replaces a log of its own by fewer events, where that saves a lot."""

    @abstractmethod
    def put_page(self, place: int, page: bytes) -> None:
        """Writes a page of a state that the log "states" is to name, of `PAGE_ROOM_BYTES` or less.

        Its callers take turns. A kill leaves it in part.
        """

    @abstractmethod
    def page(self, place: int, size_bytes: int) -> bytes:
        """Returns the first bytes of a page, unchecked, and fewer where there are not so many."""

    def settle(self, chunk_index: int, record: ChunkRecord) -> None:
        """Takes first weights as they lie; otherwise damaged old values would look new."""

    def verify(self, chunk_index: int) -> None:
        """Checks a chunk of an earlier process; StorageError names the damaged file."""


# Tables.


Places: TypeAlias = npt.NDArray[np.int64]
"""(n,) int64: places of rows, without repeats."""
Int64: TypeAlias = npt.NDArray[np.int64]
FREE = -1
"""An `update_counts` of a place without a row."""


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """A table's storage as it was made; kept with it."""

    name: str
    dim: int
    slot_widths: tuple[int, ...]
    row_capacity: int
    """The most rows; disk and memory are those of existing rows."""
    rows_per_change_max: int
    with_sum: bool
    description: dict[str, Any] = field(default_factory=dict)
    """A JSON object from which the shard makes the table again."""
    kind: ClassVar = "table"
    chunk_count: ClassVar = 1
    """A table is one, as far as workers' steps go."""

    @property
    def row_size_bytes(self) -> int:
        values = self.dim * (1 + self.with_sum) + sum(self.slot_widths)
        return 4 * values + 5 * 8 + self.with_sum * (8 + 1)

    @property
    def contents(self) -> str:
        return f"the {self.row_capacity} rows of {self.row_size_bytes} bytes of {self.name!r}"


LOADING = -1
"""A `contribution_count` of a table that is still being loaded."""


class TableRecord(NamedTuple):
    """A table's counters, beside its rows; a change replaces it as a whole."""

    row_used: int = 0
    """Places below it have, or had, a row."""
    version: int = 0
    """Steps that have closed; asynchronous: steps that were counted."""
    contribution_count: int = 0
    """Workers that ended the open step; worker_count while a fixed crew's step closes. LOADING:
    nothing is committed."""
    sample_total: int = 0
    shift: int = 0
    """The open step's sums are those of gradients times 2^-shift."""
    is_closing: bool = False
    """True if an elastic step's set is decided, and its rows are being updated."""

    @property
    def is_loading(self) -> bool:
        return self.contribution_count == LOADING

    @staticmethod
    def unpacked(
        row_used: int, version: int, packed_count: int, sample_total: int, shift: int
    ) -> TableRecord:
        """Returns the record that files have: its count is a complement while the step closes."""
        is_closing = packed_count < LOADING  # no step closes without a contribution
        count = ~packed_count if is_closing else packed_count
        return TableRecord(row_used, version, count, sample_total, shift, is_closing)


class Position(NamedTuple):
    """A seat's last step, and how much of it is counted."""

    seat_index: int
    step: int = 0
    part_count: int = 0
    """Counted parts of that step; below 2^16."""


class RowChange(Protocol):
    """A change under way. The caller is the only writer, and no thread reads meanwhile.

    The arrays may be written directly, at the change's places and from `row_used` on. All arrays of
    new rows below the record's `row_used` must be written; except `has_sum`, which becomes False
    where the change is not of `sums`.
    """

    weights: Float32
    """(n, dim), C-contiguous: a copy, gone with `commit`; new rows have no meaning. No rows without
    `values`."""
    slots: tuple[Float32, ...]
    """Copies of optimizer state: (n, width) each."""
    sums: Float32 | None
    """A copy of the sums; no rows without `sums`."""

    @property
    def weights_before(self) -> Float32:
        """Returns the old rows, (n, dim), until `commit`, after `write` or `update` of `values`."""

    def write(
        self,
        *,
        weights: Float32 | None = None,
        slots: Sequence[Float32] = (),
        sums: Float32 | None = None,
    ) -> None:
        """Writes all rows of the change; given arrays must not change until `commit`."""

    def update(self, operations: Operations, gradients: Float32) -> None:
        """Runs operations on rows `in_place`; overwrites `gradients`, (n, dim), C-contiguous."""

    def commit(self, record: TableRecord, position: Position | None) -> None:
        """Commits rows, `record` and a worker's position; StorageError: the change never began."""


class TableStorage(Storage):
    """The storage of a table. Calls that change come from one thread at a time."""

    keys: Int64
    """(row_capacity,): the id of each place that has a row."""
    update_counts: Int64
    """(row_capacity,): gradients applied to the row, or FREE."""
    last_steps: Int64
    """(row_capacity,): the step that the row's last gradient joined."""
    weights: Float32
    """(row_capacity, dim), C-contiguous."""
    slots: tuple[Float32, ...]
    sums: Float32 | None
    """(row_capacity, dim): sums of the open step's gradients."""
    has_sum: npt.NDArray[np.bool_]
    """(row_capacity,): True where the row's sum has a meaning."""
    updates_in_place = False
    """True if a change can be `in_place`; otherwise it is made of copies."""
    record = TableRecord()
    reserved_row_count = 0
    """The number of places with room."""
    undo_bytes = 0
    """The bytes on disk for taking changes back; 0 without a disk."""

    @abstractmethod
    def positions(self) -> list[Position]:
        """Returns the position of each seat."""

    @abstractmethod
    def reserve(self, row_count: int, at_most: int | None = None) -> None:
        """Makes room for `row_count` places or more, up to `at_most`; or changes nothing."""

    @abstractmethod
    def keep_rows(self, step: int, ids: Int64, rows: Float32) -> bool:
        """Keeps rows as before a step, before its commit; False: they don't survive the process."""

    @abstractmethod
    def kept_rows(self) -> Sequence[tuple[int, Int64, Float32]]:
        """Returns step, ids and rows that an earlier process kept; StorageError: unreadable."""

    @abstractmethod
    def change(
        self, places: Places, *, values: bool, sums: bool, in_place: bool = False
    ) -> AbstractContextManager[RowChange]:
        """Begins a change of reserved rows; without `commit` it never began.

        Places from `row_used` on are new. `values` are keys, update_counts, last_steps, weights and
        slots; `sums` are sums and has_sum. With `in_place` and `values` there are no copies, and
        `update` alone changes weights and slots of rows below `row_used` that have not been free.
        State that others begin with is written before it. StorageError: an earlier process's row
        was damaged; nothing changed.
        """

    def verify(self, places: Places) -> None:
        """Checks rows of an earlier process; StorageError names the file and the row."""

    def make_image(self, is_stopping: Callable[[], bool]) -> None:
        """Writes an image, if due, while changes go on; StorageError: the old one holds."""


# Both.


Begin: TypeAlias = Callable[[Any], None]
"""Takes over storage that was just made, before other code sees it."""


def check_not_retired(storage: Storage) -> None:
    """Raises StorageError if the storage was given up."""
    if storage.is_retired:
        raise StorageError(f"{storage.layout.name!r} was given up meanwhile; open it again")


class Store(ABC):
    """The storage of one shard, without files where a method has a body.

    Calls come from one thread at a time.
    """

    def recover(self) -> list[tuple[Layout, ParameterStorage]]:
        """Recovers an earlier process's parameters, first, once; StorageError names the fault."""
        return []

    def recover_tables(self) -> list[tuple[TableLayout, TableStorage]]:
        """Recovers an earlier process's tables; called after `recover`, once."""
        return []

    def check_present(self) -> None:
        """Raises StorageError if `look` has found something missing."""

    def look(self) -> None:
        """Looks for files' names, one thread at a time; once one is gone, `make_durable` raises."""

    def recovered(self) -> None:
        """Ends recovery: the caller has taken over all parameters and tables."""

    @abstractmethod
    def create(self, layout: Layout | TableLayout, begin: Begin = lambda storage: None) -> Any:
        """Makes storage under a name unique in its kind; if `begin` fails, it was never made.

        LimitError: no memory. StorageError: no room on the disk, or it can't be written to.
        """

    @abstractmethod
    def rename(self, name: str, layout: Layout | TableLayout) -> Any:
        """Renames an earlier process's storage, for `Registry.take_back`, and retires the old one.

        No call changes it meanwhile. StorageError: it has its old name.
        """

    @abstractmethod
    def remove(self, layout: Layout | TableLayout) -> None:
        """Removes storage and files, or none of it; its arrays stay valid for their users."""

    @abstractmethod
    def name_events(self) -> Sequence[Event]:
        """Returns the events that `log_name` noted, in order; called after `recover`."""

    @abstractmethod
    def log_name(self, event: Event, compacted: Sequence[Event]) -> None:
        """Notes what became of a name; earlier removals survive a loss of power with it.

        `compacted` says as much as all events and this one. StorageError: nothing is noted.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases all; the arrays are not used afterwards."""
