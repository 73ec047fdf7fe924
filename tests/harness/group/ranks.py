"""The ranks of a group as threads of the test's process, each with a server and streams of its own.

results = on_ranks(3, cluster.target, lambda group: ..., strategy=shardwell.Ring())
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

import shardwell
from harness.polling import Stopwatch
from harness.threads import in_background

ResultT = TypeVar("ResultT")
STRATEGIES = (
    shardwell.Centralized(),
    shardwell.Tree(arity=2),
    shardwell.Tree(arity=3),
    shardwell.Ring(),
)
WAIT_S = 90.0
"""A rank that takes longer hangs."""
_NUMBERS = itertools.count()


def joined(
    target: str | Sequence[str], rank: int, size: int, *, name: str = "job", **options: Any
) -> shardwell.Group:
    """Joins, with deadlines that let a test fail before its own is over."""
    given: dict[str, Any] = {"timeout_s": 60.0, "join_timeout_s": 60.0, **options}
    strategy = given.pop("strategy", None)
    return shardwell.join_group(name, rank, size, strategy, target, **given)


def begun_on_ranks(
    size: int,
    target: str | Sequence[str],
    work: Callable[[shardwell.Group], ResultT],
    *,
    name: str | None = None,
    **options: Any,
) -> list[Future[ResultT]]:
    """Starts `work` with a group of its own on each rank; what it comes to, by rank."""
    shared_name = name or f"job-{next(_NUMBERS)}"

    def run(rank: int) -> ResultT:
        with joined(target, rank, size, name=shared_name, **options) as group:
            return work(group)

    return [in_background(lambda rank=rank: run(rank)) for rank in range(size)]


def on_ranks(
    size: int,
    target: str | Sequence[str],
    work: Callable[[shardwell.Group], ResultT],
    **options: Any,
) -> list[ResultT]:
    """The results by rank, or the first rank's error."""
    watch = Stopwatch()
    futures = begun_on_ranks(size, target, work, **options)
    for future in futures:
        future.exception(max(WAIT_S - watch.elapsed_s, 0.1))
    return [future.result() for future in futures]


def error_of(call: Callable[[], Any]) -> shardwell.ShardwellError:
    """What a call raises.

    Raises:
        AssertionError: it raises nothing.
    """
    try:
        result = call()
    except shardwell.ShardwellError as error:
        return error
    raise AssertionError(f"it raised nothing, and returned {result!r}")


def summed(group: shardwell.Group, size: int = 1000, **options: Any) -> None:
    """One all-reduce of every rank, whose result must be exact."""
    array = np.full(size, group.rank + 1.0, np.float32)
    group.all_reduce(array, **options)
    assert (array == group.size * (group.size + 1) // 2).all()
