"""The trees of ranks along which chunks of a reduction flow. Pure.

A strategy answers, for one rank, from whom partial sums come and to whom they go on their way to a
collector, and the same for final values on their way from a source. Ranks here are places among
the `size` ranks that take part, from 0.

For S bytes of encoded array and n ranks, an all-reduce costs each rank, in bytes sent:
    ring          2 (n - 1) / n * S        2 (n - 1) messages behind one another; for large arrays
    tree          (1 + arity) * S at most  2 log(n) behind one another; for small arrays, many ranks
    centralized   S, but (n - 1) * S at rank 0      2 behind one another; for few ranks
Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from shardwell.errors import ArgumentError

ARITY_MAX = 64
SMALL_SIZE_BYTES = 16 * 1024
"""The segment of a ring up to which a message costs the same, however short it is."""
SMALL_ARITY = 8


class Inflow(NamedTuple):
    """A rank's place in the tree that partial sums flow along."""

    sources: tuple[int, ...]
    """Ranks that send it partial sums, in the order in which it adds them to its own."""
    target: int | None
    """None: it is the collector."""


class Outflow(NamedTuple):
    """A rank's place in the tree that final values flow along."""

    source: int | None
    """None: it is the source."""
    targets: tuple[int, ...]


class Strategy:
    """One way of reducing. A value: strategies are equal when they are spelled the same.

    Examples:
        >>> shardwell.Strategy.parse("tree")
        Tree(arity=2)
    """

    is_segmented = False
    """True if each segment of an all-reduce has a collector of its own; else it is rank 0."""

    @staticmethod
    def parse(spelling: str) -> Strategy:
        """The strategy that is spelled so, as `str` does: "ring", "tree(arity=3)", "centralized".

        "tree" has its default arity.

        Raises:
            ArgumentError: none is, or the arity can't be.
        """
        found = re.fullmatch(r"(ring|centralized|tree)(?:\(arity=(\d{1,9})\))?", str(spelling))
        if found is None or (found[2] and found[1] != "tree"):
            raise ArgumentError(
                f"strategy must be 'ring', 'tree', 'tree(arity=3)' or 'centralized'; got "
                f"{spelling!r:.80}"
            )
        if found[1] == "tree":
            return Tree(int(found[2])) if found[2] else Tree()
        return Ring() if found[1] == "ring" else Centralized()

    def __str__(self) -> str:
        """The canonical spelling, common to all ranks."""
        raise NotImplementedError

    def suited_to(self, byte_count: int, size: int) -> Strategy:
        """The strategy for an array of so many encoded bytes: itself, or a better one."""
        return self

    def inflow(self, rank: int, collector: int, size: int) -> Inflow:
        """The place of `rank` on the way to `collector`."""
        parent, children = self._heap(rank, collector, size)
        return Inflow(children, parent)

    def outflow(self, rank: int, source: int, size: int) -> Outflow:
        """The place of `rank` on the way from `source`."""
        return Outflow(*self._heap(rank, source, size))

    def _heap(self, rank: int, root: int, size: int) -> tuple[int | None, tuple[int, ...]]:
        arity, place = self._arity(size), (rank - root) % size
        first = place * arity + 1
        children = tuple((child + root) % size for child in range(first, min(first + arity, size)))
        parent = None if place == 0 else ((place - 1) // arity + root) % size
        return parent, children

    def _arity(self, size: int) -> int:
        """The children of a rank, for a strategy that has a tree as its ways."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ring(Strategy):
    """Each rank sends to the next; each segment of an array goes around twice.

    Every rank sends and receives 2 (n - 1) / n of the array, whatever n is: the least there can be.
    Arrays below 16 KiB a rank go along a tree of arity 8: there the number of messages behind one
    another counts, not the bytes.

    Examples:
        >>> strategy = shardwell.Ring()
        >>> str(strategy)  # as strategy= of join_group, and $SHARDWELL_STRATEGY, take it
        'ring'
    """

    is_segmented = True

    @override
    def suited_to(self, byte_count: int, size: int) -> Strategy:
        return Tree(SMALL_ARITY) if byte_count < SMALL_SIZE_BYTES * size else self

    def __str__(self) -> str:
        return "ring"

    @override
    def inflow(self, rank: int, collector: int, size: int) -> Inflow:
        """A line from the collector's successor around to the collector."""
        is_first = (rank - collector - 1) % size == 0
        return Inflow(
            () if is_first else ((rank - 1) % size,),
            None if rank == collector else (rank + 1) % size,
        )

    @override
    def outflow(self, rank: int, source: int, size: int) -> Outflow:
        """A line from the source around to its predecessor."""
        is_last = (rank - source + 1) % size == 0
        return Outflow(
            None if rank == source else (rank - 1) % size,
            () if is_last else ((rank + 1) % size,),
        )


@dataclass(frozen=True)
class Tree(Strategy):
    """Each rank has `arity` children, whose sums it adds to its own.

    Few messages behind one another, also for many ranks; every array moves whole.

    Examples:
        >>> strategy = shardwell.Tree(arity=3)
        >>> str(strategy)  # as strategy= of join_group, and $SHARDWELL_STRATEGY, take it
        'tree(arity=3)'
    """

    arity: int = 2
    """Children of a rank, 1 to 64; 2 keeps a rank's link from being the bottleneck."""

    def __post_init__(self) -> None:
        good = isinstance(self.arity, int) and not isinstance(self.arity, bool)
        if not good or not 1 <= self.arity <= ARITY_MAX:
            raise ArgumentError(
                f"arity must be an integer from 1 to {ARITY_MAX}; got {self.arity!r}"
            )

    def __str__(self) -> str:
        return f"tree(arity={self.arity})"

    @override
    def _arity(self, size: int) -> int:
        return self.arity


@dataclass(frozen=True)
class Centralized(Strategy):
    """Every rank sends to one, which reduces, and answers all.

    The least delay there can be; that one rank's link carries everything.

    Examples:
        >>> strategy = shardwell.Centralized()
        >>> str(strategy)  # as strategy= of join_group, and $SHARDWELL_STRATEGY, take it
        'centralized'
    """

    def __str__(self) -> str:
        return "centralized"

    @override
    def _arity(self, size: int) -> int:
        return max(size - 1, 1)
