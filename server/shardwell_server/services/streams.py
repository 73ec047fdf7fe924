"""Streams that are open on this server: how many, and which may be ended at once when it stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from shardwell.errors import LimitError


class OpenStreams:
    """Counts streams against their limit; knows those that wait for nothing but their client."""

    def __init__(self, stream_count_max: int) -> None:
        self._stream_count_max = stream_count_max
        self._lock = threading.Lock()
        self._count = 0
        self._idle: set[grpc.ServicerContext] = set()
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
        """Notes that a stream has answered everything."""
        with self._lock:
            self._idle.add(context)
            stopping = self._stopping
        if stopping:
            context.cancel()

    def busy(self, context: grpc.ServicerContext) -> None:
        """Notes that a stream has work again, or has ended."""
        with self._lock:
            self._idle.discard(context)

    def end_idle(self) -> None:
        """Ends the idle streams now, and others as soon as they are idle."""
        with self._lock:
            self._stopping = True
            idle = list(self._idle)
        for context in idle:
            context.cancel()
