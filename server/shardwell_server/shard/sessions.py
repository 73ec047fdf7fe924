"""Which sessions are alive on this shard: those that attend, and for a while those from before.

A session attends as long as one of its Attend calls is open; the server's keepalive ends those of a
machine that vanished. A shard that was started again does not know which of the sessions that own
seats live; until `return_s` after its start each that it has not heard of counts as alive, so that
a living one can come back to its seats before others take them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from shardwell.errors import (
    AccessDeniedError,
    ArgumentError,
    LimitError,
    SessionUnknownError,
    ShardUnavailableError,
)
from shardwell.rpc.session import Session
from shardwell_server.shard.quotas import Usage

RETURN_S_MAX = 5.0
"""A client tries to reach a shard that is away twice a second."""


class _Attending:
    """A session that attends, and the calls by which it does."""

    def __init__(self, worker_id: str, session: Session, usage: Usage | None) -> None:
        self.usage = usage
        """What the token uses by which it attends; None: nobody's."""
        self.worker_id = worker_id
        self.session = session
        self.ends: dict[object, Callable[[], object]] = {}

    @property
    def owner(self) -> str:
        """Name of the token; empty: of none."""
        return "" if self.usage is None else self.usage.name


class Sessions:
    """Those of one shard. Any thread may call it; no other lock is taken inside.

    Args:
        count_max: Sessions that may attend at once; of as many that have left it is known when.
        lease_s: How long a session may be gone before its seats are given to other workers.
        return_s: See the module.
        now_s: A clock that never goes back.
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
        self._now_s = now_s
        self._lease_s = lease_s
        self._return_until_s = now_s() + return_s
        self._lock = threading.Lock()
        self._attending: dict[int, _Attending] = {}
        self._left_s: dict[int, float] = {}
        """When sessions left that attended, the first one first."""
        self._others_left_s = now_s()
        """When all others had left that are not known to attend, at the latest."""
        self._is_stopping = False

    @property
    def count(self) -> int:
        """Sessions that attend."""
        return len(self._attending)

    def attend(
        self,
        worker_id: str,
        session: Session,
        end: Callable[[], object],
        usage: Usage | None = None,
    ) -> object:
        """Notes that a call of the session is open; returns what `leave` takes when it is not.

        Args:
            worker_id: Under which the session contributes.
            session: Which.
            end: Ends the call, when the shard stops.
            usage: What the token uses by which it attends; None: nobody's.

        Raises:
            ArgumentError: a session of that number has another worker_id.
            LimitError: too many sessions attend, of all or of the token.
            ShardUnavailableError: the shard stops.
        """
        token = object()
        with self._lock:
            if self._is_stopping:
                raise ShardUnavailableError("the shard is stopping; wait until it is back")
            found = self._attending.get(session.number)
            if found is None:
                if len(self._attending) >= self._count_max:
                    raise LimitError(
                        f"limit session_count_max={self._count_max}: as many clients are "
                        "connected; close some, or raise it on the shards"
                    )
                if usage is not None:
                    usage.take("members", worker_id=worker_id)
                found = self._attending[session.number] = _Attending(worker_id, session, usage)
                self._left_s.pop(session.number, None)
            elif found.worker_id != worker_id:
                raise ArgumentError(
                    f"session {session.number:#x} is that of worker {found.worker_id!r}; got "
                    f"{worker_id!r}; draw a number for each connection"
                )
            elif found.usage is not usage:  # whoever knows its number has another token now
                if usage is not None:
                    usage.take("members", worker_id=worker_id)
                if found.usage is not None:
                    found.usage.add("members", -1)
                found.usage = usage
            found.ends[token] = end
        return token

    def leave(self, session: Session, token: object) -> None:
        """Notes that a call of the session is not open any more. Safe to repeat."""
        with self._lock:
            found = self._attending.get(session.number)
            if found is None or token not in found.ends:
                return
            del found.ends[token]
            if not found.ends:
                self._forget(session.number)

    def end(self, number: int, owner: str = "") -> None:
        """Notes that a session has ended, whatever calls of it are open. Safe to repeat.

        Raises:
            AccessDeniedError: it attends by another token than the owner's.
        """
        with self._lock:
            found = self._attending.get(number)
            if found is not None and found.owner != owner:
                raise AccessDeniedError(
                    f"session {number:#x} attends by another token than {owner!r}",
                    worker_id=found.worker_id,
                )
            self._forget(number)

    def _forget(self, number: int) -> None:
        found = self._attending.pop(number, None)
        if found is not None and found.usage is not None:
            found.usage.add("members", -1)
        self._left_s.pop(number, None)
        self._left_s[number] = self._now_s()
        if len(self._left_s) > self._count_max:
            self._others_left_s = self._left_s.pop(next(iter(self._left_s)))

    def alive_for_s(self, number: int) -> float:
        with self._lock:
            if number in self._attending:
                return math.inf
            if number in self._left_s:
                return 0.0
            return max(self._return_until_s - self._now_s(), 0.0)

    def spare_in_s(self, number: int) -> float:
        with self._lock:
            if number in self._attending:
                return math.inf
            left_s = self._left_s.get(number, self._others_left_s)
            return left_s + self._lease_s - self._now_s()

    def check(self, number: int, worker_id: str, owner: str = "") -> Session:
        """The session of that number, which must attend to contribute as a worker.

        Args:
            number: Of the session.
            worker_id: Under which it contributes.
            owner: Name of the caller's token; empty: it has none.

        Raises:
            SessionUnknownError: it does not, or by another token.
            ArgumentError: it is that of another worker_id.
        """
        with self._lock:
            found = self._attending.get(number)
        if found is None or found.owner != owner:
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
            ends = [end for found in self._attending.values() for end in found.ends.values()]
        for end in ends:
            end()
