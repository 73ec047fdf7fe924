"""Certificates and tokens that end: when, and the warnings before.

Of the certificates in a file the first end counts. A client's certificate is known while the client
is connected; JWTs, which are made anew all the time, are left out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cryptography import x509

from shardwell.connection.tls import TlsFiles
from shardwell_server.access.access import Access, wall_clock_s
from shardwell_server.access.rights import time_of

_LOG = logging.getLogger("shardwell_server")
DAY_S = 86400.0
WARNED_DAYS = (30, 7, 1, 0)
"""Days before an end at which it is in the log, once each."""
_LOOK_INTERVAL_S = 60.0
_LISTED_COUNT_MAX = 100


class End(NamedTuple):
    """The end of one certificate or token."""

    ends_s: float
    """Seconds since 1970."""
    kind: str
    name: str
    lead_s: float = WARNED_DAYS[0] * DAY_S
    """The time before its end at which it is to be made anew."""

    def words(self, now_s: float) -> str:
        """Describes the end, and the remedy."""
        left_s = self.ends_s - now_s
        ends = f"ends in {left_s / DAY_S:.1f} days, at" if left_s > 0 else "has ended, at"
        advice = "shardwell token renew" if self.kind == "token" else "put a new one in its place"
        return f"{self.kind} {self.name} {ends} {time_of(self.ends_s)}; {advice}"


class Ends:
    """The ends of certificates and tokens that a shard knows. Any thread may use it."""

    def __init__(
        self,
        tls: TlsFiles | None,
        access: Access,
        clients: Callable[[], list[tuple[str, float, float]]],
        now_s: Callable[[], float] = wall_clock_s,
    ) -> None:
        self._tls, self._access, self._clients = tls, access, clients
        self.now_s = now_s
        self._looked_s = -math.inf
        self._told: dict[End, int] = {}
        """The fewest days at which each was in the log."""

    def all(self) -> list[End]:
        """Returns all ends, up to a limit; the first end is first."""
        return sorted({*self._found()})[:_LISTED_COUNT_MAX]

    def soon(self) -> list[End]:
        """Returns the ends within 30 days, or, for shorter lives, in the last third of one."""
        now_s = self.now_s()
        return [each for each in self.all() if each.ends_s <= now_s + each.lead_s]

    def warn(self) -> None:
        """Logs each end that has come close; looks once a minute at most."""
        if time.monotonic() - self._looked_s < _LOOK_INTERVAL_S:
            return
        self._looked_s = time.monotonic()
        soon = self.soon()
        for each in soon:
            left_days = (each.ends_s - self.now_s()) / DAY_S
            stage = min(days for days in WARNED_DAYS if left_days <= days)
            if stage < self._told.get(each, WARNED_DAYS[0] + 1):
                self._told[each] = stage
                level = logging.ERROR if left_days <= 0 else logging.WARNING
                _LOG.log(level, "%s", each.words(self.now_s()))
        self._told = {each: self._told[each] for each in soon}

    def _found(self) -> Iterator[End]:
        if self._tls is not None:
            tls, contents = self._tls.tls, self._tls.last
            for kind, path, pem in (
                ("certificate", tls.cert, contents.cert),
                ("authority", tls.ca, contents.ca),
            ):
                found = None if pem is None else first_end(pem)
                if found is not None:
                    yield End(found[0], kind, str(path), found[1])
        for principal in self._access.principals():
            if principal.expires_s < math.inf:
                yield End(principal.expires_s, "token", principal.name)
        for worker_id, ends_s, lead_s in self._clients():
            yield End(ends_s, "certificate of worker", worker_id, lead_s)


def first_end(pem: bytes) -> tuple[float, float] | None:
    """Returns certificates' first end, since 1970, and the time to warn before it; None: unread."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:  # what OpenSSL reads may have forms that this does not
        return None
    first = min(found, key=lambda each: each.not_valid_after_utc)
    life = first.not_valid_after_utc - first.not_valid_before_utc
    lead_s = min(WARNED_DAYS[0] * DAY_S, life.total_seconds() / 3)
    return first.not_valid_after_utc.timestamp(), lead_s
