"""Streams that are open on this server: how many, and which may be ended at once when it stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from shardwell.errors import LimitError, ShardUnavailableError


class OpenStreams:
    """Counts streams against their limit; knows those that wait for nothing but their client."""

    def __init__(self, stream_count_max: int) -> None:
        self._stream_count_max = stream_count_max
        self._lock = threading.Lock()
        self._count = 0
        self._idle: dict[grpc.ServicerContext, float] = {}
        """Since when."""
        self._stopping = False

    @property
    def count(self) -> int:
        """Streams open now."""
        return self._count

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Counts one stream while it lasts.

        Raises:
            LimitError: there are as many as the limit allows.
        """
        with self._lock:
            if self._count >= self._stream_count_max:
                raise LimitError(
                    f"limit stream_count_max={self._stream_count_max}: as many streams are open; "
                    "raise it on the shards, or use fewer workers or parameters"
                )
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1

    def idle(self, context: grpc.ServicerContext) -> None:
        """Notes that a stream has answered everything.

        Raises:
            ShardUnavailableError: the server stops. A stream that ends so brings all answers; if it
                were cancelled, those that its client has not read yet would be dropped.
        """
        with self._lock:
            if self._stopping:
                raise ShardUnavailableError("the shard is stopping; wait until it is back")
            self._idle[context] = time.monotonic()

    def busy(self, context: grpc.ServicerContext) -> None:
        """Notes that a stream has work again, or has ended."""
        with self._lock:
            self._idle.pop(context, None)

    def end_idle(self, idle_s: float) -> None:
        """Ends streams that have been idle for so long; others end themselves once they are."""
        with self._lock:
            self._stopping = True
            since_s = time.monotonic() - idle_s
            idle = [context for context, idle_since in self._idle.items() if idle_since <= since_s]
        for context in idle:
            context.cancel()
