"""Carries the messages of a collective among its ranks, in memory, in any order that links allow.

A link keeps its order; which link's turn it is, and when a rank lets a chunk enter, is the
`Order`'s choice. Counts what each rank sends and what waits on each link.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardwell.group.schedule.collective import Arrival, Collective, Sending
from shardwell.group.schedule.plan import Plan

ToArrival = Callable[[int, Any], Arrival]
Link = tuple[int, int]
"""(from, to)."""


class Order(NamedTuple):
    """Which of the things that can happen does."""

    name: str
    """random, newest, oldest or starving."""
    seed: int = 0
    """For random; with starving: the rank that gets nothing while anyone else has something."""

    def __str__(self) -> str:
        return f"{self.name}{self.seed}"


ORDERS = (
    *(Order("random", seed) for seed in range(3)),
    Order("newest"),
    Order("oldest"),
    *(Order("starving", rank) for rank in (0, 1, -1)),
)


class Relay:
    """One collective of all ranks, from beginning to end."""

    def __init__(
        self,
        plans: Sequence[Plan],
        collectives: Sequence[Collective],
        to_arrival: ToArrival,
        order: Order,
        *,
        watches_queues: bool = False,
    ) -> None:
        self._plans = plans
        self._collectives = collectives
        self._to_arrival = to_arrival
        self._order = order
        self._random = random.Random(order.seed)
        self._starved = order.seed % len(plans)
        self._links: dict[Link, deque[Any]] = {}
        self._turns: deque[Link] = deque()
        self._late_turns: deque[Link] = deque()
        self._announced = [False] * len(plans)
        self._watches_queues = watches_queues
        self._waiting: Counter[tuple[Link, int]] = Counter()
        self.waiting_max = 0
        """Most chunks of one segment that ever waited on a link."""
        self.sent_element_counts = [0] * len(plans)
        """Elements that each rank has sent."""
        self.message_count = 0
        """Messages that were delivered."""

    def run(self) -> None:
        """Delivers until nothing moves; asserts that everybody is done then."""
        for rank in range(len(self._plans)):
            self._announce(rank)
        while self._turns or self._late_turns:
            source, target = self._next_turn()
            if source == target:
                self._announced[target] = False
                self._send(target, self._collectives[target].enter())
            else:
                message = self._links[source, target].popleft()
                self.message_count += 1
                arrival = self._to_arrival(source, message)
                if self._watches_queues:
                    self._count((source, target), arrival.header.chunk.chunk_index, -1)
                self._send(target, self._collectives[target].receive(arrival))
            self._announce(target)
        for rank, collective in enumerate(self._collectives):
            assert collective.is_done, f"rank {rank} waits for {collective.awaited_ranks}"
            assert collective.awaited_ranks == ()
            assert not collective.may_enter

    def _announce(self, rank: int) -> None:
        """Gives a rank a turn to let a chunk enter: a link to itself."""
        if not self._announced[rank] and self._collectives[rank].may_enter:
            self._announced[rank] = True
            self._turn((rank, rank))

    def _send(self, rank: int, sendings: list[Sending]) -> None:
        for sending in sendings:
            assert sending.rank in self._plans[rank].targets
            assert rank in self._plans[sending.rank].sources
            link = (rank, sending.rank)
            self._links.setdefault(link, deque()).append(sending.message)
            self.sent_element_counts[rank] += sending.element_count
            if self._watches_queues:
                index = self._to_arrival(rank, sending.message).header.chunk.chunk_index
                self._count(link, index, 1)
            self._turn(link)

    def _turn(self, link: Link) -> None:
        starves = self._order.name == "starving" and link[1] == self._starved
        (self._late_turns if starves else self._turns).append(link)

    def _next_turn(self) -> Link:
        turns = self._turns or self._late_turns
        if self._order.name == "random":
            turns.rotate(self._random.randrange(len(turns)))
        return turns.pop() if self._order.name == "newest" else turns.popleft()

    def _count(self, link: Link, chunk_index: int, change: int) -> None:
        key = (link, self._plans[0].chunks[chunk_index][1])
        self._waiting[key] += change
        self.waiting_max = max(self.waiting_max, self._waiting[key])
