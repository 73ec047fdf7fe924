"""The chunks of a gradient that are whole while it is computed, and may leave. Pure arithmetic.

Each slice's chunks leave in order, whatever the other slices have: states of a chunk are *missing*
(some of its elements were not announced), *ready* (they were, and those of all chunks before it in
its slice), *begun* (a piece has it). Slices have their own counts, so that one that is ready first
waits for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from shardwell.errors import ArgumentError
from shardwell.placement.slices import Slice

PIECE_COUNT_MAX = 16
"""Pieces of a gradient that leave before all of it is computed: each has at least this part of the
elements, so that it is large beside what a call costs."""

Ranges: TypeAlias = list[tuple[int, int]]
"""The first chunk of each slice, in order, and the one behind the last."""


class ReadyChunks:
    """The states of each slice's chunks, of one size but for the last. For one thread."""

    def __init__(self, slices: Sequence[Sequence[Slice]]) -> None:
        self._slices = slices
        self._missing = [[chunk.size for chunk in chunks] for chunks in slices]
        self._ready = [0] * len(slices)
        self._begun = [0] * len(slices)
        size = sum(chunks[-1].stop - chunks[0].offset for chunks in slices)
        self._piece_size = -(-size // PIECE_COUNT_MAX)

    @property
    def begun(self) -> Sequence[int]:
        """The chunks of each slice that have begun to leave, as counts."""
        return self._begun

    def announce(self, start: int, stop: int) -> None:
        """Notes that elements [start, stop) have come; ArgumentError: some had before."""
        for number, chunks in enumerate(self._slices):
            begin, size = chunks[0].offset, chunks[0].size
            first, last = max(start, begin), min(stop, chunks[-1].stop)
            if first >= last:
                continue
            missing = self._missing[number]
            while first < last:
                index = (first - begin) // size
                end = min(chunks[index].stop, last)
                missing[index] -= end - first
                if missing[index] < 0:
                    raise ArgumentError(
                        f"elements {start} to {stop - 1} of the gradient were announced before"
                    )
                first = end
            ready = self._ready[number]
            while ready < len(missing) and not missing[ready]:
                ready += 1
            self._ready[number] = ready

    def take(self) -> Ranges | None:
        """Begins a piece of what is ready, except the last chunk of each slice; None: too small."""
        ranges = [
            (begun, max(begun, min(ready, len(chunks) - 1)))
            for begun, ready, chunks in zip(self._begun, self._ready, self._slices, strict=True)
        ]
        size = sum(
            chunks[stop - 1].stop - chunks[first].offset
            for (first, stop), chunks in zip(ranges, self._slices, strict=True)
            if first < stop
        )
        if not size or size < self._piece_size:
            return None
        self._begun = [stop for _, stop in ranges]
        return ranges

    def rest(self) -> Ranges:
        """Takes all chunks that have not begun."""
        return [
            (begun, len(chunks)) for begun, chunks in zip(self._begun, self._slices, strict=True)
        ]

    def begin_all(self) -> None:
        """Notes that the rest has begun."""
        self._begun = [len(chunks) for chunks in self._slices]

    @property
    def ready_counts(self) -> tuple[int, int]:
        """The chunks that are ready, and all."""
        return sum(self._ready), sum(map(len, self._slices))
