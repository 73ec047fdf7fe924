"""Calls, made ready to be announced: what callers pass is checked here.

A problem with a call is announced with it, because the other ranks wait for this one: so all fail
with the same error, at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shardwell.errors import (
    ArgumentError,
    CollectiveMismatchError,
    NonFiniteError,
    ShardwellError,
)
from shardwell.group.agreement.coordinator import failure_of
from shardwell.group.engine import Call, plan_of
from shardwell.group.schedule.arithmetic import Reduction
from shardwell.group.schedule.plan import Operation, Plan
from shardwell.group.schedule.strategies import Strategy
from shardwell.numerics.arguments import as_output, check_finite, check_integer
from shardwell.numerics.codec import Float32
from shardwell.numerics.reduction import REDUCTIONS, ReductionName
from shardwell.specs.deadlines import check_timeout, wait_milliseconds
from shardwell.specs.parameter import GROUP_CODECS, SAMPLE_COUNT_MAX, WireName
from shardwell.threads.spread import CoreThreads
from shardwell.v1 import peer_pb2 as pb

JOIN_TIMEOUT_S = 3600.0
REPLACEMENT_WAIT_S_MAX = 3600.0
_SPREAD_ELEMENT_COUNT = 1 << 20
_KINDS: dict[Operation, Any] = {
    each: pb.Operation.Value(f"OPERATION_{each.name}") for each in Operation
}
_REDUCTIONS: dict[Reduction, Any] = {
    each: pb.Reduction.Value(f"REDUCTION_{each.name}") for each in Reduction
}
_NOTHING: Float32 = np.empty(0, np.float32)


class CallOptions(NamedTuple):
    """A caller's options of a call, beside its array; see `Group.all_reduce`."""

    op: ReductionName | None = None
    root: int = 0
    sample_count: int = 1
    codec: WireName | None = None
    timeout_s: float | None = None
    retry: bool = False
    waits: bool = True
    """False: the caller goes on while it is made."""
    generation: int = 0
    """The only generation in which an elastic group makes it; 0: any."""


class CallMaker:
    """Makes the calls of one member; see `Group` for what they mean. Any thread may use it."""

    def __init__(
        self,
        strategy: Strategy,
        codec: WireName,
        threads: CoreThreads,
        *,
        timeout_s: float,
        allow_non_finite: bool,
    ) -> None:
        self._threads = threads
        self.strategy = strategy
        self._codec = codec
        self.timeout_s = timeout_s
        self._allow_non_finite = allow_non_finite

    def collective(
        self,
        rank: int,
        size: int,
        operation: Operation | None,
        array: Any,
        options: CallOptions,
    ) -> Call:
        """A call of rank `rank` among `size`; None for `operation` is a barrier."""
        op, root, sample_count, codec, timeout_s, *_ = options
        kind = pb.OPERATION_BARRIER if operation is None else _KINDS[operation]
        call = self._call(kind, operation, self.timeout_s if timeout_s is None else timeout_s)
        announcement = call.announcement
        try:
            call.codec_name = _checked("codec", codec or self._codec, tuple(GROUP_CODECS))
            announcement.codec = GROUP_CODECS[call.codec_name]
            if operation is not None:
                call.array = as_output(array, None, "array")
                announcement.element_count = call.array.size
                if operation.reduces:
                    call.reduction = Reduction(_checked("op", op, REDUCTIONS))
                    announcement.reduction = _REDUCTIONS[call.reduction]
                announcement.root = check_integer("root", root, 0, size - 1)
                announcement.sample_count = check_integer(
                    "sample_count", sample_count, 0, SAMPLE_COUNT_MAX
                )
                if announcement.sample_count != 1 and call.reduction is not Reduction.MEAN:
                    raise ArgumentError(
                        f'sample_count weights op="mean" alone; got it with op={op!r}'
                    )
                call.plan = plan_of(call, operation, self.strategy, rank, range(size))
                if not self._allow_non_finite:
                    self._look(call, call.plan)
        except ShardwellError as error:
            announced = error
            if not isinstance(error, NonFiniteError):
                announced = CollectiveMismatchError(error.message)
            announcement.problem.CopyFrom(failure_of(announced))
        return call

    def state(self, *, has_state: bool, timeout_s: float | None) -> Call:
        """A call that tells all ranks which of them have the group's state."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        call = self._call(pb.OPERATION_STATE, None, timeout_s)
        call.announcement.sample_count = int(has_state)
        return call

    def join(self, timeout_s: float | None) -> Call:
        """A call of `Group.join`."""
        rest_s = JOIN_TIMEOUT_S if timeout_s is None else timeout_s
        return self._call(pb.OPERATION_JOIN, None, rest_s)

    def _call(self, kind: pb.Operation, operation: Operation | None, timeout_s: float) -> Call:
        timeout_s = check_timeout(timeout_s)
        return Call(
            announcement=pb.CollectiveCall(
                operation=kind, wait_timeout_ms=wait_milliseconds(timeout_s)
            ),
            operation=operation,
            array=_NOTHING,
            reduction=Reduction.SUM,
            codec_name=self._codec,
            timeout_s=timeout_s,
            may_have_nans=self._allow_non_finite,
        )

    def _look(self, call: Call, plan: Plan) -> None:
        looked_at = range(len(plan.chunks)) if plan.operation.reduces else plan.entering
        if self._threads.count < 2 or call.array.size < _SPREAD_ELEMENT_COUNT:
            for index in looked_at:
                self._look_at(call, plan, index)
            return
        with self._threads.spread() as spread:
            for index in looked_at:
                spread.give(self._look_at, call, plan, index)

    def _look_at(self, call: Call, plan: Plan, index: int) -> None:
        where, _, _ = plan.chunks[index]
        check_finite(
            f"array of {plan.operation.value}",
            call.array[where.offset : where.stop],
            None,
            where.offset,
            remedy="skip or mend the step, or join the group with allow_non_finite=True",
        )


def _checked(what: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ArgumentError(f"{what} must be one of {', '.join(allowed)}; got {value!r:.80}")
    return str(value)
