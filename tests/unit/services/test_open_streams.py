"""Goal: of streams that only wait for their clients, none keeps another out; those at work do.

Method: more streams than the limit come at once, on a loop of asyncio's. Each waits or works as
soon as it has come, or a moment later.
"""

from __future__ import annotations

import asyncio

import pytest

from shardwell.errors import LimitError, ShardwellError
from shardwell_server.services.open_streams import LAST_READS_S, OpenStreams
from shardwell_server.shard.quotas import Quota, Usage

LIMIT = 4


class Stream:
    """A stream that notes its end."""

    def __init__(self, usage: Usage | None = None) -> None:
        self.usage = usage
        self.error: ShardwellError | None = None

    def end(self, error: ShardwellError) -> None:
        self.error = error


async def _comes(
    streams: OpenStreams, *, idle_after_s: float | None, usage: Usage | None = None
) -> Stream:
    stream = Stream(usage)
    await streams.enter(stream)
    if idle_after_s is not None:
        await asyncio.sleep(idle_after_s)
        streams.note_idle(stream)
    return stream


@pytest.mark.parametrize("idle_after_s", [0.0, LAST_READS_S / 5])
def test_any_number_that_comes_at_once_and_waits(idle_after_s: float) -> None:
    async def come() -> list[Stream]:
        streams = OpenStreams(LIMIT)
        coming = (_comes(streams, idle_after_s=idle_after_s) for _ in range(5 * LIMIT))
        found = await asyncio.gather(*coming)
        assert streams.count == LIMIT
        return found

    ended = [stream for stream in asyncio.run(come()) if stream.error is not None]
    assert len(ended) == 4 * LIMIT


def test_those_at_work_keep_others_out() -> None:
    async def come() -> None:
        streams = OpenStreams(LIMIT)
        for _ in range(LIMIT):
            streams.note_busy(await _comes(streams, idle_after_s=0.0))
        with pytest.raises(LimitError, match=f"limit stream_count_max={LIMIT}: as many streams"):
            await _comes(streams, idle_after_s=None)

    asyncio.run(come())


def test_those_that_never_say_that_they_wait_keep_others_out() -> None:
    """Streams of answers alone."""

    async def come() -> None:
        streams = OpenStreams(LIMIT)
        found = [await _comes(streams, idle_after_s=None) for _ in range(LIMIT)]
        with pytest.raises(LimitError):
            await _comes(streams, idle_after_s=None)
        assert [stream.error for stream in found] == [None] * LIMIT

    asyncio.run(come())


def limited(count: int) -> Usage:
    usage = Usage("ci")
    usage.quota = Quota(streams=count)
    return usage


def test_a_token_s_quota_is_made_room_in_by_its_own_streams_alone() -> None:
    async def come() -> None:
        streams, usage = OpenStreams(LIMIT), limited(2)
        others = await _comes(streams, idle_after_s=0.0)
        own = [await _comes(streams, idle_after_s=0.0, usage=usage) for _ in range(3)]
        assert [stream.error is None for stream in own] == [False, True, True]
        assert others.error is None
        assert usage.count("streams") == 2
        for stream in own[1:]:
            streams.note_busy(stream)
        with pytest.raises(LimitError, match="token 'ci' is at its limit streams=2: as many are"):
            await _comes(streams, idle_after_s=None, usage=usage)
        streams.leave(own[1])
        streams.leave(own[1])
        await _comes(streams, idle_after_s=None, usage=usage)
        assert usage.count("streams") == 2

    asyncio.run(come())


def test_a_quota_beside_the_limit_of_all() -> None:
    async def come() -> None:
        streams, usage = OpenStreams(LIMIT), limited(LIMIT)
        others = [await _comes(streams, idle_after_s=0.0) for _ in range(LIMIT)]
        await _comes(streams, idle_after_s=None, usage=usage)
        assert others[0].error is not None
        assert streams.count == LIMIT

    asyncio.run(come())
