"""The arrivals from other ranks, until the engine takes them: chunks, verdicts, and the end.

Filled by the threads of streams, emptied by one engine. A link's chunks come in order, and its
thread waits while too many of them lie here: gRPC's flow control then stops the sender.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from shardwell.errors import CorruptChunkError, ShardwellError
from shardwell.group.inbox import Inbox
from shardwell.group.schedule.collective import WINDOW_ROW_COUNT, Arrival
from shardwell.v1 import peer_pb2 as pb

MakeError = Callable[[], ShardwellError]


class Mailbox:
    """The messages that came. Any thread fills it; `await_verdict`, `take`, `come` are for one."""

    def __init__(self, size: int) -> None:
        # What can be under way on one link, twice over: see `group/schedule/collective.py`.
        self._arrival_count_max = 4 * WINDOW_ROW_COUNT * size + 16
        self._changed = threading.Condition()
        # None is the end. Queues of the interpreter's own: a chunk costs no lock of ours.
        self._arrivals: dict[int, queue.SimpleQueue[Arrival | None]] = {}
        self._put_count = [0] * size
        """Chunks that came, by rank; written by its link's thread alone."""
        self._taken_count = [0] * size
        """The number of chunks that were taken, by rank; written by the engine's thread alone."""
        self._blocked_count = 0
        self._waits_for_inbox = False
        """True when the engine has found nothing, and waits to be woken."""
        self._made_count = 0
        """Calls before this one have been made: nothing is due for them."""
        self._verdicts: dict[int, pb.Verdict] = {}
        self._join_verdicts: deque[pb.Verdict] = deque()
        self._standings: pb.Standings | None = None
        self._ended: MakeError | None = None
        self._is_ending: MakeError | None = None
        self.inbox = Inbox()

    def put_arrival(self, arrival: Arrival, *, waits: bool = True) -> None:
        """Adds a chunk; with `waits` it blocks while too many of its sender are here."""
        if waits and self.is_full(arrival.rank):
            with self._changed:
                self._blocked_count += 1
                while self._ended is None and self.is_full(arrival.rank):
                    self._changed.wait()
                self._blocked_count -= 1
        if self._ended is not None:
            raise self._ended()
        call_index = arrival.header.call_index
        if call_index < self._made_count:
            raise CorruptChunkError(
                f"rank {arrival.rank} sent a chunk of call {call_index}, which is over",
                rank=arrival.rank,
            )
        self._put_count[arrival.rank] += 1
        self._arrivals_of(call_index).put(arrival)
        if self._waits_for_inbox:
            self.inbox.wake()

    def put_verdict(self, verdict: pb.Verdict) -> None:
        """Adds what rank 0 says of a call."""
        with self._changed:
            if verdict.operation == pb.OPERATION_JOIN:
                self._join_verdicts.append(verdict)
            else:
                self._verdicts[verdict.call_index] = verdict
            self._changed.notify_all()

    def put_standings(self, standings: pb.Standings) -> None:
        """Adds what all ranks of an elastic group know of earlier generations."""
        with self._changed:
            self._standings = standings
            self._changed.notify_all()

    def await_standings(self, timeout_s: float) -> pb.Standings | None:
        """The counts of all ranks for earlier generations; None if they have not come in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._standings is not None or self._is_ending is not None, timeout_s
            )
            if self._standings is None and self._is_ending is not None:
                raise self._is_ending()
            return self._standings

    def end(self, make_error: MakeError, *, lets_finish: bool = False) -> None:
        """Ends all waits with the first error, except calls with a verdict if `lets_finish`."""
        with self._changed:
            if not lets_finish:
                self._ended = self._ended or self._is_ending or make_error
            self._is_ending = self._is_ending or make_error
            if self._ended is not None:
                for arrivals in self._arrivals.values():
                    arrivals.put(None)
                if self._waits_for_inbox:
                    self.inbox.wake()
            self._changed.notify_all()

    @property
    def ended(self) -> MakeError | None:
        """Makes the error that no further call escapes; None while calls can be made."""
        return self._is_ending

    def await_verdict(self, call_index: int | None, timeout_s: float) -> pb.Verdict | None:
        """The verdict of a call, or of `join` with None; None if there is none in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                verdict = self._taken_verdict(call_index)
                if verdict is not None:  # it came before the end; what needs data fails there
                    return verdict
                if self._ended is not None:
                    raise self._ended()
                if self._is_ending is not None:
                    raise self._is_ending()
                rest_s = deadline_s - time.monotonic()
                if rest_s <= 0:
                    return None
                self._changed.wait(rest_s)

    def await_end(self, timeout_s: float) -> MakeError | None:
        """The error that the generation has ended with; None if it has not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None, timeout_s)
            return self._ended

    def take(self, call_index: int, timeout_s: float) -> Arrival | None:
        """The next chunk of a call, in order of arrival; None if there is none in time."""
        arrivals = self._arrivals_of(call_index)
        if self._ended is not None:
            raise self._ended()
        arrival = self._next(arrivals, timeout_s)
        if arrival is None:
            if self._ended is not None:
                raise self._ended()
            return None
        self._note_taken(arrival.rank)
        return arrival

    def come(self, call_index: int) -> Arrival | None:
        """Takes what has come, as `take` does; None: nothing has."""
        arrivals = self._arrivals_of(call_index)
        if arrivals.empty() and self.inbox.is_taken:
            self.inbox.read(0.0)
        return None if arrivals.empty() else self.take(call_index, 0.0)

    def _next(
        self, arrivals: queue.SimpleQueue[Arrival | None], timeout_s: float
    ) -> Arrival | None:
        try:
            if not self.inbox.is_taken:
                return arrivals.get(timeout=max(timeout_s, 0.0))
            return arrivals.get_nowait()
        except queue.Empty:
            if not self.inbox.is_taken:
                return None
        deadline_s = time.monotonic() + timeout_s
        self._waits_for_inbox = True  # before it looks once more, so that nothing is missed
        try:
            while True:
                try:
                    return arrivals.get_nowait()
                except queue.Empty:
                    rest_s = deadline_s - time.monotonic()
                    if rest_s <= 0:
                        return None
                    self.inbox.read(rest_s)
        finally:
            self._waits_for_inbox = False

    def forget(self, call_index: int) -> None:
        """Drops what is left of a call that has been made."""
        with self._changed:
            self._made_count = call_index + 1
            arrivals = self._arrivals.pop(call_index, None)
        while arrivals is not None and not arrivals.empty():
            arrival = arrivals.get()
            if arrival is not None:
                self._note_taken(arrival.rank)

    def _arrivals_of(self, call_index: int) -> queue.SimpleQueue[Arrival | None]:
        arrivals = self._arrivals.get(call_index)
        if arrivals is None:
            with self._changed:
                arrivals = self._arrivals.setdefault(call_index, queue.SimpleQueue())
        return arrivals

    def is_full(self, rank: int) -> bool:
        """True if too many chunks of a rank are here."""
        return self._put_count[rank] - self._taken_count[rank] >= self._arrival_count_max

    def _note_taken(self, rank: int) -> None:
        self._taken_count[rank] += 1
        self.inbox.resume()
        if self._blocked_count:
            with self._changed:
                self._changed.notify_all()

    def _taken_verdict(self, call_index: int | None) -> pb.Verdict | None:
        if call_index is not None:
            return self._verdicts.pop(call_index, None)
        return self._join_verdicts.popleft() if self._join_verdicts else None
