"""Open streams to the shards: a set for each call that is under way, kept for the next.

A set has at most one stream to each shard, opened when it is first needed. A thread that calls
again and again uses the same set again and again, whichever parameters or tables it calls: one that
trains a hundred has one stream to each shard. A call beside it, of another thread or a prefetch,
has its own set, so that it waits for nobody else's answers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from shardwell.errors import ClosedError, DeadlineError
from shardwell.rpc.call_group import CallGroup
from shardwell.rpc.calls import cancelled_by, current_call
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.stream import ShardStream

STREAM_SET_COUNT_MAX = 8
"""Calls on one parameter or table that have streams at once; further ones wait."""
IDLE_STREAM_SET_COUNT_MAX = 4
"""Sets that a client keeps for later calls: one for those of a thread, others for its prefetches.
Each open stream counts in the shard's stream_count_max."""


class StreamSet:
    """The streams of one call. For one thread at a time, except `close`.

    Args:
        verb: A channel's verb that opens one.
    """

    def __init__(self, verb: Callable[[ShardChannel], Any]) -> None:
        self.call_group = CallGroup()
        self._verb = verb
        self._streams: dict[int, ShardStream] = {}
        self._opened: dict[int, Hashable] = {}
        """What each was used for last."""
        self._closed = False

    def stream(self, channel: ShardChannel, subject: Hashable) -> tuple[ShardStream, bool]:
        """The stream to a shard, and whether the next message must say what it is for.

        Args:
            channel: The shard.
            subject: Name of the parameter or table, and the tenure of the worker's seat there.

        Raises:
            ClosedError: the set was closed.
        """
        index = channel.shard_index
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = ShardStream(
                channel, self._verb(channel), self.call_group
            )
            if self._closed:  # looked at after the stream could be seen by `close`
                stream.close()
                raise ClosedError("the call was given up")
        opens = self._opened.get(index) != subject
        self._opened[index] = subject
        return stream, opens

    @property
    def is_open(self) -> bool:
        """Whether all streams are alive, as far as is known."""
        return all(stream.is_open for stream in self._streams.values())

    @property
    def failure(self) -> BaseException | None:
        """What went wrong while messages were made, if anything."""
        return next((stream.failure for stream in self._streams.values() if stream.failure), None)

    def close(self) -> None:
        """Ends all streams, and lets none be opened. From any thread; safe to repeat."""
        self._closed = True
        for stream in list(self._streams.values()):
            stream.close()


class IdleStreams:
    """The sets of a client that no call uses now. Any thread may use it.

    Args:
        verb: A channel's verb that opens one.
    """

    def __init__(self, verb: Callable[[ShardChannel], Any]) -> None:
        self._verb = verb
        self._lock = threading.Lock()
        self._sets: list[StreamSet] = []
        self._is_closed = False

    def take(self) -> StreamSet:
        """The one that was kept last, if a shard has not ended it since; or a new one."""
        while True:
            with self._lock:
                if not self._sets:
                    return StreamSet(self._verb)
                streams = self._sets.pop()
            if streams.is_open:
                return streams
            streams.close()

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
        where: What errors carry of it.
    """

    def __init__(self, idle: IdleStreams, what: str, **where: Any) -> None:
        self._idle = idle
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
        with self._room(timeout_s):
            streams = self._idle.take()
            try:
                with cancelled_by(streams.close):
                    yield streams
            except BaseException:
                streams.close()
                if streams.failure is not None:
                    raise streams.failure from None
                raise
            if not (streams.is_open and self._idle.keep(streams)):
                streams.close()

    @contextlib.contextmanager
    def _room(self, timeout_s: float) -> Iterator[None]:
        call = current_call()

        def is_over() -> bool:
            return call is not None and call.cancelled.is_set()

        with cancelled_by(self._wake), self._free:
            if not self._free.wait_for(
                lambda: is_over() or self._busy_count < STREAM_SET_COUNT_MAX, timeout_s
            ):
                raise DeadlineError(
                    f"{STREAM_SET_COUNT_MAX} calls of other threads on {self._what} took longer "
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
