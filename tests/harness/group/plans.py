"""The plan of one rank in a collective."""

from __future__ import annotations

from shardwell.group.schedule.plan import Operation, Plan
from shardwell.group.schedule.strategies import Ring, Strategy


def plan_of(
    rank: int,
    size: int,
    element_count: int,
    chunk_element_count: int,
    *,
    operation: Operation = Operation.ALL_REDUCE,
    strategy: Strategy | None = None,
    root: int = 0,
) -> Plan:
    """A plan on a ring, unless it is another strategy's; `root` counts where there is one."""
    return Plan(
        operation=operation,
        strategy=strategy or Ring(),
        rank=rank,
        size=size,
        root=root if operation.has_root else 0,
        element_count=element_count,
        chunk_element_count=chunk_element_count,
    )
