"""Open streams to the shards: a set for each call that is under way, kept for the next.

A set has at most one stream to each shard, opened when it is first needed. A thread that calls
again and again uses the same set again and again, whichever parameters or tables it calls: one that
trains a hundred has one stream to each shard. A call beside it, of another thread or a prefetch,
has its own set, so that it does not wait for other calls' answers; and, over gRPC, its own
connection, so that a small call does not queue behind what a large one has sent.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from shardwell.errors import (
    ClosedError,
    DeadlineError,
    SessionUnknownError,
    ShardUnavailableError,
)
from shardwell.threads.calls import cancelled_by, current_call
from shardwell.transport.call_group import CallGroup
from shardwell.transport.endpoint import ShardEndpoint
from shardwell.transport.stream import ShardStream
from shardwell.transport.unix_call import UnixCalls

_LOG = logging.getLogger("shardwell")
STREAM_SET_COUNT_MAX = 8
"""Calls on one table that have streams at once; further ones wait."""
CONNECTION_COUNT_MAX = 4
"""Connections of a client to a shard, whatever is called at once; further sets share them."""
IDLE_STREAM_SET_COUNT_MAX = 4
"""Sets that a client keeps for later calls: one for those of a thread, others for its prefetches.
Each open stream counts in the shard's stream_count_max."""


class Connections:
    """The connection that a client's calls use now, and the lock of its idle sets."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held to change `users`, and by `IdleStreams`."""
        self.users: Counter[int] = Counter()


class StreamSet:
    """The streams of one call. For one thread at a time, except `close`.

    Either all of them are over gRPC, or all on this machine: only a reader that waits for all at
    once notices that another one has ended.
    """

    def __init__(
        self, method: str, channels: Sequence[ShardEndpoint], connection: int, *, is_here: bool
    ) -> None:
        self.connection = connection
        self.is_here = is_here
        self.call_group = CallGroup()
        self.only_reads = False
        """True if no step uses this stream: the call closes it, which leaves its slot to others."""
        self._method = method
        self._channels = channels
        self._unix_calls = UnixCalls() if is_here else None
        self._streams: dict[int, ShardStream] = {}
        self._opened: dict[int, Hashable] = {}
        self._used: Sequence[ShardEndpoint] = ()
        self._closed = False

    def streams(
        self, channels: Sequence[ShardEndpoint], subject: Hashable, timeout_s: float
    ) -> list[tuple[ShardStream, bool]]:
        """The stream to each shard, and whether the next message must say what it is for.

        Blocks up to `timeout_s`, and mostly not at all. To be called once a call. `subject` is name
        and incarnation of the parameter or table, and the tenure of the worker's seat there.
        """
        self._used = channels
        try:
            for channel in channels:
                if channel.shard_index not in self._streams:
                    self._open(channel, timeout_s)
        except OSError as error:  # then none of them is used
            _LOG.debug("a call goes over gRPC: %s", error)
            self._unix_calls, self.is_here = None, False
            self._end_streams()
            self._opened.clear()
            self._streams, self.call_group = {}, CallGroup()
            for channel in channels:
                if channel.shard_index not in self._streams:
                    self._open(channel, timeout_s)
        found = []
        for channel in channels:
            index = channel.shard_index
            found.append((self._streams[index], self._opened.get(index) != subject))
            self._opened[index] = subject
        return found

    def _open(self, channel: ShardEndpoint, timeout_s: float) -> None:
        unix_call = None
        if self._unix_calls is not None:
            unix_call = channel.unix_call(self._method, self._unix_calls, timeout_s)
        stream = ShardStream(
            channel, self._method, self.call_group, unix_call, connection=self.connection
        )
        self._streams[channel.shard_index] = stream
        if self._closed:  # looked at after the stream could be seen by `close`
            stream.close()
            raise ClosedError("the call was given up")

    @property
    def is_new(self) -> bool:
        """True if it has no stream yet."""
        return not self._streams

    @property
    def is_open(self) -> bool:
        """True if all streams are alive, as a look at each shows."""
        if self._unix_calls is not None and not self._unix_calls.has_news:
            return not self.call_group.has_ended
        return all(stream.is_open for stream in self._streams.values())

    @property
    def failure(self) -> BaseException | None:
        """The failure that ended the making of messages, if any."""
        return next((stream.failure for stream in self._streams.values() if stream.failure), None)

    def note_outcome(self, error: BaseException | None) -> None:
        """Counts a failure for want of a shard; for the call's other shards, anew."""
        away = None
        if isinstance(error, ShardUnavailableError) and not isinstance(error, SessionUnknownError):
            away = error.shard_index  # a shard that does not know a session has answered
        for channel in self._used:
            if channel.shard_index == away:
                channel.note_away()
            else:
                channel.away_count = 0
        self._used = ()

    def close(self) -> None:
        """Ends all streams, and lets none be opened. From any thread; safe to repeat."""
        self._closed = True
        self._end_streams()

    def _end_streams(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()


class IdleStreams:
    """The sets of a client that no call uses now. Any thread may use it."""

    def __init__(
        self, method: str, channels: Sequence[ShardEndpoint], connections: Connections
    ) -> None:
        self._connections = connections
        self._method = method
        self._channels = channels
        self._sets: list[StreamSet] = []
        self._is_closed = False

    def take(self) -> StreamSet:
        """Takes a kept set, if no shard has ended it, or makes one, on a free connection if any."""
        is_here = all(channel.unix.is_there for channel in self._channels)
        users = self._connections.users
        while True:
            with self._connections.lock:
                known = reversed([each.connection for each in self._sets])
                connection = min((*known, *range(CONNECTION_COUNT_MAX)), key=users.__getitem__)
                users[connection] += 1
                kept = [each for each in self._sets if each.connection == connection]
                if not kept:
                    return StreamSet(self._method, self._channels, connection, is_here=is_here)
                streams = kept[-1]
                self._sets.remove(streams)
            if streams.is_here == is_here and streams.is_open:
                return streams
            self.give_back(streams, is_wanted=False)

    def give_back(self, streams: StreamSet, *, is_wanted: bool) -> None:
        """Frees its connection; closes the set, or keeps it if it is wanted and few are kept."""
        with self._connections.lock:
            self._connections.users[streams.connection] -= 1
            is_kept = (
                is_wanted and not self._is_closed and len(self._sets) < IDLE_STREAM_SET_COUNT_MAX
            )
            if is_kept:
                self._sets.append(streams)
        if not is_kept:
            streams.close()

    def close(self) -> None:
        """Ends what is kept, and keeps nothing any more. Safe to repeat."""
        with self._connections.lock:
            self._is_closed = True
            sets, self._sets = self._sets, []
        for streams in sets:
            streams.close()


class StreamPool:
    """The sets of one parameter's or table's calls, `count_max` at once. Any thread may use it."""

    def __init__(
        self,
        idle: IdleStreams,
        what: str,
        *,
        count_max: int | None = STREAM_SET_COUNT_MAX,
        **where: Any,
    ) -> None:
        self._idle = idle
        self._count_max = math.inf if count_max is None else count_max
        self._what = what
        self._where = where
        self._free = threading.Condition()
        self._busy_count = 0

    @contextlib.contextmanager
    def borrowed(self, timeout_s: float) -> Iterator[StreamSet]:
        """A set for the block, kept for another if it ends without an error, and closed if not.

        So no late answer is ever taken for another one's. It is closed as well when the call is
        cancelled that this thread runs. DeadlineError: none of the calls under way ended in time.
        """
        with self._free:
            if self._busy_count >= self._count_max:
                self._await_room(timeout_s)
            self._busy_count += 1
        try:
            streams, is_wanted = self._idle.take(), False
            try:
                with cancelled_by(streams.close):
                    yield streams
                streams.note_outcome(None)
                # The call that takes it next looks whether it is alive.
                is_wanted = not (streams.call_group.has_ended or streams.only_reads)
            except BaseException as error:
                streams.note_outcome(streams.failure or error)
                if streams.failure is not None:
                    raise streams.failure from None
                raise
            finally:
                self._idle.give_back(streams, is_wanted=is_wanted)
        finally:
            with self._free:
                self._busy_count -= 1
                self._free.notify()

    def _await_room(self, timeout_s: float) -> None:
        call = current_call()

        def is_over() -> bool:
            return call is not None and call.cancelled.is_set()

        with cancelled_by(self._wake):
            if not self._free.wait_for(
                lambda: is_over() or self._busy_count < self._count_max, timeout_s
            ):
                raise DeadlineError(
                    f"{self._count_max} calls of other threads on {self._what} took longer "
                    f"than {timeout_s:.3g} s; raise timeout_s, or call from fewer threads",
                    **self._where,
                )
            if is_over():
                raise ClosedError("the call was given up")

    def _wake(self) -> None:
        with self._free:
            self._free.notify_all()
