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
from shardwell.group.schedule.arithmetic import ChunkArithmetic, Total
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
    """Who sent it: its place among those that take part."""
    header: pb.ReceiveChunksResponse
    """What it says of itself, without the payload."""
    payload: Bytes
    """The encoded values; what can be written to is shared memory, and may change."""
    message: bytes
    """All of it, to be sent on as it is; without the payload where that is shared."""
    shared_bytes: int = 0
    """How many bytes of it came through shared memory."""
    release: Callable[[], None] | None = None
    """Gives the shared memory back; after it, `payload` is not looked at any more."""


class Sending(NamedTuple):
    """A message for another rank."""

    rank: int
    """Its place among those that take part."""
    message: bytes
    """All of it."""
    element_count: int
    """Values in it."""
    shared_bytes: int = 0
    """Of its payload, where that is in shared memory."""


RoomOf = Callable[[int, int], Room | None]
"""Where a payload for a rank goes, of so many bytes; None: into its message. Who asks uses it, and
sends the message before any other to that rank."""


def no_room(rank: int, size_bytes: int) -> Room | None:
    """All payloads go into their messages."""
    return None


class _Sum:
    """A chunk for which this rank adds what more than one other sends."""

    def __init__(self, total: Float32) -> None:
        self.total = total
        self.added_count = 0
        self.early: dict[int, tuple[int, Bytes]] = {}
        """By rank: scale exponent and checked values of what came before its turn."""


class Collective:
    """For one thread.

    Args:
        plan: This rank's.
        arithmetic: Over this rank's array.
        window_row_count: See the module.
        room_of: Says what goes through shared memory.
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
        self._sums: dict[int, _Sum] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self._due_of_row = [0] * plan.row_count
        for _, segment, row in plan.chunks:
            self._due_of_row[row] += len(plan.roles[segment].senders)
        self._due_count = sum(self._due_of_row)
        self._complete_row_count = 0
        self._complete_rows()

    @property
    def is_done(self) -> bool:
        """Whether this rank has entered, received and written everything."""
        return not self._due_count and self._entered_count == len(self._plan.entering)

    @property
    def may_enter(self) -> bool:
        """Whether `enter` has something to do now."""
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
        """Lets the next chunk of this rank's enter."""
        index = self._plan.entering[self._entered_count]
        self._entered_count += 1
        where, role = self._chunk(index)
        if role.collects:
            return self._finish(index, where, role, None)
        assert role.inflow is not None
        assert role.inflow.target is not None
        (room,) = rooms = self._rooms((role.inflow.target,), where)
        message = self._arithmetic.contribution(index, where, room)
        return _sendings((role.inflow.target,), [message], rooms, where)

    def receive(self, arrival: Arrival) -> list[Sending]:
        """Takes a message; returns what is to be sent because of it.

        Raises:
            CorruptChunkError: it has no place in this call.
        """
        header = arrival.header
        index, stage = header.chunk.chunk_index, header.stage
        try:
            intact = self._arithmetic.checked(header, arrival.payload)
        except CorruptChunkError as error:
            raise self._refused(arrival, error.message) from None
        if index >= len(self._plan.chunks):
            raise self._refused(arrival, f"the array has {len(self._plan.chunks)} chunks")
        where, role = self._chunk(index)
        is_final = stage == pb.STAGE_FINAL
        sources = () if role.inflow is None else role.inflow.sources
        if is_final:
            expected = role.outflow is not None and role.outflow.source == arrival.rank
        else:
            expected = stage == pb.STAGE_PARTIAL and arrival.rank in sources
        key = (arrival.rank, index, stage)
        if not expected or key in self._seen:
            raise self._refused(arrival, "it came before" if expected else "none is due from it")
        if is_final and any(
            (source, index, pb.STAGE_PARTIAL) not in self._seen for source in sources
        ):
            raise self._refused(arrival, "it is final before all have contributed")
        try:
            stored = self._arithmetic.opened(intact, where)
        except ShardwellError as error:
            raise self._refused(arrival, error.message) from None
        self._seen.add(key)
        sendings = (
            self._take_final(arrival, stored, where, role)
            if is_final
            else self._take_partial(arrival, stored, where, role)
        )
        self._due_count -= 1
        self._due_of_row[self._plan.chunks[index][2]] -= 1
        self._complete_rows()
        return sendings

    def _take_final(
        self, arrival: Arrival, stored: Bytes, where: Slice, role: Role
    ) -> list[Sending]:
        assert role.outflow is not None
        targets = role.outflow.targets
        rooms = self._rooms(targets, where)
        self._arithmetic.store(arrival.header.chunk.scale_exponent, stored, where, rooms)
        if not targets:
            return []
        messages = self._arithmetic.forwarded(arrival.header, stored, arrival.message, rooms)
        return _sendings(targets, messages, rooms, where)

    def _take_partial(
        self, arrival: Arrival, stored: Bytes, where: Slice, role: Role
    ) -> list[Sending]:
        assert role.inflow is not None
        sources, chunk = role.inflow.sources, arrival.header.chunk
        index, exponent = chunk.chunk_index, chunk.scale_exponent
        if len(sources) == 1:
            total = self._arithmetic.combine(exponent, stored, where)
            return self._pass_on(index, where, role, total)
        under_way = self._sums.get(index)
        if under_way is None:
            under_way = self._sums[index] = _Sum(self._arithmetic.begin(where))
        if sources[under_way.added_count] != arrival.rank:
            stored = self._arithmetic.kept(stored)
        under_way.early[arrival.rank] = (exponent, stored)
        while under_way.added_count < len(sources):
            due = under_way.early.pop(sources[under_way.added_count], None)
            if due is None:
                return []
            self._arithmetic.combine(*due, where, under_way.total)
            under_way.added_count += 1
        del self._sums[index]
        return self._pass_on(index, where, role, under_way.total)

    def _pass_on(self, index: int, where: Slice, role: Role, total: Total) -> list[Sending]:
        assert role.inflow is not None
        target = role.inflow.target
        if target is None:
            return self._finish(index, where, role, total)
        (room,) = rooms = self._rooms((target,), where)
        message = self._arithmetic.partial(index, where, total, room)
        return _sendings((target,), [message], rooms, where)

    def _finish(self, index: int, where: Slice, role: Role, total: Total | None) -> list[Sending]:
        targets = () if role.outflow is None else role.outflow.targets
        rooms = self._rooms(targets, where)
        messages = self._arithmetic.finish(index, where, total, rooms)
        return _sendings(targets, messages, rooms, where)

    def _rooms(self, targets: tuple[int, ...], where: Slice) -> list[Room | None]:
        size_bytes = self._arithmetic.payload_bytes(where)
        return [self._room_of(target, size_bytes) for target in targets]

    def _chunk(self, index: int) -> tuple[Slice, Role]:
        where, segment, _ = self._plan.chunks[index]
        return where, self._plan.roles[segment]

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


def _sendings(
    targets: tuple[int, ...], messages: list[bytes], rooms: Sequence[Room | None], where: Slice
) -> list[Sending]:
    return [
        Sending(target, message, where.size, 0 if room is None else room.memory.size)
        for target, message, room in zip(targets, messages, rooms, strict=True)
    ]
