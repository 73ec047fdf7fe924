"""An exchange whose gradient comes piece by piece, as a backward pass makes it.

A *row* is the chunk of one index of every shard. Rows whose elements are all there are exchanged
in the background, several at a time, while the rest is computed; `finish` exchanges what is left.
Rows go in order, so what is ready first should lie in front on each shard.

What happens in the background is done ahead of time and nothing else: `finish` goes on behind the
last row that came through, whatever became of the rest, and its errors are those that count.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from shardwell.errors import ArgumentError, ShardwellError
from shardwell.parameter.exchange import ShardSlice
from shardwell.parameter.values import ValuesT

_PIECE_COUNT_MAX = 8
"""Pieces that a parameter is exchanged in, so that each is large beside what a call costs."""


class OpenExchange(Generic[ValuesT]):
    """Made by `Parameter.begin_exchange`.

    Args:
        parts: What lies where.
        values: The gradient, (size,).
        start: Begins to exchange up to a row in the background; calls back when that is over. None:
            nothing is exchanged before `finish`.
        finish: Exchanges all that is left.
        allow_non_finite: Whether values that are not finite may have left.
    """

    def __init__(
        self,
        parts: Sequence[ShardSlice],
        values: npt.NDArray[Any],
        start: Callable[[int, Callable[[], None]], None] | None,
        finish: Callable[[float | None], ValuesT],
        *,
        allow_non_finite: bool = False,
    ) -> None:
        self._parts = parts
        self._values = values
        self._start = start
        self._finish = finish
        self._allow_non_finite = allow_non_finite
        self._row_count = max(len(part.chunks) for part in parts)
        self._missing = [[where.size for where in part.chunks] for part in self._parts]
        """Elements of each part's chunks that are not there yet."""
        self._ready_row = self._begun_row = 0
        self._is_busy = self._is_closed = False
        self._announced: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        # Taken by nobody who would wait for it: what others announce meanwhile, its owner does.
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"OpenExchange({self._ready_row} of {self._row_count} rows ready)"

    def ready(self, start: int, stop: int) -> None:
        """Says that elements [start, stop) of the gradient are there. Any thread; never blocks.

        Args:
            start: First element; each is announced once.
            stop: Last element, and one more.
        """
        self._announced.put((start, stop))
        self._advance()

    def finish(self, timeout_s: float | None = None) -> ValuesT:
        """Exchanges all that was not, which must be there, and returns the weights after the step.

        After an error the step is open still: call it again, with the same values. What had not
        left when one was found not to be finite may be mended before.

        Raises:
            ShardwellError: see `Parameter.exchange`.
        """
        self._is_closed = True
        return self._finish(timeout_s)

    @property
    def has_left(self) -> bool:
        """Whether a part of the gradient has left, or is about to."""
        return self._begun_row > 0

    def forget(self) -> None:
        """Makes zeros of what has not left, so that `finish` ends the step without it.

        A chunk with a value that is not finite was refused before it could leave, even if its piece
        was begun. Nothing leaves from then on before `finish`. If nothing has left at all, the
        exchange may be forgotten as a whole, without `finish`.
        """
        self._is_closed = True
        for part in self._parts:
            for index, where in enumerate(part.chunks):
                chunk = self._values[where.offset : where.stop]
                if index >= self._begun_row or not (
                    self._allow_non_finite or np.isfinite(chunk).all()
                ):
                    chunk[:] = 0.0

    def _advance(self) -> None:
        while not self._announced.empty():
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._take_announced()
            finally:
                self._lock.release()

    def _take_announced(self) -> None:
        while not self._announced.empty():
            announced = self._announced.get()
            if announced is None:
                self._is_busy = False
            else:
                self._count(*announced)
        while self._ready_row < self._row_count and not any(
            sum(missing[self._ready_row : self._ready_row + 1]) for missing in self._missing
        ):
            self._ready_row += 1
        row_count = self._ready_row - self._begun_row
        # The last row is for `finish`: then there is something that it waits for.
        is_last = self._ready_row == self._row_count
        if self._start is None or self._is_closed or self._is_busy or is_last:
            return
        if row_count * _PIECE_COUNT_MAX >= self._row_count:
            self._is_busy, self._begun_row = True, self._ready_row
            try:
                self._start(self._ready_row, self._is_over)
            except ShardwellError:
                self._is_busy = False  # `finish` will say so

    def _count(self, start: int, stop: int) -> None:
        """Takes elements from what is missing of their rows."""
        for part, missing in zip(self._parts, self._missing, strict=True):
            first, last = max(start, part.where.offset), min(stop, part.where.stop)
            while first < last:
                index = (first - part.where.offset) // part.chunk_element_count
                end = min(part.chunks[index].stop, last)
                missing[index] -= end - first
                if missing[index] < 0:
                    raise ArgumentError(
                        f"elements {start} to {stop - 1} of the gradient were announced before"
                    )
                first = end

    def _is_over(self) -> None:
        self._announced.put(None)
        self._advance()
