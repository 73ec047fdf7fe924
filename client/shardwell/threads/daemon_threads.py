"""Threads which do not keep their process from ending, and take work while it ends.

Python waits at a process's end for all threads of a ThreadPoolExecutor. Those of a member's server
write the other members' streams, which end when those members do: two that wait for each other
would never end, and a worker that fails would look as if it lived. And a ThreadPoolExecutor takes
no work once the main thread has ended, though other threads and atexit handlers go on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeAlias, TypeVar

ResultT = TypeVar("ResultT")
_Task: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """An executor whose threads end with the process at the latest. Any thread may use it."""

    def __init__(self, count_max: int, name: str) -> None:
        self._count_max = count_max
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        # Bounded by the server: maximum_concurrent_rpcs.
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

    def submit(
        self, function: Callable[..., ResultT], /, *args: Any, **kwargs: Any
    ) -> Future[ResultT]:
        """Has a thread call the function; RuntimeError: it was shut down."""
        future: Future[ResultT] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads were shut down; they take no more work")
            self._tasks.put((future, partial(function, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count_max:
                self._add()
        return future

    def offer(self, function: Callable[..., ResultT], /, *args: Any) -> Future[ResultT] | None:
        """Submits a call if a thread can begin it at once; None: none can, or after `shutdown`."""
        future: Future[ResultT] = Future()
        with self._lock:
            if self._closed:
                return None
            if not self._idle.acquire(blocking=False):
                started = len(self._threads)
                if started < self._count_max:
                    with contextlib.suppress(RuntimeError):
                        self._add()
                if len(self._threads) == started:
                    return None
            self._tasks.put((future, partial(function, *args)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes nothing further; what was submitted is still done."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        if cancel_futures:
            while (task := self._taken()) is not None:
                task[0].cancel()
        for _ in threads:
            self._tasks.put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _add(self) -> None:
        """Starts a thread; the lock is held."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            _do(*task)
            del task
            self._idle.release()

    def _taken(self) -> _Task | None:
        with contextlib.suppress(queue.Empty):
            return self._tasks.get_nowait()
        return None


def _do(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            del future, call  # which the error's traceback would hold, and they the error
