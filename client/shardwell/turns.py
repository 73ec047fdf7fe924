"""What the calls of a parameter and of a table have in common: turns, deadlines, and their end.

Calls that use the worker's next step take turns; each is attempted again until it succeeds or its
deadline has passed; and once `close` was called, that is the reason of any failure.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shardwell.errors import ClosedError, DeadlineError, ShardUnavailableError
from shardwell.retry import Attempts
from shardwell.shards import Shards
from shardwell.values import check_timeout

ResultT = TypeVar("ResultT")


class Turns:
    """The calls of one parameter or table. Any thread may use it.

    Args:
        shards: Of the cluster.
        timeout_s: Bound of calls that say nothing else.
        what: What is called, for messages: "parameter 'model'".
        where: As errors carry it.
    """

    def __init__(self, shards: Shards, timeout_s: float, what: str, **where: Any) -> None:
        self._shards = shards
        self._timeout_s = timeout_s
        self._what = what
        self._where = where
        self._lock = threading.RLock()
        self.is_closed = False
        """Whether `close` was called."""

    def attempts(self, timeout_s: float | None) -> Attempts:
        """Those of a call that begins now.

        Raises:
            ArgumentError: no such timeout can be.
        """
        return self._shards.attempts(
            check_timeout(self._timeout_s if timeout_s is None else timeout_s)
        )

    def run(self, attempts: Attempts, attempt: Callable[[], ResultT]) -> ResultT:
        """Attempts until one succeeds.

        Raises:
            ClosedError: this was closed, before or meanwhile.
            ShardwellError: see `Attempts.run`.
        """

        def checked() -> ResultT:
            self.check_open()
            try:
                return attempt()
            except (ShardUnavailableError, ValueError) as error:  # ValueError: gRPC's, when closed
                self.check_open(error)
                raise

        return attempts.run(checked)

    @contextlib.contextmanager
    def turn(self, attempts: Attempts) -> Iterator[None]:
        """Waits until no other thread's call is under way; that is bounded, too.

        Raises:
            ClosedError: this was closed.
            DeadlineError: another call took too long.
        """
        if not self._lock.acquire(timeout=attempts.rest_s):
            raise DeadlineError(
                f"another thread's call on {self._what} took longer than "
                f"{attempts.timeout_s:g} s; raise timeout_s, or let one thread call it",
                **self._where,
            )
        try:
            self.check_open()
            yield
        finally:
            self._lock.release()

    def check_open(self, cause: BaseException | None = None) -> None:
        """Refuses to work after `close`; `cause` is what came of working while it was called.

        Raises:
            ClosedError: this was closed.
        """
        if self.is_closed:
            raise ClosedError(
                f"{self._what} was closed, or its client was; open it again, or connect again",
                **self._where,
            ) from cause

    def close(self) -> None:
        """Lets no call begin. From any thread; safe to repeat."""
        self.is_closed = True
