"""The sessions that are alive on this shard: those that attend, and for a while those from before.

A session attends as long as one of its Attend calls is open; the server's keepalive ends those of a
machine that vanished. A shard that was started again does not know which of the sessions that own
seats live; until `return_s` after its start each that it has not heard of counts as alive, so that
a living one can come back to its seats before others take them. A process of this machine that has
ended does not come back, and is not waited for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from shardwell.errors import (
    AccessDeniedError,
    ArgumentError,
    LimitError,
    SessionEndedError,
    SessionUnknownError,
    ShardUnavailableError,
)
from shardwell.process.environment import has_ended
from shardwell.rpc.session import Session
from shardwell.v1 import types_pb2
from shardwell_server.shard.quotas import Usage

RETURN_S_MAX = 5.0
"""The longest wait for clients, who try to reach a shard that is away twice a second."""
_CALL_COUNT_MAX = 4
"""Attend calls of one session; one more ends the oldest, of a broken connection."""


class Attendance(NamedTuple):
    """A session that attends, and what status says of its client."""

    session: Session
    software_version: str
    transports: Sequence[types_pb2.Transport]


class _Attending:
    def __init__(
        self, worker_id: str, session: Session, software_version: str, began_s: float
    ) -> None:
        self.worker_id = worker_id
        self.began_s = began_s
        self.session = session
        self.software_version = software_version
        self.transports: set[types_pb2.Transport] = set()
        self.calls: dict[object, _Call] = {}
        """The calls by which it attends, the newest one last."""

    @property
    def usage(self) -> Usage | None:
        """The usage of the token of its newest call; None: it has no token."""
        return next(reversed(self.calls.values())).usage if self.calls else None

    @property
    def owner(self) -> str:
        return _name_of(self.usage)


class _Call(NamedTuple):
    end: Callable[[], object]
    usage: Usage | None


def _name_of(usage: Usage | None) -> str:
    return "" if usage is None else usage.name


class Sessions:
    """The sessions of one shard.

    Any thread may call it; inside, only the lock of a `Usage` is taken. At most `count_max` attend,
    and of as many that have left it is known when, and whether they ended in order. One that is
    gone for `lease_s` may lose its seats to other workers; those from before the start have
    `return_s`.
    """

    def __init__(
        self,
        *,
        count_max: int,
        lease_s: float,
        return_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count_max = count_max
        self.now_s = now_s
        self._lease_s = lease_s
        self._return_until_s = now_s() + return_s
        self._lock = threading.Lock()
        self._attending: dict[int, _Attending] = {}
        self._left_s: dict[int, float] = {}
        """Times when sessions left that attended, the first one first."""
        self._left_owners: dict[int, str] = {}
        """Names of the tokens of those that brought one."""
        self._heard_s: dict[int, float] = {}
        """Times of the last signs of life of sessions that attend."""
        self.on_left: Callable[[int], None] = lambda number: None
        """Called with the number of a session that left; never waits."""
        self._ended: set[int] = set()
        """Sessions among those that ended in order, and never attend again."""
        self._others_left_s = now_s()
        """The latest time when others had left that don't attend."""
        self._is_stopping = False

    @property
    def count(self) -> int:
        return len(self._attending)

    def by_worker(self) -> dict[str, Attendance]:
        """Returns one attending session of each worker."""
        with self._lock:
            return {
                each.worker_id: Attendance(
                    each.session, each.software_version, sorted(each.transports)
                )
                for each in self._attending.values()
            }

    def attend(
        self,
        worker_id: str,
        session: Session,
        end: Callable[[], object],
        usage: Usage | None = None,
        software_version: str = "",
    ) -> object:
        """Notes that a call of the session is open, which `end` ends; returns what `leave` takes.

        Raises:
            ArgumentError: a session of that number has another worker_id.
            SessionEndedError: the session has ended in order.
            LimitError: too many sessions attend, of all or of the token.
            ShardUnavailableError: the shard stops.
        """
        token = object()
        surplus: _Call | None = None
        with self._lock:
            if self._is_stopping:
                raise ShardUnavailableError("the shard is stopping; wait until it is back")
            if session.number in self._ended:
                raise session_ended(session.number)
            found = self._attending.get(session.number)
            if found is None:
                if len(self._attending) >= self._count_max:
                    raise LimitError(
                        f"limit session_count_max={self._count_max}: as many clients are "
                        "connected; close some, or raise it on the shards"
                    )
                _move_member(None, usage, worker_id)
                found = self._attending[session.number] = _Attending(
                    worker_id, session, software_version, self.now_s()
                )
                self._left_s.pop(session.number, None)
                self._left_owners.pop(session.number, None)
                self._heard_s[session.number] = self.now_s()
            elif found.worker_id != worker_id:
                raise ArgumentError(
                    f"session {session.number:#x} is that of worker {found.worker_id!r}; got "
                    f"{worker_id!r}; draw a number for each connection"
                )
            else:  # a client that knows its number may have another token now
                _move_member(found.usage, usage, worker_id)
                if len(found.calls) >= _CALL_COUNT_MAX:
                    surplus = found.calls.pop(next(iter(found.calls)))
            found.calls[token] = _Call(end, usage)
        if surplus is not None:
            surplus.end()
        return token

    def leave(self, session: Session, token: object) -> None:
        """Notes that a call of the session is not open any more. Safe to repeat."""
        with self._lock:
            found = self._attending.get(session.number)
            if found is None or token not in found.calls:
                return
            has_left = len(found.calls) == 1
            if has_left:
                self._forget(session.number)
            else:
                before = found.usage
                del found.calls[token]
                _move_member(before, found.usage, found.worker_id, is_forced=True)
        if has_left:
            self.on_left(session.number)

    def heard(self, number: int) -> None:
        with self._lock:
            if number in self._attending:
                self._heard_s[number] = self.now_s()

    def silent_for_s(self, number: int) -> float:
        """Returns the seconds since the last heartbeat of a session that attends."""
        now_s = self.now_s()
        with self._lock:
            return now_s - self._heard_s.get(number, now_s)

    def end(self, number: int, owner: str = "") -> bool:
        """Notes that a session has ended, whatever calls of it are open. Safe to repeat.

        False: it was not here. AccessDeniedError: it attends, or did, by another token.
        """
        with self._lock:
            found = self._attending.get(number)
            if owner and found is None and number not in self._left_s:
                return False
            whose = self._left_owners.get(number, "") if found is None else found.owner
            if whose != owner:
                raise AccessDeniedError(f"session {number:#x} attends by another token")
            self._forget(number)
            self._ended.add(number)
            return True

    def _forget(self, number: int) -> None:
        found = self._attending.pop(number, None)
        self._heard_s.pop(number, None)
        if found is not None:
            if found.owner:
                self._left_owners[number] = found.owner
            _move_member(found.usage, None, found.worker_id)
        self._left_s.pop(number, None)
        self._left_s[number] = self.now_s()
        if len(self._left_s) > self._count_max:
            first = next(iter(self._left_s))
            self._others_left_s = self._left_s.pop(first)
            self._left_owners.pop(first, None)
            self._ended.discard(first)

    def alive_for_s(self, number: int, process: str = "") -> float:
        """Returns the seconds for which a session counts as alive if it sends nothing more.

        math.inf while it attends; 0 when it is gone or its `process` has ended; else the rest of
        the time that a shard which was started again gives it.
        """
        with self._lock:
            if number in self._attending:
                return math.inf
            if number in self._left_s:
                return 0.0
            waits_s = max(self._return_until_s - self.now_s(), 0.0)
        return 0.0 if waits_s and has_ended(process) else waits_s

    def _leaves_s(self, number: int) -> float:
        """Returns when a session left; math.inf: it attends."""
        with self._lock:
            if number in self._attending:
                return math.inf
            return self._left_s.get(number, self._others_left_s)

    def spare_in_s(self, number: int) -> float:
        """Returns seconds until a session is gone for the lease; math.inf: it attends."""
        return self._leaves_s(number) + self._lease_s - self.now_s()

    def gone_for_s(self, number: int) -> float:
        """Returns the time since a session left; since the shard's start of one never seen."""
        return max(self.now_s() - self._leaves_s(number), 0.0)

    def attends_for_s(self, worker_ids: Container[str]) -> float | None:
        """Returns the longest time for which one of the workers attends, or None."""
        with self._lock:
            began = [
                each.began_s for each in self._attending.values() if each.worker_id in worker_ids
            ]
            return self.now_s() - min(began) if began else None

    def attends_as(self, worker_id: str) -> bool:
        return bool(self.all_as(worker_id))

    def all_as(self, worker_id: str) -> list[Session]:
        """Returns a worker's sessions that attend: several where clients share its id."""
        with self._lock:
            found = (each for each in self._attending.values() if each.worker_id == worker_id)
            return [each.session for each in found]

    def check(
        self,
        number: int,
        worker_id: str,
        owner: str = "",
        transport: types_pb2.Transport = types_pb2.TRANSPORT_UNSPECIFIED,
    ) -> Session:
        """Returns the session of that number, which must attend; a call is a sign of life, too.

        Raises:
            SessionEndedError: it has ended in order.
            SessionUnknownError: it does not attend, or by another token than that of `owner`.
            ArgumentError: it is that of another worker_id.
        """
        with self._lock:
            found = self._attending.get(number)
            is_its = found is not None and found.owner == owner
            if found is not None and is_its:
                self._heard_s[number] = self.now_s()
                if transport:
                    found.transports.add(transport)
            has_ended = number in self._ended
        if has_ended:
            raise session_ended(number, worker_id)
        if found is None or not is_its:
            of = f" by token {owner!r}" if owner else ""
            raise SessionUnknownError(
                f"worker {worker_id!r}: the shard knows no session {number:#x} that attends{of}; "
                "attend, then make the call again",
                worker_id=worker_id,
            )
        if found.worker_id != worker_id:
            raise ArgumentError(
                f"session {number:#x} is that of worker {found.worker_id!r}; got {worker_id!r}"
            )
        return found.session

    def stop(self) -> None:
        """Ends the calls of all sessions, and lets none attend. Safe to repeat."""
        with self._lock:
            self._is_stopping = True
            calls = [call for found in self._attending.values() for call in found.calls.values()]
        for call in calls:
            call.end()


def session_ended(number: int, worker_id: str | None = None) -> SessionEndedError:
    """Returns the error for a call by a session that has ended in order."""
    return SessionEndedError(
        f"session {number:#x} has ended (EndSession), and contributes no more; draw another number "
        "and attend with that",
        worker_id=worker_id,
    )


def _move_member(
    before: Usage | None, after: Usage | None, worker_id: str, *, is_forced: bool = False
) -> None:
    if before is after:
        return
    if after is not None and is_forced:
        after.add("members", 1)
    elif after is not None:
        after.take("members", worker_id=worker_id)
    if before is not None:
        before.add("members", -1)
