"""A lock that readers share and a writer has alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


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

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Shared with other readers; blocks while a writer has it or waits."""
        with self._changed:
            if self._is_wanted:
                self._wait_for_writer()
            self._reader_count += 1
        try:
            yield
        finally:
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

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Alone; blocks until the readers of now have gone."""
        with self._changed:
            assert not self._is_wanted, "one writer at a time"
            self._is_wanted = True
            while self._reader_count or self._promised_count:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._is_wanted = False
                self._writes += 1
                self._promised_count, self._waiting_count = self._waiting_count, 0
                self._changed.notify_all()
