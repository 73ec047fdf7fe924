"""The work of one call, spread over cores that are free.

A call gives its pieces one by one. A thread that has nothing to do takes a piece; where none is
free, the caller does the piece itself before it gives the next. So nothing waits in a queue, and at
most a piece a thread is under way, whatever the call's size and however many calls there are.

A piece of work reads no connection and waits for no other piece: it takes locks that their holders
give back without waiting for a piece. So each piece ends, and with them the call that waits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from shardwell.errors import ArgumentError
from shardwell.process.environment import variable
from shardwell.threads.daemon_threads import DaemonThreads

ResultT = TypeVar("ResultT")
THREADS_VARIABLE = "SHARDWELL_THREADS"
THREAD_COUNT_DEFAULT_MAX = 8
"""Threads of a call by default, where there are more cores: Python lets one of them run at a time
beside the native code, and others of this machine need cores, too."""
THREAD_COUNT_MAX = 256


def core_count(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the cores that this process may use, by its affinity and its container's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((cgroup / name).read_text() for name in names).split()
            if int(quota) > 0 < int(period):  # none is "max" or -1
                count = min(count, max(round(int(quota) / int(period)), 1))
    return count


def thread_count(given: int | None) -> int:
    """Returns the threads that a call may use, its own among them.

    By default $SHARDWELL_THREADS, else half as many as cores, up to `THREAD_COUNT_DEFAULT_MAX`: on
    two cores, a worker and a shard that share them lose a twentieth to more threads.
    """
    what, value, count = "threads", str(given), given
    if given is None:
        what, value = f"${THREADS_VARIABLE}", variable(THREADS_VARIABLE)
        if not value:
            return min(max(core_count() // 2, 1), THREAD_COUNT_DEFAULT_MAX)
        count = int(value) if value.isascii() and value.isdigit() else 0
    if type(count) is not int or not 1 <= count <= THREAD_COUNT_MAX:
        raise ArgumentError(f"{what} must be 1 to {THREAD_COUNT_MAX}; got {value!r:.80}")
    return count


class CoreThreads:
    """The threads that take pieces of any call's work; a count of 1 starts none."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = DaemonThreads(count - 1, "shardwell-core")
        self._process_id = os.getpid()

    def offer(self, piece: Callable[..., ResultT], *args: object) -> Future[ResultT] | None:
        """Has a free thread do a piece; None: none is free, and the caller is to do it."""
        if self.count < 2 or os.getpid() != self._process_id:
            return None
        return self._threads.offer(piece, *args)

    def spread(self) -> Spread:
        """Returns the context manager of one call."""
        return Spread(self)

    def close(self) -> None:
        """Ends the threads when their pieces have; callers do their own from then on."""
        self._threads.shutdown()


class Spread:
    """The pieces of one call. For one thread; all of them have ended when the block has."""

    def __init__(self, threads: CoreThreads) -> None:
        self._threads = threads
        self._given: list[Future[Any]] = []

    def give(self, piece: Callable[..., object], *args: object) -> None:
        """Has a free thread do a piece, or does it here; raises what a piece raised."""
        future = self._threads.offer(piece, *args)
        if future is None:
            piece(*args)
            return
        self._given.append(future)
        if any(each.done() and each.exception() is not None for each in self._given):
            del future, args  # which the error's traceback would hold
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()

    def wait(self) -> None:
        """Waits for all pieces; raises the error of the first that failed, in their order."""
        given, self._given = self._given, []
        failed = [each for each in (future.exception() for future in given) if each is not None]
        try:
            if failed:
                raise failed[0] from None
        finally:
            del given, failed  # which the error's traceback would hold, and they the error
