"""Calls of collectives as ranks announce them, and a call matcher that notes each rank's
verdicts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from shardwell.group.agreement.matching import CallMatcher, Verdicts
from shardwell.v1 import peer_pb2 as pb
from shardwell.v1 import types_pb2

TIMEOUT_S = 10.0


def a_call(index: int, operation: pb.Operation = pb.OPERATION_ALL_REDUCE, **fields: Any) -> Any:
    """An all-reduce of 8 elements, but for what is said otherwise."""
    fields.setdefault("reduction", pb.REDUCTION_SUM)
    fields.setdefault("codec", types_pb2.CODEC_FP32)
    fields.setdefault("element_count", 8)
    fields.setdefault("sample_count", 1)
    fields.setdefault("wait_timeout_ms", int(TIMEOUT_S * 1000))
    return pb.CollectiveCall(call_index=index, operation=operation, **fields)


class Room:
    """A matcher with a clock, which counts each rank's calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.now_s = 100.0
        self.matcher = CallMatcher(size)
        self.next_index = [0] * size
        self.verdicts: dict[int, list[pb.Verdict]] = defaultdict(list)
        """By rank, in order."""

    def call(
        self, rank: int, operation: pb.Operation = pb.OPERATION_ALL_REDUCE, **fields: Any
    ) -> Verdicts:
        """A rank's next call."""
        made = a_call(self.next_index[rank], operation, **fields)
        verdicts = self.matcher.call(rank, made, self.now_s)
        self.next_index[rank] += 1
        return self.note(verdicts)

    def join(self, rank: int, timeout_s: float = TIMEOUT_S) -> Verdicts:
        """A rank calls JOIN."""
        made = pb.CollectiveCall(operation=pb.OPERATION_JOIN, wait_timeout_ms=int(timeout_s * 1000))
        return self.note(self.matcher.call(rank, made, self.now_s))

    def leave(self, rank: int) -> Verdicts:
        """A rank leaves."""
        return self.note(self.matcher.leave(rank, "has left the group"))

    def pass_time(self, duration_s: float) -> Verdicts:
        """What `expire` says at the end of it."""
        self.now_s += duration_s
        return self.note(self.matcher.expire(self.now_s))

    def note(self, verdicts: Verdicts) -> Verdicts:
        """Notes each rank's verdicts; after a JOIN all do as engines do."""
        for rank, verdict in verdicts:
            self.verdicts[rank].append(verdict)
            if verdict.operation == pb.OPERATION_JOIN and not verdict.HasField("failure"):
                self.next_index[rank] = verdict.call_index
        return verdicts
