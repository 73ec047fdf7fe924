"""A lock that readers share and a writer has alone."""

from __future__ import annotations

import threading


class _Turns:
    """The holders of the lock, and those that wait for it; guarded by `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.reader_count = 0
        self.waiting_count = 0
        self.promised_count = 0
        """Readers that may come in although a writer waits."""
        self.writes = 0
        self.is_wanted = False
        """A writer has the lock, or waits for it."""


class _Reading:
    """A reader's block. Written out, as a generator costs three times as much."""

    def __init__(self, turns: _Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        turns = self._turns
        with turns.changed:
            if turns.is_wanted:
                turns.waiting_count += 1
                writes = turns.writes
                while turns.writes == writes:
                    turns.changed.wait()
                turns.promised_count -= 1
            turns.reader_count += 1

    def __exit__(self, *reason: object) -> None:
        turns = self._turns
        with turns.changed:
            turns.reader_count -= 1
            if not turns.reader_count and turns.is_wanted:
                turns.changed.notify_all()


class _Writing:
    def __init__(self, turns: _Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        turns = self._turns
        with turns.changed:
            assert not turns.is_wanted, "one writer at a time"
            turns.is_wanted = True
            while turns.reader_count or turns.promised_count:
                turns.changed.wait()

    def __exit__(self, *reason: object) -> None:
        turns = self._turns
        with turns.changed:
            turns.is_wanted = False
            turns.writes += 1
            turns.promised_count, turns.waiting_count = turns.waiting_count, 0
            turns.changed.notify_all()


class ReadingLock:
    """Two context managers, neither of which a thread may enter twice.

    A writer that waits goes before new readers, and readers that waited for it go before the next
    writer; so neither side is kept out for ever. Writers are one at a time by another lock, which
    the caller holds.
    """

    def __init__(self) -> None:
        turns = _Turns()
        self.reading = _Reading(turns)
        """Shared with other readers; blocks while a writer has the lock or waits."""
        self.writing = _Writing(turns)
        """Alone; blocks until the readers of now have gone."""
