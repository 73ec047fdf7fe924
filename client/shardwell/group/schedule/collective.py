"""One rank's part in one collective: messages in, messages out. Pure: no sockets, no clocks.

A chunk waits for its sources in the order of the plan, whatever the order of arrival, so sums are
the same bits in every run. Chunks enter row by row: one of row i only when everything that this
rank is to receive of the rows up to i - W has come. Hence
    no deadlock: where all is delivered and the lowest row that has not entered everywhere is i,
        every rank has received all rows before i, so row i may enter;
    bounded memory: a rank is at most W rows ahead of what it has received, which others had to
        enter, so no two ranks are more than 2 W rows apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwell.errors import CorruptChunkError, ShardwellError
from shardwell.group.schedule.arithmetic import ChunkArithmetic
from shardwell.group.schedule.plan import Plan, Role
from shardwell.numerics.codec import Bytes, Float32
from shardwell.placement.slices import Slice
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire.messages import Room

WINDOW_ROW_COUNT = 4
"""W above. Enough to keep a link busy while a chunk is on its way around; 4 MiB a segment."""


class Arrival(NamedTuple):
    """A message from another rank."""

    rank: int
    """The sender's number among those that take part."""
    header: pb.ReceiveChunksResponse
    payload: Bytes
    """The encoded values; what can be written to is shared memory, and may change."""
    message: bytes
    """The whole message, to be sent on as it is; without the payload where that is shared."""
    shared_bytes: int = 0
    release: Callable[[], None] | None = None
    """Gives the shared memory back; after it, `payload` is not looked at any more."""


class Sending(NamedTuple):
    """A message for another rank."""

    rank: int
    message: bytes
    element_count: int
    shared_bytes: int = 0


RoomOf = Callable[[int, int], Room | None]
"""The place of a payload of so many bytes for a rank; None: into its message. Its user sends the
message before any other to that rank."""


def no_room(rank: int, size_bytes: int) -> Room | None:
    """Leaves all payloads in their messages."""
    return None


class Sum:
    """A chunk for which this rank adds what more than one other sends."""

    def __init__(self, awaited_count: int) -> None:
        self.awaited_count = awaited_count
        self.total: Float32 | None = None
        self.added_count = 0
        self.early: dict[int, Bytes] = {}
        """The checked values that came before their turn, by rank."""


class Job(NamedTuple):
    """A piece of work on one chunk, and no other: `Collective.made` does it."""

    chunk_index: int
    where: Slice
    role: Role
    arrival: Arrival | None
    """None: the chunk enters here."""
    total: Sum | None
    targets: tuple[int, ...]
    rooms: list[Room | None]


class Collective:
    """One rank's part in a call. For one thread, except `made`, which any thread may call.

    `begin` and `admit` decide, on one thread, all that depends on other chunks. The rest is a job
    on one chunk. Jobs on different chunks may be done beside each other; those on one chunk are
    done in the order in which they were decided.
    """

    def __init__(
        self,
        plan: Plan,
        arithmetic: ChunkArithmetic,
        window_row_count: int = WINDOW_ROW_COUNT,
        room_of: RoomOf = no_room,
    ) -> None:
        self._room_of = room_of
        self._plan = plan
        self._arithmetic = arithmetic
        self._window_row_count = window_row_count
        self._entered_count = 0
        self._sums: dict[int, Sum] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self._due_of_row = [0] * plan.row_count
        for _, segment, row in plan.chunks:
            self._due_of_row[row] += len(plan.roles[segment].senders)
        self._due_count = sum(self._due_of_row)
        self._complete_row_count = 0
        self._complete_rows()

    @property
    def is_done(self) -> bool:
        """True if this rank has entered and received everything, and all jobs are decided."""
        return not self._due_count and self._entered_count == len(self._plan.entering)

    @property
    def may_enter(self) -> bool:
        """True if `enter` has something to do now."""
        if self._entered_count == len(self._plan.entering):
            return False
        row = self._plan.chunks[self._plan.entering[self._entered_count]][2]
        return row < self._complete_row_count + self._window_row_count

    @property
    def awaited_ranks(self) -> tuple[int, ...]:
        """Ranks from which something is still to come; places among those that take part."""
        seen: dict[int, int] = {}
        for rank, _, _ in self._seen:
            seen[rank] = seen.get(rank, 0) + 1
        due: dict[int, int] = {}
        for _, segment, _ in self._plan.chunks:
            for rank in self._plan.roles[segment].senders:
                due[rank] = due.get(rank, 0) + 1
        return tuple(rank for rank in sorted(due) if due[rank] > seen.get(rank, 0))

    def enter(self) -> list[Sending]:
        """Lets the next chunk of this rank's enter; returns what is to be sent because of it."""
        return self.made(self.begin(), self._arithmetic)

    def receive(self, arrival: Arrival) -> list[Sending]:
        """Takes a message; returns what is to be sent because of it, or changes nothing."""
        where, role = self._place(arrival)
        stored = self._stored(arrival, where, self._arithmetic)
        return self.made(self._admitted(arrival, where, role), self._arithmetic, stored)

    def begin(self) -> Job:
        """Returns the job of the next chunk of this rank's that enters."""
        index = self._plan.entering[self._entered_count]
        self._entered_count += 1
        where, segment, _ = self._plan.chunks[index]
        role = self._plan.roles[segment]
        targets = role.receivers
        return Job(index, where, role, None, None, targets, self._rooms(targets, where))

    def admit(self, arrival: Arrival) -> Job:
        """Takes a message unchecked: `made` checks it, and then the call fails."""
        return self._admitted(arrival, *self._place(arrival))

    def _admitted(self, arrival: Arrival, where: Slice, role: Role) -> Job:
        header = arrival.header
        index = header.chunk.chunk_index
        total: Sum | None = None
        targets: tuple[int, ...] = ()
        if header.stage == pb.STAGE_FINAL:
            assert role.outflow is not None
            targets = role.outflow.targets
        else:
            assert role.inflow is not None
            source_count = len(role.inflow.sources)
            if source_count > 1:
                total = self._sums.get(index)
                if total is None:
                    total = self._sums[index] = Sum(source_count)
                total.awaited_count -= 1
            if total is None or not total.awaited_count:
                self._sums.pop(index, None)
                targets = role.receivers
        self._seen.add((arrival.rank, index, header.stage))
        self._due_count -= 1
        self._due_of_row[self._plan.chunks[index][2]] -= 1
        self._complete_rows()
        return Job(index, where, role, arrival, total, targets, self._rooms(targets, where))

    def made(
        self, job: Job, arithmetic: ChunkArithmetic, stored: Bytes | None = None
    ) -> list[Sending]:
        """Does a job, on any thread; returns what is to be sent because of it."""
        index, where, role, arrival, under_way, targets, rooms = job
        if arrival is None:
            if role.collects:
                messages = arithmetic.finish(index, where, None, rooms)
            else:
                messages = [arithmetic.contribution(index, where, rooms[0])]
            return _sendings(targets, messages, rooms, where)
        if stored is None:
            stored = self._stored(arrival, where, arithmetic)
        header = arrival.header
        if header.stage == pb.STAGE_FINAL:
            arithmetic.store(stored, where, rooms)
            if not targets:
                return []
            messages = arithmetic.forwarded(header, stored, arrival.message, rooms)
            return _sendings(targets, messages, rooms, where)
        assert role.inflow is not None
        if under_way is None:
            total = arithmetic.combine(stored, where)
        else:
            total = _added(under_way, role.inflow.sources, arrival, stored, where, arithmetic)
            if under_way.added_count < len(role.inflow.sources):
                return []
        if role.inflow.target is None:
            messages = arithmetic.finish(index, where, total, rooms)
        else:
            messages = [arithmetic.partial(index, where, total, rooms[0])]
        return _sendings(targets, messages, rooms, where)

    def _place(self, arrival: Arrival) -> tuple[Slice, Role]:
        index, stage = arrival.header.chunk.chunk_index, arrival.header.stage
        if index >= len(self._plan.chunks):
            raise self._misplaced(arrival, f"the array has {len(self._plan.chunks)} chunks")
        where, segment, _ = self._plan.chunks[index]
        role = self._plan.roles[segment]
        is_final = stage == pb.STAGE_FINAL
        sources = () if role.inflow is None else role.inflow.sources
        if is_final:
            expected = role.outflow is not None and role.outflow.source == arrival.rank
        else:
            expected = stage == pb.STAGE_PARTIAL and arrival.rank in sources
        if not expected:
            raise self._misplaced(arrival, "none is due from it")
        if (arrival.rank, index, stage) in self._seen:
            raise self._misplaced(arrival, "it came before")
        if is_final and any(
            (source, index, pb.STAGE_PARTIAL) not in self._seen for source in sources
        ):
            raise self._misplaced(arrival, "it is final before all have contributed")
        return where, role

    def _misplaced(self, arrival: Arrival, why: str) -> CorruptChunkError:
        try:
            self._arithmetic.checked(arrival.header, arrival.payload)
        except CorruptChunkError as error:
            why = error.message
        return self._refused(arrival, why)

    def _stored(self, arrival: Arrival, where: Slice, arithmetic: ChunkArithmetic) -> Bytes:
        try:
            return arithmetic.opened(arithmetic.checked(arrival.header, arrival.payload), where)
        except ShardwellError as error:
            raise self._refused(arrival, error.message) from None

    def _rooms(self, targets: tuple[int, ...], where: Slice) -> list[Room | None]:
        if not targets:
            return []
        size_bytes = self._arithmetic.payload_bytes(where)
        return [self._room_of(target, size_bytes) for target in targets]

    def _complete_rows(self) -> None:
        while (
            self._complete_row_count < len(self._due_of_row)
            and not self._due_of_row[self._complete_row_count]
        ):
            self._complete_row_count += 1

    def _refused(self, arrival: Arrival, why: str) -> CorruptChunkError:
        header = arrival.header
        stage = pb.Stage.Name(header.stage) if header.stage in pb.Stage.values() else header.stage
        return CorruptChunkError(
            f"chunk {header.chunk.chunk_index} ({stage}) of call {header.call_index} "
            f"({self._plan.operation.value}): {why}"
        )


def _added(
    under_way: Sum,
    sources: tuple[int, ...],
    arrival: Arrival,
    stored: Bytes,
    where: Slice,
    arithmetic: ChunkArithmetic,
) -> Float32:
    if under_way.total is None:
        under_way.total = arithmetic.begin(where)
    if sources[under_way.added_count] != arrival.rank:
        stored = arithmetic.kept(stored)
    under_way.early[arrival.rank] = stored
    while under_way.added_count < len(sources):
        due = under_way.early.pop(sources[under_way.added_count], None)
        if due is None:
            break
        arithmetic.combine(due, where, under_way.total)
        under_way.added_count += 1
    return under_way.total


def _sendings(
    targets: tuple[int, ...], messages: list[bytes], rooms: Sequence[Room | None], where: Slice
) -> list[Sending]:
    return [
        Sending(target, message, where.size, 0 if room is None else room.memory.size)
        for target, message, room in zip(targets, messages, rooms, strict=True)
    ]
