"""Goal: of two sessions with one worker id one at most can contribute, in whatever order they come.

And where there are more workers than seats, no living worker loses its own, and no gradient
counts twice.

Method: a hypothesis state machine drives Sessions and the seats of a StepTracker, with a clock of
its own and restarts, beside a model that keeps what each process did: when its calls opened and
ended, who was given a place last, what was logged, and how much of each tenure was counted. Whether
a session may have a place, whose place that is, and whether its gradient counts, is derived from
that by the words of session.proto.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.data.sessions import applicant, contributor, session_of, step_tracker, take
from harness.machines import cases
from shardwell.errors import (
    ArgumentError,
    LimitError,
    SeatsTakenError,
    SessionEndedError,
    SessionUnknownError,
    ShardUnavailableError,
    StepOrderError,
    WorkerIdInUseError,
)
from shardwell.rpc.session import Session
from shardwell_server.shard.crews import Event, owner_event, owner_of
from shardwell_server.shard.sessions import Sessions
from shardwell_server.shard.step_tracker import Decision

WORKERS = ["w0", "w1", "w2", "w3"]
LIVES = range(2)
RETURN_S = 5.0
LEASE_S = 8.0
SESSION_COUNT_MAX = 4
PLACE_COUNT = 2
workers, lives = st.sampled_from(WORKERS), st.sampled_from(LIVES)


class Place:
    """A seat in the model."""

    def __init__(self, worker: str, owner: Session | None, tenure: int) -> None:
        self.worker = worker
        self.owner = owner
        self.tenure = tenure
        self.ended = 0
        """When its owner ended in order, in the order of such ends."""


class SessionMachine(RuleBasedStateMachine):
    """The tracker has one chunk, two seats, and is asynchronous or not."""

    @initialize(is_sync=st.booleans())
    def open(self, is_sync: bool) -> None:
        self.is_sync = is_sync
        self.now_s = 100.0
        self.events: list[Event] = []
        self.stored: Counter[int] = Counter()
        """Steps that the storage has, by seat."""
        self.places: list[Place] = []
        self.known: dict[Session, int] = {}
        """The tenure that each process believes to have."""
        self.counted: Counter[tuple[str, int]] = Counter()
        self.numbers = itertools.count(1)
        self.start()

    def start(self) -> None:
        self.started_s = self.now_s
        self.sessions = Sessions(
            count_max=SESSION_COUNT_MAX,
            lease_s=LEASE_S,
            return_s=RETURN_S,
            now_s=lambda: self.now_s,
        )
        self.tracker = step_tracker(
            worker_count=PLACE_COUNT if self.is_sync else 0,
            worker_count_max=PLACE_COUNT,
            sessions=self.sessions,
        )
        self.calls: dict[Session, list[object]] = {}
        self.remembered: dict[Session, bool] = {}
        """Sessions that left, of which the shard knows, and whether they ended in order."""
        self.left_s: dict[Session, float] = {}

    def place_of(self, worker: str) -> Place | None:
        return next((place for place in self.places if place.worker == worker), None)

    def may_live(self, session: Session) -> bool:
        """Whether the shard must take a session for alive."""
        if self.calls.get(session):
            return True
        forgot = len(self.left_s) > SESSION_COUNT_MAX and self.sessions.alive_for_s(session.number)
        return (session not in self.left_s or bool(forgot)) and (
            self.now_s < self.started_s + RETURN_S
        )

    def gone_s(self, session: Session) -> float:
        """For how long a session is gone, for all that a shard can know."""
        if self.calls.get(session):
            return -1.0
        return self.now_s - self.left_s.get(session, self.started_s)

    def note_left(self, session: Session, *, in_order: bool = False) -> None:
        self.left_s.pop(session, None)
        self.left_s[session] = self.now_s
        in_order |= self.remembered.pop(session, False)
        self.remembered[session] = in_order
        if len(self.remembered) > SESSION_COUNT_MAX:
            del self.remembered[next(iter(self.remembered))]

    @rule(worker=workers, life=lives)
    def attend(self, worker: str, life: int) -> None:
        session = session_of(worker, life)
        attending = [one for one, calls in self.calls.items() if calls]
        if self.remembered.get(session):
            with pytest.raises(SessionEndedError, match="has ended"):
                self.sessions.attend(worker, session, lambda: None)
            return
        if session not in attending and len(attending) == SESSION_COUNT_MAX:
            with pytest.raises(LimitError, match="session_count_max"):
                self.sessions.attend(worker, session, lambda: None)
            return
        token = self.sessions.attend(worker, session, lambda: None)
        if session not in attending:
            self.remembered.pop(session, None)
        self.calls.setdefault(session, []).append(token)

    @rule(worker=workers, life=lives, again=st.booleans())
    def leave(self, worker: str, life: int, again: bool) -> None:
        session = session_of(worker, life)
        if calls := self.calls.get(session):
            token = calls.pop(0)
            for _ in range(1 + again):
                self.sessions.leave(session, token)
            if not calls:
                self.note_left(session)

    @rule(worker=workers, life=lives)
    def end(self, worker: str, life: int) -> None:
        """As Shard.end_session and Register.end_session do."""
        session = session_of(worker, life)
        self.sessions.end(session.number)
        owned = [place for place in self.places if place.owner == session]
        assert self.tracker.crew.owned_by(session.number) == [place.worker for place in owned]
        for place in owned:
            self.events.append(owner_event(place.worker, None))
            self.tracker.crew.set_owner(place.worker, None)
            place.owner, place.ended = None, next(self.numbers)
        self.calls[session] = []
        self.note_left(session, in_order=True)

    @rule(duration_s=st.sampled_from([0.5, 2.0, 10.0]))
    def wait(self, duration_s: float) -> None:
        self.now_s += duration_s

    @rule()
    def restart(self) -> None:
        self.start()
        for event in self.events:
            match event["kind"]:
                case "seat":
                    index = len(self.tracker.crew.seats)
                    self.tracker.crew.restore_seat(event, [self.stored[index] - 1])
                case "tenure":
                    self.tracker.crew.restore_tenure(event)
                case _:
                    self.tracker.crew.set_owner(event["worker_id"], owner_of(event))

    def spare(self) -> list[Place]:
        """Those that may be given to a newcomer, the one that is gone for longest first."""
        ended = [place for place in self.places if place.owner is None]
        gone = [
            place for place in self.places if place.owner and self.gone_s(place.owner) >= LEASE_S
        ]
        ended.sort(key=lambda place: place.ended)
        gone.sort(key=lambda place: -self.gone_s(place.owner))
        return ended + gone

    @rule(
        worker=workers, life=lives, attends=st.booleans(), anew=st.booleans(), fails=st.booleans()
    )
    def contribute(self, worker: str, life: int, attends: bool, anew: bool, fails: bool) -> None:
        """A process that takes its place and gives one gradient, as clients do."""
        session = session_of(worker, life)
        if attends and not self.calls.get(session):
            self.attend(worker, life)
        if not self.calls.get(session):
            has_ended = self.remembered.get(session)
            with pytest.raises(SessionEndedError if has_ended else SessionUnknownError):
                self.sessions.check(session.number, worker)
            return
        assert self.sessions.check(session.number, worker) == session
        drawn = next(self.numbers)
        asks = applicant(worker, life, drawn, begins_anew=anew)
        place = self.place_of(worker)
        if place and place.owner not in (None, session) and self.may_live(place.owner):
            with pytest.raises(WorkerIdInUseError) as caught:
                self.tracker.crew.seat(asks, self.events.append)
            assert str(place.owner) in caught.value.message
            assert str(session) in caught.value.message
            assert (caught.value.free_in_s is None) == bool(self.calls.get(place.owner))
            return
        if fails:
            self.fail(asks)
        given = None
        if place is None and len(self.places) == PLACE_COUNT:
            if self.is_sync:
                with pytest.raises(SeatsTakenError):
                    self.tracker.crew.seat(asks, self.events.append)
                return
            given = self.given(asks)
            if given is None:
                return
        else:
            seat = self.tracker.crew.seat(asks, self.events.append)
            begins = place is None or (anew and not self.is_sync)
            if begins or place.owner != session:
                assert seat.was_taken_over == (not begins)
        tenure = 0 if self.is_sync else drawn
        if given is not None:
            given.worker, given.owner, given.tenure = worker, session, tenure
        elif place is None:
            self.places.append(Place(worker, session, tenure))
        else:
            place.owner = session
            place.tenure = tenure if anew else place.tenure
        seat = self.tracker.crew.seat(applicant(worker, life, drawn), self.events.append)
        place = self.place_of(worker)
        assert place is not None
        assert seat.tenure.number == self.tracker.crew.tenure_of(worker) == place.tenure
        self.known[session] = place.tenure
        self.give(worker, session)

    def given(self, asks: Any) -> Place | None:
        """The place that a newcomer gets where there are as many as the limit allows."""
        before = {seat.index: seat for seat in self.tracker.crew.seats}
        spare = self.spare()
        knows_all = len(self.left_s) <= SESSION_COUNT_MAX
        seat = None
        with contextlib.suppress(LimitError):
            seat = self.tracker.crew.seat(asks, self.events.append)
        if seat is None:
            assert not spare or not (knows_all or spare[0].owner is None)
            return None
        place = self.places[seat.index]
        assert place in spare
        if knows_all or spare[0].owner is None:
            gone = [place.ended if place.owner is None else -self.gone_s(place.owner)]
            gone.append(spare[0].ended if spare[0].owner is None else -self.gone_s(spare[0].owner))
            assert (place.owner is None) == (spare[0].owner is None)
            assert gone[0] == gone[1]
        old = contributor(place.worker, 0, place.tenure)
        old.seat = before[seat.index]  # a stream that has it from before
        with pytest.raises(StepOrderError, match="given to a newcomer"):
            self.tracker.crew.check(old)
        return place

    def fail(self, asks: Any) -> None:
        """What can't be noted does not happen."""
        before = [
            (seat, seat.worker_id, seat.owner, seat.is_over) for seat in self.tracker.crew.seats
        ]

        def note(event: Event) -> None:
            raise OSError("disk full")

        with contextlib.suppress(OSError, LimitError, SeatsTakenError):
            self.tracker.crew.seat(asks, note)
        after = [
            (seat, seat.worker_id, seat.owner, seat.is_over) for seat in self.tracker.crew.seats
        ]
        assert after == before

    @rule(worker=workers, life=lives)
    def replace(self, worker: str, life: int) -> None:
        """One process of a worker dies, another one contributes at once."""
        other = session_of(worker, 1 - life)
        while self.calls.get(other):
            self.leave(worker, 1 - life, again=False)
        self.contribute(worker, life, attends=True, anew=False, fails=False)

    @rule(duration_s=st.sampled_from([0.0, LEASE_S, 100.0]))
    def crash(self, duration_s: float) -> None:
        """All connections end; some time later others may come."""
        for worker, life in itertools.product(WORKERS, LIVES):
            while self.calls.get(session_of(worker, life)):
                self.leave(worker, life, again=False)
        self.now_s += duration_s

    @rule(worker=workers, life=lives)
    def come_late(self, worker: str, life: int) -> None:
        """A gradient of a process that had a place, be its session alive or not."""
        session = session_of(worker, life)
        if session in self.known:
            self.give(worker, session)

    @rule(worker=workers, life=lives, back=st.integers(1, 3))
    def repeat(self, worker: str, life: int, back: int) -> None:
        """A gradient of its tenure that was counted before: a duplicate, or refused."""
        session = session_of(worker, life)
        tenure = self.known.get(session)
        if tenure is None or self.counted[worker, tenure] < back:
            return
        step = self.counted[worker, tenure] - back
        seat = self.standing(worker, session, tenure)
        if seat is not None:
            assert self.tracker.decide(seat, 0, step) is Decision.DUPLICATE

    def standing(self, worker: str, session: Session, tenure: int) -> Any:
        """The seat, if a gradient of a tenure may count; None: it was refused."""
        stream = contributor(worker, LIVES.index(session.pid - 1000), tenure)
        place = self.place_of(worker)
        if not self.is_sync and (place is None or place.tenure != tenure):
            with pytest.raises(StepOrderError, match="given to a newcomer"):
                self.tracker.crew.seat(stream, self.events.append)
            for seat in self.tracker.crew.seats:
                if seat.worker_id == worker:
                    stream.seat = seat
                    with pytest.raises(StepOrderError, match="given to a newcomer"):
                        self.tracker.crew.check(stream)
            return None
        assert place is not None
        seat = next(seat for seat in self.tracker.crew.seats if seat.worker_id == worker)
        stream.seat = seat
        if place.owner is None:
            with pytest.raises(SessionUnknownError, match="has ended"):
                self.tracker.crew.check(stream)
            return None
        if place.owner != session:
            with pytest.raises(WorkerIdInUseError, match="has taken over") as caught:
                self.tracker.crew.check(stream)
            assert str(place.owner) in caught.value.message
            return None
        self.tracker.crew.check(stream)
        return seat

    def give(self, worker: str, session: Session) -> None:
        tenure = self.known[session]
        seat = self.standing(worker, session, tenure)
        if seat is None:
            return
        step = self.counted[worker, tenure]
        expected = self.tracker.decide(seat, 0, step, 7)
        if self.is_sync and expected is Decision.WAIT:
            return
        assert expected is Decision.COUNT
        self.tracker.record(
            seat, 0, step, self.tracker.following(0, 1, closes=self.tracker.is_complete(0, seat)), 7
        )
        seat.contributed(session, 0.0, None)
        assert not seat.was_taken_over
        self.counted[worker, tenure] += 1
        assert seat.tenure.first_step + step >= self.stored[seat.index]
        self.stored[seat.index] = seat.tenure.first_step + step + 1

    @invariant()
    def those_who_attend_are_counted(self) -> None:
        if hasattr(self, "calls"):
            assert self.sessions.count == sum(bool(calls) for calls in self.calls.values())

    @invariant()
    def places_are_where_the_model_says(self) -> None:
        if not hasattr(self, "calls"):
            return
        found = [
            (seat.worker_id, seat.owner, seat.tenure.number) for seat in self.tracker.crew.seats
        ]
        assert found == [(place.worker, place.owner, place.tenure) for place in self.places]
        assert [seat.index for seat in self.tracker.crew.seats] == list(range(len(self.places)))
        done = [place.worker for place in self.places if place.owner is None]
        assert self.tracker.crew.done_worker_ids == done
        for place in self.places:
            if not self.is_sync:
                step = self.counted[place.worker, place.tenure]
                assert self.tracker.next_step(place.worker) == step


TestSessions, TestMoreSessions = cases(SessionMachine, max_examples=300, step_count=50)


def test_a_shard_that_stops_ends_all_calls_and_takes_no_more() -> None:
    sessions = Sessions(count_max=9, lease_s=LEASE_S, return_s=RETURN_S)
    ended: list[str] = []
    for name in WORKERS:
        sessions.attend(name, session_of(name), lambda name=name: ended.append(name))
    sessions.stop()
    assert ended == WORKERS
    with pytest.raises(ShardUnavailableError, match="stopping"):
        sessions.attend("w9", session_of("w9"), lambda: None)


def test_of_very_many_who_opened_those_who_live_are_named() -> None:
    sessions = Sessions(count_max=9, lease_s=LEASE_S, return_s=0)
    tracker = step_tracker(
        worker_count=9,
        worker_count_max=3,
        sessions=sessions,
    )
    for number in range(1000):
        tracker.crew.remember(f"gone-{number}", number + 1)
    for name in ("w0", "w1"):
        sessions.attend(name, session_of(name), lambda: None)
        tracker.crew.remember(name, session_of(name).number)
    assert tracker.crew.missing(0) == (["w0", "w1"], 7)
    for number in range(1000):
        tracker.crew.remember(f"gone-{number}", number + 1)
    assert tracker.crew.missing(0) == (["w0", "w1"], 7)


def test_an_asynchronous_place_has_a_tenure() -> None:
    tracker = step_tracker(
        worker_count=0,
        worker_count_max=1,
        sessions=Sessions(count_max=9, lease_s=LEASE_S, return_s=0),
    )
    with pytest.raises(ArgumentError, match="tenure must be"):
        tracker.crew.seat(applicant("w0", tenure=0), lambda event: None)
    with pytest.raises(StepOrderError, match="has not, or not any more, the seat"):
        tracker.crew.seat(contributor("w0"), lambda event: None)
    assert tracker.crew.seats == []


def test_the_error_says_when_a_seat_will_be_free() -> None:
    now_s = 0.0
    sessions = Sessions(count_max=9, lease_s=LEASE_S, return_s=0, now_s=lambda: now_s)
    tracker = step_tracker(worker_count=0, worker_count_max=1, sessions=sessions)
    token = sessions.attend("w0", session_of("w0"), lambda: None)
    take(tracker, "w0")
    with pytest.raises(LimitError, match=r"^limit worker_count_max=1: 'w1' .* are done; or raise"):
        take(tracker, "w1")
    sessions.leave(session_of("w0"), token)
    now_s = 3.0
    with pytest.raises(LimitError, match=r"worker_count_max=1: 'w1' .* or try again in 5 s, when"):
        take(tracker, "w1")
    now_s = LEASE_S
    assert take(tracker, "w1").index == 0
    assert [seat.worker_id for seat in tracker.crew.seats] == ["w1"]


def test_of_very_many_that_left_none_is_gone_too_early() -> None:
    """When each left is known of some; all others had left by then."""
    now_s = 0.0
    sessions = Sessions(count_max=2, lease_s=LEASE_S, return_s=0, now_s=lambda: now_s)
    for now_s in (1.0, 2.0, 3.0, 4.0):
        session = session_of("w0", int(now_s))
        sessions.leave(session, sessions.attend("w0", session, lambda: None))
    now_s = 5.0
    assert [sessions.spare_in_s(session_of("w0", life).number) for life in (0, 1, 2, 3, 4)] == [
        LEASE_S - 3,
        LEASE_S - 3,
        LEASE_S - 3,
        LEASE_S - 2,
        LEASE_S - 1,
    ]
    sessions.attend("w0", session_of("w0", 4), lambda: None)
    assert sessions.spare_in_s(session_of("w0", 4).number) == math.inf
