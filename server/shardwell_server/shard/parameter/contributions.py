"""Whose gradients the last steps of a slice have, chunk by chunk, in the order of their sums.

In memory; of an open step, and of all that closed since the shard was started, the storage and the
contribution log know more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

STEP_COUNT_MAX = 16
"""Steps that are known."""

Contributors = tuple[str, ...]
TakesSet = Callable[[int, int, Contributors], None]
"""Takes the step, the chunk of the shard, and who contributed, in order."""


class Contributions:
    """Any thread may call it.

    Args:
        log: Where each set goes besides; None: nowhere.
    """

    def __init__(self, log: TakesSet | None = None) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._by_step: dict[int, dict[int, Contributors]] = {}
        self._known: tuple[int, int, list[str]] = (-1, 0, [])
        """What `workers` found last, of how many chunks of which step."""
        self._last: Contributors = ()
        """The set that came last: mostly the next one is the same, and needs no memory."""

    def note(self, step: int, chunk_index: int, worker_ids: Sequence[str]) -> None:
        """A chunk's step has closed with these workers' gradients, in this order."""
        found = tuple(worker_ids)
        with self._lock:
            if found == self._last:
                found = self._last
            self._last = found
            chunks = self._by_step.get(step)
            if chunks is None:
                chunks = self._by_step[step] = {}
                while len(self._by_step) > STEP_COUNT_MAX:
                    del self._by_step[min(self._by_step)]
            chunks[chunk_index] = found
        if self._log is not None:
            self._log(step, chunk_index, found)

    def of_step(self, step: int) -> dict[int, Contributors]:
        """The contributors to each chunk that has closed a step; empty: no longer known."""
        with self._lock:
            return dict(self._by_step.get(step, {}))

    def workers(self, step: int) -> list[str]:
        """All who contributed to any chunk that has closed a step, sorted."""
        with self._lock:
            chunks = self._by_step.get(step, {})
            known_step, count, found = self._known
            if (known_step, count) != (step, len(chunks)):  # each of its workers asks
                sets = set(chunks.values())
                found = sorted({worker_id for each in sets for worker_id in each})
                self._known = step, len(chunks), found
            return found
