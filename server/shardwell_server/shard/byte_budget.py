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
            where: As errors carry it.

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
        """Counts what is there, whatever the limit is; a negative number gives back."""
        with self._lock:
            self._count += size_bytes


class OwnedBytes:
    """The part of a budget that the owner of a token uses, who has a bound of his own."""

    def __init__(self, all_: ByteBudget, usage: Usage) -> None:
        self._all = all_
        self._usage = usage

    def take(self, size_bytes: int, what: str, advice: str, **where: Any) -> None:
        """As `ByteBudget.take`, of both."""
        self._usage.take("stored_bytes", size_bytes, **where)
        try:
            self._all.take(size_bytes, what, advice, **where)
        except BaseException:
            self._usage.add("stored_bytes", -size_bytes)
            raise

    @property
    def left_bytes(self) -> int:
        """How many more may be taken."""
        own = self._usage.left("stored_bytes")
        of_all = max(self._all.limit_bytes - self._all.count, 0)
        return of_all if own is None else min(own, of_all)

    def add(self, size_bytes: int) -> None:
        """As `ByteBudget.add`, of both."""
        self._usage.add("stored_bytes", size_bytes)
        self._all.add(size_bytes)
