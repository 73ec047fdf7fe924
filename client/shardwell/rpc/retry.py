"""The attempts of one call: again after a shard went away, until the call's deadline has passed.

Pure: clock, randomness and waiting are passed in. It decides when another attempt is made and which
error the caller gets; it knows neither shards nor messages. An attempt repeats only requests that
are safe to repeat, as all requests of a client to a shard are.

Between two attempts it pauses and then waits until the shard that failed answers again, so that the
other shards are not troubled meanwhile. Pauses are drawn from 0 to a bound that doubles ("full
jitter": Brooker, Exponential Backoff and Jitter, 2015): many workers lose a shard at one moment,
and must not all come back at one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, TypeVar

from shardwell.errors import (
    AuthenticationError,
    CorruptChunkError,
    DeadlineError,
    SessionUnknownError,
    ShardUnavailableError,
    ShardwellError,
)

PAUSE_S_FIRST = 0.05
"""The bound of the first pause; a shard that dropped one stream answers at once."""
PAUSE_S_MAX = 2.0
"""The bound of later ones; only a shard that answers and fails again is paused for so long."""
UNKNOWN_PAUSE_S_MAX = 0.2
"""The bound while a shard does not know the session: the client attends by then."""
CORRUPT_RETRY_COUNT_MAX = 2
"""Attempts after damaged chunks; a wire that damages more of one call needs its owner."""
_REST_S_MIN = 0.05
"""The least time that an attempt gets."""

_WAITED = re.compile(r"\bwaited \S+ s\b")

ResultT = TypeVar("ResultT")


class Surroundings(Protocol):
    """The clock, the pauses and the shards that attempts use."""

    def now_s(self) -> float:
        """A clock that never goes back."""

    def jitter(self) -> float:
        """A random number from 0 to 1."""

    def pause(self, duration_s: float) -> None:
        """Pauses a call; ClosedError: the client was closed, before or meanwhile."""

    def await_shard(self, shard_index: int, timeout_s: float) -> bool:
        """Waits until a shard answers; False if it has not, or went away again."""

    def describe(self, shard_index: int) -> str:
        """Names a shard and its address, for messages."""

    def replace_older(self) -> bool:
        """Ends older clients of this process with this worker's seats; False: none was found."""


class Attempts:
    """The attempts of one call, which begins now. For one thread."""

    def __init__(self, timeout_s: float, surroundings: Surroundings) -> None:
        self.timeout_s = timeout_s
        """The caller's, for all attempts together."""
        self._surroundings = surroundings
        self._now_s = surroundings.now_s
        self._began_s = self._now_s()
        self._until_s = self._began_s + timeout_s
        self._attempt_began_s = self._began_s
        self._pause_bound_s = PAUSE_S_FIRST
        self._corrupt_count = 0
        self.is_again = False
        """True once an attempt has failed and another one follows."""

    def beside(self) -> Attempts:
        """Makes the attempts of a part of the call on another thread, up to one deadline."""
        return self._part(self.remaining_s)

    def within(self, timeout_s: float) -> Attempts:
        """Makes the attempts of a part of the call that is to take no longer than that."""
        return self._part(max(min(timeout_s, self.remaining_s), _REST_S_MIN))

    def _part(self, timeout_s: float) -> Attempts:
        part = Attempts(timeout_s, self._surroundings)
        part.timeout_s = self.timeout_s  # the caller's, for messages
        return part

    @property
    def remaining_s(self) -> float:
        """The time until the deadline; not above 0 once it has passed."""
        return self._until_s - self._now_s()

    @property
    def rest_s(self) -> float:
        """The time for something that is tried in any case: what remains, or a moment."""
        return max(self._until_s - self._now_s(), _REST_S_MIN)

    def run(self, attempt: Callable[[], ResultT]) -> ResultT:
        """Returns the result of the first attempt that has one; each is to end within `rest_s`.

        A shard that has believed the client's token before is asked until the deadline, as another
        token may come. May be used for parts of a call in turn.
        """
        while True:
            self._attempt_began_s = self._now_s()
            try:
                return attempt()
            except ShardUnavailableError as error:
                lost: ShardwellError = error
            except AuthenticationError as error:
                if not error.retryable:
                    raise
                lost = error
            except CorruptChunkError:
                self._corrupt_count += 1
                if self._corrupt_count > CORRUPT_RETRY_COUNT_MAX or self.remaining_s <= 0:
                    raise
                self.pause(self._next_pause_s())
                continue
            except DeadlineError as error:
                if type(error) is DeadlineError and error.shard_index is not None:
                    raise self._with_wait(error) from None
                if self.remaining_s <= 0:  # of which the shard knows what was left for it
                    whole = f"waited {self.timeout_s:g} s"
                    error.message = _WAITED.sub(whole, error.message, count=1)
                raise  # because of other workers, which it names
            self._await(lost)

    def replace_older(self) -> bool:
        """Ends older clients of this process with this worker's seats; False: none was found."""
        return self._surroundings.replace_older()

    def pause(self, duration_s: float) -> None:
        """Pauses the call, though not beyond the deadline."""
        self._surroundings.pause(max(min(duration_s, self.remaining_s), 0.0))

    def _await(self, lost: ShardwellError) -> None:
        if self._now_s() - self._attempt_began_s > PAUSE_S_MAX:
            self._pause_bound_s = PAUSE_S_FIRST  # it was there for a while: this is another failure
        if isinstance(lost, SessionUnknownError):
            self._pause_bound_s = min(self._pause_bound_s, UNKNOWN_PAUSE_S_MAX)
        while self.remaining_s > 0:
            self.pause(self._next_pause_s())
            timeout_s = self.remaining_s
            if timeout_s <= 0:
                break
            if lost.shard_index is None:
                return
            if self._surroundings.await_shard(lost.shard_index, timeout_s):
                return
        self._surroundings.pause(0.0)  # raises ClosedError after `close`
        raise self._with_wait(lost) from None

    def _next_pause_s(self) -> float:
        self.is_again = True
        bound_s = self._pause_bound_s
        self._pause_bound_s = min(2 * bound_s, PAUSE_S_MAX)
        return self._surroundings.jitter() * bound_s

    def _with_wait(self, error: ShardwellError) -> Exception:
        message = error.message
        if error.shard_index is not None:
            where = self._surroundings.describe(error.shard_index)
            if where not in message:
                message = f"{where}: {message}"
        waited_s = min(self._now_s() - self._began_s, self.timeout_s)
        is_said = "timeout_s" in message or isinstance(error, AuthenticationError)
        advice = "" if is_said else "; raise timeout_s to wait longer"
        error.message = f"waited {waited_s:.3g} s: {message}{advice}"
        return error
