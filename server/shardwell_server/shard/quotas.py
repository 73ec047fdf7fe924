"""The use of a shard, and its bounds: by the owner of a token, see `Quota`; in bytes, by all.

The files of a parameter or table name its owner; so its bytes count from the start on, before a
client has come with a token of that name.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from shardwell.errors import LimitError
from shardwell.numerics.arguments import check_integer

Counted: TypeAlias = Literal["stored_bytes", "parameters", "tables", "members", "streams", "calls"]
_BURST_S = 1.0
"""Seconds of its rate that a token which was quiet may use at once."""
_USAGE_COUNT_MAX = 4096
"""Names of tokens, of which JWTs may bring any number; idle ones are forgotten then."""
_DELAY_S_MAX = 10.0
"""The longest delay of calls with which another one is begun."""
CALL_BYTES = 16 * 1024
"""The bytes as which a call, and each message of a stream, counts at the least."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """The bounds of a token owner's use of one shard; None: only the shard's own limits."""

    stored_bytes: int | None = None
    """Bytes of parameters and tables that it has made; see `Limits.stored_bytes_max`."""
    parameters: int | None = None
    tables: int | None = None
    members: int | None = None
    """Workers connected with the token, and as many again in groups that meet here."""
    streams: int | None = None
    calls: int | None = None
    """Calls of any kind: also streams, and those by which workers attend or wait."""
    bytes_per_s: int | None = None
    """Bytes of calls and answers, payloads in shared memory included. With `CALL_BYTES` this bounds
    calls a second, too. Faster ones are delayed."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if value is not None:
                check_integer(f"quota {entry.name}", value, 0, 2**63 - 1)


NO_QUOTA = Quota()


class Usage:
    """The usage of one token. Any thread may call it."""

    def __init__(self, name: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.quota = NO_QUOTA
        """The bounds that its caller, or the file, gave last."""
        self._now_s = now_s
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._debt_bytes = 0.0
        """Bytes beyond the quota's rate at `_looked_s`; below 0: less."""
        self._looked_s = now_s() - _BURST_S

    @property
    def is_used(self) -> bool:
        return any(self._counts.values()) or self.delay_s(0) > 0

    def count(self, what: Counted) -> int:
        return self._counts.get(what, 0)

    def left(self, what: Counted) -> int | None:
        most: int | None = getattr(self.quota, what)
        return None if most is None else max(most - self.count(what), 0)

    def take(self, what: Counted, count: int = 1, **where: Any) -> None:
        """Counts so much more; LimitError: nothing changed."""
        most: int | None = getattr(self.quota, what)
        with self._lock:
            used = self._counts.get(what, 0)
            if most is not None and used + count > most:
                raise LimitError(
                    f"token {self.name!r} is at its limit {what}={most}: it has {used} on this "
                    f"shard, and {count} more would go over it; use less, or raise it where the "
                    "token is made",
                    **where,
                )
            self._counts[what] = used + count

    def add(self, what: Counted, count: int) -> None:
        """Counts existing things, whatever the quota is; a negative number gives back."""
        with self._lock:
            self._counts[what] = self._counts.get(what, 0) + count

    def delay_s(self, size_bytes: int) -> float:
        """Counts bytes that pass; returns their call's delay, with which the rate holds."""
        rate = self.quota.bytes_per_s
        if rate is None:
            return 0.0
        with self._lock:
            now_s, rate = self._now_s(), max(rate, 1)
            self._debt_bytes -= (now_s - self._looked_s) * rate
            self._debt_bytes = max(self._debt_bytes, -_BURST_S * rate) + size_bytes
            self._looked_s = now_s
            return max(self._debt_bytes / rate, 0.0)

    def check_rate(self) -> None:
        """Raises LimitError while the calls that are there have to wait for long."""
        rate, delay_s = self.quota.bytes_per_s, self.delay_s(0)
        if delay_s > _DELAY_S_MAX:
            raise LimitError(
                f"token {self.name!r} is at its limit bytes_per_s={rate}: what "
                f"its calls move takes {delay_s:.0f} s more at that rate; call less at once, or "
                "raise it where the token is made"
            )


class Usages:
    """The usage of each token, by its name. Any thread may call it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._by_name: dict[str, Usage] = {}

    def of(self, name: str, quota: Quota | None = None) -> Usage:
        with self._lock:
            usage = self._by_name.get(name)
            if usage is None:
                if len(self._by_name) >= _USAGE_COUNT_MAX:
                    self._forget_idle()
                usage = self._by_name[name] = Usage(name, self._now_s)
        if quota is not None:
            usage.quota = quota
        return usage

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Sets the quotas of the file of tokens, also of owners who have not called yet."""
        for name, quota in quotas.items():
            self.of(name, quota)

    def _forget_idle(self) -> None:
        self._by_name = {name: each for name, each in self._by_name.items() if each.is_used}


class ByteBudget:
    """The bytes that a shard stores (`Limits.stored_bytes_max`). Any thread may call it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def take(self, size_bytes: int, what: str, advice: str, **where: Any) -> None:
        """Counts so many more for `what`, '.. needs {} bytes here'; LimitError: nothing changed."""
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
    """The bytes of one parameter or table, in a budget and in its owner's quota."""

    def __init__(self, all_: ByteBudget, usage: Usage) -> None:
        self._all = all_
        self._usage = usage
        self._lock = threading.Lock()
        self._count = 0
        self._is_over = False

    def take(self, size_bytes: int, what: str, advice: str, **where: Any) -> None:
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
        return self._count

    @property
    def left_bytes(self) -> int:
        own = self._usage.left("stored_bytes")
        of_all = max(self._all.limit_bytes - self._all.count, 0)
        return of_all if own is None else min(own, of_all)

    def add(self, size_bytes: int) -> None:
        with self._lock:
            if not self._is_over:
                self._add(size_bytes)

    def give_back(self) -> int:
        """Counts nothing of it any more, whatever comes; returns how many bytes that were.

        A call on a parameter or table that is gone may be under way, and still ask for room.
        """
        with self._lock:
            count, self._is_over = self._count, True
            self._add(-count)
            return count

    def _add(self, size_bytes: int) -> None:
        self._count += size_bytes
        self._usage.add("stored_bytes", size_bytes)
        self._all.add(size_bytes)
