"""The calls of a member that are under way: as many as its engine may have at once."""

from __future__ import annotations

import threading

from shardwell.errors import ArgumentError, LimitError
from shardwell.group.engine import Call
from shardwell.group.generation import Generation

UNDER_WAY_COUNT_MAX = 64
"""Calls of a member that may be under way at once."""


class CallsUnderWay:
    """Of one member, over all its generations. Any thread may submit."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._room = threading.BoundedSemaphore(UNDER_WAY_COUNT_MAX)

    def submit(self, call: Call, generation: Generation, *, waits: bool) -> None:
        """Gives a call to the generation's engine. Blocks while too many are under way.

        Args:
            call: Its place is taken until its result is there.
            generation: Whose ranks make it.
            waits: Whether the caller waits for its result.

        Raises:
            ArgumentError: a callback of the engine waits for what comes after it.
            LimitError: too many are under way, and a callback can't wait for one to end.
            WorkerLostError, ClosedError: the generation is over.
        """
        is_callback = generation.engine.is_current_thread
        if waits and is_callback:
            raise ArgumentError(
                "a callback of all_reduce_async waits for another call of the group, which is made "
                "when the callback has returned; call all_reduce_async there, or another thread"
            )
        # The engine makes room, but not while a callback of its own waits for it.
        if not self._room.acquire(blocking=not is_callback):
            raise LimitError(
                f"limit under_way_count_max={UNDER_WAY_COUNT_MAX}: as many calls of group "
                f"{self._group!r} are under way; a callback can't wait for one to end: make fewer"
            )
        call.result.add_done_callback(lambda _: self._room.release())
        try:
            generation.submit(call)
        except BaseException:
            self._room.release()
            raise
