"""The schedule of one rank in one collective, chunk by chunk. Pure.

Every rank makes its own plan from the same few numbers, and the plans fit together: whatever one
sends another waits for. Ranks here are places among those that take part.

An array is cut into segments, one a rank, where each has a collector or source of its own; else it
is one segment. Segments are cut into chunks. Row i is the i-th chunks of all segments: chunks enter
row by row, which bounds what is under way (see `collective.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from shardwell.group.schedule.strategies import Inflow, Outflow, Strategy
from shardwell.placement.slices import Slice, slice_of


class Operation(enum.Enum):
    """The collectives that move chunks."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"

    @property
    def reduces(self) -> bool:
        """True if elements of several ranks are combined."""
        return self not in (Operation.BROADCAST, Operation.ALL_GATHER)

    @property
    def spreads(self) -> bool:
        """True if final values travel."""
        return self not in (Operation.REDUCE, Operation.REDUCE_SCATTER)

    @property
    def has_root(self) -> bool:
        """True if one rank is the collector or source of everything."""
        return self in (Operation.REDUCE, Operation.BROADCAST)


@dataclass(frozen=True)
class Role:
    """A rank's part in the chunks of one segment."""

    inflow: Inflow | None
    """None: nothing is reduced."""
    outflow: Outflow | None
    """None: final values stay where they are."""

    @property
    def enters(self) -> bool:
        """True if chunks enter here, without waiting for another rank."""
        if self.inflow is not None:
            return not self.inflow.sources
        return self.outflow is not None and self.outflow.source is None

    @property
    def collects(self) -> bool:
        """True if it has the final values first."""
        if self.inflow is not None:
            return self.inflow.target is None
        return self.outflow is not None and self.outflow.source is None

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that get a chunk when this rank has added its part."""
        if self.inflow is not None and self.inflow.target is not None:
            return (self.inflow.target,)
        return () if self.outflow is None else self.outflow.targets

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks that send a message for a chunk; twice where a rank does so on both ways."""
        senders = () if self.inflow is None else self.inflow.sources
        if self.outflow is not None and self.outflow.source is not None:
            senders += (self.outflow.source,)
        return senders


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one rank for one call."""

    operation: Operation
    strategy: Strategy
    rank: int
    size: int
    root: int
    """Collector or source where all segments have one; 0 unless the caller names it."""
    element_count: int
    chunk_element_count: int
    """Elements of a chunk; the last of a segment may have fewer."""

    @cached_property
    def segments(self) -> tuple[Slice, ...]:
        """The array's parts with a collector or source each."""
        if self._is_segmented:
            return tuple(slice_of(self.element_count, i, self.size) for i in range(self.size))
        return (Slice(0, self.element_count),)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """This rank's role in each segment."""
        return tuple(self._role(index) for index in range(len(self.segments)))

    @cached_property
    def chunks(self) -> tuple[tuple[Slice, int, int], ...]:
        """The (range, segment, row) of each chunk, in the order of their elements."""
        return tuple(
            (segment.chunk(row, self.chunk_element_count), index, row)
            for index, segment in enumerate(self.segments)
            for row in range(segment.chunk_count(self.chunk_element_count))
        )

    @cached_property
    def row_count(self) -> int:
        """The rows of the longest segment."""
        return max(segment.chunk_count(self.chunk_element_count) for segment in self.segments)

    @cached_property
    def entering(self) -> tuple[int, ...]:
        """The chunks that enter at this rank, row by row: the order in which they do."""
        own = [i for i, (_, segment, _) in enumerate(self.chunks) if self.roles[segment].enters]
        return tuple(sorted(own, key=lambda index: self.chunks[index][2]))

    @property
    def is_one_way(self) -> bool:
        """True if chunks only flow towards the root, or only away from it."""
        return self.operation.has_root

    @cached_property
    def targets(self) -> frozenset[int]:
        """The ranks that this one sends to."""
        found: set[int] = set()
        for role in self.roles:
            if role.inflow is not None and role.inflow.target is not None:
                found.add(role.inflow.target)
            if role.outflow is not None:
                found.update(role.outflow.targets)
        return frozenset(found)

    @cached_property
    def sources(self) -> frozenset[int]:
        """The ranks that send to this one."""
        return frozenset(rank for role in self.roles for rank in role.senders)

    @property
    def _is_segmented(self) -> bool:
        if self.operation is Operation.ALL_REDUCE:
            return self.strategy.is_segmented
        return not self.operation.has_root

    def _role(self, segment: int) -> Role:
        middle = segment if self._is_segmented else self.root
        place = (self.rank, middle, self.size)
        return Role(
            self.strategy.inflow(*place) if self.operation.reduces else None,
            self.strategy.outflow(*place) if self.operation.spreads else None,
        )
