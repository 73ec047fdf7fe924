"""Goal: readers share a ReadingLock, a writer has it alone, and neither is kept out for ever.

Method: threads that change turns as often as Python can check a pair of numbers that only the
writer makes unequal; and an order of events that is forced.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together
from shardwell_server.shard.table.reading_lock import ReadingLock


@pytest.fixture(autouse=True)
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_no_call_reads_in_the_middle_of_a_change() -> None:
    """The writer goes on until both readers had their turns: it does not keep them out."""
    lock, pair, counts, failed = ReadingLock(), [0, 0], [0, 0], []

    def write() -> None:
        number = 0
        while min(counts) < 100 and not failed:
            number += 1
            with lock.writing:
                pair[0] = number
                for _ in range(20):
                    pass
                pair[1] = number

    def read(index: int) -> None:
        while min(counts) < 100 and not failed:
            with lock.reading:
                first = pair[0]
                for _ in range(20):
                    pass
                if (first, first) != tuple(pair):
                    failed.append((first, *pair))
            counts[index] += 1

    together([write, lambda: read(0), lambda: read(1)])
    assert not failed


def test_readers_share_it() -> None:
    lock, both = ReadingLock(), threading.Barrier(2)

    def read() -> int:
        with lock.reading:
            return both.wait(PATIENCE_S)

    assert sorted(together([read, read])) == [0, 1]


def test_a_writer_goes_before_new_readers() -> None:
    lock, order = ReadingLock(), []

    def write() -> None:
        with lock.writing:
            order.append("writer")

    def read() -> None:
        with lock.reading:
            order.append("new reader")

    with lock.reading:
        writer = in_background(write)
        eventually("the writer waits", lambda: lock.writing._turns.is_wanted)
        reader = in_background(read)
        order.append("old reader")
    writer.result(PATIENCE_S)
    reader.result(PATIENCE_S)
    assert order == ["old reader", "writer", "new reader"]


def test_an_error_gives_it_back() -> None:
    lock = ReadingLock()
    for side in (lock.reading, lock.writing, lock.writing, lock.reading):
        with pytest.raises(KeyError), side:
            raise KeyError
