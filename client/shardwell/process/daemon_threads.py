"""Threads for a worker's server, which do not keep its process from ending.

Python waits at a process's end for all threads of a ThreadPoolExecutor. Those of a member's server
write the other members' streams, which end when those members do: two that wait for each other
would never end, and a worker that fails would look as if it lived.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class DaemonThreads(Executor):
    """An executor whose threads end with the process at the latest. Any thread may use it.

    Args:
        count_max: Threads, which are started as they are needed.
        name: Of each.
    """

    def __init__(self, count_max: int, name: str) -> None:
        self._count_max = count_max
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        # Bounded by the server: maximum_concurrent_rpcs.
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )

    def submit(
        self, function: Callable[..., ResultT], /, *args: Any, **kwargs: Any
    ) -> Future[ResultT]:
        """Has a thread call the function: what it returns or raises.

        Raises:
            RuntimeError: it was shut down.
        """
        future: Future[ResultT] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads were shut down; they take no more work")
            self._tasks.put((future, partial(function, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count_max:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes nothing further; what was submitted is still done."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, call
            self._idle.release()
