"""Reader-writer locks of stripes, of which a call takes all that it needs at once.

Rows are striped: `rows_per_lock` neighbours have one lock. A request names its stripes and is
granted whole, when none of them conflicts with what others hold, nor with an earlier request that
still waits. So:

- Two that need no common stripe, or only read, never wait for each other.
- No call holds one stripe while it waits for another: there is no order to keep, and no deadlock.
- Requests that conflict are granted in the order in which they came. A waiting writer goes before
  readers that come later, and readers before writers that come later: no thread starves.

The state of all locks is in arrays, so that a request costs a few passes over its stripes and no
Python for each of them, and a lock that no call has taken yet costs no memory.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardwell_server.store.lazy_memory import lazy_zeros

Stripes: TypeAlias = npt.NDArray[np.int64]
"""(n,) int64: numbers of stripes, without repeats."""


class StripeLocks:
    """Locks 0 to `stripe_count` - 1. Not reentrant: who holds some must not ask for more."""

    def __init__(self, stripe_count: int) -> None:
        self._mutex = threading.Lock()
        self._holders: dict[Hold, None] = {}
        self._is_all_held = False
        self._waiting: list[Hold] = []
        # Readers of each stripe, or -1 for a writer.
        self._holds = lazy_zeros((stripe_count,), np.int32)
        # The last sweep in which a request for it went on waiting, and one for writing did.
        self._waited_for = lazy_zeros((stripe_count,), np.int64)
        self._waited_for_by_writer = lazy_zeros((stripe_count,), np.int64)
        self._sweep_number = 0

    def exclusive(self, stripes: Stripes) -> Hold:
        """A hold, for a `with`, in which no other call has any of these stripes."""
        return Hold(self, stripes, is_shared=False)

    def shared(self, stripes: Stripes) -> Hold:
        """A hold, for a `with`, in which no call writes any of these stripes."""
        return Hold(self, stripes, is_shared=True)

    def everything(self) -> Hold:
        """A hold, for a `with`, in which no other call holds anything."""
        return Hold(self, None, is_shared=False)

    def cut(self, find: Callable[[], Stripes], *, is_shared: bool) -> Hold:
        """A hold on all stripes that were written before it, as a clean cut in time.

        `find` finds the stripes that calls have written which held them. It is called while no
        request is granted or ended; it must be quick, and take no lock. The hold is of these, and
        of the stripes that writers hold or wait for now: a writer who came earlier has ended when
        it is granted; one who comes later has not begun, or has none of these stripes.
        """
        return Hold(self, None, is_shared=is_shared, find=find)

    @property
    def waiting_count(self) -> int:
        """The requests that wait now."""
        with self._mutex:  # one that is granted at once is among them for a moment
            return len(self._waiting)

    def _acquire(self, hold: Hold) -> None:
        with self._mutex:
            if hold.find is not None:
                hold.stripes = self._claimed(hold.find())
            if not self._waiting and not self._conflicts(hold):
                self._grant(hold)
                return
            hold.granted = threading.Lock()
            hold.granted.acquire()
            self._waiting.append(hold)
            self._sweep()
        try:
            hold.granted.acquire()
        except BaseException:  # Ctrl-C
            with self._mutex:
                if hold in self._holders:
                    self._end(hold)
                else:
                    self._waiting.remove(hold)
                self._sweep()
            raise

    def _release(self, hold: Hold) -> None:
        with self._mutex:
            self._end(hold)
            if self._waiting:
                self._sweep()

    def _claimed(self, found: Stripes) -> Stripes | None:
        claims = [found]
        for other in (*self._holders, *self._waiting):
            if not other.is_shared:
                if other.stripes is None:
                    return None
                claims.append(other.stripes)
        return found if len(claims) == 1 else np.unique(np.concatenate(claims))

    def _conflicts(self, hold: Hold) -> bool:
        if hold.stripes is None or self._is_all_held:
            return bool(self._holders)
        held = self._holds[hold.stripes]
        return bool(np.count_nonzero(held < 0 if hold.is_shared else held))

    def _sweep(self) -> None:
        self._sweep_number += 1
        left: list[Hold] = []
        is_all_waited_for = False
        for hold in self._waiting:
            is_behind = is_all_waited_for or self._is_behind(hold, left)
            if not is_behind and not self._conflicts(hold):
                self._grant(hold)
                assert hold.granted is not None
                hold.granted.release()
                continue
            left.append(hold)
            if hold.stripes is None:
                is_all_waited_for = True
                continue
            self._waited_for[hold.stripes] = self._sweep_number
            if not hold.is_shared:
                self._waited_for_by_writer[hold.stripes] = self._sweep_number
        self._waiting = left

    def _is_behind(self, hold: Hold, earlier: list[Hold]) -> bool:
        if hold.stripes is None:
            return bool(earlier)
        marks = self._waited_for_by_writer if hold.is_shared else self._waited_for
        return bool(earlier) and bool((marks[hold.stripes] == self._sweep_number).any())

    def _grant(self, hold: Hold) -> None:
        self._holders[hold] = None
        self._mark(hold, is_held=True)

    def _end(self, hold: Hold) -> None:
        del self._holders[hold]
        self._mark(hold, is_held=False)

    def _mark(self, hold: Hold, *, is_held: bool) -> None:
        if hold.stripes is None:
            self._is_all_held = is_held
        elif hold.is_shared:
            self._holds[hold.stripes] += 1 if is_held else -1
        else:
            self._holds[hold.stripes] = -1 if is_held else 0


@dataclasses.dataclass(eq=False, slots=True)
class Hold:
    """A request for stripes (None: all), and what it holds while its `with` runs, once."""

    locks: StripeLocks
    stripes: Stripes | None
    is_shared: bool
    find: Callable[[], Stripes] | None = None
    granted: threading.Lock | None = None

    def __enter__(self) -> Hold:
        self.locks._acquire(self)
        return self

    def __exit__(self, *reason: object) -> None:
        self.locks._release(self)
