"""How long a request may wait for other workers, and how: it is made again once something changed.

No thread waits. What a request asks for is looked at under the lock of what it depends on; where it
is too early, the request leaves its address there and ends with `NotYet`. It is made anew once
something has changed, until its time is over.
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
    """A lock, and the requests that wait for a change of what it guards.

    Args:
        lock: The lock; default: one of its own, which a thread may take twice.
    """

    def __init__(self, lock: threading.Lock | None = None) -> None:
        self.lock: AbstractContextManager[bool] = lock or threading.RLock()
        """What a thread holds that calls `notify_all` or `wake_next`."""
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
        """Does not call it any more, as far as that has not begun. Any thread."""
        self._waiting.pop(wake, None)


class NotYet(Exception):  # noqa: N818 - it is no error: the request is to be made again
    """Raised when a wanted thing does not exist yet. `wake` is called when it may.

    Args:
        changes: Where it was found to be missing.
        wake: The callback that was left there.
        deadline_s: When it is to be made again anyway, on time.monotonic's clock.
    """

    def __init__(self, changes: Changes, wake: Callable[[], None], deadline_s: float) -> None:
        super().__init__()
        self._changes = changes
        self._wake = wake
        self.deadline_s = deadline_s

    def forget(self) -> None:
        """There is no need to be woken."""
        self._changes.forget(self._wake)


def until(
    attempt: Callable[..., ResultT], *arguments: Any, begun: Future[ResultT] | None = None
) -> Generator[NotYet, None, ResultT]:
    """The result of a call that may be too early, and is made again each time this goes on.

    Args:
        attempt: Makes the call.
        arguments: Its own.
        begun: Its first attempt, which another thread makes; None: this thread makes all.
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
    """The deadline of one request.

    Args:
        timeout_s: How long it may wait from now on.
        wake: Called when it is to be made again, from any thread and with locks held.
        is_stopping: Whether the shard ends all waits.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        wake: Callable[[], None] = lambda: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.timeout_s = timeout_s
        """What it was given, for messages."""
        self._deadline_s = time.monotonic() + timeout_s
        self._wake = wake
        self._is_stopping = is_stopping

    def wait(self, changes: Changes, *, look_s: float = math.inf) -> None:
        """To be called where it is too early, with the lock held; returns when time is over.

        Args:
            changes: After the next of them it is to be made again.
            look_s: Or after so long, where time alone may bring what is asked for.

        Raises:
            NotYet: it is not; the request is to be made again after the next change.
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
        """Whether the client still waits for the answer."""

    def wake(self) -> None:
        """Makes the call look again."""


class WaitingShard(Protocol):
    """The shard where it waits."""

    @property
    def config(self) -> ShardConfig:
        """With the longest wait that the shard allows."""

    def ends_waits(self) -> bool:
        """Whether all waits end now."""


def deadline_of(shard: WaitingShard, call: WaitingCall, timeout_s: float) -> RequestDeadline:
    """The deadline of a call, or of a message on a stream.

    Args:
        shard: The shard that answers.
        call: The call.
        timeout_s: What it asks for; 0: no longer than its deadline.
    """
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
    """Returns a check, for any thread, whether the client still reads a long answer."""
    remaining_s = call.remaining_s
    bound_s = shard.config.limits.wait_max_s
    deadline_s = time.monotonic() + (bound_s if remaining_s is None else remaining_s)
    return lambda: call.is_active and time.monotonic() < deadline_s
