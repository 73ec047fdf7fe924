"""The times that steps take and wait, in plain counters that status reads.

A step of a parameter or table begins, on this shard, with the first contribution to any of its
parts, and ends when the last part has closed it. Several may be open at once, as a worker may be
one ahead of the others in some parts.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper ends of what is counted together: from a step of ten elements to a lost worker."""
_OPEN_COUNT_MAX = 4
"""Steps that are open at once; more only where some never close, as after a restore."""


class Durations:
    """A histogram."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """The counts up to each bound and, last, beyond them."""
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class StepTimes:
    """The step times of one parameter or table of `part_count` parts. Any thread may call it."""

    def __init__(self, part_count: int, now_s: Callable[[], float]) -> None:
        self._part_count = part_count
        self._now_s = now_s
        self._lock = threading.Lock()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets all; no other thread knows of it yet."""
        self._begun_s: dict[int, float] = {}
        self._closed_counts: dict[int, int] = {}
        """Numbers of parts that have closed open steps."""
        self._last_s: float | None = None
        self.waits = Durations()
        """From the first contribution to a step to its end."""
        self.periods = Durations()
        """From the end of a step to that of the next."""

    def contributed(self, step: int) -> float | None:
        """Counts a contribution; returns when its step began; None: with this one."""
        begun_s = self._begun_s.get(step)
        if begun_s is None:
            with self._lock:
                self._begun_s.setdefault(step, self._now_s())
                while len(self._begun_s) > _OPEN_COUNT_MAX:
                    oldest = min(self._begun_s)
                    del self._begun_s[oldest]
                    self._closed_counts.pop(oldest, None)
        return begun_s

    def closed(self, step: int) -> None:
        with self._lock:
            count = self._closed_counts[step] = self._closed_counts.get(step, 0) + 1
            if count < self._part_count:
                return
            now_s, begun_s = self._now_s(), self._begun_s.get(step)
            if begun_s is not None:
                self.waits.add(now_s - begun_s)
            if self._last_s is not None:
                self.periods.add(now_s - self._last_s)
            self._last_s = now_s
            self._begun_s = {k: v for k, v in self._begun_s.items() if k > step}
            self._closed_counts = {k: v for k, v in self._closed_counts.items() if k > step}

    def open_for_s(self, step: int) -> float | None:
        """Returns the age of a step; None: no worker has contributed to it."""
        begun_s = self._begun_s.get(step)
        return None if begun_s is None else max(self._now_s() - begun_s, 0.0)
