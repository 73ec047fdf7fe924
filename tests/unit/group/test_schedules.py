"""Goal: plans of all ranks fit together, for every size, length, strategy and operation.

Method: collectives run in memory with symbols instead of values: what travels is the set of ranks
that have contributed, a bit each. So "every contribution once" and "written once" are exact. Who
sends to whom is written out here a second time, from peer.proto.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from harness.group.plans import plan_of
from harness.oracles.relay import ORDERS, Order, Relay
from shardwell.errors import ArgumentError
from shardwell.group.schedule.collective import Arrival, Collective
from shardwell.group.schedule.plan import Operation
from shardwell.group.schedule.strategies import Centralized, Ring, Strategy, Tree
from shardwell.placement.slices import Slice
from shardwell.v1 import peer_pb2 as pb

STRATEGIES: tuple[Strategy, ...] = (Ring(), Tree(1), Tree(2), Tree(3), Centralized())
SIZES = range(1, 18)
LENGTHS = range(101)
PART_COUNT = 4
SEGMENTED = {Operation.REDUCE_SCATTER, Operation.ALL_GATHER}


class Symbol(NamedTuple):
    """A message: who has contributed to a chunk."""

    stage: int
    index: int
    ranks: int
    """A bit each."""


def to_arrival(source: int, symbol: Symbol) -> Arrival:
    chunk = SimpleNamespace(chunk_index=symbol.index)
    header: Any = SimpleNamespace(stage=symbol.stage, chunk=chunk, call_index=0)
    payload: Any = symbol.ranks
    message: Any = symbol
    return Arrival(source, header, payload, message)


class Symbols:
    """In place of ChunkArithmetic: the same methods on sets of ranks."""

    def __init__(self, rank: int, length: int) -> None:
        self.own = 1 << rank
        self.written = [0] * length
        """Who has contributed to each element; none while it was not written."""
        self.order: list[int] = []
        """The ranks added to sums, in order."""

    def payload_bytes(self, where: Slice) -> int:
        return where.size

    def contribution(self, index: int, where: Slice, room: None) -> Symbol:
        return Symbol(pb.STAGE_PARTIAL, index, self.own)

    def begin(self, where: Slice) -> list[int]:
        return [self.own]

    def checked(self, header: Any, ranks: int) -> int:
        return ranks

    def opened(self, ranks: int, where: Slice) -> int:
        return ranks

    def kept(self, ranks: int) -> int:
        return ranks

    def combine(self, ranks: int, where: Slice, total: list[int] | None = None) -> list[int]:
        total = [self.own] if total is None else total
        assert not total[0] & ranks, "a contribution was added twice"
        total[0] |= ranks
        self.order.append(ranks)
        return total

    def partial(self, index: int, where: Slice, total: list[int], room: None) -> Symbol:
        return Symbol(pb.STAGE_PARTIAL, index, total[0])

    def finish(
        self, index: int, where: Slice, total: list[int] | None, rooms: list[None]
    ) -> list[Any]:
        ranks = self.own if total is None else total[0]
        self._write(where, ranks)
        return [Symbol(pb.STAGE_FINAL, index, ranks) for _ in rooms]

    def forwarded(
        self, header: Any, ranks: int, message: Symbol, rooms: list[None]
    ) -> list[Symbol]:
        return [message for _ in rooms]

    def store(self, ranks: int, where: Slice, rooms: list[None]) -> None:
        self._write(where, ranks)

    def _write(self, where: Slice, ranks: int) -> None:
        assert not any(self.written[where.offset : where.stop]), "written twice"
        self.written[where.offset : where.stop] = [ranks] * where.size


def expected_writes(
    operation: Operation, rank: int, size: int, length: int, root: int
) -> list[int]:
    """Who contributes to each element that a rank writes, by peer.proto's Operation; else none."""
    everyone = (1 << size) - 1
    # The first `length % size` segments are one longer.
    sizes = [length // size + (index < length % size) for index in range(size)]
    match operation:
        case Operation.ALL_REDUCE:
            return [everyone] * length
        case Operation.REDUCE:
            return [everyone if rank == root else 0] * length
        case Operation.BROADCAST:
            return [1 << root] * length
        case Operation.REDUCE_SCATTER:
            return [everyone * (r == rank) for r, count in enumerate(sizes) for _ in range(count)]
        case Operation.ALL_GATHER:
            return [1 << r for r, count in enumerate(sizes) for _ in range(count)]


def run(
    operation: Operation,
    strategy: Strategy,
    size: int,
    length: int,
    *,
    root: int = 0,
    order: Order = ORDERS[0],
    window: int = 4,
    chunk: int = 4,
    watches_queues: bool = False,
) -> tuple[Relay, list[Symbols]]:
    """Runs a collective to its end, and checks what every rank has written."""
    plans = [
        plan_of(rank, size, length, chunk, operation=operation, strategy=strategy, root=root)
        for rank in range(size)
    ]
    symbols: list[Any] = [Symbols(rank, length) for rank in range(size)]
    collectives = [
        Collective(plan, symbol, window) for plan, symbol in zip(plans, symbols, strict=True)
    ]
    relay = Relay(plans, collectives, to_arrival, order, watches_queues=watches_queues)
    relay.run()
    return relay, symbols


@pytest.mark.sampled(6)
@pytest.mark.parametrize("part", range(PART_COUNT))
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.value)
def test_every_size_and_length(operation: Operation, strategy: Strategy, part: int) -> None:
    for size, length in list(itertools.product(SIZES, LENGTHS))[part::PART_COUNT]:
        if operation is not Operation.ALL_REDUCE and length > 20 and (size + length) % 4:
            continue  # they are all-reduce's two halves; every pair would take a minute
        turn = size * len(LENGTHS) + length
        root = turn * 7 % size
        relay, symbols = run(
            operation,
            strategy,
            size,
            length,
            root=root,
            order=ORDERS[turn % len(ORDERS)],
            window=1 + turn // len(ORDERS) % 4,
            chunk=3 + turn % 7,
        )
        case = f"{size} ranks, {length} elements, root {root}"
        for rank, symbol in enumerate(symbols):
            expected = expected_writes(operation, rank, size, length, root)
            assert symbol.written == expected, f"{case}, rank {rank}"
        check_cost(operation, strategy, size, length, relay, case)


def check_cost(
    operation: Operation,
    strategy: Strategy,
    size: int,
    length: int,
    relay: Relay,
    case: str,
) -> None:
    """Elements that were sent: what the trees cost, no more and no less."""
    ways = 2 if operation is Operation.ALL_REDUCE else 1
    sent = relay.sent_element_counts
    assert sum(sent) == ways * (size - 1) * length, case
    if isinstance(strategy, Ring) and operation not in (Operation.REDUCE, Operation.BROADCAST):
        # Each rank sends all segments but one, once a way.
        assert max(sent) <= ways * (size - 1) * -(-length // size), case
        assert max(sent) <= ways * (length - length // size), case
    if operation is not Operation.ALL_REDUCE:
        return
    if isinstance(strategy, Tree):
        assert max(sent) <= (1 + strategy.arity) * length, case
    if isinstance(strategy, Centralized):
        assert sent == [(size - 1) * length, *[length] * (size - 1)], case


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.value)
def test_every_order_of_delivery_window_and_root(operation: Operation, strategy: Strategy) -> None:
    """No deadlock, and bounded queues, whatever comes first."""
    for size, length in ((2, 40), (3, 50), (5, 61), (8, 70)):
        for order, window in itertools.product(ORDERS, range(1, 5)):
            root = (window + order.seed) % size
            relay, symbols = run(
                operation,
                strategy,
                size,
                length,
                root=root,
                order=order,
                window=window,
                chunk=1 if operation in SEGMENTED or isinstance(strategy, Ring) else 2,
                watches_queues=True,
            )
            for rank, symbol in enumerate(symbols):
                assert symbol.written == expected_writes(operation, rank, size, length, root)
            if not operation.has_root:  # there flow control is what bounds
                assert relay.waiting_max <= 2 * window, f"{size} ranks, {order}, window {window}"


@pytest.mark.parametrize("operation", [Operation.REDUCE, Operation.BROADCAST])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_rank_may_be_root(operation: Operation, strategy: Strategy) -> None:
    for size in SIZES:
        for root in range(size):
            _, symbols = run(operation, strategy, size, 7, root=root, chunk=3)
            for rank, symbol in enumerate(symbols):
                assert symbol.written == expected_writes(operation, rank, size, 7, root)


def parent_of(strategy: Strategy, rank: int, root: int, size: int, *, is_partial: bool) -> int:
    """Towards the root, as peer.proto says it; -1 at the root."""
    if rank == root:
        return -1
    place = (rank - root) % size
    if isinstance(strategy, Ring):
        return (rank + 1) % size if is_partial else (rank - 1) % size
    if isinstance(strategy, Tree):
        return ((place - 1) // strategy.arity + root) % size
    return root


@pytest.mark.parametrize("strategy", [*STRATEGIES, Tree(16), Tree(64)], ids=str)
def test_trees_are_those_of_the_proto(strategy: Strategy) -> None:
    for size in SIZES:
        for root, rank in itertools.product(range(size), range(size)):
            near = [(rank + step) % size for step in range(size)]
            by_place = sorted(near, key=lambda other: (other - root) % size)
            inflow = strategy.inflow(rank, root, size)
            up = parent_of(strategy, rank, root, size, is_partial=True)
            assert inflow.target == (None if up < 0 else up)
            assert list(inflow.sources) == [
                r for r in by_place if parent_of(strategy, r, root, size, is_partial=True) == rank
            ]
            outflow = strategy.outflow(rank, root, size)
            down = parent_of(strategy, rank, root, size, is_partial=False)
            assert outflow.source == (None if down < 0 else down)
            assert sorted(outflow.targets) == sorted(
                r for r in near if parent_of(strategy, r, root, size, is_partial=False) == rank
            )


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_sums_are_taken_in_order_of_place(order: Order) -> None:
    """Rank 0 of tree(arity=3) with 9 ranks: 1 brings 4, 5, 6; 2 brings 7, 8; 3 itself."""
    _, symbols = run(Operation.ALL_REDUCE, Tree(3), 9, 4, order=order, chunk=4)
    brings = [{1, 4, 5, 6}, {2, 7, 8}, {3}]
    assert symbols[0].order == [sum(1 << rank for rank in ranks) for ranks in brings]
    assert symbols[1].order == [1 << 4, 1 << 5, 1 << 6]


def test_segments_are_numbered_over_the_whole_array() -> None:
    """Eleven elements of three ranks in chunks of two: 4 + 4 + 3."""
    plan = plan_of(1, 3, 11, 2)
    assert [(where.offset, where.size, segment, row) for where, segment, row in plan.chunks] == [
        (0, 2, 0, 0),
        (2, 2, 0, 1),
        (4, 2, 1, 0),
        (6, 2, 1, 1),
        (8, 2, 2, 0),
        (10, 1, 2, 1),
    ]
    # A line to collector c begins at c + 1: chunks of segment 0 enter at rank 1.
    assert plan.entering == (0, 1)
    assert plan.sources == {0}
    assert plan.targets == {2}


def test_a_rank_enters_no_further_than_its_window() -> None:
    """Of two ranks one gets nothing: it lets W chunks enter, and no more."""
    for window in range(1, 5):
        plan = plan_of(0, 2, 40, 2)
        symbols: Any = Symbols(0, 40)
        collective = Collective(plan, symbols, window)
        entered = 0
        while collective.may_enter:
            collective.enter()
            entered += 1
        assert entered == window
        assert collective.awaited_ranks == (1,)
        assert not collective.is_done


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_spelling_tells_strategies_apart(strategy: Strategy) -> None:
    assert [str(other) for other in STRATEGIES].count(str(strategy)) == 1
    assert [other == strategy for other in STRATEGIES].count(True) == 1


@pytest.mark.parametrize("arity", [0, -1, 65, 2.0, "2", True, None])
def test_arity_is_checked(arity: Any) -> None:
    with pytest.raises(ArgumentError, match="arity must be an integer from 1 to 64"):
        Tree(arity)


@pytest.mark.parametrize("strategy", [Ring(), Tree(), Tree(3), Tree(64), Centralized()])
def test_a_strategy_is_read_back_from_its_spelling(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy


def test_spellings_that_are_none() -> None:
    assert Strategy.parse("tree") == Tree()
    for spelling in ("", "Ring", "ring(arity=2)", "tree()", "tree(arity=-1)", "tree(3)", 7):
        with pytest.raises(ArgumentError, match="strategy must be 'ring'"):
            Strategy.parse(spelling)
    for spelling in ("tree(arity=0)", "tree(arity=65)"):
        with pytest.raises(ArgumentError, match="arity must be an integer from 1 to 64"):
            Strategy.parse(spelling)
