"""Who records what all have done, and which clients have told: see docs/adr/0021-trace.md.

States of a recording: open, from `begin`, in which clients are asked and give; over, from `end`.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Container, Iterator
from contextlib import contextmanager

from shardwell.errors import LimitError
from shardwell.v1 import trace_pb2 as pb
from shardwell_server.shard.deadline import Changes, RequestDeadline

RECORDING_COUNT_MAX = 4
"""At once; each holds up to a megabyte a client."""
_RETURN_S = 2.0
"""A session that was told asks again within this time, mostly."""


class Recording:
    """One that is open. For `Recordings`, whose lock guards it.

    Args:
        expected: Sessions that are sure to be asked.
    """

    def __init__(self, expected: set[int]) -> None:
        self.expected = expected
        self.told: set[int] = set()
        """Sessions that know of it."""
        self.given: set[int] = set()
        """Sessions whose spans have come."""
        self.waiting: deque[pb.ProcessSpans] = deque()
        """What has come and was not taken yet."""


class Recordings:
    """Of one shard. Any thread may call it."""

    def __init__(self) -> None:
        self._changed = Changes()
        self._open: dict[int, Recording] = {}
        self._asking: Counter[int] = Counter()
        """Sessions that wait to be told."""
        self._return_s: dict[int, float] = {}
        """Until when sessions that were told are expected to ask again."""
        self._is_stopping = False

    @contextmanager
    def asking(self, session: int) -> Iterator[None]:
        """For the time in which a session waits to be told."""
        with self._changed:
            self._asking[session] += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking[session] -= 1
                if not self._asking[session]:
                    del self._asking[session]

    def news(self, session: int, deadline: RequestDeadline) -> int:
        """The number of a recording that a session does not know yet; 0 at the deadline."""
        with self._changed:
            for number, recording in self._open.items():
                if session not in recording.told:
                    recording.told.add(session)
                    self._return_s[session] = time.monotonic() + _RETURN_S
                    return number
            if not self._is_stopping:
                deadline.wait(self._changed)
            return 0

    def begin(self, attending: Container[int]) -> int:
        """Opens a recording, and has all clients told that ask; its number.

        Args:
            attending: Sessions that are there; others that asked are not waited for.

        Raises:
            LimitError: too many are open.
        """
        with self._changed:
            if len(self._open) >= RECORDING_COUNT_MAX:
                raise LimitError(
                    f"{RECORDING_COUNT_MAX} recordings are under way; wait for one to end"
                )
            number = secrets.randbits(63) + 1
            now_s = time.monotonic()
            self._return_s = {one: s for one, s in self._return_s.items() if s > now_s}
            known = {*self._asking, *self._return_s}
            self._open[number] = Recording({one for one in known if one in attending})
            self._changed.notify_all()
            return number

    def give(self, number: int, session: int, process: pb.ProcessSpans) -> None:
        """Takes a session's spans; what comes twice, too late or unasked is dropped."""
        with self._changed:
            recording = self._open.get(number)
            if recording is None or session in recording.given or session not in recording.told:
                return
            recording.given.add(session)
            recording.waiting.append(process)
            self._changed.notify_all()

    def next(self, number: int, deadline: RequestDeadline) -> pb.ProcessSpans | None:
        """Spans of one more session; None when all have given theirs, or time is over."""
        with self._changed:
            recording = self._open[number]
            if recording.waiting:
                return recording.waiting.popleft()
            if recording.expected <= recording.given:
                return None
            deadline.wait(self._changed)
            return None

    def stop(self) -> None:
        """Has nobody wait to be told any more. Safe to repeat."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def end(self, number: int) -> set[int]:
        """Closes a recording; the sessions that gave."""
        with self._changed:
            return self._open.pop(number).given
