"""How much a shard stores, over all parameters and tables, and the limit of it.

What counts is said at `Limits.stored_bytes_max`.
"""

from __future__ import annotations

import threading
from typing import Any

from shardwell.errors import LimitError
from shardwell_server.shard.quotas import Usage


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

    def take(self, size_bytes: int, what: str, advice: str, **where: Any) -> None:
        """Counts so many more.

        Args:
            size_bytes: How many.
            what: What for, for the message: "parameter 'm' needs {} bytes here".
            advice: What to do where there are none.
            where: `parameter` or `table`, and its name, for errors.

        Raises:
            LimitError: that is beyond the limit, and nothing changed.
        """
        with self._lock:
            if self._count + size_bytes > self.limit_bytes:
                raise LimitError(
                    f"limit stored_bytes_max={self.limit_bytes}: {what.format(size_bytes)} beside "
                    f"the {self._count} in use; {advice}",
                    **where,
                )
            self._count += size_bytes

    def add(self, size_bytes: int) -> None:
        """Counts existing bytes, whatever the limit is; a negative number gives back."""
        with self._lock:
            self._count += size_bytes


class OwnedBytes:
    """What one parameter or table uses of a budget, and of what its owner's token may use."""

    def __init__(self, all_: ByteBudget, usage: Usage) -> None:
        self._all = all_
        self._usage = usage
        self._lock = threading.Lock()
        self._count = 0
        self._is_over = False

    def take(self, size_bytes: int, what: str, advice: str, **where: Any) -> None:
        """As `ByteBudget.take`, of both."""
        with self._lock:
            if self._is_over:
                return
            self._usage.take("stored_bytes", size_bytes, **where)
            try:
                self._all.take(size_bytes, what, advice, **where)
            except BaseException:
                self._usage.add("stored_bytes", -size_bytes)
                raise
            self._count += size_bytes

    @property
    def count(self) -> int:
        """Bytes that it has."""
        return self._count

    @property
    def left_bytes(self) -> int:
        """How many more may be taken."""
        own = self._usage.left("stored_bytes")
        of_all = max(self._all.limit_bytes - self._all.count, 0)
        return of_all if own is None else min(own, of_all)

    def add(self, size_bytes: int) -> None:
        """As `ByteBudget.add`, of both."""
        with self._lock:
            if not self._is_over:
                self._add(size_bytes)

    def give_back(self) -> int:
        """Counts nothing of it any more, whatever comes; returns how many bytes that were.

        Of a parameter or table that is gone: a call that is under way may still ask for room.
        """
        with self._lock:
            count, self._is_over = self._count, True
            self._add(-count)
            return count

    def _add(self, size_bytes: int) -> None:
        self._count += size_bytes
        self._usage.add("stored_bytes", size_bytes)
        self._all.add(size_bytes)
