"""A slice, which any thread may touch: each part of it changes under the lock that guards the part.

A slice is the part of a parameter or table that one shard has. Here is the work that both kinds
share: its workers, hand-over, disk and status. Crew, rates and events change rarely, under the lock
of its state; parameter/slice.py and table/slice.py have the locks under which gradients change it.
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
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from shardwell.errors import WorkerIdInUseError
from shardwell.process.spans import Spans, now_ns
from shardwell.v1 import parameter_server_pb2 as parameter_pb
from shardwell.v1 import table_pb2 as table_pb
from shardwell.v1 import types_pb2
from shardwell.v1.trace_pb2 import SPAN_KIND_FLUSH
from shardwell_server.config import ShardConfig
from shardwell_server.shard.contribution_log import ClosedSet
from shardwell_server.shard.crews import Contributor, Seat, Tracker
from shardwell_server.shard.register import SliceRegister
from shardwell_server.shard.sessions import Attendance, Sessions
from shardwell_server.shard.step_times import StepTimes
from shardwell_server.shard.watch import Timer
from shardwell_server.store.contract import Storage

_LOG = logging.getLogger("shardwell_server")
_KNOWN_S = 60.0
"""The time for which a shard tells that a tenure is over."""
_MEMBER_COUNT_MAX = 512
"""Members in an answer: each takes a look at all chunks, and room in it."""
_HOST_LENGTH_MAX = 64
"""Characters of a member's host in an answer."""

SeatT = TypeVar("SeatT", bound=Seat)
OpenedT = TypeVar("OpenedT", parameter_pb.CreateParameterResponse, table_pb.OpenTableResponse)
StatusT = TypeVar("StatusT", parameter_pb.ParameterStatus, table_pb.TableStatus)


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """The parts of a shard that all its slices use."""

    config: ShardConfig
    sessions: Sessions
    spans: Spans
    timer: Timer | None = None
    """It ends grace, and looks after elastic members; None: nothing does."""
    log: Callable[[ClosedSet], None] | None = None
    """It takes each step's contributors, where sets are open."""
    spool_dir: Path | None = None
    """The directory of copies for snapshots; None: the system's."""


class SliceState(Generic[SeatT]):
    """The components of a slice, for the classes that share its work."""

    storage: Storage
    tracker: Tracker[SeatT]
    register: SliceRegister[SeatT]
    lock: AbstractContextManager[bool]
    """Guards the register, and the crew."""
    times: StepTimes
    spans: Spans


def _on(this: weakref.ref[Any], method: str, *arguments: Any) -> None:
    """Calls a method of a slice, unless it was freed."""
    found = this()
    if found is not None:
        getattr(found, method)(*arguments)


class ShardSlice(ABC, Generic[SeatT, OpenedT, StatusT]):
    """The base of both. All methods may be called from any thread.

    It is at rest once no worker has been connected for `Limits.abandoned_after_s`.
    """

    kind: ClassVar[Literal["parameter", "table"]]
    spec: Any
    storage: Any

    def __init__(self, name: str, state: SliceState[SeatT], shared: SharedParts) -> None:
        self._name = name
        self._state = state
        self._timer = shared.timer
        self._is_watched = False
        self._ended: dict[str, tuple[int, float]] = {}
        """The last tenures that were over, by worker, and when."""
        self.lost_count = 0
        # Weakly: the files of a slice that was deleted are to be free at once.
        this = weakref.ref(self)
        self._crew = state.tracker.crew
        self._crew.come_to_rest = partial(_on, this, "_come_to_rest")
        self._crew.give_on = partial(_on, this, "_give_on")
        self._abandoned_after_s = shared.config.limits.abandoned_after_s
        self.times = state.times

    # Taking part.

    def join(
        self,
        worker_id: str,
        session_number: int = 0,
        *,
        seat_for: Contributor[SeatT] | None = None,
        incarnation: int = 0,
    ) -> OpenedT:
        """Notes that a worker opened it; returns how far the slice and the worker are.

        `seat_for` is the worker as it asks for its seat. `incarnation`, of another shard, becomes
        this shard's if nothing has begun here; 0: not given.

        Raises:
            OtherIncarnationError: it has begun with another incarnation.
            NotInitializedError, SeatsTakenError, WorkerIdInUseError, LimitError: the worker asked
                for a seat and can't have one.
            StorageError: it can't be noted.
        """
        crew = self._crew
        is_changed = False
        with self._state.lock:
            incarnation = self._meet_incarnation(incarnation)
            took_over = False
            if seat_for is not None:
                seat = self._seat(seat_for)
                took_over = seat is not None and seat.was_taken_over
                is_changed = self._state.register.await_from(seat_for)
                if is_changed:
                    self._note_all_ended()  # a member that comes tells it to the other shards
            elif worker_id and session_number:
                crew.remember(worker_id, session_number)
            response = self._opened(worker_id)
            response.incarnation = incarnation
            response.took_over = took_over
            response.tenure = crew.tenure_of(worker_id)
            response.has_seat = crew.find(worker_id) is not None
            response.rank, response.ranked_count = crew.rank_of(worker_id)
            if is_changed:
                self._say_when(response, worker_id)
        if is_changed:
            self._settle_all()  # those who awaited an earlier tenure, or an earlier first step
            self._look_after()
        self.make_durable()  # next_step tells that the steps before it were counted
        return response

    @abstractmethod
    def _meet_incarnation(self, incarnation: int) -> int:
        """Takes over an incarnation if nothing has begun; returns the slice's own."""

    @abstractmethod
    def _opened(self, worker_id: str) -> OpenedT:
        """Answers a worker that joins, but for its seat; the state's lock is held."""

    def _seat(self, contributor: Contributor[SeatT]) -> SeatT | None:
        """Returns the worker's seat: `Crew.seat`; the state's lock is held."""
        try:
            seat = self._state.register.seat(contributor)
        except WorkerIdInUseError:
            if self._crew.rivals:
                self._wake_all()  # its owner may wait for the worker that this one should be
            raise
        if seat is not None and seat.was_taken_over:
            self._wake_all()  # its last owner may wait there, or was counting until now
            seat.forget_checksums()
        return seat

    @property
    def incarnation(self) -> int:
        return self._state.register.incarnation

    def living_members(self, but: int) -> list[tuple[str, int, float]]:
        with self._state.lock:
            return self._crew.living(but)

    def end_session(self, number: int) -> None:
        with self._state.lock:
            ended = self._state.register.end_session(number)
            for worker_id, tenure in ended:
                self._note_ended(worker_id, tenure)
            if self._crew.is_sync and self._crew.ended:
                self._wake_all()
        if ended:
            self._settle_all()

    @abstractmethod
    def _wake_all(self) -> None:
        """Wakes all requests that wait for other workers; the state's lock is held."""

    # Elastic members, see docs/adr/0036.

    def _say_when(self, response: OpenedT, worker_id: str) -> None:
        needed = self._crew.needed_step(worker_id)
        if needed is not None:
            response.needed_step = needed

    def end_tenure(self, worker_id: str, tenure: int) -> None:
        """Ends a tenure: no step awaits the member, and its gradients in that tenure are late.

        Safe to repeat; where the worker has another tenure, nothing happens. StorageError: it can't
        be noted, or a step that it ends can't be journaled.
        """
        with self._state.lock:
            if not self._state.register.end_tenure(worker_id, tenure):
                return
            self._note_ended(worker_id, tenure)
        self._settle_all()

    def dismiss(self, worker_id: str, *, drains: bool) -> None:
        """Ends a member's tenure, or asks the member to leave; nothing where it has none."""
        with self._state.lock:
            tenure = self._crew.tenure_of(worker_id)
            member = self._crew.member(worker_id, tenure)
            if member is not None and drains:
                member.is_draining = True
        if not drains:
            self.end_tenure(worker_id, tenure)

    def count_members(self) -> Counter[types_pb2.MemberState]:
        return Counter(self._state_of(seat) for seat in self._crew.seats)

    def _note_ended(self, worker_id: str, tenure: int) -> None:
        now_s = time.monotonic()
        kept = {k: v for k, v in self._ended.items() if now_s - v[1] < _KNOWN_S}
        self._ended = {**kept, worker_id: (tenure, now_s)}

    def _note_all_ended(self) -> None:
        """Notes the tenures that are over, and whose seats no other worker has."""
        for seat in self._crew.seats:
            if seat.is_over:
                self._note_ended(seat.worker_id, seat.tenure.number)

    def ended_tenures(self) -> list[tuple[str, int]]:
        """Returns the workers and tenures that were over in the last minute."""
        now_s = time.monotonic()
        return [(k, tenure) for k, (tenure, s) in self._ended.items() if now_s - s < _KNOWN_S]

    def had_session(self, session_number: int) -> bool:
        """Returns True if a session has a member's seat, be its tenure over or not."""
        return bool(self._crew.owned_by(session_number))

    def _look_after(self) -> None:
        with self._state.lock:
            is_due = not self._is_watched and bool(self._crew.awaited)
            self._is_watched |= is_due
        if is_due:
            self._after(0.0, self.look_for_lost)

    def look_for_lost(self) -> float | None:
        """Ends tenures of members that are gone; returns seconds until the next look, if any."""
        if self._state.storage.is_retired:  # for good, or it is looked after anew
            self._is_watched = False
            return None
        lost, next_s = self._crew.lost(time.monotonic())
        for seat in lost:
            _LOG.warning(
                "%s: member %r is lost: no step awaits it any more", self._name, seat.worker_id
            )
            self.lost_count += not seat.is_lost  # one that could not be noted is found again
            seat.is_lost = True
            self.end_tenure(seat.worker_id, seat.tenure.number)
        with self._state.lock:
            self._is_watched = bool(self._crew.awaited)
            return max(next_s, 0.01) if self._is_watched else None

    def _after(self, delay_s: float, act: Callable[[], float | None]) -> None:
        if self._timer is not None:
            self._timer.after(delay_s, act)

    def _settle_all(self) -> None:
        """Ends each open step that awaits no worker any more."""

    def _come_to_rest(self) -> None:
        """Returns when nothing is being counted that was checked before the call."""

    def _give_on(self, seat: SeatT) -> None:
        """Learns that what is kept by a seat's index is not the next worker's."""

    def go_on_after_start(self) -> None:
        """Has the timer look, in a moment, after members of an earlier process."""
        with self._state.lock:
            self._note_all_ended()
        if self._crew.awaited:
            self._after(0.0, self._go_on)

    def _go_on(self) -> None:
        self._settle_all()
        self._look_after()

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """Keeps all from changing in the block and after it; where the block fails, all goes on.

        Calls that would change something meanwhile raise StorageError.
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
        """Waits until what the state's lock does not guard has ended its changes."""
        return contextlib.nullcontext()

    # Keeping.

    def make_durable(self) -> None:
        """Returns when what was counted may be acknowledged; StorageError: the disk failed."""
        begin_ns = now_ns()
        self._state.storage.make_durable()
        self._state.spans.add_long(SPAN_KIND_FLUSH, self._name, begin_ns)

    def sync(self) -> None:
        self._state.storage.sync()

    @abstractmethod
    def make_image(self, is_stopping: Callable[[], bool]) -> None:
        """Writes an image if it is time, and unless the shard is stopping meanwhile."""

    # Status.

    @abstractmethod
    def describe(
        self, name_count_max: int, attending: Mapping[str, Attendance] | None = None
    ) -> StatusT:
        """Returns the status; at most `name_count_max` contributed, missing and done workers."""

    def _add_members(
        self,
        status: StatusT,
        step: int,
        name_count_max: int,
        attending: Mapping[str, Attendance] | None,
    ) -> tuple[int, int]:
        """Adds members and the wait; returns counts of contributors and of those missing."""
        tracker, crew, attending = self._state.tracker, self._crew, attending or {}
        missing, unknown = crew.missing(step)
        done, gone_for_s, has_ended = crew.done_worker_ids, crew.gone_for_s, crew.has_ended
        is_abandoned = gone_for_s >= self._abandoned_after_s > 0 and not has_ended
        status.wait.SetInParent()
        if has_ended or is_abandoned:
            missing, unknown = [], 0
        else:
            if not tracker.has_begun(step):
                missing = [worker_id for worker_id in missing if worker_id not in done]
            open_for_s = self.times.open_for_s(step)
            if open_for_s is not None:
                status.wait.open_for_s = open_for_s
        contributed = tracker.contributed(step) if crew.is_sync else []
        named = missing[:name_count_max]
        for worker_id in named:
            attendance, seat = attending.get(worker_id), crew.find(worker_id)
            owner = None if seat is None else seat.owner
            session = owner if attendance is None else attendance.session
            worker = status.wait.workers.add(worker_id=worker_id, connected=attendance is not None)
            if session is not None:
                worker.host, worker.pid = session.host, session.pid
        status.contributed_worker_ids.extend(contributed[:name_count_max])
        status.missing_worker_ids.extend(named)
        status.unknown_worker_count = unknown
        status.done_worker_ids.extend(done[:name_count_max])
        status.ended = has_ended
        if is_abandoned:
            status.abandoned_for_s = gone_for_s
        status.lost_member_count = self.lost_count
        status.members.extend(self._members(name_count_max, attending))
        return len(contributed), len(missing)

    def _members(
        self, count_max: int, attending: Mapping[str, Attendance]
    ) -> Iterator[types_pb2.MemberStatus]:
        now_s, is_sync = time.monotonic(), self._crew.is_sync
        by_lag = sorted(self._crew.seats, key=lambda seat: (seat.is_over, -seat.lag_s))
        for seat in by_lag[: min(count_max, _MEMBER_COUNT_MAX)]:
            member = types_pb2.MemberStatus(
                worker_id=seat.worker_id,
                next_step=self._state.tracker.next_step(seat.worker_id),
                state=self._state_of(seat),
                from_step=seat.from_step,
                counted_chunk_count=seat.counted_count,
                late_chunk_count=seat.late_count,
            )
            if seat.last_s is not None:
                member.idle_s = max(now_s - seat.last_s, 0.0)
                if is_sync:
                    member.lag_s = seat.lag_s
            attendance, session = attending.get(seat.worker_id), seat.owner
            if attendance is not None:
                session, member.connected = attendance.session, True
                member.software_version = attendance.software_version
                member.transports.extend(attendance.transports)
            if session is not None:
                member.host, member.pid = session.host[:_HOST_LENGTH_MAX], session.pid
            yield member

    def _state_of(self, seat: SeatT) -> types_pb2.MemberState:
        crew = self._crew
        if seat.is_over or seat.owner is None:
            return types_pb2.MEMBER_STATE_LOST if seat.is_lost else types_pb2.MEMBER_STATE_OVER
        if seat.is_draining:
            return types_pb2.MEMBER_STATE_DRAINING
        is_seated = not crew.is_sync or (crew.comes_and_goes and seat.from_step is None)
        return types_pb2.MEMBER_STATE_SEATED if is_seated else types_pb2.MEMBER_STATE_AWAITED
