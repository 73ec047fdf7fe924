"""Recordings of all clients' spans, and which clients have given theirs: docs/adr/0021-trace.md.

States of a recording: open, from `begin`, in which clients are asked and give; over, from `end`.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from shardwell.errors import LimitError
from shardwell.v1 import trace_pb2 as pb
from shardwell_server.shard.deadline import Changes, RequestDeadline

RECORDING_COUNT_MAX = 4
_WAITING_BYTES_MAX = 64 << 20
"""Most bytes of spans of one recording that wait for its reader; more of them are dropped."""
_READ_S = 5.0
"""The time for a reader to read what came in time, where others want to record."""
_RETURN_S = 2.0
"""The time within which most sessions that got an answer ask again."""


class Recording:
    """An open recording, over at `until_s` at the latest; the lock of `Recordings` guards it."""

    def __init__(self, expected: set[int], until_s: float) -> None:
        self.expected = expected
        self.until_s = until_s
        self.knowing: set[int] = set()
        self.given: set[int] = set()
        self.waiting: deque[pb.ProcessSpans] = deque()
        self.waiting_bytes = 0


class Recordings:
    """The recordings of one shard. Any thread may call it."""

    def __init__(self) -> None:
        self._changed = Changes()
        self._open: dict[int, Recording] = {}
        self._asking: dict[int, Callable[[], object]] = {}
        """Waiting sessions, and what ends the call by which they wait."""
        self._return_s: dict[int, float] = {}
        """Times until which sessions that got an answer are to ask again."""
        self._is_stopping = False

    @contextmanager
    def asking(self, session: int, end: Callable[[], object]) -> Iterator[None]:
        """Notes for a `with` that a session waits for a recording, which it does by one call.

        An earlier call is ended: its connection has broken, and would carry no answer.
        """
        with self._changed.lock:
            earlier = self._asking.get(session)
            self._asking[session] = end
        if earlier is not None:
            earlier()
        try:
            yield
        finally:
            with self._changed.lock:
                if self._asking.get(session) is end:
                    del self._asking[session]

    def news(self, session: int, deadline: RequestDeadline) -> int:
        """Returns the number of a recording new to a session; 0 at the deadline."""
        with self._changed.lock:
            for number, recording in self._open.items():
                if session not in recording.knowing:
                    recording.knowing.add(session)
                    self._return_s[session] = time.monotonic() + _RETURN_S
                    return number
            if not self._is_stopping:
                deadline.wait(self._changed)
            return 0

    def begin(self, attending: Container[int], wait_s: float) -> int:
        """Opens a recording, and answers all clients that ask; returns its number.

        Sessions that asked and are not `attending` are not waited for. Clients have `wait_s`; a
        reader that does not read what comes keeps others from recording for little longer.
        """
        with self._changed.lock:
            now_s = time.monotonic()
            if len(self._open) >= RECORDING_COUNT_MAX:
                self._open = {one: r for one, r in self._open.items() if r.until_s > now_s}
            if len(self._open) >= RECORDING_COUNT_MAX:
                raise LimitError(
                    f"{RECORDING_COUNT_MAX} recordings are under way; wait for one to end"
                )
            number = secrets.randbits(63) + 1
            self._return_s = {one: s for one, s in self._return_s.items() if s > now_s}
            known = {*self._asking, *self._return_s}
            expected = {one for one in known if one in attending}
            self._open[number] = Recording(expected, now_s + wait_s + _READ_S)
            self._changed.notify_all()
            return number

    def give(self, number: int, session: int, process: pb.ProcessSpans) -> None:
        """Takes a session's spans; what comes twice, too late or unasked is dropped.

        Spans beyond `_WAITING_BYTES_MAX` are, too; their session counts as one that has not given.
        """
        size = process.ByteSize()
        with self._changed.lock:
            recording = self._open.get(number)
            if recording is None or session in recording.given or session not in recording.knowing:
                return
            if recording.waiting_bytes + size > _WAITING_BYTES_MAX:
                return
            recording.given.add(session)
            recording.waiting.append(process)
            recording.waiting_bytes += size
            self._changed.notify_all()

    def next(self, number: int, deadline: RequestDeadline) -> pb.ProcessSpans | None:
        """Returns one more session's spans; None: all have given theirs, or time is over."""
        with self._changed.lock:
            recording = self._open.get(number)
            if recording is None:
                return None
            if recording.waiting:
                process = recording.waiting.popleft()
                recording.waiting_bytes -= process.ByteSize()
                return process
            if recording.expected <= recording.given:
                return None
            deadline.wait(self._changed)
            return None

    def stop(self) -> None:
        """Ends all waits for a recording. Safe to repeat."""
        with self._changed.lock:
            self._is_stopping = True
            self._changed.notify_all()

    def end(self, number: int) -> set[int]:
        """Closes a recording; returns the sessions that gave."""
        with self._changed.lock:
            recording = self._open.pop(number, None)
            return set() if recording is None else recording.given
