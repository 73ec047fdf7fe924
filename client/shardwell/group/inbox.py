"""The input over Unix sockets: the engine reads it while it moves chunks, and a thread between.

While the engine computes, no thread waits for a socket: so a message to it wakes no thread, and
takes no turn of the processor from the sender. Between calls, a thread reads, so that a rank that
leaves is noticed. The reader holds a lock, and never waits while it does.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

IS_SUPPORTED = hasattr(os, "eventfd") and hasattr(select, "poll")
_LINGER_S = 0.05
"""Pause after a call before a thread reads: the next call has often begun by then."""


class Source(Protocol):
    """A socket on which chunks come."""

    @property
    def is_full(self) -> bool:
        """True if nothing more is to be read before the engine has taken some."""

    def receive(self) -> bool:
        """Takes what has come, without waiting; False: nothing more will."""


class Inbox:
    """The receiver over the sockets of a generation; `taken_over` and `read` are the engine's."""

    def __init__(self) -> None:
        self.is_taken = False
        """True while the engine reads, and no other thread."""
        self._sources: dict[int, Source] = {}
        self._paused: dict[int, Source] = {}
        self._lock = threading.Lock()
        """Guards both, and is held by the reader."""
        self._files: tuple[int, ...] = ()
        """Descriptors that wake the engine, and the thread; none: it is not open."""
        self._waking = threading.Lock()
        """Guards them: a closed descriptor may be another's."""
        self._polls = (select.poll(), select.poll())
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwell-inbox", daemon=True)
        self._reader_id = 0

    def open(self) -> bool:
        """Makes it ready for `add`; returns whether it is."""
        with self._lock, self._waking:
            if self._files or self._is_closed.is_set() or not IS_SUPPORTED:
                return bool(self._files)
            try:
                engine_file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            except OSError:
                return False
            try:
                thread_file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            except OSError:
                os.close(engine_file)
                return False
            self._files = (engine_file, thread_file)
            for poll, file in zip(self._polls, self._files, strict=True):
                poll.register(file, select.POLLIN)
            try:
                self._thread.start()
            except RuntimeError:  # no thread is left
                self._close_files()
                self._is_closed.set()
                return False
            return True

    def add(self, file: int, source: Source) -> None:
        """Reads this one, too, until nothing more comes from it; after `open`."""
        with self._lock:
            if self._is_closed.is_set():
                return
            self._sources[file] = source
            self._register(file)
        self._wake(0, 1)

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Lets only the engine read in its block, if the inbox was open before."""
        self.is_taken = bool(self._files)
        if self.is_taken:
            self._wake(1)
        try:
            yield
        finally:
            self.is_taken = False

    def read(self, timeout_s: float) -> None:
        """Waits until something has come, or `wake` was called, and takes what there is."""
        self._reader_id = threading.get_ident()
        try:
            self._take(0, timeout_s)
        finally:
            self._reader_id = 0

    def wake(self) -> None:
        """Ends the engine's wait, or its next one."""
        if self._reader_id != threading.get_ident():
            self._wake(0)

    def resume(self) -> None:
        """Goes on reading those that are full no more."""
        if not self._paused:
            return
        with self._lock:
            for file in [file for file, source in self._paused.items() if not source.is_full]:
                self._sources[file] = self._paused.pop(file)
                self._register(file)
        self._wake(0, 1)

    def close(self) -> None:
        """Reads nothing further. Safe to repeat; not from within a read."""
        with self._lock:
            self._is_closed.set()
            self._sources.clear()
            self._paused.clear()
        self._wake(1)
        if self._files:
            self._thread.join()
        with self._waking:
            self._close_files()

    def _wake(self, *who: int) -> None:
        with self._waking:
            if self._files:
                for each in who:
                    os.eventfd_write(self._files[each], 1)

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = ()

    def _register(self, file: int) -> None:
        for poll in self._polls:
            poll.register(file, select.POLLIN)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if self.is_taken:
                self._is_closed.wait(_LINGER_S)
            else:
                self._take(1, None)

    def _take(self, who: int, timeout_s: float | None) -> None:
        found = self._polls[who].poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)
        with self._lock:
            for file, _ in found:
                if file == self._files[who]:
                    os.eventfd_read(file)
                    continue
                if who == 1 and self.is_taken:
                    continue
                source = self._sources.get(file)
                if source is None:  # it has ended, or is paused
                    continue
                goes_on = source.receive()
                if not goes_on or source.is_full:
                    del self._sources[file]
                    for poll in self._polls:
                        poll.unregister(file)
                    if goes_on:
                        self._paused[file] = source
