"""A group whose members are threads: what GroupSync asks of a group, for tests without sockets.

Much simpler than a real group, and independent of it: float64 sums by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.polling import PATIENCE_S

_TIMEOUT_S = PATIENCE_S


class ThreadGroups:
    """Members meet here; `member(rank)` is one's group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._active = set(range(size))
        self._calls: dict[int, tuple[np.ndarray, int]] = {}
        self._round = 0
        self._joins = 0
        self._last = -1

    def member(self, rank: int) -> ThreadGroup:
        return ThreadGroup(self, rank)

    def call(
        self,
        rank: int,
        array: np.ndarray,
        weight: int,
        work: Callable[[dict[int, tuple[np.ndarray, int]]], None],
    ) -> None:
        with self._condition:
            round_now = self._round
            self._calls[rank] = (array, weight)
            self._work = work
            self._proceed()
            assert self._condition.wait_for(lambda: self._round > round_now, _TIMEOUT_S)

    def join(self, rank: int) -> int:
        with self._condition:
            joins = self._joins
            self._active.remove(rank)
            if self._active:
                self._proceed()
            else:
                self._last, self._joins = rank, joins + 1
                self._active = set(range(self.size))
                self._condition.notify_all()
            assert self._condition.wait_for(lambda: self._joins > joins, _TIMEOUT_S)
            return self._last

    def _proceed(self) -> None:
        if self._calls and set(self._calls) == self._active:
            self._work(self._calls)
            self._calls = {}
            self._round += 1
            self._condition.notify_all()


class ThreadGroup:
    """One member."""

    def __init__(self, groups: ThreadGroups, rank: int) -> None:
        self._groups = groups
        self.rank = rank
        self.size = groups.size
        self.codecs: list[Any] = []
        """That broadcasts were called with."""

    def all_reduce(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        sample_count: int = 1,
        codec: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        assert op in ("sum", "mean")

        def mean(calls: dict[int, tuple[np.ndarray, int]]) -> None:
            ranks = sorted(calls)
            values = np.float64([calls[rank][0] for rank in ranks])
            weights = [calls[rank][1] for rank in ranks]
            result = np.average(values, axis=0, weights=weights) if any(weights) else 0.0
            if op == "sum":
                result = values.sum(axis=0)
            for rank in ranks:
                calls[rank][0][...] = result

        self._groups.call(self.rank, array, sample_count, mean)

    def broadcast(
        self,
        array: np.ndarray,
        root: int = 0,
        *,
        codec: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        self.codecs.append(codec)

        def copy(calls: dict[int, tuple[np.ndarray, int]]) -> None:
            for other, _ in calls.values():
                other[...] = calls[root][0]

        self._groups.call(self.rank, array, 0, copy)

    def join(self, *, timeout_s: float | None = None) -> int:
        return self._groups.join(self.rank)
