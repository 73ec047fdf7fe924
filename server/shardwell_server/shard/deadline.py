"""The waiting of a request for other workers: it is made again once something has changed.

No thread waits. A request is looked at under the lock of what it depends on; where it is too early,
it leaves its address there and ends with `NotYet`. It is made anew once something has changed,
until its time is over.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from shardwell.errors import ShardUnavailableError
from shardwell.specs.deadlines import SHARD_MARGIN_S, less_margin
from shardwell_server.config import ShardConfig

ResultT = TypeVar("ResultT")


class Changes:
    """A lock, and the requests that wait for a change of what it guards."""

    def __init__(self, lock: threading.Lock | None = None) -> None:
        self.lock: AbstractContextManager[bool] = lock or threading.RLock()
        """Held by a thread that calls `notify_all` or `wake_next`; reentrant by default."""
        self._waiting: dict[Callable[[], None], None] = {}

    def notify_all(self) -> None:
        """Wakes all requests that wait; the lock is held."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                wake()

    def wake_next(self, wake: Callable[[], None]) -> None:
        """Calls `wake` at the next change, from whatever thread makes it; the lock is held."""
        self._waiting[wake] = None

    def forget(self, wake: Callable[[], None]) -> None:
        """Does not call it any more, unless that has begun. Any thread."""
        self._waiting.pop(wake, None)


class NotYet(Exception):  # noqa: N818 - it is no error: the request is to be made again
    """The signal that a request is too early, and has left `wake` with `changes`.

    It is to be made again when that is called, or at `deadline_s` on time.monotonic's clock.
    """

    def __init__(self, changes: Changes, wake: Callable[[], None], deadline_s: float) -> None:
        super().__init__()
        self._changes = changes
        self._wake = wake
        self.deadline_s = deadline_s

    def forget(self) -> None:
        self._changes.forget(self._wake)


def until(
    attempt: Callable[..., ResultT], *arguments: Any, begun: Future[ResultT] | None = None
) -> Generator[NotYet, None, ResultT]:
    """Makes a call, again each time this goes on, until it is not too early; returns its result.

    `begun` is its first attempt, which another thread makes; None: this thread makes all.
    """
    while True:
        try:
            return attempt(*arguments) if begun is None else begun.result()
        except NotYet as found:
            too_early = found.with_traceback(None)  # which has all that the call had at hand
        finally:
            begun = None
        yield too_early


class RequestDeadline:
    """The deadline of one request; any thread calls `wake`, with locks held."""

    def __init__(
        self,
        timeout_s: float,
        *,
        wake: Callable[[], None] = lambda: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._wake = wake
        self._is_stopping = is_stopping

    def wait(self, changes: Changes, *, look_s: float = math.inf) -> None:
        """Ends a request that is too early, the lock being held; returns when its time is over.

        Raises:
            NotYet: the request is to be made again after the next change, or after `look_s`.
            ShardUnavailableError: the shard is stopping.
        """
        now_s = time.monotonic()
        if now_s >= self._deadline_s:
            return
        if self._is_stopping():
            raise ShardUnavailableError(
                "the shard is stopping and other workers have not contributed yet; "
                "call again when it is back"
            )
        changes.wake_next(self._wake)
        raise NotYet(changes, self._wake, min(self._deadline_s, now_s + look_s))


class WaitingCall(Protocol):
    """A call that waits."""

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the client's deadline; None: it set none."""

    @property
    def is_active(self) -> bool:
        """True if the client still waits for the answer."""

    def wake(self) -> None:
        """Makes the call look again."""


class WaitingShard(Protocol):
    """The shard where it waits."""

    @property
    def config(self) -> ShardConfig:
        """The settings, with the longest wait that the shard allows."""

    def ends_waits(self) -> bool:
        """Returns True if all waits end now."""


def deadline_of(shard: WaitingShard, call: WaitingCall, timeout_s: float) -> RequestDeadline:
    """Returns the deadline of a call or message; `timeout_s` 0: no longer than the client's."""
    remaining_s = call.remaining_s
    bound_s = shard.config.limits.wait_max_s
    if remaining_s is not None:
        bound_s = min(bound_s, max(less_margin(remaining_s, SHARD_MARGIN_S), 0.0))
    return RequestDeadline(
        min(timeout_s, bound_s) if timeout_s else bound_s,
        wake=call.wake,
        is_stopping=shard.ends_waits,
    )


def wanted(shard: WaitingShard, call: WaitingCall) -> Callable[[], bool]:
    """Returns a check, for any thread, that the client still reads a long answer."""
    remaining_s = call.remaining_s
    bound_s = shard.config.limits.wait_max_s
    deadline_s = time.monotonic() + (bound_s if remaining_s is None else remaining_s)
    return lambda: call.is_active and time.monotonic() < deadline_s
