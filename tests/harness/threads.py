"""Several workers at the same time, one thread each.

Threads are daemons and every wait has a deadline: a test that hangs fails, and the next one runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from harness.polling import Stopwatch

ResultT = TypeVar("ResultT")
JOIN_TIMEOUT_S = 60.0


def together(
    calls: Sequence[Callable[[], ResultT]], *, timeout_s: float = JOIN_TIMEOUT_S
) -> list[ResultT]:
    """Starts all calls at one moment; their results in order, or the first error."""
    barrier = threading.Barrier(len(calls))

    def start(call: Callable[[], ResultT]) -> Future[ResultT]:
        def run() -> ResultT:
            barrier.wait(timeout_s)
            return call()

        return in_background(run)

    futures = [start(call) for call in calls]
    watch = Stopwatch()
    results = [future.exception(max(timeout_s - watch.elapsed_s, 0)) for future in futures]
    for error in results:
        if error is not None:
            raise error
    return [future.result(0) for future in futures]


def in_background(call: Callable[[], ResultT]) -> Future[ResultT]:
    """Starts a call on a thread of its own; the thread ends with the call."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="in-background", daemon=True).start()
    return future
