"""Open streams to the shards: a set for each call that is under way, kept for the next.

A set has at most one stream to each shard, opened when it is first needed. A thread that calls
again and again uses the same set again and again, whichever parameters or tables it calls: one that
trains a hundred has one stream to each shard. A call beside it, of another thread or a prefetch,
has its own set, so that it waits for nobody else's answers; and, over gRPC, its own connection, so
that a small call does not queue behind what a large one has sent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from shardwell.errors import ClosedError, DeadlineError
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
    """Which of a client's connections its calls use now. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()

    def take(self, known: Sequence[int]) -> int:
        """The one for another call: one that nobody uses, of those that are `known` if there is."""
        with self._lock:
            choice: int = min(
                (*reversed(known), *range(CONNECTION_COUNT_MAX)), key=self._users.__getitem__
            )
            self._users[choice] += 1
            return choice

    def give_back(self, connection: int) -> None:
        """The call has ended."""
        with self._lock:
            self._users[connection] -= 1


class StreamSet:
    """The streams of one call. For one thread at a time, except `close`.

    Either all of them are over gRPC, or all on this machine: only who waits for all at once notices
    that another one has ended.

    Args:
        method: What they are calls of, as gRPC names it.
        channels: Every shard that there may be a stream to.
        connection: Which one its streams go over, where they are over gRPC.
    """

    def __init__(self, method: str, channels: Sequence[ShardEndpoint], connection: int) -> None:
        self.connection = connection
        """The number of the connection."""
        self.call_group = CallGroup()
        self.only_reads = False
        """Whether it is not to be kept: nobody's step needs it, and its place may be another's."""
        self._method = method
        self._channels = channels
        self._unix_calls = UnixCalls() if self._are_neighbours() else None
        """Of all streams; None: they are over gRPC."""
        self._streams: dict[int, ShardStream] = {}
        self._opened: dict[int, Hashable] = {}
        """What each was used for last."""
        self._closed = False

    def streams(
        self, channels: Sequence[ShardEndpoint], subject: Hashable, timeout_s: float
    ) -> list[tuple[ShardStream, bool]]:
        """The stream to each shard, and whether the next message must say what it is for.

        Blocks up to `timeout_s`, and mostly not at all. To be called once a call.

        Args:
            channels: The shards.
            subject: Name and incarnation of the parameter or table, and the tenure of the worker's
                seat there.
            timeout_s: For shards on this machine.

        Raises:
            ClosedError: the set was closed.
        """
        try:
            for channel in channels:
                self._open(channel, timeout_s)
        except OSError as error:  # then none of them is used
            _LOG.debug("a call goes over gRPC: %s", error)
            self._unix_calls = None
            self._end_streams()
            self._opened.clear()
            self._streams, self.call_group = {}, CallGroup()
            for channel in channels:
                self._open(channel, timeout_s)
        found = []
        for channel in channels:
            index = channel.shard_index
            found.append((self._streams[index], self._opened.get(index) != subject))
            self._opened[index] = subject
        return found

    def _open(self, channel: ShardEndpoint, timeout_s: float) -> None:
        if channel.shard_index in self._streams:
            return
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

    def _are_neighbours(self) -> bool:
        return all(channel.unix.is_there for channel in self._channels)

    @property
    def is_as_wanted(self) -> bool:
        """Whether a new set would be as this one, on this machine or over gRPC."""
        return (self._unix_calls is not None) == self._are_neighbours()

    @property
    def is_new(self) -> bool:
        """Whether it has no stream yet."""
        return not self._streams

    @property
    def is_open(self) -> bool:
        """Whether all streams are alive, as a look at each shows."""
        if self._unix_calls is not None and not self._unix_calls.has_news:
            return not self.has_ended
        return all(stream.is_open for stream in self._streams.values())

    @property
    def has_ended(self) -> bool:
        """Whether one is known to be dead, without looking."""
        return any(stream.has_ended for stream in self._streams.values())

    @property
    def failure(self) -> BaseException | None:
        """What went wrong while messages were made, if anything."""
        return next((stream.failure for stream in self._streams.values() if stream.failure), None)

    def close(self) -> None:
        """Ends all streams, and lets none be opened. From any thread; safe to repeat."""
        self._closed = True
        self._end_streams()

    def _end_streams(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()


class IdleStreams:
    """The sets of a client that no call uses now. Any thread may use it.

    Args:
        method: What they are calls of, as gRPC names it.
        channels: All shards.
        connections: Of the client.
    """

    def __init__(
        self, method: str, channels: Sequence[ShardEndpoint], connections: Connections
    ) -> None:
        self._connections = connections
        self._method = method
        self._channels = channels
        self._lock = threading.Lock()
        self._sets: list[StreamSet] = []
        self._is_closed = False

    def take(self) -> StreamSet:
        """One that was kept, if a shard has not ended it since; or a new one.

        On a connection that no other call uses, if there is; to be given back.
        """
        while True:
            with self._lock:
                connection = self._connections.take([each.connection for each in self._sets])
                kept = [each for each in self._sets if each.connection == connection]
                if not kept:
                    return StreamSet(self._method, self._channels, connection)
                self._sets.remove(kept[-1])
            if kept[-1].is_open and kept[-1].is_as_wanted:
                return kept[-1]
            kept[-1].close()
            self.give_back(kept[-1])

    def give_back(self, streams: StreamSet) -> None:
        """Its connection is nobody's now, whether it is kept or not."""
        self._connections.give_back(streams.connection)

    def keep(self, streams: StreamSet) -> bool:
        """Keeps a set for another call; False if there are enough, or it was closed."""
        with self._lock:
            if self._is_closed or len(self._sets) >= IDLE_STREAM_SET_COUNT_MAX:
                return False
            self._sets.append(streams)
            return True

    def close(self) -> None:
        """Ends what is kept, and keeps nothing any more. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            sets, self._sets = self._sets, []
        for streams in sets:
            streams.close()


class StreamPool:
    """The sets of one parameter's or table's calls. Any thread may use it.

    Args:
        idle: Sets of the client.
        what: For messages: "table 'users'".
        count_max: Calls that have streams at once; further ones wait. None: any number.
        where: What errors carry of it.
    """

    def __init__(
        self,
        idle: IdleStreams,
        what: str,
        *,
        count_max: int | None = STREAM_SET_COUNT_MAX,
        **where: Any,
    ) -> None:
        self._idle = idle
        self._count_max = count_max
        self._what = what
        self._where = where
        self._free = threading.Condition()
        self._busy_count = 0

    @contextlib.contextmanager
    def borrowed(self, timeout_s: float) -> Iterator[StreamSet]:
        """A set for the block, kept for another if it ends without an error, and closed if not.

        So no late answer is ever taken for another one's. It is closed as well when the call is
        cancelled that this thread runs.

        Raises:
            DeadlineError: as many calls as there can be are under way, and none ended in time.
            BaseException: why messages could not be made, instead of what came of that.
        """
        with (
            contextlib.nullcontext()
            if self._count_max is None
            else self._room(self._count_max, timeout_s)
        ):
            streams = self._idle.take()
            try:
                with cancelled_by(streams.close):
                    yield streams
            except BaseException:
                streams.close()
                if streams.failure is not None:
                    raise streams.failure from None
                raise
            finally:
                self._idle.give_back(streams)
            if (
                streams.has_ended or streams.only_reads or not self._idle.keep(streams)
            ):  # whoever takes it looks
                streams.close()

    @contextlib.contextmanager
    def _room(self, count_max: int, timeout_s: float) -> Iterator[None]:
        call = current_call()

        def is_over() -> bool:
            return call is not None and call.cancelled.is_set()

        with cancelled_by(self._wake), self._free:
            if not self._free.wait_for(
                lambda: is_over() or self._busy_count < count_max, timeout_s
            ):
                raise DeadlineError(
                    f"{count_max} calls of other threads on {self._what} took longer "
                    f"than {timeout_s:.3g} s; raise timeout_s, or call from fewer threads",
                    **self._where,
                )
            if is_over():
                raise ClosedError("the call was given up")
            self._busy_count += 1
        try:
            yield
        finally:
            with self._free:
                self._busy_count -= 1
                self._free.notify()

    def _wake(self) -> None:
        with self._free:
            self._free.notify_all()
