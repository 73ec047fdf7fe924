"""The contract of all stores: the a slice's arrays and records, changed chunk by chunk.

A chunk has three kinds of transitions, and nothing else ever changes it (first weights apart, which
are not believed before they stand): see `Transition`. A store that outlives its process makes each
of them happen whole or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from shardwell.numerics.codec import Bytes, Float32
from shardwell_server.store.event import Event
from shardwell_server.store.table_contract import TableLayout, TableStorage


class ChunkRecord(NamedTuple):
    """Where a chunk stands, beside its arrays; a transition replaces it as a whole."""

    version: int = 0
    """Updates applied so far, which is also the number of the open step."""
    contribution_count: int = 0
    """Contributions to the open step."""
    sample_total: int = 0
    """Their samples."""
    total_factor: float = 0.0
    """The open step's sum is total_factor * 2^shift * gradient_sum; 0: there is none."""
    shift: int = 0
    """See total_factor."""


class Transition(enum.Enum):
    """What a contribution does to a chunk's arrays."""

    FIRST = enum.auto()
    """Overwrites the sum, which held nothing of meaning."""
    ADD = enum.auto()
    """Adds to the sum."""
    CLOSE = enum.auto()
    """Updates weights and optimizer state; the sum loses its meaning."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What storage is made for; kept with it."""

    name: str
    """The parameter; checked by `shardwell.specs.names`."""
    slice_size: int
    """Elements of this shard's slice; 0 is possible."""
    chunk_element_count: int
    """Elements of a chunk; the last may be shorter."""
    with_sum: bool
    """Whether gradients are summed before they are applied."""
    initial_slots: tuple[float, ...] = ()
    """First value of each array of optimizer state."""
    description: dict[str, Any] = field(default_factory=dict)
    """What the shard needs to make the parameter again: a JSON object."""

    @property
    def chunk_count(self) -> int:
        """Chunks of the slice."""
        return -(-self.slice_size // self.chunk_element_count)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        return 4 * self.slice_size * (1 + self.with_sum + len(self.initial_slots))


class JournalEntry(NamedTuple):
    """One contribution to one chunk, as a journal keeps it."""

    chunk_index: int
    seat_index: int
    sequence: int
    """Of the chunk's transition that it was."""
    step: int
    sample_count: int
    exponent: int
    learning_rate: float
    """Of the update, should it close the step."""
    payload: Bytes
    """The codec's bytes."""


class ChunkChange(Protocol):
    """One transition of one chunk under way. The caller holds the chunk's lock."""

    def before(self, start: int, stop: int) -> None:
        """To be called before elements [start, stop) of the chunk are written.

        In ascending order, without gaps, from 0 to the chunk's end.
        """

    def after(self, start: int, stop: int) -> None:
        """To be called when they have been written, before the next ones are."""

    def commit(self, record: ChunkRecord, seat_index: int, step: int) -> None:
        """Makes it all stand: the arrays as written, `record`, and that a seat gave `step`."""


class ParameterStorage(Protocol):
    """Storage of one slice. Different chunks may be changed at once, one chunk by one thread."""

    weights: Float32
    """Master weights: (slice_size,), C-contiguous, writable, from zero."""
    gradient_sum: Float32 | None
    """Sum of the open step's gradients, as large; None where one gradient makes an update."""
    slots: tuple[Float32, ...]
    """Optimizer state, one array a slot, each as large."""

    def records(self) -> list[ChunkRecord]:
        """Where each chunk stands."""

    def last_steps(self) -> list[list[int]]:
        """The last step that each seat gave to each chunk, -1 for none; by seat, then chunk."""

    def events(self) -> Sequence[Event]:
        """What was logged, in order."""

    def log(self, event: Event) -> None:
        """Adds an event; it stands when the call returns.

        Raises:
            StorageError: it could not be written; nothing changed.
        """

    def compact(self, events: Sequence[Event]) -> None:
        """Replaces what was logged by fewer events that say the same, where that saves much."""

    def add_seat(self) -> None:
        """Makes room for the marks of one seat more. Its event is the caller's to log, after.

        Raises:
            StorageError: there is no room; nothing changed.
        """

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
        exponent: int,
        learning_rate: float,
        payload: Bytes,
    ) -> None:
        """Notes a contribution that is about to be counted; the chunk's lock is held.

        Raises:
            StorageError: it can't be written; the contribution must not be counted.
        """

    def make_durable(self) -> None:
        """Returns when all that was journaled may be acknowledged.

        Raises:
            StorageError: the disk failed; it must not be acknowledged.
        """

    def sync(self) -> None:
        """Writes to disk what was journaled.

        Raises:
            StorageError: the disk failed.
        """

    def replay(self) -> Iterable[JournalEntry]:
        """Contributions that the arrays lack, in order, to be counted before anything else is."""

    @property
    def is_torn(self) -> bool:
        """Whether the machine lost power, and only `verify` can tell what the arrays hold."""

    @property
    def wants_image(self) -> bool:
        """Whether it is time for an image."""

    def imaging(self) -> AbstractContextManager[Callable[[int], None]]:
        """Makes an image on disk of every chunk that the block calls the result with, all of them.

        The chunk's lock is held at that call. When the block ends, the image stands.

        Raises:
            StorageError: it can't be written; the one before stands.
        """

    def settle(self, chunk_index: int, record: ChunkRecord) -> None:
        """Makes weights and optimizer state of a chunk stand as they lie: first weights.

        The caller has set all of them: what was damaged before can't be told from what is new.
        """

    def verify(self, chunk_index: int) -> None:
        """Checks what an earlier process has left of a chunk, before it is believed.

        Raises:
            StorageError: it was damaged; names the file.
        """


Kind = TypeVar("Kind")
Begin = Callable[[Kind], None]
"""Takes over storage that was just made, before anybody else sees it."""


def nothing(storage: object) -> None:
    """Takes over nothing."""


class Store(Protocol):
    """Storage of one shard. Calls come from one thread at a time."""

    def recover(self) -> list[tuple[Layout, ParameterStorage]]:
        """What an earlier process left, to be called once, first.

        Raises:
            StorageError: something can't be believed; names the file, and what to do.
        """

    def recover_tables(self) -> list[tuple[TableLayout, TableStorage]]:
        """The tables that an earlier process left, to be called once, after `recover`.

        Raises:
            StorageError: something can't be believed; names the file, and what to do.
        """

    def check_present(self) -> None:
        """Refuses what could not be kept.

        Raises:
            StorageError: `look` has found something missing.
        """

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

        Args:
            layout: Of it.
            begin: What takes it over. When that fails, the storage was never made.

        Raises:
            LimitError: there is no memory for it.
            StorageError: there is no room on the disk, or it can't be written to.
        """

    def create_table(
        self, layout: TableLayout, begin: Begin[TableStorage] = nothing
    ) -> TableStorage:
        """Makes the storage of a new table; tables and parameters may have the same names.

        Args:
            layout: Of it.
            begin: See `create`.

        Raises:
            LimitError: there is no address space for it.
            StorageError: there is no room on the disk, or it can't be written to.
        """

    def close(self) -> None:
        """Lets go of everything. The arrays are not to be used afterwards."""
