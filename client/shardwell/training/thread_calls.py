"""What threads call together, and whether their calls agree. Pure.

A call that can't be used is brought all the same, so that every thread learns of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwell.errors import ArgumentError, CollectiveMismatchError, NonFiniteError, ShardwellError
from shardwell.numerics.arguments import as_writable, check_integer
from shardwell.numerics.codec import Float32
from shardwell.numerics.finite import first_non_finite
from shardwell.numerics.reduction import REDUCTIONS
from shardwell.specs.names import format_ranks
from shardwell.specs.parameter import SAMPLE_COUNT_MAX


@dataclass(frozen=True, kw_only=True)
class ThreadCall:
    """One thread's call."""

    op: str
    """One of REDUCTIONS."""
    values: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    """The array as one dimension, a view."""
    shape: tuple[int, ...] = ()
    """The array's."""
    sample_count: int = 0
    """Its weight in a mean."""
    problem: str = ""
    """Why it can't be used, if so."""
    non_finite_index: int | None = None
    """The first element that is not finite and may not be so."""

    @staticmethod
    def of(array: Any, op: Any, sample_count: Any, *, allow_non_finite: bool) -> ThreadCall:
        """What a thread calls, checked; never raises."""
        if op not in REDUCTIONS:
            return ThreadCall(op="", problem=f"op must be one of {REDUCTIONS}; got {op!r:.80}")
        try:
            values = as_writable("array", array)
            count = check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX)
        except ArgumentError as error:
            return ThreadCall(op=op, problem=error.message)
        return ThreadCall(
            op=op,
            values=values,
            shape=array.shape,
            sample_count=count,
            non_finite_index=None if allow_non_finite else first_non_finite(values),
        )

    @property
    def form(self) -> str:
        """What must be the same for all, in words."""
        if self.problem:
            return self.problem
        shape = f" of shape {self.shape}" if len(self.shape) != 1 else ""
        return f"{self.op} of {self.values.size} elements{shape}"


def failure_of(calls: Sequence[ThreadCall]) -> Callable[[], ShardwellError] | None:
    """What makes the error that all threads get; None if the calls, by rank, can go on."""
    unusable = [rank for rank, call in enumerate(calls) if call.problem]
    if len(unusable) == len(calls):
        message = f"rank 0: {calls[0].problem}"
        return lambda: ArgumentError(message, rank=0)
    if len({call.form for call in calls}) > 1:
        message = (
            f"the threads called different things: {_forms(calls)}; no array was written; all "
            "must call the same, with arrays of one shape"
        )
        return lambda: CollectiveMismatchError(message, rank=unusable[0] if unusable else None)
    shared = _sharing(calls)
    if shared is not None:
        message = f"the arrays of ranks {shared[0]} and {shared[1]} overlap; give each its own"
        return lambda: ArgumentError(message, rank=shared[1])
    for rank, call in enumerate(calls):
        if call.non_finite_index is not None:
            return _non_finite(rank, call, call.non_finite_index)
    return None


def _non_finite(rank: int, call: ThreadCall, index: int) -> Callable[[], ShardwellError]:
    message = (
        f"array of rank {rank}: element {index} is {call.values[index]}; no array was written; "
        "skip or mend the step, or use ThreadedSync(..., allow_non_finite=True)"
    )
    return lambda: NonFiniteError(message, element_index=index, rank=rank)


def _forms(calls: Sequence[ThreadCall]) -> str:
    """What each called: "mean of 5 elements (ranks 0, 2), mean of 4 elements (rank 1)"."""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call.form, []).append(rank)
    return ", ".join(f"{form} ({format_ranks(found)})" for form, found in ranks.items())


def _sharing(calls: Sequence[ThreadCall]) -> tuple[int, int] | None:
    """Two ranks whose arrays share memory, if there are."""
    starts = sorted(
        (int(call.values.__array_interface__["data"][0]), rank)
        for rank, call in enumerate(calls)
        if call.values.size
    )
    for (start, rank), (next_start, next_rank) in itertools.pairwise(starts):
        if start + calls[rank].values.nbytes > next_start:
            return min(rank, next_rank), max(rank, next_rank)
    return None
