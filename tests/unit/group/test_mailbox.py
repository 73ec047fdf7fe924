"""Goal: what streams put in comes out in order, waits are bounded, and an end ends them all.

Method: streams' threads and an engine's, without sockets. A thread that must wait is watched until
it does; nothing is slept for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType

import numpy as np
import pytest

from harness.polling import PATIENCE_S, Stopwatch, eventually
from shardwell.errors import ClosedError, CorruptChunkError, WorkerLostError
from shardwell.group.mailbox import Mailbox
from shardwell.group.schedule.collective import WINDOW_ROW_COUNT, Arrival
from shardwell.v1 import peer_pb2 as pb
from shardwell.v1 import types_pb2

LONG_S = 30.0
COUNT_MAX = 4 * WINDOW_ROW_COUNT * 3 + 16
"""Chunks of one sender that a mailbox of three ranks takes before it lets the sender wait."""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4, thread_name_prefix="mailbox-test") as pool:
        yield pool


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    box = Mailbox(3)
    yield box
    box.end(lost)  # lets go of the threads of a test that fails


def arrival(rank: int, call_index: int, chunk_index: int) -> Arrival:
    chunk = types_pb2.Chunk(chunk_index=chunk_index)
    header = pb.ReceiveChunksResponse(call_index=call_index, chunk=chunk)
    return Arrival(rank, header, np.empty(0, np.uint8), b"")


def lost() -> WorkerLostError:
    return WorkerLostError("rank 1 is gone", rank=1)


def left() -> WorkerLostError:
    return WorkerLostError("rank 0 has left", rank=0)


def place(taken: Arrival | None) -> tuple[int, int]:
    """(rank, chunk)."""
    assert taken is not None
    return taken.rank, taken.header.chunk.chunk_index


def is_waiting(mailbox: Mailbox, count: int = 1) -> None:
    """Returns when that many threads are inside one of its methods: they wait there."""

    def is_inside(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_globals.get("__name__") == Mailbox.__module__:
                return True
            frame = frame.f_back
        return False

    def look() -> bool:
        return sum(map(is_inside, sys._current_frames().values())) == count

    eventually("threads wait", look)
    eventually("they still do", look)


def fill(mailbox: Mailbox, rank: int = 1, call_index: int = 0) -> None:
    for index in range(COUNT_MAX):
        mailbox.put_arrival(arrival(rank, call_index, index))


def verdict(call_index: int, operation: pb.Operation = pb.OPERATION_BARRIER) -> pb.Verdict:
    return pb.Verdict(call_index=call_index, operation=operation)


def test_chunks_come_in_order_for_each_call(mailbox: Mailbox) -> None:
    for call_index, rank, index in [(0, 1, 0), (1, 1, 5), (0, 2, 1), (1, 2, 6), (0, 1, 2)]:
        mailbox.put_arrival(arrival(rank, call_index, index))
    assert [place(mailbox.take(1, 0)) for _ in range(2)] == [(1, 5), (2, 6)]
    assert [place(mailbox.take(0, 0)) for _ in range(3)] == [(1, 0), (2, 1), (1, 2)]
    assert mailbox.take(0, 0) is None


def test_what_has_come_is_taken_without_a_wait(mailbox: Mailbox) -> None:
    assert mailbox.come(0) is None
    mailbox.put_arrival(arrival(2, 1, 5))
    mailbox.put_arrival(arrival(1, 0, 0))
    mailbox.put_arrival(arrival(2, 0, 1))
    assert [place(mailbox.come(0)) for _ in range(2)] == [(1, 0), (2, 1)]
    assert mailbox.come(0) is None
    fill(mailbox)
    assert mailbox.is_full(1)
    mailbox.come(0)
    assert not mailbox.is_full(1)
    mailbox.end(lost)
    with pytest.raises(WorkerLostError, match="rank 1 is gone"):
        mailbox.come(0)


def test_verdicts_are_taken_once_and_by_call(mailbox: Mailbox) -> None:
    mailbox.put_verdict(verdict(1))
    mailbox.put_verdict(verdict(0))
    assert mailbox.await_verdict(0, 0) == verdict(0)
    assert mailbox.await_verdict(0, 0) is None
    assert mailbox.await_verdict(1, 0) == verdict(1)


def test_answers_to_joins_are_kept_apart_and_in_order(mailbox: Mailbox) -> None:
    """Their call_index is that of another call."""
    mailbox.put_verdict(verdict(3, pb.OPERATION_JOIN))
    mailbox.put_verdict(verdict(4, pb.OPERATION_JOIN))
    assert mailbox.await_verdict(3, 0) is None
    found = [mailbox.await_verdict(None, 0) for _ in range(3)]
    assert found == [verdict(3, pb.OPERATION_JOIN), verdict(4, pb.OPERATION_JOIN), None]


def test_waits_end_at_their_deadline(mailbox: Mailbox) -> None:
    watch = Stopwatch()
    assert mailbox.take(0, 0.05) is None
    assert mailbox.await_verdict(0, 0.05) is None
    assert mailbox.await_verdict(None, -1.0) is None
    assert 0.09 <= watch.elapsed_s < PATIENCE_S


def test_what_comes_wakes_who_waits(mailbox: Mailbox, threads: ThreadPoolExecutor) -> None:
    taken = threads.submit(mailbox.take, 7, LONG_S)
    is_waiting(mailbox)
    mailbox.put_arrival(arrival(1, 6, 0))  # another call's
    mailbox.put_arrival(arrival(1, 7, 3))
    assert place(taken.result(LONG_S)) == (1, 3)
    awaited = threads.submit(mailbox.await_verdict, 7, LONG_S)
    is_waiting(mailbox)
    mailbox.put_verdict(verdict(7))
    assert awaited.result(LONG_S) == verdict(7)


def test_a_sender_waits_while_too_many_of_its_chunks_lie_here(
    mailbox: Mailbox, threads: ThreadPoolExecutor
) -> None:
    fill(mailbox)
    blocked = threads.submit(mailbox.put_arrival, arrival(1, 0, COUNT_MAX))
    is_waiting(mailbox)
    mailbox.put_arrival(arrival(2, 0, 0))  # another sender's
    assert not blocked.done()
    assert place(mailbox.take(0, 0)) == (1, 0)
    blocked.result(LONG_S)
    rest = [place(mailbox.take(0, 0)) for _ in range(COUNT_MAX + 1)]
    assert [index for rank, index in rest if rank == 1] == list(range(1, COUNT_MAX + 1))


def test_chunks_of_later_calls_count_too(mailbox: Mailbox, threads: ThreadPoolExecutor) -> None:
    for index in range(COUNT_MAX):
        mailbox.put_arrival(arrival(1, index % 3, index))
    blocked = threads.submit(mailbox.put_arrival, arrival(1, 9, 0))
    is_waiting(mailbox)
    mailbox.take(2, 0)
    blocked.result(LONG_S)


def test_forgetting_a_call_makes_room(mailbox: Mailbox, threads: ThreadPoolExecutor) -> None:
    fill(mailbox, call_index=4)
    blocked = threads.submit(mailbox.put_arrival, arrival(1, 5, 0))
    is_waiting(mailbox)
    mailbox.forget(4)
    blocked.result(LONG_S)
    assert mailbox.take(4, 0) is None
    assert place(mailbox.take(5, 0)) == (1, 0)
    fill(mailbox, call_index=6)  # all room is free again
    with pytest.raises(CorruptChunkError, match="call 4, which is over"):
        mailbox.put_arrival(arrival(0, 4, 0))


def test_the_end_ends_all_waits(mailbox: Mailbox, threads: ThreadPoolExecutor) -> None:
    fill(mailbox, call_index=8)
    waits: list[Future[object]] = [
        threads.submit(mailbox.put_arrival, arrival(1, 8, 99)),
        threads.submit(mailbox.take, 0, LONG_S),
        threads.submit(mailbox.await_verdict, 0, LONG_S),
        threads.submit(mailbox.await_verdict, None, LONG_S),
    ]
    is_waiting(mailbox, len(waits))
    mailbox.end(lost)
    raised = [wait.exception(LONG_S) for wait in waits]
    assert [type(error) for error in raised] == [WorkerLostError] * len(waits)
    assert len({id(error) for error in raised}) == len(waits), "each wait raises its own"


def test_nothing_goes_on_after_the_end(mailbox: Mailbox) -> None:
    """Not even what has come: the generation is over. But what was decided before was."""
    mailbox.put_arrival(arrival(1, 0, 0))
    mailbox.put_verdict(verdict(0))
    assert mailbox.ended is None
    mailbox.end(lost)
    assert mailbox.await_verdict(0, 0) == verdict(0)
    calls: list[Callable[[], object]] = [
        lambda: mailbox.take(0, 0),
        lambda: mailbox.await_verdict(0, 0),
        lambda: mailbox.put_arrival(arrival(1, 0, 1)),
    ]
    for call in calls:
        with pytest.raises(WorkerLostError, match="rank 1 is gone"):
            call()


@pytest.mark.parametrize("lets_finish", [False, True])
def test_the_first_end_counts(mailbox: Mailbox, lets_finish: bool) -> None:
    mailbox.end(left, lets_finish=lets_finish)
    mailbox.end(lost)
    mailbox.end(lambda: ClosedError("closed"))
    assert mailbox.ended is left
    with pytest.raises(WorkerLostError, match="rank 0 has left"):
        mailbox.take(0, 0)


def test_calls_that_have_a_verdict_may_finish(
    mailbox: Mailbox, threads: ThreadPoolExecutor
) -> None:
    """Rank 0 leaves: the others still exchange the chunks of what was agreed."""
    mailbox.put_verdict(verdict(0))
    mailbox.end(left, lets_finish=True)
    assert mailbox.ended is left
    assert mailbox.await_verdict(0, 0) == verdict(0)
    taken = threads.submit(mailbox.take, 0, LONG_S)
    is_waiting(mailbox)
    mailbox.put_arrival(arrival(1, 0, 0))
    assert place(taken.result(LONG_S)) == (1, 0)
    for call_index in (1, None):
        with pytest.raises(WorkerLostError, match="rank 0 has left"):
            mailbox.await_verdict(call_index, LONG_S)


def test_who_waits_for_a_verdict_hears_that_none_will_come(
    mailbox: Mailbox, threads: ThreadPoolExecutor
) -> None:
    awaited = threads.submit(mailbox.await_verdict, 3, LONG_S)
    taken = threads.submit(mailbox.take, 2, LONG_S)
    is_waiting(mailbox, 2)
    mailbox.end(left, lets_finish=True)
    assert isinstance(awaited.exception(LONG_S), WorkerLostError)
    is_waiting(mailbox, 1)
    mailbox.end(lost)
    assert str(taken.exception(LONG_S)) == "rank 0 has left"


def test_two_senders_and_an_engine(mailbox: Mailbox, threads: ThreadPoolExecutor) -> None:
    """Many more chunks than there is room for: all come, each sender's in order."""
    count, start = 40 * COUNT_MAX, threading.Barrier(3)

    def send(rank: int) -> None:
        start.wait(LONG_S)
        for index in range(count):
            mailbox.put_arrival(arrival(rank, index * 4 // count, index))

    senders = [threads.submit(send, rank) for rank in (1, 2)]
    start.wait(LONG_S)
    found: dict[int, list[int]] = {1: [], 2: []}
    for call_index in range(4):
        for _ in range(2 * count // 4):
            rank, index = place(mailbox.take(call_index, LONG_S))
            found[rank].append(index)
        mailbox.forget(call_index)
    assert found == {1: list(range(count)), 2: list(range(count))}
    for sender in senders:
        sender.result(LONG_S)
