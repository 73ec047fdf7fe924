"""A store in plain memory: as fast as it gets, gone with the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from shardwell.errors import LimitError
from shardwell.numerics.codec import Float32
from shardwell_server.store.contract import (
    Begin,
    ChunkRecord,
    Event,
    JournalEntry,
    Layout,
    ParameterStorage,
    TableLayout,
    TableStorage,
    Transition,
    nothing,
)
from shardwell_server.store.memory.table import MemoryStorage, MemoryTable


class _MemoryChange:
    def blocks(self, count: int) -> Iterable[tuple[int, int]]:
        return ((0, count),)

    def commit(self, record: ChunkRecord, seat_index: int, step: int) -> None:
        pass

    def __enter__(self) -> _MemoryChange:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class MemoryParameter(MemoryStorage):
    """A parameter's arrays without files; an unused array costs nothing until its first write."""

    is_in_memory = True
    is_torn = False
    wants_image = False

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)

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

    def records(self) -> list[ChunkRecord]:
        return [ChunkRecord()] * self.layout.chunk_count

    def last_steps(self) -> list[list[int]]:
        return []

    def add_seat(self) -> None:
        pass

    def change(self, chunk_index: int, transition: Transition) -> _MemoryChange:
        return self._change

    def journal(self, *contribution: object, closes: bool = False) -> None:
        pass

    def replay(self) -> Sequence[JournalEntry]:
        return ()

    @contextlib.contextmanager
    def imaging(self) -> Iterator[Callable[[int], None]]:
        yield lambda chunk_index: None

    def keep(self, chunk_index: int, version: int, encoded: bytes) -> None:
        self._kept[chunk_index] = version, encoded

    def kept(self, chunk_index: int, version: int) -> bytes | None:
        found, encoded = self._kept.get(chunk_index, (-1, b""))
        return encoded if found == version else None

    def settle(self, chunk_index: int, record: ChunkRecord) -> None:
        pass

    def verify(self, chunk_index: int) -> None:
        pass


class MemoryStore:
    """The store without files: it has no names to lose, and recovers nothing."""

    def __init__(self) -> None:
        self._parameters: dict[str, MemoryParameter] = {}
        self._tables: dict[str, MemoryTable] = {}
        self._name_events: list[Event] = []

    def check_present(self) -> None:
        pass

    def look(self) -> None:
        pass

    def recover(self) -> list[tuple[Layout, ParameterStorage]]:
        return []

    def recover_tables(self) -> list[tuple[TableLayout, TableStorage]]:
        return []

    def recovered(self) -> None:
        pass

    def create(self, layout: Layout, begin: Begin[ParameterStorage] = nothing) -> MemoryParameter:
        if layout.name in self._parameters:
            raise ValueError(f"storage of {layout.name!r} exists")
        try:
            made = self._parameters[layout.name] = MemoryParameter(layout)
            begin(made)
        except BaseException as error:
            self._parameters.pop(layout.name, None)
            if not isinstance(error, MemoryError):
                raise
            raise LimitError(
                f"no memory for {layout.slice_size} elements of {layout.name!r} with "
                f"{len(layout.initial_slots)} slots of optimizer state; add shards or memory",
                parameter=layout.name,
            ) from None
        return made

    def create_table(
        self, layout: TableLayout, begin: Begin[TableStorage] = nothing
    ) -> MemoryTable:
        if layout.name in self._tables:
            raise ValueError(f"storage of table {layout.name!r} exists")
        try:
            made = self._tables[layout.name] = MemoryTable(layout)
            begin(made)
        except BaseException as error:
            self._tables.pop(layout.name, None)
            if not isinstance(error, MemoryError):
                raise
            raise LimitError(
                f"no address space for the {layout.row_capacity} rows that table {layout.name!r} "
                f"may have, of {layout.row_size_bytes} bytes; add shards",
                table=layout.name,
            ) from None
        return made

    def rename(self, name: str, layout: object) -> MemoryStorage:
        raise AssertionError(f"{name!r} is of this process, and no earlier one renamed it")

    def remove(self, name: str) -> None:
        del self._parameters[name]

    def remove_table(self, name: str) -> None:
        del self._tables[name]

    def name_events(self) -> Sequence[Event]:
        return list(self._name_events)

    def log_name(self, event: Event, compacted: Sequence[Event]) -> None:
        self._name_events = list(compacted)

    def close(self) -> None:
        self._parameters.clear()
        self._tables.clear()
