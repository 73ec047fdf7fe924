"""asyncio's loop of this process, on a thread of its own, for all servers in it.

gRPC has one queue of events for all loops of a process, and wakes each of them for each event.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class EventLoop:
    """A user's hold on the loop, which ends with the last. For all threads but the loop's."""

    _lock = threading.Lock()
    _shared: _LoopThread | None = None
    _user_count = 0

    def __init__(self) -> None:
        with self._lock:
            if self._shared is None or self._shared.process_id != os.getpid():
                EventLoop._shared, EventLoop._user_count = _LoopThread(), 0
            EventLoop._user_count += 1
            assert self._shared is not None
            self._thread = self._shared
        self.loop = self._thread.loop

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Runs a coroutine on the loop, and blocks until it is done; Ctrl-C ends it."""
        future = self.begin(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        with self._lock:
            EventLoop._user_count -= 1
            if not self._user_count:
                EventLoop._shared = None
                self._thread.close()


class _LoopThread:
    def __init__(self) -> None:
        self.process_id = os.getpid()
        """A fork has no such thread."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="shardwell-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
