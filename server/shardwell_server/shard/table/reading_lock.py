"""A lock that readers share and a writer has alone."""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Side:
    """What a block is entered by. Written out, as a generator costs three times as much."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *reason: object) -> None:
        self._end()


class ReadingLock:
    """Neither side may take it twice in one thread.

    A writer that waits goes before new readers, and readers that waited for it go before the next
    writer; so neither side is kept out for ever. Writers are one at a time by another lock, which
    the caller holds.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._reader_count = 0
        self._waiting_count = 0
        self._promised_count = 0
        """Readers that may come in although a writer waits."""
        self._writes = 0
        self._is_wanted = False
        """A writer has it, or waits for it."""
        self._reading = _Side(self._begin_reading, self._end_reading)
        self._writing = _Side(self._begin_writing, self._end_writing)

    def reading(self) -> _Side:
        """Shared with other readers; blocks while a writer has it or waits."""
        return self._reading

    def writing(self) -> _Side:
        """Alone; blocks until the readers of now have gone."""
        return self._writing

    def _begin_reading(self) -> None:
        with self._changed:
            if self._is_wanted:
                self._wait_for_writer()
            self._reader_count += 1

    def _end_reading(self) -> None:
        with self._changed:
            self._reader_count -= 1
            if not self._reader_count and self._is_wanted:
                self._changed.notify_all()

    def _wait_for_writer(self) -> None:
        self._waiting_count += 1
        writes = self._writes
        while self._writes == writes:
            self._changed.wait()
        self._promised_count -= 1

    def _begin_writing(self) -> None:
        with self._changed:
            assert not self._is_wanted, "one writer at a time"
            self._is_wanted = True
            while self._reader_count or self._promised_count:
                self._changed.wait()

    def _end_writing(self) -> None:
        with self._changed:
            self._is_wanted = False
            self._writes += 1
            self._promised_count, self._waiting_count = self._waiting_count, 0
            self._changed.notify_all()
