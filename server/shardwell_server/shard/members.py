"""Who takes part in a parameter or a table, how many may, and which session each seat belongs to.

Pure. Those that send gradients have a seat. What a worker has contributed is kept with its seat,
as the kind of tracker needs it. Sessions that opened the parameter without a seat are known while
they are alive, so that their workers can be named when they are missing; they take no worker's
seat.

A seat belongs to one session, its owner. When a session asks for the seat of its worker:

    there is no seat                        take one, if there is room
    the owner is the same session           the session has it already
    the owner has ended, or is not alive    take it over; the old owner's gradients are refused
    the owner is another one, and alive     WorkerIdInUseError

A synchronous parameter has worker_count seats, each taken at its worker's first gradient at the
latest and kept for good. With elastic members it has seats for as many members, and for as many
that left: see `Seats.await_from`, and docs/adr/0036. An asynchronous one has worker_count_max; when
all are taken, a newcomer is given that of a worker that is gone. From its taking to that a worker
has a *tenure*, by a number
that it has drawn and that its gradients name. So a gradient of a tenure that is over is refused,
whichever worker has the seat since, and whether or not its worker has another one. Steps are
counted from 0 in each tenure; in the storage they go on, so that what an earlier tenure left there
is below `first_step` and counts for nothing in this one.

Invariants:
  - At any time one session at most can contribute under a worker_id.
  - The seat of a session that is alive, or was so within the lease, is given to no other session.
  - Steps in the storage never decrease, whosever the seat is.

The caller holds a lock around all that changes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
from shardwell.specs.members import Elastic
from shardwell.v1 import types_pb2

Event = dict[str, Any]
TakesNote = Callable[[Event], None]
"""How a change of seats is noted before it takes effect."""


class Liveness(Protocol):
    """Answers which sessions are alive, by their numbers."""

    def alive_for_s(self, number: int, process: str = "") -> float:
        """For how many seconds a session counts as alive if nothing is heard of it.

        math.inf while it attends; 0 when it is gone, or its `process` has ended; else it is waited
        for since the shard was started.
        """

    def spare_in_s(self, number: int) -> float:
        """In how many seconds a session will have been gone for the lease; below 0: it has been.

        math.inf while it attends.
        """

    def gone_for_s(self, number: int) -> float:
        """For how many seconds a session has not attended; 0 while it does.

        Of one that this process of the shard never saw: since the process began.
        """

    def silent_for_s(self, number: int) -> float:
        """For how many seconds a session that attends was not heard of: by heartbeats."""

    def attends_for_s(self, worker_ids: Container[str]) -> float | None:
        """For how many seconds one of these workers has attended, the longest; None: none does."""

    def attends_as(self, worker_id: str) -> bool:
        """Whether any session of a worker attends."""

    def all_as(self, worker_id: str) -> list[Session]:
        """The sessions of a worker that attend; more than one where clients share its id."""

    def now_s(self) -> float:
        """A clock that never goes back."""


class Tenure(NamedTuple):
    """The tenure of a seat; see the module."""

    number: int = 0
    """Drawn by its worker; 0 where seats are kept for good."""
    first_step: int = 0
    """The storage's number of its worker's step 0."""


class Attendance(NamedTuple):
    """A session that attends, and what status says of its client."""

    session: Session
    software_version: str
    """Version of the client; empty: it did not say."""
    transports: Sequence[types_pb2.Transport]
    """How its gradients come, each once; none: none has come."""


class Rivals(NamedTuple):
    """Two clients that would contribute as one worker."""

    owner: Session
    """The one that has the seat."""
    refused: Session
    """The one that asked for it last, in vain."""
    since_s: float
    """When it asked first."""
    asked_s: float
    """When it asked last."""

    @property
    def words(self) -> str:
        """Names of both, for a message."""
        return f"{self.owner}, which contributes, and {self.refused}, which was refused"


_FOR_GOOD = Tenure()

RETURN_AFTER_END_S = 1.0
"""For so long after a worker's session has ended in order, others wait for its next one. A client
that is closed and made anew in one process attends within that; longer, and those who wait for a
worker that is gone for good would learn it late."""
_RIVAL_ASKS_S = TAKE_OVER_S + 1.0
"""For so long a client asks for a seat that is another one's, with its pauses."""
_RIVAL_KNOWN_S = 30.0
"""For so long after it has asked, others that wait learn of it."""
_MEMBER_COUNT_MAX = 512
"""Members in an answer: each takes a look at all chunks, and room in it."""
_HOST_LENGTH_MAX = 64
"""Characters of a member's host in an answer."""


class Seat(ABC):
    """One worker's seat. `owner` is None once the owner's session has ended in order.

    All that it tells of steps is in the worker's own count.
    """

    def __init__(
        self, worker_id: str, index: int, owner: Session | None, tenure: Tenure = _FOR_GOOD
    ) -> None:
        self.worker_id = worker_id
        self.index = index
        """0-based, in the order in which seats were taken."""
        self.owner = owner
        self.tenure = tenure
        self.is_over = False
        """Whether the tenure is."""
        self.from_step: int | None = None
        """Of an elastic member: the first step that awaits it; None: none does yet."""
        self.is_draining = False
        """Of an elastic member: whether it is to leave after its step."""
        self.given_at: int | None = None
        """Of an elastic member whose seat was another worker's: the newest version at that time.
        Everything of that worker's is in steps before it."""
        self.is_lost = False
        """Whether the tenure is over because the shard found the member to be gone."""
        self.counted_count = 0
        """Parts of the worker's that counted in this tenure, as far as this process knows, where
        sets are open."""
        self.late_count = 0
        """The same of those that were late."""
        self.was_taken_over = False
        """Whether the owner has it from another session, and has not contributed yet."""
        self.last_s: float | None = None
        """When it contributed last, on time.monotonic's clock; None: not to this process."""
        self.lag_s = 0.0
        """How long that was after the first contribution of any worker to the same step."""

    def stored(self, step: int) -> int:
        """What a step of the worker is in the storage."""
        return self.tenure.first_step + step

    @property
    @abstractmethod
    def unused_step(self) -> int:
        """A step that nothing has been counted of, nor is being counted just now."""

    def give_to(self, session: Session) -> None:
        """Makes another session the owner."""
        self.owner = session
        self.was_taken_over = True
        self.forget_checksums()

    @abstractmethod
    def forget_checksums(self) -> None:
        """Forgets what the owner's last payloads were: those of another session may differ."""

    def begin_at(self, version: int, *, is_restored: bool = False) -> None:
        """Forgets what another worker contributed, whose seat it was up to a version.

        Args:
            version: The version.
            is_restored: Whether the worker itself may have contributed since.
        """
        self.given_at = version
        self._forget_marks(is_restored)

    @abstractmethod
    def _forget_marks(self, is_restored: bool) -> None:
        """Forgets the marks of steps before `given_at`, some of which may be its own."""

    def contributed(self, session: Session, now_s: float, begun_s: float | None) -> None:
        """Notes that something of a session's, which may have lost the seat meanwhile, counted.

        Args:
            session: The session that contributes.
            now_s: When.
            begun_s: When its step began; None: with this.
        """
        self.last_s, self.lag_s = now_s, 0.0 if begun_s is None else now_s - begun_s
        if self.owner is not None and self.owner.number == session.number:
            self.was_taken_over = False

    def check(self, contributor: Contributor[Any]) -> None:
        """Refuses who has not the seat, or not any more.

        Raises:
            StepOrderError: the tenure is over.
            WorkerIdInUseError: another session has taken it over.
            SessionUnknownError: the session has ended.
        """
        number = self.tenure.number
        if self.is_over or (number and number != contributor.tenure):
            raise _tenure_is_over(contributor.worker_id)
        session = contributor.session
        owner = self.owner
        if owner is None:
            raise SessionUnknownError(
                f"the session of worker {self.worker_id!r} has ended; connect again",
                worker_id=self.worker_id,
            )
        if owner.number != session.number:
            raise WorkerIdInUseError(
                f"worker id {self.worker_id!r}: {owner} has taken over from this {session}, which "
                "was not connected then; what this process sends under that id is not counted; "
                "give each worker an id of its own",
                worker_id=self.worker_id,
            )


SeatT = TypeVar("SeatT", bound=Seat)


class Contributor(Generic[SeatT]):
    """A worker that asks for a seat, or whose gradients a stream carries.

    Args:
        worker_id: The worker's id.
        session: In which life of its process.
        tenure: The number of its tenure, or of the one that it asks for; no matter where seats are
            kept for good.
        asks: Whether it asks for a seat, and contributes nothing.
        begins_anew: With `asks`: whether the seat that it has is to have that tenure.
        from_step: With `asks`: the first step that awaits it, of an elastic member; None: none yet.
    """

    def __init__(
        self,
        worker_id: str,
        session: Session,
        tenure: int = 0,
        *,
        asks: bool = False,
        begins_anew: bool = False,
        from_step: int | None = None,
    ) -> None:
        self.from_step = from_step
        self.worker_id = worker_id
        self.session = session
        self.tenure = tenure
        self.asks = asks
        self.begins_anew = begins_anew
        self.seat: SeatT | None = None
        """Known once it has contributed."""
        self.superseded: list[int] = []
        """Chunks that it sent for which Decision was SUPERSEDED."""
        self.late: set[int] = set()
        """Parts of its last step that were late."""
        self.is_over = False
        """Whether its tenure was found to be over, of an elastic member."""
        self.may_have_counted = False
        """Whether a late part of its last step may have counted before: nothing here knows it."""


# Events. That of a seat: who takes the next one. Of an owner: the same worker's other session.
# Of a tenure: seat `seat_index` is that worker's from now on.


def seat_event(seat: Seat) -> Event:
    """The log's event for a worker that takes the next seat."""
    event = {"kind": "seat", **_facts(seat.worker_id, seat.owner, seat.tenure)}
    if seat.from_step is not None:
        event["from_step"] = seat.from_step
    if seat.is_over:
        event["is_over"] = True
    if seat.given_at is not None:
        event["given_at"] = seat.given_at
    return event


def owner_event(worker_id: str, owner: Session | None) -> Event:
    """The log's event for a seat that changes its owner."""
    return {"kind": "owner", "worker_id": worker_id, "session": owner and list(owner)}


def _facts(worker_id: str, owner: Session | None, tenure: Tenure) -> Event:
    return {"worker_id": worker_id, "session": owner and list(owner), "tenure": list(tenure)}


def owner_of(event: Event) -> Session | None:
    """The owner that an event tells of."""
    return None if event["session"] is None else Session(*event["session"])


def tenure_of(event: Event) -> Tenure:
    """The tenure that an event tells of."""
    return Tenure(*event["tenure"])


class Seats(ABC, Generic[SeatT]):
    """The part of a tracker that knows workers.

    Args:
        worker_count: Workers that make a synchronous step; 0: asynchronous.
        worker_count_max: Workers that may have a seat.
        sessions: Answers which sessions are alive.
        elastic: Limits of members that come and go; None: worker_count of them make a step.
    """

    def __init__(
        self,
        *,
        worker_count: int,
        worker_count_max: int,
        sessions: Liveness,
        elastic: Elastic | None = None,
    ) -> None:
        self.elastic = elastic
        """Limits of the members that make a step, where workers come and go."""
        self.is_sync = worker_count > 0
        """Whether steps need all workers."""
        self._worker_count = worker_count
        self._worker_count_max = worker_count_max
        self._sessions = sessions
        self._seats: dict[str, SeatT] = {}
        """In the order of their indexes."""
        self.ended: dict[str, int] = {}
        """Workers with a seat whose sessions have ended in order, the first one first; with the
        session's number, 0 where it is not known."""
        self.rivals: dict[str, Rivals] = {}
        """Clients that asked for a seat whose owner is connected, by its worker."""
        self.come_to_rest: Callable[[], None] = lambda: None
        """Returns when nothing is being counted that was checked before the call."""
        self.give_on: Callable[[SeatT], None] = lambda seat: None
        """Called before a seat of an elastic member is another worker's."""
        self.awaited: tuple[SeatT, ...] = ()
        """Elastic members that open steps may await: those whose tenure is not over."""
        self._openers: dict[int, str] = {}
        """Worker ids by the sessions that opened it, of which some may be gone, or unknown yet."""

    @abstractmethod
    def _fresh_seat(self, worker_id: str, index: int, owner: Session, tenure: Tenure) -> SeatT:
        """The seat of a worker that has contributed nothing."""

    @abstractmethod
    def _seat_after(
        self, seat: SeatT, worker_id: str, owner: Session | None, tenure: Tenure
    ) -> SeatT:
        """The same seat in a later tenure, with what the storage has of that."""

    @property
    @abstractmethod
    def newest_version(self) -> int:
        """The most updates that anything of it has seen."""

    @abstractmethod
    def restore_seat(self, event: Event, stored: Any) -> SeatT:
        """Gives a worker the next seat, as was logged; `stored` is what the storage has of it."""

    @abstractmethod
    def next_step(self, worker_id: str) -> int:
        """The first step that a worker has not contributed in full, and still can."""

    @abstractmethod
    def contributed(self, step: int) -> list[str]:
        """Workers that have contributed all of `step`."""

    @abstractmethod
    def has_begun(self, step: int) -> bool:
        """Whether any worker has contributed to `step`."""

    def missing(self, step: int) -> tuple[list[str], int]:
        """Known workers that have not contributed all of `step`, and how many were never seen."""
        return self._missing_beside(self.contributed(step))

    def remember(self, worker_id: str, session_number: int) -> None:
        """Notes that a worker takes part, so that it can be named when it is missing.

        While its session is alive, and while there is room: of very many, some are not named.
        """
        is_new = session_number not in self._openers  # which keeps its place among them
        if is_new and len(self._openers) >= self._worker_count_max:
            self._openers = {
                number: name
                for number, name in self._openers.items()
                if self._sessions.alive_for_s(number)
            }
        if not is_new or len(self._openers) < self._worker_count_max:
            self._openers[session_number] = worker_id

    def seat(self, contributor: Contributor[SeatT], note: TakesNote) -> SeatT:
        """The seat of a worker, which belongs to the session from now on; see the module.

        Raises:
            WorkerIdInUseError: another session has it, and is alive.
            StepOrderError: it contributes in a tenure that is over.
            SeatsTakenError: worker_count others have contributed already.
            LimitError: as many workers as the limit allows have seats, and none is to be given
                away.
            ArgumentError: it asks for a seat without a tenure.
        """
        if self.elastic is not None:
            return self._member_seat(contributor, note)
        worker_id, session = contributor.worker_id, contributor.session
        seat = self._seats.get(worker_id)
        number = 0
        if not self.is_sync:
            self._check_tenure(contributor, seat)
            number = contributor.tenure
        if seat is None:
            given = self._check_room(worker_id)
            if given is not None:
                return self._give(given, contributor, note)
            seat = self._fresh_seat(worker_id, len(self._seats), session, Tenure(number))
            note(seat_event(seat))
            return self._sit(seat)
        is_other = seat.owner is None or seat.owner.number != session.number
        if is_other:
            self._check_gone(worker_id, seat.owner, session)
        if contributor.begins_anew and seat.tenure.number != number:
            return self._give(seat, contributor, note)
        if is_other:
            note(owner_event(worker_id, session))
            seat.give_to(session)
            self._note_ended(seat)
        return seat

    # Elastic members.

    @abstractmethod
    def _is_spent(self, seat: SeatT) -> bool:
        """Whether no open step has a gradient of a seat."""

    def _member_seat(self, contributor: Contributor[SeatT], note: TakesNote) -> SeatT:
        """The seat of an elastic member that asks for one, in the tenure that it names.

        Raises:
            WorkerIdInUseError, ArgumentError: see `seat`.
            SeatsTakenError: max_count others are members.
            LimitError: open steps have gradients of too many who left.
            StepOrderError: it does not ask, and its tenure is over.
        """
        elastic, worker_id = self.elastic, contributor.worker_id
        assert elastic is not None
        seat = self._seats.get(worker_id)
        if seat is not None and seat.tenure.number == contributor.tenure and contributor.tenure:
            return seat
        if not contributor.asks:
            raise _tenure_is_over(worker_id)
        self._check_tenure(contributor, seat)
        session = contributor.session
        if seat is not None and seat.owner is not None and seat.owner.number != session.number:
            self._check_gone(worker_id, seat.owner, session)
        others = [each for each in self.awaited if each is not seat]
        if len(others) >= elastic.max_count:
            raise SeatsTakenError(
                f"max_count={elastic.max_count} members take part already: "
                f"{_names(each.worker_id for each in others)}; {worker_id!r} would be one more; "
                "wait until one leaves, or make it anew with a larger max_count",
                worker_id=worker_id,
            )
        if seat is None and len(self._seats) < min(elastic.seat_count_max, self._worker_count_max):
            made = self._fresh_seat(
                worker_id, len(self._seats), session, Tenure(contributor.tenure)
            )
            note(seat_event(made))
            return self._sit(made)
        if seat is None:
            self.come_to_rest()  # what was checked before its tenure ended may be counted just now
            seat = next(
                (each for each in self.seats if each.is_over and self._is_spent(each)), None
            )
        if seat is None:
            raise LimitError(
                f"{len(self._seats)} seats are taken, and open steps have gradients of all who "
                f"left; {worker_id!r} may have one when such a step has closed; try again",
                worker_id=worker_id,
            )
        was_over, seat.is_over = seat.is_over, True
        tenure, given_at = Tenure(contributor.tenure), seat.given_at
        try:
            self.come_to_rest()
            if seat.worker_id != worker_id:
                self.give_on(seat)
                given_at = self.newest_version
            event = {"kind": "tenure", "seat_index": seat.index}
            event |= _facts(worker_id, session, tenure)
            note(event if given_at is None else event | {"given_at": given_at})
        except BaseException:
            seat.is_over = was_over
            raise
        made = self._replace(seat, worker_id, session, tenure)
        made.given_at = given_at
        if given_at is not None and seat.worker_id != worker_id:
            made.begin_at(given_at)
        return made

    def seat_in(self, worker_id: str, tenure: int) -> SeatT | None:
        """The seat of an elastic member in a tenure, which may be over; None: it has another."""
        seat = None if self.elastic is None else self._seats.get(worker_id)
        return seat if seat is not None and seat.tenure.number == tenure else None

    def member(self, worker_id: str, tenure: int) -> SeatT | None:
        """An elastic member's seat, if its tenure is that, and not over."""
        seat = self.seat_in(worker_id, tenure)
        return None if seat is None or seat.is_over else seat

    def await_from(self, worker_id: str, tenure: int, step: int, note: TakesNote) -> bool:
        """Open steps await an elastic member from a step on; whether that was another one before.

        They do not where its tenure is over: the answer says so.
        """
        seat = self.member(worker_id, tenure)
        if seat is None or seat.from_step == step:
            return False
        note({"kind": "from", "seat_index": seat.index, "from_step": step})
        seat.from_step = step
        return True

    def end_tenure(self, worker_id: str, tenure: int, note: TakesNote) -> bool:
        """No open step awaits an elastic member any more; whether one did. Safe to repeat."""
        seat = self.member(worker_id, tenure)
        if seat is None:
            return False
        note({"kind": "over", "seat_index": seat.index})
        self.restore_over(seat.index)
        return True

    def restore_from(self, seat_index: int, step: int) -> None:
        """Goes on from a first step that was noted."""
        self.seats[seat_index].from_step = step

    def restore_over(self, seat_index: int) -> None:
        """Goes on from the end of a tenure that was noted."""
        self.seats[seat_index].is_over = True
        self._count_awaited()

    def _count_awaited(self) -> None:
        if self.elastic is not None:
            self.awaited = tuple(each for each in self._seats.values() if not each.is_over)

    @abstractmethod
    def needed_step(self, worker_id: str) -> int | None:
        """The lowest open step that can't reach the floor without a worker; None: there is none."""

    def lost(self, now_s: float) -> tuple[list[SeatT], float]:
        """Elastic members that are gone for good, and in how many seconds to look again.

        Args:
            now_s: On time.monotonic's clock.
        """
        elastic = self.elastic
        assert elastic is not None
        found, next_s = [], elastic.member_return_s
        lease_s = elastic.member_lease_s + elastic.member_return_s
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
                rest_s = max(alive_for_s, elastic.member_return_s - gone_s)
            if rest_s <= 0:
                found.append(seat)
            else:
                next_s = min(next_s, rest_s)
        return found, next_s

    def _check_tenure(self, contributor: Contributor[SeatT], seat: SeatT | None) -> None:
        if contributor.asks:
            if not contributor.tenure:
                raise ArgumentError("tenure must be a number drawn at random, not 0; got 0")
        elif seat is None or seat.tenure.number != contributor.tenure:
            raise _tenure_is_over(contributor.worker_id)

    def _give(self, seat: SeatT, contributor: Contributor[SeatT], note: TakesNote) -> SeatT:
        """Ends a seat's tenure, and begins another."""
        # Other threads may be counting: what has not been checked by now is refused.
        seat.is_over = True
        tenure = Tenure(contributor.tenure, seat.stored(seat.unused_step))
        facts = _facts(contributor.worker_id, contributor.session, tenure)
        try:
            note({"kind": "tenure", "seat_index": seat.index, **facts})
        except BaseException:
            seat.is_over = False
            raise
        return self._replace(seat, contributor.worker_id, contributor.session, tenure)

    def restore_tenure(self, event: Event) -> None:
        """Goes on from a tenure that was noted.

        Raises:
            IndexError, KeyError, TypeError: there is no such seat, or the event is another's.
        """
        seat = self.seats[event["seat_index"]]
        made = self._replace(seat, event["worker_id"], owner_of(event), tenure_of(event))
        if "given_at" in event:
            made.begin_at(event["given_at"], is_restored=True)

    def _replace(self, seat: SeatT, worker_id: str, owner: Session | None, tenure: Tenure) -> SeatT:
        made = self._seat_after(seat, worker_id, owner, tenure)
        self.ended.pop(seat.worker_id, None)
        seats = (made if each is seat else each for each in self.seats)
        self._seats = {each.worker_id: each for each in seats}
        self._note_ended(made)
        self._count_awaited()
        return made

    def events(self) -> list[Event]:
        """The fewest events that lead to where the seats stand."""
        return [
            *map(seat_event, self.seats),
            *(owner_event(worker_id, None) for worker_id in self.ended),  # for their order
        ]

    def _check_room(self, worker_id: str) -> SeatT | None:
        """The seat that a newcomer is to be given; None: there is room for one more."""
        if self.is_sync and len(self._seats) >= self._worker_count:
            raise SeatsTakenError(
                f"worker_count={self._worker_count} workers contribute already: "
                f"{_names(self._seats)}{self._gone_words()}; {worker_id!r} would be one more; a "
                "replacement must use the worker_id of the worker that it replaces (worker_id=, "
                "$SHARDWELL_WORKER_ID); if more are to take part, give all of them a greater "
                "worker_count=, or members=",
                worker_id=worker_id,
            )
        if len(self._seats) < self._worker_count_max:
            return None
        advice = "reuse worker ids"
        if not self.is_sync:
            ended = next(iter(self.ended), None)
            if ended is not None:  # nothing of it can come any more
                return self._seats[ended]
            spares = [(self._spare_in_s(seat), seat.index) for seat in self.seats]
            spare_in_s, index = min(spares)
            if spare_in_s <= 0:
                return self.seats[index]
            advice = "close clients that are done"
            if spare_in_s < math.inf:
                advice += (
                    f", or try again in {spare_in_s:.3g} s, when a worker that is gone will have "
                    "been so for session_lease_s"
                )
        raise LimitError(
            f"limit worker_count_max={self._worker_count_max}: {worker_id!r} is one worker too "
            f"many; {advice}; or raise the limit",
            worker_id=worker_id,
        )

    def _gone_words(self) -> str:
        """Which workers with seats are not connected, for a message."""
        gone = [each for each in self._seats if not self._sessions.attends_as(each)]
        return f" (not connected: {_names(gone)})" if gone else ""

    def _spare_in_s(self, seat: SeatT) -> float:
        assert seat.owner is not None
        return self._sessions.spare_in_s(seat.owner.number)

    def _check_gone(self, worker_id: str, owner: Session | None, session: Session) -> None:
        if owner is None:
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

    def set_owner(self, worker_id: str, owner: Session | None) -> None:
        """Goes on from a change of owner that was noted; None: the last one ended in order.

        Raises:
            KeyError: the worker has no seat.
        """
        seat = self._seats[worker_id]
        before, seat.owner = seat.owner, owner
        self._note_ended(seat, 0 if before is None else before.number)

    def _note_ended(self, seat: SeatT, number: int = 0) -> None:
        self.ended.pop(seat.worker_id, None)
        if seat.owner is None:
            self.ended[seat.worker_id] = number

    def shared_ids(self) -> tuple[dict[str, Rivals], float]:
        """Workers as which a second client would contribute, beside one that does.

        Only of a client that asks no more: until then the first one may be about to end, or would
        end because of an error, and the second one would take its seat.

        Returns:
            Both, by worker id, and in how many seconds there may be more.
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

    def ids_of_several(self) -> dict[str, list[Session]]:
        """The connected clients of each worker that opened it under the id of another one."""
        names = {*self._seats, *list(self._openers.values())}
        found = {worker_id: self._sessions.all_as(worker_id) for worker_id in sorted(names)}
        return {worker_id: sessions for worker_id, sessions in found.items() if len(sessions) > 1}

    def ended_among(self, worker_ids: Iterable[str]) -> tuple[list[str], float]:
        """The workers that have ended in order, and under whose ids no session attends.

        Workers that ended before any of those came who attend now are expected with them: a
        training that is started again, its workers one after the other.

        Returns:
            Their ids, and for how many seconds more all of them may be expected back: 0 once one
            has been gone for RETURN_AFTER_END_S; math.inf: there are none.
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

    def _sit(self, seat: SeatT) -> SeatT:
        """Gives the next seat to its worker."""
        self._seats[seat.worker_id] = seat
        self._note_ended(seat)
        self._count_awaited()
        return seat

    def tenure_of(self, worker_id: str) -> int:
        """The number of a worker's tenure; 0: it has none, or seats are kept for good."""
        seat = self._seats.get(worker_id)
        is_none = seat is None or (seat.is_over and self.elastic is not None)
        return 0 if seat is None or is_none else seat.tenure.number

    def has_seat(self, worker_id: str) -> bool:
        """Whether a worker has a seat."""
        return worker_id in self._seats

    def rank_of(self, worker_id: str) -> tuple[int, int]:
        """A worker's rank, and how many workers have one; (0, 0): asynchronous, or no worker.

        A fixed crew's ranks are the indexes of its seats. Of elastic members the one that steps
        await longest has rank 0; workers that have opened it without joining come behind all of
        them, in the order in which they opened it.
        """
        if not self.is_sync or not worker_id:
            return 0, 0
        if self.elastic is None:
            seat = self._seats.get(worker_id)
            return (0 if seat is None else seat.index), self._worker_count
        by_age = sorted(
            self.awaited,
            key=lambda seat: (seat.from_step is None, seat.from_step or 0, seat.index),
        )
        ranked = [seat.worker_id for seat in by_age]
        member_count = len(ranked)
        if worker_id not in ranked:
            ranked += [
                name
                for number, name in self._openers.items()
                if name not in ranked and self._sessions.alive_for_s(number)
            ]
        rank = ranked.index(worker_id) if worker_id in ranked else len(ranked)
        return rank, max(member_count, rank + 1)

    @property
    def seats(self) -> list[SeatT]:
        """By index."""
        return list(self._seats.values())  # others may join meanwhile

    @property
    def done_worker_ids(self) -> list[str]:
        """Workers with a seat whose sessions have ended in order."""
        return [seat.worker_id for seat in self.seats if seat.owner is None]

    def living(self, but: int = 0) -> list[tuple[str, int, float]]:
        """Workers with a seat, or that have opened it, whose sessions count as alive.

        Args:
            but: Number of a session that is none of them; 0: none.

        Returns:
            Of each its id, the number of its session, and `Liveness.alive_for_s` of that.
        """
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

    @property
    def has_ended(self) -> bool:
        """Whether every worker with a seat has left in order, and none is about to take one.

        Of elastic members some may have been lost before the last one left.
        """
        lost = [seat.owner.number for seat in self.seats if seat.owner is not None]
        if not self.ended or self._newcomers():
            return False
        if not lost or self.elastic is None or self.awaited:
            return not lost
        gone_for_s = self._sessions.gone_for_s
        return min(map(gone_for_s, self.ended.values())) < min(map(gone_for_s, lost))

    @property
    def gone_for_s(self) -> float:
        """For how long no worker with a seat has been connected, though not all left in order.

        0 where one is, where no worker has a seat, where all left in order, or where a newcomer is
        about to take a seat.
        """
        owners = [seat.owner for seat in self.seats if seat.owner is not None]
        if not owners or self._newcomers():
            return 0.0
        return min(self._sessions.gone_for_s(owner.number) for owner in owners)

    def _newcomers(self) -> list[str]:
        """Workers that have opened it, are alive, and may take a seat, or have one."""
        taken = len(self._seats) if self.elastic is None else len(self.awaited)
        has_room = not self.is_sync or taken < self._worker_count
        return [
            worker_id
            for number, worker_id in list(self._openers.items())
            if (has_room or worker_id in self._seats) and self._sessions.alive_for_s(number)
        ]

    def owned_by(self, session_number: int) -> list[str]:
        """Workers whose seats a session has; one at the most, as a session has one worker_id."""
        return [
            seat.worker_id
            for seat in self.seats
            if seat.owner is not None and seat.owner.number == session_number
        ]

    def _missing_beside(self, done: Iterable[str]) -> tuple[list[str], int]:
        """Known workers that are not among `done`, and how many more were never seen."""
        if not self.is_sync:
            return [], 0
        present = set(done)
        candidates = dict.fromkeys(self._seats)
        if len(candidates) < self._worker_count:
            for number, worker_id in list(self._openers.items()):
                if self._sessions.alive_for_s(number):
                    candidates[worker_id] = None
        missing = [worker_id for worker_id in candidates if worker_id not in present]
        return missing, max(self._worker_count - len(present) - len(missing), 0)


class Rest(NamedTuple):
    """Whether all workers have gone, so that no step waits for any."""

    has_ended: bool
    """Every worker with a seat has left in order; see `Seats.has_ended`."""
    abandoned_for_s: float | None
    """For how long none has been connected, where not all left in order; None: not for long."""

    @property
    def is_over(self) -> bool:
        """Either of them."""
        return self.has_ended or self.abandoned_for_s is not None


def rest_of(seats: Seats[Any], abandoned_after_s: float) -> Rest:
    """Whether all members of a parameter or table have left, or are gone for long."""
    gone_for_s = seats.gone_for_s
    is_abandoned = gone_for_s >= abandoned_after_s > 0
    has_ended = seats.has_ended
    return Rest(has_ended, gone_for_s if is_abandoned and not has_ended else None)


def step_wait(
    seats: Seats[Any],
    missing_worker_ids: Iterable[str],
    attending: Mapping[str, Attendance],
    open_for_s: float | None,
) -> types_pb2.StepWait:
    """What the open step waits for, as status tells it.

    Args:
        seats: Seats of the parameter or table.
        missing_worker_ids: Workers to be named.
        attending: Sessions that are connected, by their workers.
        open_for_s: How long ago the step began; None: it has not.
    """
    owners = {seat.worker_id: seat.owner for seat in seats.seats}
    wait = types_pb2.StepWait(open_for_s=open_for_s)
    for worker_id in missing_worker_ids:
        attendance = attending.get(worker_id)
        connected = attendance is not None
        session = owners.get(worker_id) if attendance is None else attendance.session
        host, pid = ("", 0) if session is None else (session.host, session.pid)
        wait.workers.add(worker_id=worker_id, host=host, pid=pid, connected=connected)
    return wait


def state_of(seats: Seats[Any], seat: Seat) -> types_pb2.MemberState:
    """How far a worker with a seat takes part."""
    if seat.is_over or seat.owner is None:
        return types_pb2.MEMBER_STATE_LOST if seat.is_lost else types_pb2.MEMBER_STATE_OVER
    if seat.is_draining:
        return types_pb2.MEMBER_STATE_DRAINING
    is_seated = not seats.is_sync or (seats.elastic is not None and seat.from_step is None)
    return types_pb2.MEMBER_STATE_SEATED if is_seated else types_pb2.MEMBER_STATE_AWAITED


def members_of(
    seats: Seats[Any], count_max: int, now_s: float, attending: Mapping[str, Attendance]
) -> list[types_pb2.MemberStatus]:
    """The workers with seats, and how they keep up; of many those that lag most.

    Args:
        seats: Seats of the parameter or table.
        count_max: How many are listed.
        now_s: On time.monotonic's clock.
        attending: Sessions that are connected, by their workers.
    """
    count_max = min(count_max, _MEMBER_COUNT_MAX)
    found = sorted(seats.seats, key=lambda seat: (seat.is_over, -seat.lag_s))[:count_max]
    members = []
    for seat in found:
        member = types_pb2.MemberStatus(
            worker_id=seat.worker_id,
            next_step=seats.next_step(seat.worker_id),
            state=state_of(seats, seat),
            from_step=seat.from_step,
            counted_chunk_count=seat.counted_count,
            late_chunk_count=seat.late_count,
        )
        if seat.last_s is not None:
            member.idle_s = max(now_s - seat.last_s, 0.0)
            if seats.is_sync:
                member.lag_s = seat.lag_s
        attendance = attending.get(seat.worker_id)
        session = seat.owner if attendance is None else attendance.session
        if session is not None:
            member.host, member.pid = session.host[:_HOST_LENGTH_MAX], session.pid
        if attendance is not None:
            member.connected = True
            member.software_version = attendance.software_version
            member.transports.extend(attendance.transports)
        members.append(member)
    return members


def _tenure_is_over(worker_id: str) -> StepOrderError:
    return StepOrderError(
        f"worker {worker_id!r} has not, or not any more, the seat that it sends a gradient for: "
        "when there are worker_count_max workers, that of one which has ended, or is away for "
        "longer than session_lease_s, is given to a newcomer; the gradient is not counted now, and "
        "whether it was before is not known any more; open the parameter or table again, and go on "
        "as a new worker at its next_step",
        worker_id=worker_id,
    )


def _names(worker_ids: Iterable[str], most: int = 8) -> str:
    names = [repr(worker_id) for worker_id in worker_ids]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
