"""The contributions to the steps of a table, part by part. Pure: events in, decisions out.

On each shard a worker's step is part 0, 1, ..., the last of which ends it. Its position is (o, c):
its open step, and the parts of it that are counted. v is the table's version (steps that have
closed; asynchronous: that were ended). Synchronous, a worker that is new, or known to a table that
was restored since, goes on at the open step: where o < v, its position counts as (v, 0).

    part (s, k) of a worker at (o, c)
    s < o, or s = o and k < c    DUPLICATE   acknowledge, do not count
    the latter, ending the step  StepOrderError: more parts were counted, of other rows
    either, of the last step of the seat's owner, with another CRC: StepOrderError
    the same of an earlier owner SUPERSEDED  acknowledge, do not count, and say so
    sync: s < v                  StepOrderError: closed without it
    s = o and k = c              COUNT; sync, o = v + 1: WAIT until v closes
    otherwise                    StepOrderError: parts or steps were skipped

An abandoned step is ended with the parts that were counted: as above, k having no meaning.

    counted, step not ended      (o, c + 1)
    counted, step ended          (o + 1, 0); async: v + 1
    sync, worker_count at v + 1  complete; nothing counts until `close`: v + 1

Elastic members, whose steps may close without them (docs/adr/0036):

    part (s, k) of a member at (o, c)
    the tenure is over, s < v, or the set of v is decided         LATE, unless it was counted
    of a step that an earlier tenure of the worker gave           SUPERSEDED, unless it was counted
    of a tenure that the seat has no longer                       see `decide_past`
    the tenure is over, o = v and c > 0: `cut_off`                to be ended: (v + 1, 0), and the
                                                                  log says that c parts were counted
    no worker is awaited, min_count at v + 1                         complete: the set is decided

A member is awaited whose tenure is not over and that has not ended v, if it has begun v, or its
`from` is v at the most. The set of a step has the members with a part in its sums, and those that
have ended it.

Invariants:
  - Positions never decrease, so a part counts once however often it is sent.
  - Synchronous: o <= v + 1; a step closes when worker_count workers, who hold all the seats, have
    ended it, so no worker that has contributed is left behind.
  - Versions only grow, by one for each step that closes (asynchronous: that a worker ends).

The caller holds the table's lock around all of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from shardwell.errors import StepOrderError
from shardwell.rpc.session import Session
from shardwell.specs.table import TableSpec
from shardwell_server.shard.crews import OpenPart, Seat, Tenure, Tracker
from shardwell_server.shard.step_tracker import Decision
from shardwell_server.store.contract import Position, TableRecord

if TYPE_CHECKING:
    from shardwell_server.shard.sessions import Sessions


class TableSeat(Seat):
    """One worker, and its position; `stored` is the seat's in the storage, of any worker."""

    def __init__(
        self, worker_id: str, stored: Position, owner: Session | None, tenure: Tenure
    ) -> None:
        super().__init__(worker_id, stored.seat_index, owner, tenure)
        step = stored.step - tenure.first_step
        self.position = stored._replace(step=step) if step >= 0 else Position(self.index)
        self.last_step = -1
        self.part_crc32cs: dict[int, int] = {}
        """CRCs of the payloads of `last_step`'s parts that were counted, as far as known."""
        self.earlier_step = -1
        self.earlier_crc32cs: dict[int, int] = {}
        """CRCs of `earlier_step`'s parts, and an earlier owner's."""
        self.ended_at: tuple[int, int] | None = None
        """Of an elastic member: the last step that it has ended, and how many parts of it had
        counted; None: the log has not said."""

    def stored_position(self, position: Position) -> Position:
        """Returns a position of the worker as the storage counts steps."""
        return position._replace(step=position.step + self.tenure.first_step)

    @property
    def marks(self) -> Position:
        return self.stored_position(self.position)

    @property
    def unused_step(self) -> int:
        return self.position.step + 1  # some parts of the open one may be counted

    def forget_checksums(self) -> None:
        if self.last_step >= 0:
            if self.last_step != self.earlier_step:
                self.earlier_step, self.earlier_crc32cs = self.last_step, {}
            self.earlier_crc32cs.update(self.part_crc32cs)
        self.last_step, self.part_crc32cs = -1, {}

    def go_on_from(self, earlier: TableSeat) -> None:
        # What it gave in this step is known to be another gradient, if it gives one anew.
        earlier.forget_checksums()
        self.earlier_step, self.earlier_crc32cs = earlier.earlier_step, earlier.earlier_crc32cs

    def _forget_marks(self, version: int, *, is_restored: bool) -> None:
        if self.position[1:] <= (version, 0):
            self.position = Position(self.index)

    def has_given(self, step: int, part_index: int) -> bool:
        """Returns True if a part of a step has counted, as the seat's own position says."""
        if self.ended_at is not None and self.ended_at[0] == step:
            return part_index < self.ended_at[1]
        return (step, part_index) < self.position[1:]


class TableStepTracker(Tracker[TableSeat]):
    """The contributions to one table on one shard."""

    def __init__(
        self,
        spec: TableSpec,
        version: int,
        sessions: Sessions,
        worker_count_max: int,
        *,
        is_closing: bool = False,
    ) -> None:
        super().__init__(spec, sessions, worker_count_max)
        self.version = version
        """Steps that have closed, which is also the number of the open one; asynchronous: steps
        that were ended. Set by the caller when a checkpoint is restored."""
        self.is_closing = is_closing
        """True if the open step's set is decided, with elastic members. Set by the caller, from the
        record that decides it."""

    def make_seat(
        self,
        worker_id: str,
        index: int,
        marks: Position | None,
        owner: Session | None,
        tenure: Tenure,
    ) -> TableSeat:
        stored = Position(index) if marks is None else marks
        assert stored.seat_index == index
        return TableSeat(worker_id, stored, owner, tenure)

    def version_max(self) -> int:
        return self.version

    def version_of(self, part: int | None) -> int:
        return self.version

    def is_spent(self, seat: TableSeat) -> bool:
        return seat.position[1:] <= (self.version, 0)

    def decide(
        self,
        seat: TableSeat,
        step: int,
        part_index: int,
        *,
        ends_step: bool,
        crc32c: int | None = None,
    ) -> Decision:
        """Decides on a part of a seat's step by the table above; a CRC of None is not compared."""
        if self.has_open_sets and self._is_late(seat, step, part_index, crc32c):
            return Decision.LATE
        _, open_step, part_count = seat.position
        if (step, part_index) < (open_step, part_count):
            if ends_step and step == open_step:  # to acknowledge it would leave the step open
                raise StepOrderError(
                    f"worker {seat.worker_id!r} ended step {step} with part {part_index}, and "
                    f"{part_count} parts of it are counted here, which were not the last: those "
                    "had other rows; send them again, or abandon the step",
                    worker_id=seat.worker_id,
                )
            counted = seat.part_crc32cs.get(part_index) if step == seat.last_step else None
            if crc32c is not None and counted not in (None, crc32c):
                raise StepOrderError(
                    f"worker {seat.worker_id!r} sent part {part_index} of step {step} again with "
                    f"other rows or gradients than were counted (crc32c {crc32c:#010x}, counted "
                    f"{counted:#010x}); send the same again, or abandon the step, or, if it has "
                    "ended, open the table again and go on at its next_step",
                    worker_id=seat.worker_id,
                )
            if counted is None and crc32c is not None and step == seat.earlier_step:
                counted = seat.earlier_crc32cs.get(part_index)
                # A member's step is at its end with its tenure: what came no more does not count.
                known = (crc32c,) if self.has_open_sets else (None, crc32c)
                if counted not in known:
                    return Decision.SUPERSEDED
            return Decision.DUPLICATE
        turn = self._turn(seat, step)
        _, expected = self._next_part(seat)
        if part_index != expected:
            raise StepOrderError(
                f"worker {seat.worker_id!r} sent part {part_index} of step {step}, of which "
                f"{expected} are counted here; send part {expected}, or abandon the step",
                worker_id=seat.worker_id,
            )
        return turn

    def decide_end(self, seat: TableSeat, step: int) -> Decision:
        """Decides on the end of a seat's step when it abandons the rest of it."""
        if step < seat.position.step:
            return Decision.DUPLICATE
        if self.has_open_sets and self._has_closed_to(seat, step):
            return Decision.LATE
        return self._turn(seat, step)

    def decide_past(
        self,
        worker_id: str,
        step: int,
        part_index: int,
        crc32c: int,
        contributors: Container[str] | None,
    ) -> Decision:
        """Decides on an elastic worker's part of a tenure that its seat has no longer.

        `contributors` is the step's set, so far if it is open; None: it is not known any more.
        """
        seat = self.crew.find(worker_id)
        if seat is not None and step in (seat.last_step, seat.earlier_step):
            crc32cs = seat.part_crc32cs if step == seat.last_step else seat.earlier_crc32cs
            if part_index in crc32cs:
                return Decision.DUPLICATE if crc32cs[part_index] == crc32c else Decision.LATE
        is_out = contributors is not None and worker_id not in contributors
        return Decision.LATE if step > self.version or is_out else Decision.UNKNOWN

    def _is_late(self, seat: TableSeat, step: int, part_index: int, crc32c: int | None) -> bool:
        """Returns True if a part of a member's comes too late to count, and has not counted."""
        is_known = step == seat.last_step
        counted = seat.part_crc32cs.get(part_index) if is_known else None
        if counted is not None and crc32c in (None, counted):
            return False  # it has counted, whatever became of the step since
        if not self._has_closed_to(seat, step):
            return False
        return counted is not None or not seat.has_given(step, part_index)

    def _has_closed_to(self, seat: TableSeat, step: int) -> bool:
        return seat.is_over or step < self.version or (step == self.version and self.is_closing)

    def _turn(self, seat: TableSeat, step: int) -> Decision:
        expected, _ = self._next_part(seat)
        if step != expected:
            reason = "closed without it" if step < expected else "was not its next"
            raise StepOrderError(
                f"worker {seat.worker_id!r} sent step {step}, which {reason}: expected step "
                f"{expected}; open the table again and go on at its next_step",
                worker_id=seat.worker_id,
            )
        return Decision.WAIT if self.is_sync and step > self.version else Decision.COUNT

    def following(self, seat: TableSeat, *, ends_step: bool) -> Position:
        """Returns a worker's position with one part more, or with its step ended."""
        step, part_count = self._next_part(seat)
        if ends_step:
            return Position(seat.index, step + 1)
        return Position(seat.index, step, part_count + 1)

    def record(self, seat: TableSeat, following: Position, crc32c: int | None = None) -> None:
        """Counts a part, or an end, for which a decision was COUNT."""
        step, part_index = self._next_part(seat)
        ended = following.step > step
        if step != seat.last_step:
            seat.last_step, seat.part_crc32cs = step, {}
        if crc32c is not None:
            seat.part_crc32cs[part_index] = crc32c
            seat.counted_count += 1
        if ended and self.has_open_sets:
            seat.ended_at = step, part_index + (crc32c is not None)
        seat.position = following
        if ended and not self.is_sync:
            self.version += 1

    @property
    def is_complete(self) -> bool:
        """True if all workers of a synchronous step have ended it, so that it is to be closed."""
        return self.completes()

    def completes(self, arriving: TableSeat | None = None) -> bool:
        """Returns True if the open step is complete once `arriving` has ended it, too."""
        count = len(self.contributed(self.version)) + (arriving is not None)
        if not self.is_sync or self.is_closing or count < self.crew.full_count or self.cut_off:
            return False
        return not any(seat is not arriving for seat in self._awaited_now())

    def is_decided(self, record: TableRecord) -> bool:
        """Returns True if the open step of a table of several workers is being closed."""
        if self.has_open_sets:
            return record.is_closing
        return 1 < self.crew.full_count <= record.contribution_count

    def close(self) -> None:
        """Closes the open step, whose set was decided and whose sums have been applied."""
        self.version += 1
        self.is_closing = False

    def contributors(self, step: int) -> list[str]:
        """Returns the workers in the set of the open step, or of the one after it."""
        return [seat.worker_id for seat in self.crew.seats if seat.position[1:] > (step, 0)]

    def _awaited_now(self) -> list[TableSeat]:
        begun = (self.version, 0)
        return [
            seat
            for seat in self.crew.awaited
            if seat.position.step <= self.version
            and (
                seat.position[1:] > begun
                or (seat.from_step is not None and seat.from_step <= self.version)
            )
        ]

    @property
    def cut_off(self) -> list[TableSeat]:
        """The elastic members whose tenure ended in the open step: they are to end it first."""
        if self.is_closing:
            return []
        begun, ended = (self.version, 0), self.version + 1
        return [
            seat
            for seat in self.crew.seats
            if seat.is_over and seat.position[1:] > begun and seat.position.step < ended
        ]

    def open_parts(self, part: int | None = None) -> Iterator[OpenPart[TableSeat]]:
        if not self.is_closing:
            count = len(self.contributed(self.version))
            yield OpenPart(self.version, count, self._awaited_now())

    def next_part(self, worker_id: str) -> tuple[int, int]:
        """Returns a worker's open step, and how many parts of it are counted."""
        seat = self.crew.find(worker_id)
        if seat is None:
            return (self.version if self.is_sync else 0), 0
        return self._next_part(seat)

    def next_step(self, worker_id: str) -> int:
        return self.next_part(worker_id)[0]

    def _next_part(self, seat: TableSeat) -> tuple[int, int]:
        _, step, part_count = seat.position
        if self.is_sync and step < self.version:
            return self.version, 0
        return step, part_count

    def contributed(self, step: int, part: int | None = None) -> list[str]:
        return [seat.worker_id for seat in self.crew.seats if seat.position.step > step]

    def has_begun(self, step: int) -> bool:
        return any(seat.position[1:] > (step, 0) for seat in self.crew.seats)
