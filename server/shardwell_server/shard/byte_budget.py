"""How much a shard stores, over all parameters and tables, and the limit of it.

What counts is said at `Limits.stored_bytes_max`.
"""

from __future__ import annotations

import threading


class ByteBudget:
    """A count with a bound. Any thread may call it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Bytes in use."""
        return self._count

    def take(self, size_bytes: int) -> bool:
        """Counts so many more; False if that is beyond the limit, and nothing changed."""
        with self._lock:
            if self._count + size_bytes > self.limit_bytes:
                return False
            self._count += size_bytes
            return True

    def add(self, size_bytes: int) -> None:
        """Counts what is there, whatever the limit is; a negative number gives back."""
        with self._lock:
            self._count += size_bytes
