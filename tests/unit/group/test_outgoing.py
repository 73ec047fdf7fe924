"""Goal: a rank that has taken all that was sent may go, at any moment; one that has not is lost.

Method: the stream of chunks to one rank, read here by hand, and ended where a test says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwell.group.transport.peers import Outgoing
from shardwell.process.shared_memory import HEAD_BYTES, IS_SUPPORTED, OwnMemory
from shardwell.process.spans import Traffic
from shardwell.transport.arena import BATCH_COUNT, payload_of
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import messages as framing
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES


class Context:
    """Of a stream that ends when a test says so."""

    def __init__(self) -> None:
        self.end: Callable[[], None]

    def add_callback(self, ended: Callable[[], None]) -> bool:
        self.end = ended
        return True


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def outgoing(failures: list[str]) -> Outgoing:
    return Outgoing(Traffic(), failures.append)


def begun(outgoing: Outgoing) -> tuple[Context, Iterator[bytes]]:
    """The stream, after the first of two chunks."""
    context: Any = Context()
    stream = outgoing.serve(context)
    outgoing.send(b"first", 1)
    outgoing.send(b"second", 1)
    assert next(stream) == b"first"
    return context, stream


@pytest.mark.parametrize("finishes", [False, True])
def test_a_rank_that_goes_before_it_has_all_is_lost(
    outgoing: Outgoing, failures: list[str], finishes: bool
) -> None:
    context, _ = begun(outgoing)
    if finishes:
        outgoing.finish()
    context.end()
    assert failures == ["it no longer takes what is sent to it"]


@pytest.mark.parametrize("finishes", [False, True])
def test_a_rank_that_has_all_may_go(
    outgoing: Outgoing, failures: list[str], finishes: bool
) -> None:
    """Also before this rank's own stream has come to its end, as on a busy machine."""
    context, stream = begun(outgoing)
    assert next(stream) == b"second"
    if finishes:
        outgoing.finish()
    context.end()
    assert failures == []


@pytest.mark.skipif(not IS_SUPPORTED, reason="no memory can be sealed on this system")
@pytest.mark.parametrize("taken_count", [1, 2])
def test_chunks_that_wait_leave_as_one(
    outgoing: Outgoing, failures: list[str], taken_count: int
) -> None:
    """And who goes without the last of them is lost, though it is no more in line."""
    with contextlib.closing(OwnMemory(HEAD_BYTES + 8 * PAYLOAD_SIZE_MAX_BYTES)) as own:
        context: Any = Context()
        stream = outgoing.serve(context, own.memory)
        outgoing.send(b"", 1)
        assert next(stream) == b""  # it is open, and shares memory
        sent = []
        for index in range(BATCH_COUNT + 1):
            header = pb.ReceiveChunksResponse(call_index=index)
            room = outgoing.room(PAYLOAD_SIZE_MAX_BYTES)
            assert room is not None
            room.memory[:] = index
            header.chunk.shared.offset, header.chunk.shared.size = room.offset, room.memory.size
            outgoing.send(header.SerializeToString(), 1, room.memory.size)
            sent.append((index, bytes([index]) * PAYLOAD_SIZE_MAX_BYTES))
        left = [next(stream) for _ in range(taken_count)]
        assert own.memory is not None
        found = []
        for message in left:
            for each in framing.split(pb.ReceiveChunksResponse, message):
                header, payload = framing.parse(pb.ReceiveChunksResponse, each)
                payload = payload_of(header.chunk, payload, own.memory)
                found.append((header.call_index, payload.tobytes()))
        assert found == sent[: len(found)]
        assert len(found) == (BATCH_COUNT if taken_count == 1 else BATCH_COUNT + 1)
        context.end()
        assert len(failures) == (taken_count == 1)


def test_a_stream_that_is_cut_here_is_no_failure(outgoing: Outgoing, failures: list[str]) -> None:
    context, _ = begun(outgoing)
    outgoing.cut()
    context.end()
    assert failures == []


@pytest.mark.parametrize("finishes", [False, True])
def test_a_stream_that_is_opened_when_all_is_done(
    outgoing: Outgoing, failures: list[str], finishes: bool
) -> None:
    """As by a rank on a busy machine that nothing had to be sent to: its stream says that this is
    all.

    Else it would take this rank, which has left by then, for dead; as it does where that left in
    the middle.
    """
    if finishes:
        outgoing.finish()
        outgoing.await_received(0.0)  # no rank is connected, and nothing was sent
    else:
        outgoing.cut()
    context: Any = Context()
    ends = [pb.ReceiveChunksResponse.FromString(each).last for each in outgoing.serve(context)]
    assert ends == ([True] if finishes else [])
    assert failures == []
