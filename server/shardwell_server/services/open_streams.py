"""Streams that are open on this server: how many, and which wait for nothing but their client.

Those are ended at once when the server stops; and the one that has waited longest gives way when
there are as many streams as the limit allows and one more comes. Its client, if it still runs,
opens another with its next call. So silent or forgotten streams keep no client out.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Protocol

from shardwell.errors import LimitError, ShardUnavailableError, ShardwellError
from shardwell_server.shard.quotas import Usage

LAST_READS_S = 0.25
"""The time for a client to read the last answers, before a stream without work is ended."""
_ENTER_S_MAX = 10.0


_LOOK_S = 0.01


class Endable(Protocol):
    """A stream that can be ended."""

    usage: Usage | None

    def end(self, error: ShardwellError) -> None:
        """Ends it with that error, when its current work has ended."""


class OpenStreams:
    """Counts streams against their limit; knows those that are idle. For the loop's thread."""

    def __init__(self, stream_count_max: int) -> None:
        self._stream_count_max = stream_count_max
        self._open: set[Endable] = set()
        """Streams that count; those that gave way do not."""
        self._idle: dict[Endable, float] = {}
        self._new: dict[Endable, float] = {}
        self._stopping = False

    @property
    def count(self) -> int:
        return len(self._open)

    async def enter(self, stream: Endable) -> None:
        """Counts a stream until it leaves; waits for a moment where another gives way.

        Where the quota of its token is used up, another of that token's gives way. LimitError: no
        stream is idle.
        """
        until_s = time.monotonic() + _ENTER_S_MAX
        while refusal := self._refusal(stream):
            # A stream for which there is no room otherwise makes room only among its own.
            of = None if len(self._open) >= self._stream_count_max else stream.usage
            idlest, since_s = next(
                ((each, s) for each, s in self._idle.items() if of in (None, each.usage)),
                (None, 0.0),
            )
            now_s = time.monotonic()
            # Several that gave way at once may have made room for as many that are not idle yet.
            new_s = (s for each, s in self._new.items() if of in (None, each.usage))
            may_be_idle = now_s - max(new_s, default=-math.inf) < LAST_READS_S
            if (idlest is None and not may_be_idle) or self._stopping or now_s >= until_s:
                raise LimitError(refusal)
            if idlest is None:
                await asyncio.sleep(_LOOK_S)
                continue
            wait_s = since_s + LAST_READS_S - now_s
            if wait_s > 0:
                await asyncio.sleep(wait_s)  # then it may have work again, and others may be idle
                continue
            self.leave(idlest)
            idlest.end(ShardUnavailableError("the stream was idle and gave way; open another"))
        self._open.add(stream)
        if stream.usage is not None:
            stream.usage.add("streams", 1)
        self._new[stream] = time.monotonic()

    def _refusal(self, stream: Endable) -> str:
        if len(self._open) >= self._stream_count_max:
            return (
                f"limit stream_count_max={self._stream_count_max}: as many streams are at "
                "work; raise it on the shards, or use fewer workers"
            )
        usage = stream.usage
        most = None if usage is None else usage.quota.streams
        if usage is not None and most is not None and usage.count("streams") >= most:
            return (
                f"token {usage.name!r} is at its limit streams={most}: as many are at work; raise "
                "it where the token is made, or use fewer workers"
            )
        return ""

    def leave(self, stream: Endable) -> None:
        if stream in self._open and stream.usage is not None:
            stream.usage.add("streams", -1)
        self._open.discard(stream)
        self._new.pop(stream, None)
        self._idle.pop(stream, None)

    def note_idle(self, stream: Endable) -> None:
        if self._stopping:
            raise _stopping()
        self._new.pop(stream, None)
        if stream in self._open:
            self._idle[stream] = time.monotonic()

    def note_busy(self, stream: Endable) -> None:
        self._new.pop(stream, None)
        self._idle.pop(stream, None)

    def end_idle(self, idle_s: float) -> None:
        self._stopping = True
        since_s = time.monotonic() - idle_s
        for stream in [each for each, idle_since in self._idle.items() if idle_since <= since_s]:
            stream.end(_stopping())


def _stopping() -> ShardUnavailableError:
    return ShardUnavailableError("the shard is stopping; wait until it is back")
