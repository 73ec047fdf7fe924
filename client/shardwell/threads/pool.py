"""The threads of this process for what must not wait, and its one timer.

A task has a thread at once: one without work, or a new one. No task waits in a queue for another to
end, so tasks may wait for one another. Callers bound how many they give.

| a thread | leaves by |
|---|---|
| works, and has the name of its task | the task has ended: has no work |
| has no work, and is called IDLE_NAME | a task comes: works; 10 s have passed: ends |

No lock is taken, since a signal may interrupt the caller anywhere: each operation of SimpleQueue
and deque is whole. A forked process has none of the threads, and begins with none.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

_LOG = logging.getLogger("shardwell")
IDLE_NAME, TIMER_NAME = "shardwell-idle", "shardwell-timer"
_IDLE_S = 10.0
_Task: TypeAlias = tuple[str, Callable[[], object]]


class Later:
    """An act that is to come; `cancel` drops it, unless it has begun."""

    def __init__(self, due_s: float, name: str, act: Callable[[], object]) -> None:
        self.due_s = due_s
        self.name = name
        self.act: Callable[[], object] | None = act

    def cancel(self) -> None:
        """Lets go of the act. Safe to repeat, from any thread."""
        self.act = None


class _Pool:
    def __init__(self) -> None:
        self.process_id = os.getpid()
        self._idle: deque[queue.SimpleQueue[_Task]] = deque()
        """The last has worked last, and gets the next task."""
        self._given: queue.SimpleQueue[Later] = queue.SimpleQueue()
        self._has_timer = False

    def begin(self, name: str, body: Callable[[], object]) -> None:
        try:
            tasks = self._idle.pop()
        except IndexError:
            # By the queue: a thread keeps the arguments that it was started with.
            tasks = queue.SimpleQueue[_Task]()
            tasks.put((name, body))
            threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True).start()
        else:
            tasks.put((name, body))

    def _work(self, tasks: queue.SimpleQueue[_Task]) -> None:
        thread = threading.current_thread()
        name, body = tasks.get()
        while True:
            thread.name = name
            body()
            del body  # while the thread waits, it holds nothing
            self._idle.append(tasks)
            thread.name = IDLE_NAME
            try:
                name, body = tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                with contextlib.suppress(ValueError):
                    self._idle.remove(tasks)
                    return
                name, body = tasks.get()  # it was taken out: a task comes

    def after(self, later: Later) -> None:
        self._given.put(later)
        if not self._has_timer:
            try:
                self._has_timer = True
                self.begin(TIMER_NAME, self._time)
            except BaseException:
                self._has_timer = False
                raise

    def _time(self) -> None:
        waiting: list[tuple[float, int, Later]] = []
        numbers = itertools.count()
        while True:
            wait_s = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else _IDLE_S
            with contextlib.suppress(queue.Empty):
                later = self._given.get(timeout=wait_s)
                heapq.heappush(waiting, (later.due_s, next(numbers), later))
                del later
                continue
            if not waiting:
                self._has_timer = False
                if self._given.empty():
                    return
                self._has_timer = True  # one was given meanwhile
            while waiting and (waiting[0][2].act is None or waiting[0][0] <= time.monotonic()):
                self._begin_due(heapq.heappop(waiting)[2])

    def _begin_due(self, later: Later) -> None:
        if (act := later.act) is not None:
            try:
                self.begin(later.name, act)
            except (RuntimeError, MemoryError):  # without a further thread, on this one
                try:
                    act()
                except Exception:  # or no act of this process would come any more
                    _LOG.exception("%s has failed, without a thread of its own", later.name)


_pool = _Pool()


def _own_pool() -> _Pool:
    global _pool
    if _pool.process_id != os.getpid():
        _pool = _Pool()
    return _pool


def begin(name: str, body: Callable[[], object]) -> None:
    """Has a thread run `body` at once, under that name; RuntimeError: the system has no further."""
    _own_pool().begin(name, body)


def after(delay_s: float, name: str, act: Callable[[], object]) -> Later:
    """Begins `act` after a delay; raises as `begin` does."""
    later = Later(time.monotonic() + delay_s, name, act)
    _own_pool().after(later)
    return later


def together(name: str, work: Callable[[], object], count: int) -> None:
    """Has this thread do `work`, and up to `count` others at once; returns when all have ended."""
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def help_out() -> None:
        try:
            work()
        finally:
            ended.put(None)

    begun = 0
    try:
        with contextlib.suppress(RuntimeError, MemoryError):  # the system has no further thread
            while begun < count:
                begin(name, help_out)
                begun += 1
        work()
    finally:
        for _ in range(begun):
            ended.get()
