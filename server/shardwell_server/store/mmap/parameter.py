"""A slice in mapped files: whatever instruction its process is killed at, each chunk is whole.

Files of a parameter's directory; the arrays are plain little-endian float32:

    parameter.json    what it is
    weights, gradient_sum, slot-0, slot-1
    records           counters of each chunk, and CRCs of its arrays   (records/atomic_records.py)
    marks             the last step of each worker for each chunk       (records/worker_steps.py)
    undo              what chunks were that are being changed           (undo.py)
    events            seats, first weights, learning rates              (records/event_log.py)
    samples           which samples have counted, where they are dealt  (records/event_log.py)
    states            what workers keep beside the weights              (records/event_log.py)
    pages             the parts of that which are large                 (pages.py)
    image-*, journal-*    what survives the machine                     (storage.py)

A transition, in the order of its writes (docs/adr/0007-crash-safety.md has the proof):

    FIRST        the sum, of no meaning so far      record    mark
    ADD, CLOSE   undo: block, progress | the block  record    mark        for every block

The record is the instant of change. Before it, an undo entry with the chunk's sequence number takes
the blocks back; after it, the entry is void, and the mark is written again from the record.

The files' contents are believed when their CRCs fit: records, marks, events and undo at the start,
arrays chunk by chunk (`verify`) before their first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, get_args

import numpy as np
from fastcrc import crc32

from shardwell.errors import StorageError
from shardwell.numerics.codec import Float32
from shardwell.numerics.elementwise import blocks
from shardwell_server.store.contract import (
    NO_SEAT,
    ChunkRecord,
    Event,
    JournalEntry,
    Layout,
    LogName,
    ParameterStorage,
    Transition,
    check_not_retired,
)
from shardwell_server.store.files.layout import Home
from shardwell_server.store.files.mapped import MappedFile, sync_path
from shardwell_server.store.files.presence import NamedFile
from shardwell_server.store.journal.journal import (
    HEAD_BYTES,
    cut_off,
    image_path,
    segments,
)
from shardwell_server.store.journal.parameter_entries import pack_entry, read_entries
from shardwell_server.store.mmap import undo
from shardwell_server.store.mmap.kept import KeptWeights, kept_size, make_room
from shardwell_server.store.mmap.pages import NAME as PAGES
from shardwell_server.store.mmap.pages import StatePages
from shardwell_server.store.mmap.storage import MmapStorage
from shardwell_server.store.mmap.undo import Arrays, UndoArea
from shardwell_server.store.records.atomic_records import ChunkRecords, StoredChunkRecord, file_size
from shardwell_server.store.records.event_log import EventLog


class MmapParameter(MmapStorage, ParameterStorage):
    """The arrays and records of one slice, in files."""

    def __init__(self, home: Home, *, is_new: bool) -> None:
        layout: Layout = home.layout
        super().__init__(home, is_new=is_new)
        if not is_new:
            make_room(home.path / "kept", layout)

        def opened(name: str, size_bytes: int) -> MappedFile:
            return self._opened(MappedFile, name, size_bytes)

        def array(name: str) -> Float32:
            values: Float32 = opened(name, 4 * layout.slice_size).data.view(np.float32)
            return values

        self.weights = array("weights")
        self.gradient_sum = array("gradient_sum") if layout.with_sum else None
        self._slot_names = [f"slot-{i}" for i in range(len(layout.initial_slots))]
        self.slots = tuple(map(array, self._slot_names))
        self._records = ChunkRecords(opened("records", file_size(layout.chunk_count)), home)
        self._stored = self._records.stored
        summed = self._parts(self.gradient_sum)
        self._changing = {
            Transition.FIRST: summed,
            Transition.ADD: summed,
            Transition.CLOSE: self._parts(self.weights, *self.slots),
        }
        self._logs = {
            name: EventLog(home.path / name, home.salt, home.reached, keeps_open=True)
            for name in get_args(LogName)
        }
        self._used_logs = {
            name for name in self._logs if not is_new and (home.path / name).exists()
        }
        self._pages = StatePages(home)
        self._undo = UndoArea(opened("undo", undo.file_size(layout)), home)
        size = kept_size(layout)
        self._kept = KeptWeights(opened("kept", size), layout, home.reached) if size else None

    def _fill(self) -> None:
        for slot, value in zip(self.slots, self.layout.initial_slots, strict=True):
            if value:
                slot[:] = value
                self._reached("slot")
        crcs: dict[int, tuple[int, ...]] = {}
        for index in range(self.layout.chunk_count):
            size = self._chunk(self.weights, index).size
            if size not in crcs:  # two sizes at most
                crcs[size] = self._crcs(index)
            self._records.put(index, StoredChunkRecord(0, ChunkRecord(), -1, -1, crcs[size]))

    def _take_back(self) -> list[tuple[int, int]]:
        self._records.read()
        for entry in self._undo.entries:
            pending = entry.pending(self.layout.chunk_count)
            if pending is None:
                continue
            index, sequence, transition = pending
            if sequence == self._stored[index].sequence:
                entry.roll_back(self._changing[transition][index])
                self.verify(index)
                self.rolled_back_count += 1
            entry.void()
        return [(stored.seat_index, stored.step) for stored in self._stored]

    def facts(self) -> dict[str, Any]:
        versions = [stored.record.version for stored in self._stored]
        return {
            "size": self.layout.slice_size,
            "version_min": min(versions, default=0),
            "version_max": max(versions, default=0),
            "taken_back_chunk_count": self.rolled_back_count,
        }

    def records(self) -> list[ChunkRecord]:
        return [stored.record for stored in self._stored]

    def last_steps(self) -> list[list[int]]:
        return [self._marks.row(seat) for seat in range(self._seat_count)]

    def change(self, chunk_index: int, transition: Transition) -> _MmapChange:
        check_not_retired(self)
        return _MmapChange(self, chunk_index, transition)

    # The journal.

    @property
    def wants_image(self) -> bool:
        return self._journal is not None and self._journal.wants_image

    def journal(self, entry: JournalEntry) -> None:
        if self._journal is not None:
            entry = entry._replace(sequence=self._stored[entry.chunk_index].sequence + 1)
            self._journal.append(pack_entry(entry, self._salt), self.layout.size_bytes)

    def replay(self) -> Iterator[JournalEntry]:
        if not self.is_torn:
            return
        paths, name = segments(self.home.path), self.layout.name
        counted: dict[tuple[int, int], tuple[int, int]] = {}
        for number, path in paths.items():
            end = HEAD_BYTES
            for entry, end in read_entries(path, name, self._salt):
                counted[entry.chunk_index, entry.sequence] = (number, end)
            cut_off(path, end)
        for number, path in paths.items():
            for entry, end in read_entries(path, name, self._salt):
                if entry.chunk_index >= self.layout.chunk_count:
                    raise StorageError(f"{path} has an entry of chunk {entry.chunk_index}")
                expected = self._stored[entry.chunk_index].sequence + 1
                if counted[entry.chunk_index, entry.sequence] != (number, end):
                    continue  # the shard was killed before it counted
                if entry.sequence > expected:
                    raise StorageError(
                        f"{path}: chunk {entry.chunk_index} goes on with transition "
                        f"{entry.sequence}; expected {expected}: a part of the journal is gone; "
                        "restore a checkpoint",
                        parameter=self.layout.name,
                    )
                if entry.sequence == expected:
                    yield entry

    @contextlib.contextmanager
    def imaging(self) -> Iterator[Callable[[int], None]]:
        check_not_retired(self)
        journal = self._journal
        if journal is None:
            yield lambda chunk_index: None
            return
        number = journal.begin_segment()
        if image_path(self.home.path, number).exists():
            # Nothing was journaled since, but first weights may have come.
            number = journal.begin_segment(anyway=True)
        with journal.imaging(number) as path:
            image = MmapParameter.create(self.home._replace(path=path))
            yield lambda chunk_index: image.copy_chunk(self, chunk_index)
            image.sync_contents()

    def copy_chunk(self, source: MmapParameter, chunk_index: int) -> None:
        for into, array in zip(self._arrays(), source._arrays(), strict=True):
            np.copyto(self._chunk(into, chunk_index), source._chunk(array, chunk_index))
        if self._kept is not None and source._kept is not None:
            self._kept.copy(source._kept, chunk_index)
        self._records.put(chunk_index, source._stored[chunk_index])
        self._marks.make_room(source._seat_count)
        for seat_index in range(source._seat_count):
            step = source._marks.get(seat_index, chunk_index)
            self._marks.put(seat_index, chunk_index, step)

    def _arrays(self) -> Arrays:
        total = () if self.gradient_sum is None else (self.gradient_sum,)
        return (self.weights, *total, *self.slots)

    def keep(self, chunk_index: int, version: int, encoded: bytes) -> None:
        if self._kept is not None:
            self._kept.put(chunk_index, version, encoded)

    def kept(self, chunk_index: int, version: int) -> bytes | None:
        return None if self._kept is None else self._kept.get(chunk_index, version)

    def noted(self, log: LogName) -> Sequence[Event]:
        if log not in self._used_logs:
            return ()
        return self._logs[log].read(is_cut_off=log == "states" and self.is_torn)

    def note(self, log: LogName, event: Event) -> None:
        check_not_retired(self)
        if log not in self._used_logs:
            self._logs[log].begin()
            self._used_logs.add(log)
        self._logs[log].append(event)

    def compact_notes(self, log: LogName, events: Callable[[], Sequence[Event]]) -> None:
        if log in self._used_logs and self._logs[log].is_long:
            self._logs[log].compact(events())

    def put_page(self, place: int, page: bytes) -> None:
        check_not_retired(self)
        self._pages.put(place, page)

    def page(self, place: int, size_bytes: int) -> bytes:
        return self._pages.get(place, size_bytes)

    def start_journal(self, *, syncs_each: bool, is_new: bool = False) -> None:
        self._logs["samples"].is_synced = True  # "states" are read up to where they are whole
        super().start_journal(syncs_each=syncs_each, is_new=is_new)

    def _files_in_use(self) -> Sequence[NamedFile]:
        return [*self._files, *self._logs.values()]

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        super().close()

    def _sync_unmapped(self) -> None:
        super()._sync_unmapped()
        for name in (*self._used_logs, *([PAGES] if self._pages.path.exists() else [])):
            sync_path(self.home.path / name)

    def settle(self, chunk_index: int, record: ChunkRecord) -> None:
        check_not_retired(self)
        stored = self._stored[chunk_index]
        self._records.put(
            chunk_index,
            stored._replace(
                sequence=stored.sequence + 1, record=record, crcs=self._crcs(chunk_index)
            ),
        )

    def verify(self, chunk_index: int) -> None:
        stored, names = self._stored[chunk_index], ("weights", "gradient_sum", *self._slot_names)
        # More CRCs than arrays are stored, where there are few slots.
        for name, found, crc in zip(names, self._crcs(chunk_index), stored.crcs, strict=False):
            has_meaning = name != "gradient_sum" or stored.record.total_factor != 0.0
            if has_meaning and found != crc:
                raise StorageError(
                    f"{self.home.path / name}: chunk {chunk_index} of parameter "
                    f"{self.layout.name!r} was damaged: CRC32C {found:#010x}, expected "
                    f"{crc:#010x}; restore the directory from a copy or a checkpoint",
                    parameter=self.layout.name,
                )

    def _chunk(self, array: Float32, chunk_index: int) -> Float32:
        start = chunk_index * self.layout.chunk_element_count
        return array[start : start + self.layout.chunk_element_count]

    def _crcs(self, chunk_index: int) -> tuple[int, ...]:
        """The sum's CRC is 0 where the record has none."""
        arrays = (self.weights, self.gradient_sum, *self.slots)
        return tuple(
            0 if array is None else _crc(self._chunk(array, chunk_index)) for array in arrays
        )

    def _parts(self, *arrays: Float32 | None) -> list[Arrays]:
        found = [array for array in arrays if array is not None]
        return [
            [self._chunk(array, index) for array in found]
            for index in range(self.layout.chunk_count)
        ]


class _MmapChange:
    """Arrays go to their undo entry before they change; `commit` replaces the record."""

    def __init__(self, of: MmapParameter, chunk_index: int, transition: Transition) -> None:
        self._of = of
        self._chunk_index = chunk_index
        self._transition = transition
        self._arrays = of._changing[transition][chunk_index]
        self._crcs: list[int] | None = None
        self._entry: undo.UndoEntry | None = None
        self._is_committed = False

    def __enter__(self) -> _MmapChange:
        if self._transition is not Transition.FIRST:
            self._entry = self._of._undo.take()
            sequence = self._of._stored[self._chunk_index].sequence
            self._entry.begin(self._chunk_index, sequence, self._transition)
        return self

    def blocks(self, count: int) -> Iterator[tuple[int, int]]:
        arrays, entry = self._arrays, self._entry
        crcs = self._crcs = [0] * len(arrays)
        for start, stop in blocks(count):
            if entry is not None:
                entry.save(arrays, start, stop)
            yield start, stop  # what is saved is still in the cache when it is changed
            self._of._reached("block")
            for number, array in enumerate(arrays):
                crcs[number] = crc32.iscsi(array[start:stop].view(np.uint8).data, crcs[number])

    def commit(self, record: ChunkRecord, seat_index: int, step: int) -> None:
        old = self._of._stored[self._chunk_index]
        crcs, written = old.crcs, self._crcs
        if written is not None and self._transition is Transition.CLOSE:
            crcs = (written[0], 0, *written[1:])
        elif written is not None:
            crcs = (crcs[0], written[0], *crcs[2:])
        stored = StoredChunkRecord(old.sequence + 1, record, seat_index, step, crcs)
        self._of._records.put(self._chunk_index, stored)
        self._is_committed = True
        if seat_index != NO_SEAT:
            self._of._marks.put(seat_index, self._chunk_index, step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            try:
                if not self._is_committed:
                    entry.roll_back(self._arrays)
            finally:
                self._of._undo.give_back(entry)


def _crc(values: Float32) -> int:
    crc = 0
    for start, stop in blocks(values.size):
        block = values[start:stop]
        crc = crc32.iscsi(block.view(np.uint8).data, crc)
    return crc
