"""A crew: the workers that make the steps of a parameter or table, and when one of them is lost.

Pure. Workers that send gradients have a *seat*; what a worker has contributed is kept with its
seat, as its tracker needs it. Sessions that opened the parameter or table without a seat are known
while they are alive, so that their workers can be named when they are missing.

A seat belongs to one session, its owner. When another session asks for the seat of its worker:

    the owner has ended, or is not alive    takes it over; the old owner's gradients are refused
    the owner is alive                      WorkerIdInUseError

From the taking of a seat to its loss a worker has a *tenure*, by a number that it has drawn and
that its gradients name. A gradient of a tenure that is over is refused, or late, whichever worker
has the seat since. The three crews differ in what a newcomer is given, and in whom a step awaits:

    crew         seats                   a newcomer is given           a step closes with
    FixedCrew    worker_count, for good  a free one, or is refused     worker_count gradients
    OpenCrew     worker_count_max        a free one, or that of a      each gradient
                                         worker that is gone
    ElasticCrew  2 * max_count           a free one, or that of one    those of all that it awaits,
                                         who left, if no open step     min_count at least
                                         has its gradient

Invariants:
  - At any time one session at most can contribute under a worker_id.
  - The seat of a session that is alive, or was so within the lease, is given to no other session.
  - Steps in the storage never decrease, whosever the seat is.

The caller holds a lock around all that changes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from shardwell.errors import (
    ArgumentError,
    LimitError,
    SeatsTakenError,
    SessionUnknownError,
    StepOrderError,
    WorkerIdInUseError,
)
from shardwell.rpc.session import Session
from shardwell.rpc.take_over import TAKE_OVER_S
from shardwell.specs.parameter import TrainingSpec

if TYPE_CHECKING:
    from shardwell_server.shard.sessions import Sessions

Event = dict[str, Any]
TakesNote = Callable[[Event], None]
"""Notes a change of seats before it takes effect."""


class Tenure(NamedTuple):
    """The time from the taking of a seat to its loss."""

    number: int = 0
    """Drawn by its worker; 0 where seats are kept for good."""
    first_step: int = 0
    """The storage's number of its worker's step 0."""


class Rivals(NamedTuple):
    """Two clients that would contribute as one worker."""

    owner: Session
    refused: Session
    """The client that asked for the owner's seat last."""
    since_s: float
    asked_s: float
    """The time of its last request; `since_s` that of its first."""

    @property
    def words(self) -> str:
        return f"{self.owner}, which contributes, and {self.refused}, which was refused"


RETURN_AFTER_END_S = 1.0
"""The time that others wait for the next session of a worker whose last one ended in order. A
client that is made anew in one process attends within it; more would make others learn late of a
worker that is gone for good."""
_NAMED_MAX = 8
"""Workers that a message names."""
_RIVAL_ASKS_S = TAKE_OVER_S + 1.0
"""The time for which a client asks for a seat that is another one's, with its pauses."""
_RIVAL_KNOWN_S = 30.0
"""The time after its last request in which others that wait learn of a rival."""


class Seat(ABC):
    """One worker's seat, which counts steps as the worker does."""

    def __init__(self, worker_id: str, index: int, owner: Session | None, tenure: Tenure) -> None:
        self.worker_id = worker_id
        self.index = index
        self.owner = owner
        self.tenure = tenure
        self.is_over = False
        self.from_step: int | None = None
        """The first step that awaits an elastic member; None: none does yet."""
        self.is_draining = False
        self.given_at: int | None = None
        """The newest version when an elastic member got a seat that was another worker's, whose
        gradients are all in steps before it."""
        self.is_lost = False
        self.counted_count = 0
        self.late_count = 0
        self.was_taken_over = False
        """True until the owner contributes, if it has the seat from another."""
        self.last_s: float | None = None
        """The time of its last contribution on time.monotonic's clock; None: none here."""
        self.lag_s = 0.0
        """The time from any worker's first contribution to the step to that one."""

    @property
    @abstractmethod
    def marks(self) -> Any:
        """The seat's contributions, as the storage counts steps."""

    @property
    @abstractmethod
    def unused_step(self) -> int:
        """A step that nothing has been counted of, nor is being counted just now."""

    def give_to(self, session: Session) -> None:
        self.owner, self.was_taken_over = session, True
        self.forget_checksums()

    @abstractmethod
    def forget_checksums(self) -> None:
        """Forgets the checksums of the owner's payloads: those of another may differ."""

    @abstractmethod
    def go_on_from(self, earlier: Any) -> None:
        """Keeps an earlier tenure's checksums, by which another gradient is recognized."""

    @abstractmethod
    def _forget_marks(self, version: int, *, is_restored: bool) -> None:
        """Forgets the marks of steps before a version, some of which may be its own."""

    def begin_at(self, version: int, *, is_restored: bool = False) -> None:
        """Forgets an earlier worker's marks; `is_restored`: some since may be its own."""
        self.given_at = version
        self._forget_marks(version, is_restored=is_restored)

    def contributed(self, session: Session, now_s: float, begun_s: float | None) -> None:
        """Notes a contribution of a session that may have lost the seat meanwhile."""
        self.last_s, self.lag_s = now_s, 0.0 if begun_s is None else now_s - begun_s
        if self.owner is not None and self.owner.number == session.number:
            self.was_taken_over = False


SeatT = TypeVar("SeatT", bound=Seat)


@dataclass(eq=False)
class Contributor(Generic[SeatT]):
    """A worker that asks for a seat, or whose gradients a stream carries."""

    worker_id: str
    session: Session
    tenure: int = 0
    """The tenure of its gradients, or that it asks for; 0 where seats are for good."""
    asks: bool = field(default=False, kw_only=True)
    begins_anew: bool = field(default=False, kw_only=True)
    """True if the seat that it has and asks for is to have that tenure."""
    from_step: int | None = field(default=None, kw_only=True)
    """The first step that awaits an elastic member which asks; None: none yet."""
    seat: SeatT | None = field(default=None, init=False)
    superseded: list[int] = field(default_factory=list, init=False)
    """Parts that it sent for which Decision was SUPERSEDED."""
    late: set[int] = field(default_factory=set, init=False)
    is_over: bool = field(default=False, init=False)
    may_have_counted: bool = field(default=False, init=False)
    """True if a late part of its last step may have counted before."""

    def note_late(self, part: int, *, may_have_counted: bool) -> None:
        self.late.add(part)
        self.may_have_counted |= may_have_counted
        if self.seat is not None:
            self.seat.late_count += 1


class OpenPart(NamedTuple, Generic[SeatT]):
    """A part of a slice whose open step takes contributions: a chunk, or all of a table."""

    step: int
    contribution_count: int
    awaited: list[SeatT]


class Tracker(ABC, Generic[SeatT]):
    """The contributions to a parameter or table, as a crew and a slice ask for them."""

    def __init__(self, spec: TrainingSpec, sessions: Sessions, worker_count_max: int) -> None:
        self.spec = spec
        crew: type[Crew[SeatT]] = OpenCrew
        if spec.members is not None:
            crew = ElasticCrew
        elif spec.worker_count:
            crew = FixedCrew
        self.crew = crew(self, spec, sessions, worker_count_max)
        self.is_sync = crew.is_sync
        self.has_open_sets = spec.has_open_sets
        """True if a step may close without a worker that could have contributed."""

    @abstractmethod
    def make_seat(
        self, worker_id: str, index: int, marks: Any, owner: Session | None, tenure: Tenure
    ) -> SeatT:
        """Makes a seat from the storage's `marks`; None: it has none."""

    @abstractmethod
    def version_max(self) -> int:
        """Returns the most updates that any part has seen."""

    @abstractmethod
    def version_of(self, part: int | None) -> int:
        """Returns the number of a part's open step; None: that of all of a table."""

    @abstractmethod
    def is_spent(self, seat: SeatT) -> bool:
        """Returns True if no open step has a gradient of a seat."""

    @abstractmethod
    def next_step(self, worker_id: str) -> int:
        """Returns the first step that a worker has not given in full, and still can."""

    @abstractmethod
    def contributed(self, step: int, part: int | None = None) -> list[str]:
        """Returns the workers that have contributed a step to a part, or to all."""

    @abstractmethod
    def has_begun(self, step: int) -> bool:
        """Returns True if any worker has contributed to a step."""

    @abstractmethod
    def open_parts(self, part: int | None = None) -> Iterator[OpenPart[SeatT]]:
        """Yields all parts, or one, whose open step's set is not decided yet."""


# Events. That of a seat: who takes the next one. Of an owner: the same worker's other session.
# Of a tenure: seat `seat_index` is that worker's from now on.


def seat_event(seat: Seat) -> Event:
    """Returns the event of a worker that takes the next seat."""
    event = {"kind": "seat", **_facts(seat.worker_id, seat.owner, seat.tenure)}
    if seat.from_step is not None:
        event["from_step"] = seat.from_step
    if seat.is_over:
        event["is_over"] = True
    if seat.given_at is not None:
        event["given_at"] = seat.given_at
    return event


def owner_event(worker_id: str, owner: Session | None) -> Event:
    """Returns the event of a seat that changes its owner."""
    return {"kind": "owner", "worker_id": worker_id, "session": owner and list(owner)}


def _facts(worker_id: str, owner: Session | None, tenure: Tenure) -> Event:
    return {"worker_id": worker_id, "session": owner and list(owner), "tenure": list(tenure)}


def owner_of(event: Event) -> Session | None:
    """Returns the owner that an event names."""
    return None if event["session"] is None else Session(*event["session"])


class Crew(ABC, Generic[SeatT]):
    """The workers of a parameter or table, and their seats."""

    is_sync: ClassVar[bool] = True
    comes_and_goes: ClassVar[bool] = False
    """True if members that leave are awaited no more."""
    awaited: tuple[SeatT, ...] = ()

    def __init__(
        self,
        tracker: Tracker[SeatT],
        spec: TrainingSpec,
        sessions: Sessions,
        worker_count_max: int,
    ) -> None:
        self.floor = 1 if spec.members is None else spec.members.min_count
        """Gradients without which no step closes, however long it waits."""
        self.full_count = max(spec.worker_count, 1) if spec.members is None else self.floor
        """Gradients with which a step closes that awaits no member."""
        self._tracker = tracker
        self._sessions = sessions
        self._worker_count_max = worker_count_max
        self._seats: dict[str, SeatT] = {}
        self.ended: dict[str, int] = {}
        """Workers with a seat whose sessions have ended in order, the first one first; with the
        session's number, 0 where it is not known."""
        self.rivals: dict[str, Rivals] = {}
        """Clients that asked for a seat whose owner is connected, by its worker."""
        self._openers: dict[int, str] = {}
        """Worker ids by the sessions that opened it; some may be gone."""
        self.come_to_rest: Callable[[], None] = lambda: None
        """Returns when nothing is being counted that was checked before."""
        self.give_on: Callable[[SeatT], None] = lambda seat: None
        """Called before a seat of an elastic member is another worker's."""

    # What the kinds answer.

    @abstractmethod
    def seat(self, contributor: Contributor[SeatT], note: TakesNote) -> SeatT | None:
        """Returns the seat of a worker, which belongs to the session from now on.

        None for an elastic member that does not ask and names a tenure which the seat has not.

        Raises:
            WorkerIdInUseError: another session has it, and is alive.
            StepOrderError: it contributes in a tenure that is over.
            SeatsTakenError: as many workers as make a step have seats already.
            LimitError: as many workers as the limit allows have seats, and none is to be given on.
            ArgumentError: it asks for a seat without a tenure.
        """

    @abstractmethod
    def rank_of(self, worker_id: str) -> tuple[int, int]:
        """Returns a worker's rank, and the number of ranks; (0, 0): there are none."""

    @abstractmethod
    def missing(self, step: int, part: int | None = None) -> tuple[list[str], int]:
        """Returns the workers that a step or its part lacks, and how many more unnamed ones."""

    @property
    @abstractmethod
    def _has_room(self) -> bool:
        """True if a newcomer may take part."""

    def await_from(self, contributor: Contributor[SeatT], note: TakesNote) -> bool:
        """Has open steps await a member from its `from_step` on; True: they may await others."""
        return False

    def end_tenure(self, worker_id: str, tenure: int, note: TakesNote) -> bool:
        """Ends a tenure: no open step awaits the member. True if one did. Safe to repeat."""
        return False

    def member(self, worker_id: str, tenure: int) -> SeatT | None:
        return None

    def lost(self, now_s: float) -> tuple[list[SeatT], float]:
        """Returns the members that are gone for good, and seconds until the next look."""
        return [], math.inf

    def needed_step(self, worker_id: str) -> int | None:
        """Returns the lowest open step that can't reach the floor without a worker."""
        return None

    @property
    def may_wait_in_vain(self) -> bool:
        """True if a step may await a worker that can't come."""
        return bool(self.ended or self.rivals)

    @property
    def has_ended(self) -> bool:
        """True if every worker with a seat left in order, and none is about to take one."""
        return bool(self.ended) and not self._owners and not self._newcomers()

    def _over(self, contributor: Contributor[SeatT]) -> None:
        raise _tenure_is_over(contributor.worker_id)

    # Seats.

    def check(self, contributor: Contributor[SeatT]) -> None:
        """Notes `is_over` of a worker whose gradient is late at the best, as its tenure is over.

        Raises:
            StepOrderError: the tenure is over, where each gradient is needed.
            WorkerIdInUseError: another session has taken the seat over.
            SessionUnknownError: the session has ended.
        """
        seat = contributor.seat
        if (
            seat is None
            or seat.is_over
            or (seat.tenure.number and seat.tenure.number != contributor.tenure)
        ):
            self._over(contributor)
            return
        owner, session = seat.owner, contributor.session
        if owner is None:
            raise SessionUnknownError(
                f"the session of worker {seat.worker_id!r} has ended; connect again",
                worker_id=seat.worker_id,
            )
        if owner.number != session.number:
            raise WorkerIdInUseError(
                f"worker id {seat.worker_id!r}: {owner} has taken over from this {session}, which "
                "was not connected then; what this process sends under that id is not counted; "
                "give each worker an id of its own",
                worker_id=seat.worker_id,
            )

    @property
    def seats(self) -> list[SeatT]:
        return list(self._seats.values())  # others may join meanwhile

    def seated_worker_ids(self) -> set[str]:
        """Returns the workers with seats whose tenures are not over. Any thread may call it."""
        return {seat.worker_id for seat in self.seats if not seat.is_over}

    def find(self, worker_id: str) -> SeatT | None:
        return self._seats.get(worker_id)

    def tenure_of(self, worker_id: str) -> int:
        """Returns the number of a worker's tenure; 0: none, or seats are kept for good."""
        seat = self._seats.get(worker_id)
        return 0 if seat is None or seat.is_over else seat.tenure.number

    def _next_seat(self, contributor: Contributor[SeatT], tenure: Tenure, note: TakesNote) -> SeatT:
        seat = self._tracker.make_seat(
            contributor.worker_id, len(self._seats), None, contributor.session, tenure
        )
        note(seat_event(seat))
        return self._sit(seat)

    def _owned(self, seat: SeatT, contributor: Contributor[SeatT], note: TakesNote) -> SeatT:
        session = contributor.session
        if seat.owner is None or seat.owner.number != session.number:
            self._check_gone(seat, session)
            note(owner_event(seat.worker_id, session))
            seat.give_to(session)
            self._note_ended(seat)
        return seat

    def _begin_tenure(self, seat: SeatT, contributor: Contributor[SeatT], note: TakesNote) -> SeatT:
        # Other threads may be counting: what has not been checked by now is refused.
        was_over, seat.is_over = seat.is_over, True
        try:
            tenure, given_at = self._new_tenure(seat, contributor)
            facts = _facts(contributor.worker_id, contributor.session, tenure)
            event = {"kind": "tenure", "seat_index": seat.index, **facts}
            note(event if given_at is None else event | {"given_at": given_at})
        except BaseException:
            seat.is_over = was_over
            raise
        made = self._replace(seat, contributor.worker_id, contributor.session, tenure)
        made.given_at = given_at
        if given_at is not None and seat.worker_id != contributor.worker_id:
            made.begin_at(given_at)
        return made

    def _new_tenure(
        self, seat: SeatT, contributor: Contributor[SeatT]
    ) -> tuple[Tenure, int | None]:
        return Tenure(contributor.tenure, seat.tenure.first_step + seat.unused_step), None

    def _check_tenure(self, contributor: Contributor[SeatT]) -> None:
        if not contributor.tenure:
            raise ArgumentError("tenure must be a number drawn at random, not 0; got 0")

    def _sit(self, seat: SeatT) -> SeatT:
        self._seats[seat.worker_id] = seat
        self._note_ended(seat)
        self._changed()
        return seat

    def _replace(self, seat: SeatT, worker_id: str, owner: Session | None, tenure: Tenure) -> SeatT:
        made = self._tracker.make_seat(worker_id, seat.index, seat.marks, owner, tenure)
        if seat.worker_id == worker_id and tenure.first_step == seat.tenure.first_step:
            made.go_on_from(seat)  # it counts the steps of before
        self.ended.pop(seat.worker_id, None)
        seats = (made if each is seat else each for each in self.seats)
        self._seats = {each.worker_id: each for each in seats}
        self._note_ended(made)
        self._changed()
        return made

    def _changed(self) -> None:
        """Learns of another seat, or of a tenure that is over."""

    # Owners.

    def set_owner(self, worker_id: str, owner: Session | None) -> None:
        seat = self._seats[worker_id]
        before, seat.owner = seat.owner, owner
        self._note_ended(seat, 0 if before is None else before.number)

    def _note_ended(self, seat: SeatT, number: int = 0) -> None:
        self.ended.pop(seat.worker_id, None)
        if seat.owner is None:
            self.ended[seat.worker_id] = number

    def _check_gone(self, seat: SeatT, session: Session) -> None:
        owner, worker_id = seat.owner, seat.worker_id
        if owner is None or owner.number == session.number:
            return
        alive_for_s = self._sessions.alive_for_s(owner.number, owner.process)
        if not alive_for_s:
            return
        advice = "give each worker an id of its own"
        if alive_for_s == math.inf:
            free_in_s = None
            found, now_s = self.rivals.get(worker_id), self._sessions.now_s()
            is_new = found is None or found.owner != owner or now_s - found.asked_s > _RIVAL_KNOWN_S
            since_s = now_s if is_new or found is None else found.since_s
            self.rivals[worker_id] = Rivals(owner, session, since_s, now_s)
            advice += (
                "; if that process is gone, its seat is free when its connection has ended, at "
                "the latest after the shard's session_lease_s"
            )
        else:
            free_in_s = alive_for_s
            advice += (
                "; the shard was started again and waits for that process to come back, another "
                f"{alive_for_s:.3g} s"
            )
        asks = "another client of it" if owner[1:] == session[1:] else f"this {session}"
        raise WorkerIdInUseError(
            f"worker id {worker_id!r} is in use: {owner} contributes under it, and so would "
            f"{asks}; {advice}",
            free_in_s=free_in_s,
            worker_id=worker_id,
        )

    @property
    def _owners(self) -> list[Session]:
        return [seat.owner for seat in self.seats if seat.owner is not None]

    def owned_by(self, session_number: int) -> list[str]:
        return [
            seat.worker_id
            for seat in self.seats
            if seat.owner is not None and seat.owner.number == session_number
        ]

    @property
    def done_worker_ids(self) -> list[str]:
        return [seat.worker_id for seat in self.seats if seat.owner is None]

    @property
    def gone_for_s(self) -> float:
        """The time without a connected worker; 0: all left in order, or one is about to sit."""
        owners = self._owners
        if not owners or self._newcomers():
            return 0.0
        return min(self._sessions.gone_for_s(owner.number) for owner in owners)

    def ended_among(self, worker_ids: Iterable[str]) -> tuple[list[str], float]:
        """Returns workers that ended in order, and seconds for which all may be expected back.

        A worker is left out while a session attends under its id, and if it ended before the
        present ones came: where a training is started again, its workers come one after the other.
        The time is 0 once one has been gone for RETURN_AFTER_END_S, and math.inf if there are none.
        """
        found, rest_s = [], math.inf
        attends_for_s = self._sessions.attends_for_s(self._seats) if self.ended else None
        for worker_id in worker_ids:
            number = self.ended.get(worker_id)
            if number is None or self._sessions.attends_as(worker_id):
                continue
            gone_for_s = self._sessions.gone_for_s(number)
            if attends_for_s is not None and attends_for_s < gone_for_s:
                continue
            found.append(worker_id)
            rest_s = min(rest_s, max(RETURN_AFTER_END_S - gone_for_s, 0.0))
        return found, rest_s

    def shared_ids(self) -> tuple[dict[str, Rivals], float]:
        """Returns rivals that ask no more, by worker id, and the seconds until there may be others.

        While a rival asks, the owner may be about to end, and the rival would take its seat.
        """
        found, rest_s = {}, math.inf
        for worker_id, rivals in list(self.rivals.items()):
            seat = self._seats.get(worker_id)
            if seat is None or seat.owner != rivals.owner:
                continue
            now_s = self._sessions.now_s()
            if now_s - rivals.asked_s > _RIVAL_KNOWN_S:  # it may be another worker by now
                continue
            asks_for_s = now_s - rivals.since_s
            if asks_for_s >= _RIVAL_ASKS_S:
                found[worker_id] = rivals
            else:
                rest_s = min(rest_s, _RIVAL_ASKS_S - asks_for_s)
        return found, rest_s

    # Workers without a seat.

    def remember(self, worker_id: str, session_number: int) -> None:
        """Notes a worker without a seat, to name it when it is missing; of very many only some."""
        is_new = session_number not in self._openers  # which keeps its place among them
        if is_new and len(self._openers) >= self._worker_count_max:
            self._openers = dict(self._living_openers())
        if not is_new or len(self._openers) < self._worker_count_max:
            self._openers[session_number] = worker_id

    def _living_openers(self) -> Iterator[tuple[int, str]]:
        for number, worker_id in list(self._openers.items()):
            if self._sessions.alive_for_s(number):
                yield number, worker_id

    def _newcomers(self) -> list[str]:
        has_room = self._has_room
        return [name for _, name in self._living_openers() if has_room or name in self._seats]

    def ids_of_several(self) -> dict[str, list[Session]]:
        names = {*self._seats, *list(self._openers.values())}
        found = {worker_id: self._sessions.all_as(worker_id) for worker_id in sorted(names)}
        return {worker_id: sessions for worker_id, sessions in found.items() if len(sessions) > 1}

    def living(self, but: int = 0) -> list[tuple[str, int, float]]:
        """Returns (worker id, session, `alive_for_s`) of living workers, without session `but`."""
        sessions = dict(self._openers)
        for seat in self.seats:
            if seat.owner is not None:
                sessions[seat.owner.number] = seat.worker_id
        found = [
            (worker_id, number, self._sessions.alive_for_s(number))
            for number, worker_id in sessions.items()
            if number != but
        ]
        return [each for each in found if each[2] > 0]

    # Restoring.

    def events(self) -> list[Event]:
        return [
            *map(seat_event, self.seats),
            *(owner_event(worker_id, None) for worker_id in self.ended),  # for their order
        ]

    def restore_seat(self, event: Event, marks: Any) -> SeatT:
        seat = self._tracker.make_seat(
            event["worker_id"],
            len(self._seats),
            marks,
            owner_of(event),
            Tenure(*event["tenure"]),
        )
        seat.from_step, seat.is_over = event.get("from_step"), event.get("is_over", False)
        if "given_at" in event:
            seat.begin_at(event["given_at"], is_restored=True)
        return self._sit(seat)

    def restore_tenure(self, event: Event) -> None:
        seat, tenure = self.seats[event["seat_index"]], Tenure(*event["tenure"])
        made = self._replace(seat, event["worker_id"], owner_of(event), tenure)
        if "given_at" in event:
            made.begin_at(event["given_at"], is_restored=True)

    def restore_from(self, seat_index: int, step: int) -> None:
        self.seats[seat_index].from_step = step

    def restore_over(self, seat_index: int) -> None:
        self.seats[seat_index].is_over = True
        self._changed()


class FixedCrew(Crew[SeatT]):
    """A crew of `worker_count` workers, each of whom gives a gradient to each step.

    A worker keeps its seat for good: one that replaces it comes under its id.
    """

    def seat(self, contributor: Contributor[SeatT], note: TakesNote) -> SeatT:
        worker_id = contributor.worker_id
        seat = self._seats.get(worker_id)
        if seat is not None:
            return self._owned(seat, contributor, note)
        if not self._has_room:
            gone = [each for each in self._seats if not self._sessions.attends_as(each)]
            raise SeatsTakenError(
                f"worker_count={self.full_count} workers contribute already: "
                f"{names_of(self._seats)}{(gone and f' (not connected: {names_of(gone)})') or ''}; "
                f"{worker_id!r} would be one more; a "
                "replacement must use the worker_id of the worker that it replaces (worker_id=, "
                "$SHARDWELL_WORKER_ID); if more are to take part, give all of them a greater "
                "worker_count=, or members=",
                worker_id=worker_id,
            )
        if len(self._seats) >= self._worker_count_max:
            raise _too_many(self._worker_count_max, worker_id, "reuse worker ids")
        return self._next_seat(contributor, Tenure(), note)

    def rank_of(self, worker_id: str) -> tuple[int, int]:
        seat = self._seats.get(worker_id)
        return (0 if seat is None else seat.index), self.full_count if worker_id else 0

    def missing(self, step: int, part: int | None = None) -> tuple[list[str], int]:
        present = set(self._tracker.contributed(step, part))
        candidates = dict.fromkeys(self._seats)
        if self._has_room:
            candidates |= dict.fromkeys(name for _, name in self._living_openers())
        missing = [worker_id for worker_id in candidates if worker_id not in present]
        return missing, max(self.full_count - len(present) - len(missing), 0)

    @property
    def _has_room(self) -> bool:
        return len(self._seats) < self.full_count


class OpenCrew(Crew[SeatT]):
    """A crew of any workers, for whom no step waits: an asynchronous parameter or table.

    Steps are counted from 0 in each tenure; in the storage they go on, so that the marks of an
    earlier tenure are below `first_step`, and count for nothing in this one.
    """

    is_sync = False

    def seat(self, contributor: Contributor[SeatT], note: TakesNote) -> SeatT:
        seat = self._seats.get(contributor.worker_id)
        if contributor.asks:
            self._check_tenure(contributor)
        elif seat is None or seat.tenure.number != contributor.tenure:
            raise _tenure_is_over(contributor.worker_id)
        if seat is None:
            spare = self._spare(contributor.worker_id)
            if spare is None:
                return self._next_seat(contributor, Tenure(contributor.tenure), note)
            return self._begin_tenure(spare, contributor, note)
        if contributor.begins_anew and seat.tenure.number != contributor.tenure:
            self._check_gone(seat, contributor.session)
            return self._begin_tenure(seat, contributor, note)
        return self._owned(seat, contributor, note)

    def _spare(self, worker_id: str) -> SeatT | None:
        if len(self._seats) < self._worker_count_max:
            return None
        ended = next(iter(self.ended), None)
        if ended is not None:  # nothing of it can come any more
            return self._seats[ended]
        owned = ((seat.owner, seat.index) for seat in self.seats)
        spare_in_s, index = min(
            (self._sessions.spare_in_s(owner.number), index) for owner, index in owned if owner
        )
        if spare_in_s <= 0:
            return self.seats[index]
        advice = "close clients that are done"
        if spare_in_s < math.inf:
            advice += (
                f", or try again in {spare_in_s:.3g} s, when a worker that is gone will have "
                "been so for session_lease_s"
            )
        raise _too_many(self._worker_count_max, worker_id, advice)

    def rank_of(self, worker_id: str) -> tuple[int, int]:
        return 0, 0

    def missing(self, step: int, part: int | None = None) -> tuple[list[str], int]:
        return [], 0

    @property
    def _has_room(self) -> bool:
        return True


class ElasticCrew(Crew[SeatT]):
    """A crew whose members come and go: a step awaits the present ones; see docs/adr/0036.

    States of a member's seat, each change noted before it takes effect:

        state     event                                                    next      method
                  asks for its seat in tenure T, which it drew             seated    seat
        seated    says from which step on it is awaited                    awaited   await_from
        awaited   says another step, as long as T has counted nothing      awaited   await_from
        seated,   leaves; its session ended in order; is removed; another
        awaited   shard says so; is gone for member_return_s, or silent
                  for member_lease_s besides                               over      end_tenure
        any       asks for its seat in another tenure: T is over           seated    seat
        over      another worker asks, all seats are taken, and no open
                  step has a gradient of this one                          seated    seat

    A member that is seated may contribute, and no step awaits it.
    """

    comes_and_goes = True

    def __init__(
        self,
        tracker: Tracker[SeatT],
        spec: TrainingSpec,
        sessions: Sessions,
        worker_count_max: int,
    ) -> None:
        super().__init__(tracker, spec, sessions, worker_count_max)
        assert spec.members is not None
        self._limits = spec.members

    def seat(self, contributor: Contributor[SeatT], note: TakesNote) -> SeatT | None:
        worker_id = contributor.worker_id
        seat = self._seats.get(worker_id)
        if seat is not None and seat.tenure.number == contributor.tenure and contributor.tenure:
            return seat
        if not contributor.asks:
            return None
        self._check_tenure(contributor)
        if seat is not None:
            self._check_gone(seat, contributor.session)
        others = [each for each in self.awaited if each is not seat]
        if len(others) >= self._limits.max_count:
            raise SeatsTakenError(
                f"max_count={self._limits.max_count} members take part already: "
                f"{names_of(each.worker_id for each in others)}; {worker_id!r} would be one more; "
                "wait until one leaves, or make it anew with a larger max_count",
                worker_id=worker_id,
            )
        if seat is None:
            most = min(self._limits.seat_count_max, self._worker_count_max)
            if len(self._seats) < most:
                return self._next_seat(contributor, Tenure(contributor.tenure), note)
            seat = self._spare(worker_id)
        return self._begin_tenure(seat, contributor, note)

    def _spare(self, worker_id: str) -> SeatT:
        self.come_to_rest()  # what was checked before its tenure ended may be counted just now
        for seat in self.seats:
            if seat.is_over and self._tracker.is_spent(seat):
                return seat
        raise LimitError(
            f"{len(self._seats)} seats are taken, and open steps have gradients of all who "
            f"left; {worker_id!r} may have one when such a step has closed; try again",
            worker_id=worker_id,
        )

    def _new_tenure(
        self, seat: SeatT, contributor: Contributor[SeatT]
    ) -> tuple[Tenure, int | None]:
        self.come_to_rest()
        given_at = seat.given_at
        if seat.worker_id != contributor.worker_id:
            self.give_on(seat)
            given_at = self._tracker.version_max()
        return Tenure(contributor.tenure), given_at

    def _changed(self) -> None:
        self.awaited = tuple(each for each in self._seats.values() if not each.is_over)

    def member(self, worker_id: str, tenure: int) -> SeatT | None:
        seat = self._seats.get(worker_id)
        is_its = seat is not None and seat.tenure.number == tenure and not seat.is_over
        return seat if is_its else None

    def await_from(self, contributor: Contributor[SeatT], note: TakesNote) -> bool:
        seat, step = self.member(contributor.worker_id, contributor.tenure), contributor.from_step
        if seat is not None and step is not None and seat.from_step != step:
            note({"kind": "from", "seat_index": seat.index, "from_step": step})
            seat.from_step = step
            self.come_to_rest()  # steps that were complete before close, and do not await it
        return True

    def end_tenure(self, worker_id: str, tenure: int, note: TakesNote) -> bool:
        seat = self.member(worker_id, tenure)
        if seat is None:
            return False
        note({"kind": "over", "seat_index": seat.index})
        self.restore_over(seat.index)
        return True

    def lost(self, now_s: float) -> tuple[list[SeatT], float]:
        found, next_s = [], self._limits.member_return_s
        lease_s = self._limits.member_lease_s + self._limits.member_return_s
        for seat in self.awaited:
            if seat.owner is None:
                found.append(seat)
                continue
            number = seat.owner.number
            alive_for_s = self._sessions.alive_for_s(number, seat.owner.process)
            if alive_for_s == math.inf:
                silent_s = self._sessions.silent_for_s(number)
                if seat.last_s is not None:
                    silent_s = min(silent_s, now_s - seat.last_s)
                rest_s = lease_s - silent_s
            else:
                gone_s = self._sessions.gone_for_s(number)
                rest_s = max(alive_for_s, self._limits.member_return_s - gone_s)
            if rest_s <= 0:
                found.append(seat)
            else:
                next_s = min(next_s, rest_s)
        return found, next_s

    def needed_step(self, worker_id: str) -> int | None:
        needing = [
            each.step
            for each in self._tracker.open_parts()
            if each.contribution_count + sum(s.worker_id != worker_id for s in each.awaited)
            < self.floor
        ]
        return min(needing, default=None)

    def missing(self, step: int, part: int | None = None) -> tuple[list[str], int]:
        names: dict[str, None] = {}
        lacking = 0
        for each in self._tracker.open_parts(part):
            if each.step == step:
                names |= dict.fromkeys(seat.worker_id for seat in each.awaited)
                lacking = max(lacking, self.floor - each.contribution_count - len(each.awaited))
        return list(names), lacking

    def rank_of(self, worker_id: str) -> tuple[int, int]:
        """Ranks members by the first step that awaits them; workers without a seat come last."""
        if not worker_id:
            return 0, 0
        by_age = sorted(
            self.awaited,
            key=lambda seat: (seat.from_step is None, seat.from_step or 0, seat.index),
        )
        ranked = dict.fromkeys(seat.worker_id for seat in by_age)
        if worker_id not in ranked:
            ranked |= dict.fromkeys(name for _, name in self._living_openers())
        rank = [*ranked, worker_id].index(worker_id)
        return rank, max(len(by_age), rank + 1)

    @property
    def may_wait_in_vain(self) -> bool:
        return False

    @property
    def has_ended(self) -> bool:
        """True if all left in order, also if some were lost before the last one did."""
        if not self.ended or self._newcomers():
            return False
        lost = [owner.number for owner in self._owners]
        if not lost or self.awaited:
            return not lost
        gone_for_s = self._sessions.gone_for_s
        return min(map(gone_for_s, self.ended.values())) < min(map(gone_for_s, lost))

    @property
    def _has_room(self) -> bool:
        return len(self.awaited) < self._limits.max_count

    def _over(self, contributor: Contributor[SeatT]) -> None:
        contributor.is_over = True


def _tenure_is_over(worker_id: str) -> StepOrderError:
    return StepOrderError(
        f"worker {worker_id!r} has not, or not any more, the seat that it sends a gradient for: "
        "when there are worker_count_max workers, that of one which has ended, or is away for "
        "longer than session_lease_s, is given to a newcomer; the gradient is not counted now, and "
        "whether it was before is not known any more; open the parameter or table again, and go on "
        "as a new worker at its next_step",
        worker_id=worker_id,
    )


def _too_many(worker_count_max: int, worker_id: str, advice: str) -> LimitError:
    return LimitError(
        f"limit worker_count_max={worker_count_max}: {worker_id!r} is one worker too many; "
        f"{advice}; or raise the limit",
        worker_id=worker_id,
    )


def names_of(worker_ids: Iterable[str]) -> str:
    """Returns the first workers' ids for a message, and how many more there are."""
    names = [repr(worker_id) for worker_id in worker_ids]
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more
