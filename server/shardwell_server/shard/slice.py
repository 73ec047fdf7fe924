"""What the slices of parameters and of tables have in common: members, hand-over, disk, status.

A slice is what one shard has of a parameter or a table. Its members, rates and events change
rarely, under the lock of its state; what gradients change is the business of parameter/slice.py and
table/slice.py.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from shardwell.errors import WorkerIdInUseError
from shardwell.process.spans import Spans, now_ns
from shardwell.v1 import parameter_server_pb2 as parameter_pb
from shardwell.v1 import table_pb2 as table_pb
from shardwell.v1 import types_pb2
from shardwell.v1.trace_pb2 import SPAN_KIND_FLUSH
from shardwell_server.shard.members import (
    Attendance,
    Contributor,
    Seat,
    Seats,
    members_of,
    rest_of,
    state_of,
    step_wait,
)
from shardwell_server.shard.membership_log import MembershipLog
from shardwell_server.shard.step_times import StepTimes
from shardwell_server.shard.watch import Timer
from shardwell_server.store.contract import Storage

_LOG = logging.getLogger("shardwell_server")
_KNOWN_S = 60.0
"""For so long a shard tells that a tenure is over."""

SeatT = TypeVar("SeatT", bound=Seat)
OpenedT = TypeVar("OpenedT", parameter_pb.CreateParameterResponse, table_pb.OpenTableResponse)
StatusT = TypeVar("StatusT", parameter_pb.ParameterStatus, table_pb.TableStatus)


@dataclass(frozen=True, kw_only=True)
class SliceState(Generic[SeatT]):
    """What a slice is made of, for the classes that share its work."""

    storage: Storage
    tracker: Seats[SeatT]
    """The workers' seats and contributions."""
    register: MembershipLog[SeatT]
    """What changes rarely."""
    lock: AbstractContextManager[bool]
    """Guards the register, and the seats of the tracker."""
    times: StepTimes
    """Times of its synchronous steps."""
    spans: Spans


def _on(this: weakref.ref[Any], method: str, *arguments: Any) -> None:
    """Calls a method of a slice, if there is one still."""
    found = this()
    if found is not None:
        getattr(found, method)(*arguments)


class ShardSlice(ABC, Generic[SeatT, OpenedT, StatusT]):
    """Base of both. All methods may be called from any thread.

    Args:
        name: Name of the parameter or table.
        state: What it is made of.
        abandoned_after_s: See `rest_of`.
        timer: Looks after elastic members, and ends grace; None: nothing does.
    """

    def __init__(
        self,
        name: str,
        state: SliceState[SeatT],
        abandoned_after_s: float,
        timer: Timer | None = None,
    ) -> None:
        self._name = name
        self._state = state
        self._timer = timer
        self._is_watched = False
        """Whether the timer looks after elastic members."""
        self._ended: dict[str, tuple[int, float]] = {}
        """Tenures that were over last, by worker, and when."""
        self.lost_count = 0
        """Members that this process found to be gone."""
        # Weakly: the files of a slice that was deleted are to be free at once.
        this = weakref.ref(self)
        state.tracker.come_to_rest = partial(_on, this, "_come_to_rest")
        state.tracker.give_on = partial(_on, this, "_give_on")
        self._abandoned_after_s = abandoned_after_s
        self.times = state.times
        """Times of its synchronous steps."""

    # Taking part.

    def join(
        self,
        worker_id: str,
        session_number: int = 0,
        *,
        seat_for: Contributor[SeatT] | None = None,
        incarnation: int = 0,
    ) -> OpenedT:
        """Notes that a worker opened the parameter or table, if the worker has a name.

        Args:
            worker_id: The worker; empty: a client that will not contribute.
            session_number: Number of the worker's session, by which it is known while that is
                alive; 0: it has none.
            seat_for: The worker as it asks for its seat, if it does.
            incarnation: The incarnation on shard 0 or other shards, which becomes this shard's if
                nothing has begun here; 0: not given.

        Returns:
            Where the slice and the worker are.

        Raises:
            OtherIncarnationError: it has begun with another incarnation.
            NotInitializedError, SeatsTakenError, WorkerIdInUseError, LimitError: the worker asked
                for a seat and can't have one.
            StorageError: it can't be noted.
        """
        tracker = self._state.tracker
        is_changed = False
        with self._state.lock:
            incarnation = self._meet_incarnation(incarnation)
            took_over = False
            if seat_for is not None:
                took_over = self._seat(seat_for).was_taken_over
                if tracker.elastic is not None:
                    self._state.register.await_from(seat_for)
                    self._note_all_ended()  # who comes tells it to shards that do not know
                    is_changed = True
            elif worker_id and session_number:
                tracker.remember(worker_id, session_number)
            response = self._opened(worker_id)
            response.incarnation = incarnation
            response.took_over = took_over
            response.tenure = tracker.tenure_of(worker_id)
            response.has_seat = tracker.has_seat(worker_id)
            response.rank, response.ranked_count = tracker.rank_of(worker_id)
            if is_changed:
                self._say_when(response, worker_id)
        if is_changed:
            self._settle_all()  # those who awaited an earlier tenure, or an earlier first step
            self._look_after()
        self.make_durable()  # next_step tells that the steps before it were counted
        return response

    @abstractmethod
    def _meet_incarnation(self, incarnation: int) -> int:
        """Takes over an incarnation before anything has begun; returns the slice's own.

        Raises:
            OtherIncarnationError: it has begun with another one.
            StorageError: it can't be noted.
        """

    @abstractmethod
    def _opened(self, worker_id: str) -> OpenedT:
        """The answer to a worker that joins, but for its seat; the state's lock is held."""

    def _seat(self, contributor: Contributor[SeatT]) -> SeatT:
        """The worker's seat, which is the session's from now on; the state's lock is held.

        Raises:
            ShardwellError: see `MembershipLog.seat`.
        """
        try:
            seat = self._state.register.seat(contributor)
        except WorkerIdInUseError:
            if self._state.tracker.rivals:
                self._wake_all()  # its owner may wait for the worker that this one should be
            raise
        if seat.was_taken_over:
            self._taken_over(seat)
        return seat

    @abstractmethod
    def _taken_over(self, seat: SeatT) -> None:
        """Wakes the requests of a seat's last owner; the state's lock is held."""

    @property
    def incarnation(self) -> int:
        """The number that tells it from others of its name; 0: it has none yet."""
        return self._state.register.incarnation

    def living_members(self, but: int) -> list[tuple[str, int, float]]:
        """Its workers whose sessions are alive: `Seats.living`."""
        with self._state.lock:
            return self._state.tracker.living(but)

    def end_session(self, number: int) -> None:
        """Notes that a session, by its number, has ended in order.

        Raises:
            StorageError: it can't be noted.
        """
        with self._state.lock:
            ended = [
                (worker_id, self._state.tracker.tenure_of(worker_id))
                for worker_id in self._state.tracker.owned_by(number)
            ]
            self._state.register.end_session(number)
            for worker_id, tenure in ended:
                self._note_ended(worker_id, tenure)
            if self._state.tracker.is_sync and self._state.tracker.ended:
                self._wake_all()
        if self._state.tracker.elastic is not None:
            self._settle_all()

    @abstractmethod
    def _wake_all(self) -> None:
        """Has all requests look again that wait for other workers; the state's lock is held."""

    # Elastic members, see docs/adr/0036.

    def _say_when(self, response: OpenedT, worker_id: str) -> None:
        """Adds to an answer what a member chooses its first step by."""
        needed = self._state.tracker.needed_step(worker_id)
        if needed is not None:
            response.needed_step = needed

    def end_tenure(self, worker_id: str, tenure: int) -> None:
        """No step awaits a member any more, and what it sends in that tenure is late.

        Safe to repeat; where the worker has another tenure, nothing happens.

        Raises:
            StorageError: it can't be noted, or a step that it ends can't be journaled.
        """
        with self._state.lock:
            if not self._state.register.end_tenure(worker_id, tenure):
                return
            self._note_ended(worker_id, tenure)
        self._settle_all()

    def dismiss(self, worker_id: str, *, drains: bool) -> None:
        """Ends a member's tenure, or asks the member to leave; nothing where it has none.

        Raises:
            StorageError: see `end_tenure`.
        """
        with self._state.lock:
            tenure = self._state.tracker.tenure_of(worker_id)
            member = self._state.tracker.member(worker_id, tenure)
            if member is not None and drains:
                member.is_draining = True
        if not drains:
            self.end_tenure(worker_id, tenure)

    def count_members(self) -> Counter[types_pb2.MemberState]:
        """How many workers with seats are in each state."""
        tracker = self._state.tracker
        return Counter(state_of(tracker, seat) for seat in tracker.seats)

    def _note_ended(self, worker_id: str, tenure: int) -> None:
        if tenure and self._state.tracker.elastic is not None:
            now_s = time.monotonic()
            kept = {k: v for k, v in self._ended.items() if now_s - v[1] < _KNOWN_S}
            self._ended = {**kept, worker_id: (tenure, now_s)}

    def _note_all_ended(self) -> None:
        """Notes the end of all tenures that are over, and whose seats no other worker has."""
        for seat in self._state.tracker.seats:
            if seat.is_over:
                self._note_ended(seat.worker_id, seat.tenure.number)

    def ended_tenures(self) -> list[tuple[str, int]]:
        """Workers and tenures that were over in the last minute."""
        now_s = time.monotonic()
        return [(k, tenure) for k, (tenure, s) in self._ended.items() if now_s - s < _KNOWN_S]

    def is_owned_by(self, session_number: int) -> bool:
        """Whether an open step may await a member of that session."""
        awaited = self._state.tracker.awaited
        return any(s.owner is not None and s.owner.number == session_number for s in awaited)

    def had_session(self, session_number: int) -> bool:
        """Whether a session has a member's seat, be its tenure over or not."""
        seats = self._state.tracker.seats
        return any(s.owner is not None and s.owner.number == session_number for s in seats)

    def _look_after(self) -> None:
        """Has the timer look for members that are gone, while there are members."""
        with self._state.lock:
            is_due = not self._is_watched and bool(self._state.tracker.awaited)
            self._is_watched |= is_due
        if is_due:
            self._after(0.0, self.look_for_lost)

    def look_for_lost(self) -> float | None:
        """Ends the tenures of members that are gone; in how many seconds to look again.

        None: there are no members.

        Raises:
            StorageError: see `end_tenure`.
        """
        tracker = self._state.tracker
        if tracker.elastic is None:
            return None
        if self._state.storage.is_retired:  # for good, or it is looked after anew
            self._is_watched = False
            return None
        lost, next_s = tracker.lost(time.monotonic())
        for seat in lost:
            _LOG.warning(
                "%s: member %r is lost: no step awaits it any more", self._name, seat.worker_id
            )
            self.lost_count += not seat.is_lost  # one that could not be noted is found again
            seat.is_lost = True
            self.end_tenure(seat.worker_id, seat.tenure.number)
        with self._state.lock:
            self._is_watched = bool(tracker.awaited)
            return max(next_s, 0.01) if self._is_watched else None

    def _after(self, delay_s: float, act: Callable[[], float | None]) -> None:
        if self._timer is not None:
            self._timer.after(delay_s, act)

    def _settle_all(self) -> None:
        """Ends each open step that awaits no worker any more.

        Raises:
            StorageError: one can't be journaled.
        """

    def _come_to_rest(self) -> None:
        """Returns when nothing is being counted that was checked before the call."""

    def _give_on(self, seat: SeatT) -> None:
        """A seat becomes another worker's: what is kept by its index is not that one's."""

    def go_on_after_start(self) -> None:
        """Looks after the members that an earlier process had. The timer does it, in a moment."""
        if self._state.tracker.elastic is not None:
            with self._state.lock:
                self._note_all_ended()
        if self._state.tracker.awaited:
            self._after(0.0, self._go_on)

    def _go_on(self) -> None:
        self._settle_all()
        self._look_after()

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """Nothing of it changes in the block, and after it; where it fails, all goes on.

        Raises:
            StorageError: in calls that would change something meanwhile.
        """
        storage = self._state.storage
        storage.is_retired = True
        try:
            with self._state.lock, self._at_rest():
                yield
        except BaseException:
            storage.is_retired = False
            self._look_after()
            raise

    def _at_rest(self) -> AbstractContextManager[object]:
        """A block that begins when what the state's lock does not guard has ended its changes."""
        return contextlib.nullcontext()

    # Keeping.

    def make_durable(self) -> None:
        """Returns when what was counted may be acknowledged.

        Raises:
            StorageError: the disk failed.
        """
        begin_ns = now_ns()
        self._state.storage.make_durable()
        self._state.spans.add_long(SPAN_KIND_FLUSH, self._name, begin_ns)

    def sync(self) -> None:
        """Writes the journal to disk.

        Raises:
            StorageError: the disk failed.
        """
        self._state.storage.sync()

    @abstractmethod
    def make_image(self, is_stopping: Callable[[], bool]) -> None:
        """Writes an image if it is time, and unless the shard is stopping meanwhile.

        Raises:
            StorageError: the disk failed, or is full; or what is on it was damaged.
        """

    # Status.

    @abstractmethod
    def describe(
        self, name_count_max: int, attending: Mapping[str, Attendance] | None = None
    ) -> StatusT:
        """What GetStatus or GetTableStatus says of it, with at most so many names of each kind.

        Args:
            name_count_max: Most names of workers that have contributed, are missing, or are done.
            attending: Sessions that are connected, by their workers.
        """

    def _add_members(
        self,
        status: StatusT,
        step: int,
        name_count_max: int,
        attending: Mapping[str, Attendance] | None,
    ) -> tuple[int, int]:
        """Adds to a status who takes part, and what the open step waits for.

        Returns:
            How many workers have contributed to `step`, and how many known ones are missing.
        """
        tracker = self._state.tracker
        missing, unknown = tracker.missing(step)
        done = tracker.done_worker_ids
        rest = rest_of(tracker, self._abandoned_after_s)
        if rest.is_over:
            missing, unknown = [], 0
        elif not tracker.has_begun(step):
            missing = [worker_id for worker_id in missing if worker_id not in done]
        contributed = tracker.contributed(step) if tracker.is_sync else []
        named = missing[:name_count_max]
        open_for_s = None if rest.is_over else self.times.open_for_s(step)
        status.contributed_worker_ids.extend(contributed[:name_count_max])
        status.missing_worker_ids.extend(named)
        status.unknown_worker_count = unknown
        status.done_worker_ids.extend(done[:name_count_max])
        status.wait.CopyFrom(step_wait(tracker, named, attending or {}, open_for_s))
        status.ended = rest.has_ended
        if rest.abandoned_for_s is not None:
            status.abandoned_for_s = rest.abandoned_for_s
        status.lost_member_count = self.lost_count
        status.members.extend(
            members_of(tracker, name_count_max, time.monotonic(), attending or {})
        )
        return len(contributed), len(missing)
