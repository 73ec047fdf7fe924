"""Who has contributed which parts of which step to a table. Pure: events in, decisions out.

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

Awaited is whose tenure is not over and who has not ended v, if it has begun v, or its `from` is v
at the most. In the set of a step is who has a part in its sums, or has ended it.

Invariants:
  - Positions never decrease, so a part counts once however often it is sent.
  - Synchronous: o <= v + 1; a step closes when worker_count workers, who hold all the seats, have
    ended it, so no worker that has contributed is left behind.
  - Versions only grow, by one for each step that closes (asynchronous: that a worker ends).

The caller holds the table's lock around all of it.
"""

from __future__ import annotations

from collections.abc import Container

from shardwell.errors import StepOrderError
from shardwell.rpc.session import Session
from shardwell.specs.members import Elastic
from shardwell_server.shard import members
from shardwell_server.shard.members import Event, Liveness, Seats, Tenure, owner_of, tenure_of
from shardwell_server.shard.step_tracker import Decision
from shardwell_server.store.contract import Position, TableRecord


class Seat(members.Seat):
    """One worker, and its position.

    Args:
        worker_id: The worker's id.
        stored: The seat's position in the storage, of any worker.
        owner: The session that contributes; None once it has ended in order.
        tenure: The tenure that the seat belongs to.
    """

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
        """The same of `earlier_step`, and an earlier owner's."""
        self.ended_at: tuple[int, int] | None = None
        """Of an elastic member: the last step that it has ended, and how many parts of it had
        counted; None: the log has not said."""

    def stored_position(self, position: Position) -> Position:
        """What a position of the worker is in the storage."""
        return position._replace(step=position.step + self.tenure.first_step)

    @property
    def unused_step(self) -> int:
        return self.position.step + 1  # some parts of the open one may be counted

    def forget_checksums(self) -> None:
        if self.last_step >= 0:
            if self.last_step != self.earlier_step:
                self.earlier_step, self.earlier_crc32cs = self.last_step, {}
            self.earlier_crc32cs.update(self.part_crc32cs)
        self.last_step, self.part_crc32cs = -1, {}

    def _forget_marks(self, is_restored: bool) -> None:
        assert self.given_at is not None
        if self.position[1:] <= (self.given_at, 0):
            self.position = Position(self.index)

    def has_given(self, step: int, part_index: int) -> bool:
        """Whether a part of a step has counted, as the position says of the seat's own tenure."""
        if self.ended_at is not None and self.ended_at[0] == step:
            return part_index < self.ended_at[1]
        return (step, part_index) < self.position[1:]


class TableStepTracker(Seats[Seat]):
    """The contributions to one table on one shard. `worker_count` 0 means asynchronous.

    Args:
        version: Steps that have closed.
        worker_count: Workers that make a synchronous step.
        worker_count_max: Workers that may have a seat.
        sessions: Answers which sessions are alive.
        elastic: Limits of members that come and go; None: worker_count of them make a step.
        is_closing: Whether the open step's set was decided, with elastic members.
    """

    def __init__(
        self,
        version: int,
        *,
        worker_count: int,
        worker_count_max: int,
        sessions: Liveness,
        elastic: Elastic | None = None,
        is_closing: bool = False,
    ) -> None:
        super().__init__(
            worker_count=worker_count,
            worker_count_max=worker_count_max,
            sessions=sessions,
            elastic=elastic,
        )
        self.version = version
        """Steps that have closed, which is also the number of the open one; asynchronous: steps
        that were ended. Set by the caller when a checkpoint is restored."""
        self.is_closing = is_closing
        """Whether the open step's set is decided, with elastic members. Set by the caller, from the
        record that decides it."""
        self._floor = 1 if elastic is None else elastic.min_count

    def _fresh_seat(self, worker_id: str, index: int, owner: Session, tenure: Tenure) -> Seat:
        return Seat(worker_id, Position(index), owner, tenure)

    def _seat_after(
        self, seat: Seat, worker_id: str, owner: Session | None, tenure: Tenure
    ) -> Seat:
        made = Seat(worker_id, seat.stored_position(seat.position), owner, tenure)
        if self.elastic is not None and seat.worker_id == worker_id:
            # What it gave in this step is known to be another gradient, if it gives one anew.
            seat.forget_checksums()
            made.earlier_step, made.earlier_crc32cs = seat.earlier_step, seat.earlier_crc32cs
        return made

    def restore_seat(self, event: Event, stored: Position) -> Seat:
        assert stored.seat_index == len(self._seats)
        seat = Seat(event["worker_id"], stored, owner_of(event), tenure_of(event))
        seat.from_step, seat.is_over = event.get("from_step"), event.get("is_over", False)
        if "given_at" in event:
            seat.begin_at(event["given_at"], is_restored=True)
        return self._sit(seat)

    @property
    def newest_version(self) -> int:
        return self.version

    def _is_spent(self, seat: Seat) -> bool:
        return seat.position[1:] <= (self.version, 0)

    def decide(
        self,
        seat: Seat,
        step: int,
        part_index: int,
        *,
        ends_step: bool,
        crc32c: int | None = None,
    ) -> Decision:
        """What to do with a part of `seat`'s step, which may be its last.

        `crc32c` is its payload's; None: it is not compared.

        Raises:
            StepOrderError: see the table above.
        """
        if self.elastic is not None and self._is_late(seat, step, part_index, crc32c):
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
                known = (crc32c,) if self.elastic is not None else (None, crc32c)
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

    def decide_end(self, seat: Seat, step: int) -> Decision:
        """What to do with the end of `seat`'s step when it abandons the rest of it.

        Raises:
            StepOrderError: see the table above.
        """
        if step < seat.position.step:
            return Decision.DUPLICATE
        if self.elastic is not None and self._has_closed_to(seat, step):
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
        """What to do with an elastic worker's part of a tenure that its seat has no longer.

        Args:
            worker_id: The worker, which may have another tenure by now, or no seat.
            step: Its step.
            part_index: The part.
            crc32c: CRC of its payload.
            contributors: The step's set, so far if it is open; None: it is not known any more.
        """
        seat = self._seats.get(worker_id)
        if seat is not None and step in (seat.last_step, seat.earlier_step):
            crc32cs = seat.part_crc32cs if step == seat.last_step else seat.earlier_crc32cs
            if part_index in crc32cs:
                return Decision.DUPLICATE if crc32cs[part_index] == crc32c else Decision.LATE
        is_out = contributors is not None and worker_id not in contributors
        return Decision.LATE if step > self.version or is_out else Decision.UNKNOWN

    def _is_late(self, seat: Seat, step: int, part_index: int, crc32c: int | None) -> bool:
        """Whether a part of an elastic member's comes too late to count, and has not counted."""
        is_known = step == seat.last_step
        counted = seat.part_crc32cs.get(part_index) if is_known else None
        if counted is not None and crc32c in (None, counted):
            return False  # it has counted, whatever became of the step since
        if not self._has_closed_to(seat, step):
            return False
        return counted is not None or not seat.has_given(step, part_index)

    def _has_closed_to(self, seat: Seat, step: int) -> bool:
        """Whether nothing more of an elastic member's counts for a step."""
        return seat.is_over or step < self.version or (step == self.version and self.is_closing)

    def _turn(self, seat: Seat, step: int) -> Decision:
        """Whether `seat`'s next step, which it is to be, counts now or waits.

        Raises:
            StepOrderError: `step` is another.
        """
        expected, _ = self._next_part(seat)
        if step != expected:
            reason = "closed without it" if step < expected else "was not its next"
            raise StepOrderError(
                f"worker {seat.worker_id!r} sent step {step}, which {reason}: expected step "
                f"{expected}; open the table again and go on at its next_step",
                worker_id=seat.worker_id,
            )
        return Decision.WAIT if self.is_sync and step > self.version else Decision.COUNT

    def following(self, seat: Seat, *, ends_step: bool) -> Position:
        """Where a worker will stand with one part more, or with its step ended."""
        step, part_count = self._next_part(seat)
        if ends_step:
            return Position(seat.index, step + 1)
        return Position(seat.index, step, part_count + 1)

    def record(self, seat: Seat, following: Position, crc32c: int | None = None) -> None:
        """Counts a part, or an end, for which a decision was COUNT."""
        step, part_index = self._next_part(seat)
        ended = following.step > step
        if step != seat.last_step:
            seat.last_step, seat.part_crc32cs = step, {}
        if crc32c is not None:
            seat.part_crc32cs[part_index] = crc32c
            seat.counted_count += 1
        if ended and self.elastic is not None:
            seat.ended_at = step, part_index + (crc32c is not None)
        seat.position = following
        if ended and not self.is_sync:
            self.version += 1

    @property
    def is_complete(self) -> bool:
        """Synchronous: all workers have ended the open step; it is to be closed."""
        return self.completes()

    def completes(self, arriving: Seat | None = None) -> bool:
        """Whether the open step is complete once `arriving` has ended it, too."""
        count = len(self.contributed(self.version)) + (arriving is not None)
        if self.elastic is None:
            return self.is_sync and count >= self._worker_count
        if self.is_closing or count < self._floor or self.cut_off:
            return False
        return not any(seat is not arriving for seat in self._awaited_now())

    def is_decided(self, record: TableRecord) -> bool:
        """Whether the open step of a table whose steps several workers make is being closed."""
        if self.elastic is not None:
            return record.is_closing
        return 1 < self._worker_count <= record.contribution_count

    def close(self) -> None:
        """The open step, whose set was decided, has been applied."""
        assert self.elastic is not None or self.completes()
        self.version += 1
        self.is_closing = False

    def contributors(self, step: int) -> list[str]:
        """Workers in the set of the open step, or of the one after it."""
        return [seat.worker_id for seat in self.seats if seat.position[1:] > (step, 0)]

    def _awaited_now(self) -> list[Seat]:
        """Elastic members that the open step awaits."""
        begun = (self.version, 0)
        return [
            seat
            for seat in self.awaited
            if seat.position.step <= self.version
            and (
                seat.position[1:] > begun
                or (seat.from_step is not None and seat.from_step <= self.version)
            )
        ]

    @property
    def cut_off(self) -> list[Seat]:
        """Elastic members who are to end the open step first: they have begun it, and are over."""
        if self.elastic is None or self.is_closing:
            return []
        begun, ended = (self.version, 0), self.version + 1
        return [
            seat
            for seat in self.seats
            if seat.is_over and seat.position[1:] > begun and seat.position.step < ended
        ]

    def needed_step(self, worker_id: str) -> int | None:
        if self.elastic is None or self.is_closing:
            return None
        coming = sum(seat.worker_id != worker_id for seat in self._awaited_now())
        count = len(self.contributed(self.version))
        return self.version if count + coming < self._floor else None

    def missing(self, step: int) -> tuple[list[str], int]:
        """See `Seats.missing`. Of elastic members: those awaited, and how many it lacks besides."""
        if self.elastic is None:
            return super().missing(step)
        if step != self.version or self.is_closing:
            return [], 0
        awaited = [seat.worker_id for seat in self._awaited_now()]
        count = len(self.contributed(step)) + len(awaited)
        return awaited, max(self._floor - count, 0)

    def next_part(self, worker_id: str) -> tuple[int, int]:
        """A worker's open step, and how many parts of it are counted."""
        seat = self._seats.get(worker_id)
        if seat is None:
            return (self.version if self.is_sync else 0), 0
        return self._next_part(seat)

    def next_step(self, worker_id: str) -> int:
        return self.next_part(worker_id)[0]

    def _next_part(self, seat: Seat) -> tuple[int, int]:
        _, step, part_count = seat.position
        if self.is_sync and step < self.version:
            return self.version, 0
        return step, part_count

    def contributed(self, step: int) -> list[str]:
        """Workers that have ended `step`."""
        return [seat.worker_id for seat in self.seats if seat.position.step > step]

    def has_begun(self, step: int) -> bool:
        """Whether any worker has contributed to `step`."""
        return any(seat.position[1:] > (step, 0) for seat in self.seats)
