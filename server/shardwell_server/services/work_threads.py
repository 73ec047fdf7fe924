"""Threads for what takes the processor or the disk, so that the loop has neither to wait for."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

_LOG = logging.getLogger("shardwell_server")


class _Job(NamedTuple):
    call: Callable[[], Any]
    outcome: asyncio.Future[Any] | None
    """None: it is dropped."""
    abandoned: Callable[[Any], object]


class WorkThreads:
    """A pool of up to `count_max` threads, started when work needs them; the first one at once.

    Where the system has no further thread, work waits for one of the others; RuntimeError: none
    exists. Of those without work, the one that worked last gets the next, in a queue of its own: of
    several that wait at one queue, each job would wake two. For the loop's thread, except `close`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, count_max: int) -> None:
        self._loop = loop
        self._count_max = count_max
        self._lock = threading.Lock()
        self._waiting: deque[_Job | None] = deque()
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        """Queues of threads without work; the last has worked last."""
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        with self._lock:
            self._start()

    async def run(
        self, call: Callable[[], Any], abandoned: Callable[[Any], object] = lambda result: None
    ) -> Any:
        """Makes a call on a thread; if cancelled, `abandoned` gets its result on the loop."""
        outcome = self._loop.create_future()
        if not self._put(_Job(call, outcome, abandoned)):
            raise asyncio.CancelledError
        try:
            return await outcome
        except asyncio.CancelledError:
            if outcome.done() and not outcome.cancelled():  # cancelled as it was delivered
                abandoned(None if outcome.exception() else outcome.result())
            raise

    def begin(self, call: Callable[[], Any]) -> None:
        if not self._put(_Job(call, None, lambda result: None)):
            call()

    def close(self) -> None:
        """Ends all threads after their work. From any thread but theirs."""
        with self._lock:
            self._is_closed = True  # from here on there are no more jobs and no more threads
            self._waiting.extend([None] * len(self._threads))
            while self._idle:
                self._idle.pop().put(self._waiting.popleft())
        for thread in self._threads:
            thread.join()

    def _put(self, job: _Job) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            if self._idle:
                self._idle.pop().put(job)
                return True
            self._waiting.append(job)
            if len(self._threads) < self._count_max:
                with suppress(RuntimeError, MemoryError):
                    self._start()
            return True

    # With the lock held.

    def _start(self) -> None:
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._work, args=(jobs,), name="shardwell-work", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        self._is_free(jobs)

    def _is_free(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        if self._waiting:
            jobs.put(self._waiting.popleft())
        else:
            self._idle.append(jobs)

    # On the threads, and what comes of that on the loop.

    def _work(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.call()
            except BaseException as raised:
                error = raised
            with self._lock:
                self._is_free(jobs)  # before it is delivered, and the next one comes of that
            self._loop.call_soon_threadsafe(self._deliver, job, result, error)
            del job, result, error  # before the next comes, they would hold what is large

    def _deliver(self, job: _Job, result: Any, error: BaseException | None) -> None:
        if job.outcome is None:
            if error is not None:
                _LOG.error("what ends a call has failed", exc_info=error)
        elif job.outcome.cancelled():
            job.abandoned(result)
        elif error is not None:
            job.outcome.set_exception(error)
        else:
            job.outcome.set_result(result)
