"""The client's part of a recording of last steps: see trace.proto and docs/adr/0021-trace.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import grpc

from shardwell.errors import ShardUnavailableError, ShardwellError
from shardwell.process.spans import Spans, clock_id, now_ns
from shardwell.rpc.held_call import HeldCall
from shardwell.threads.pool import begin
from shardwell.v1 import trace_pb2 as pb
from shardwell.v1 import types_pb2

_CLOCK_COUNT = 4
"""The quickest of so many answers counts."""
_GIVE_S = 2.0
"""For spans on their way; a recording does not wait for longer."""


class ClockOffset(NamedTuple):
    """The difference between this process's clock and a shard's. Nanoseconds."""

    offset_ns: int
    """To be added to a time of this process's."""
    error_ns: int
    """The most that it may be wrong, either way; 0: it is one clock."""


def clock_offset(ask: Any, shard: types_pb2.ShardIdentity, timeout_s: float) -> ClockOffset:
    """Measures a shard's clock by its GetClock. Blocks up to `timeout_s` a few times."""
    found = []
    for _ in range(_CLOCK_COUNT):
        begin_ns = now_ns()
        answer = ask(pb.GetClockRequest(shard=shard), timeout=timeout_s)
        end_ns = now_ns()
        if answer is None:  # its frame was damaged on its way
            continue
        if answer.clock_id and answer.clock_id == clock_id():
            return ClockOffset(0, 0)
        error_ns = (end_ns - begin_ns + 1) // 2
        found.append(ClockOffset(answer.now_ns - begin_ns - error_ns, error_ns))
    if not found:
        raise ShardUnavailableError("the shard's clock could not be read; call again")
    return min(found, key=lambda each: each.error_ns)


class SpanGiver(HeldCall):
    """Gives a client's spans to the recording on shard 0. Any thread may use it.

    `unary` has gRPC's call of a method.
    """

    def __init__(
        self,
        spans: Spans,
        unary: Callable[[str], Any],
        who: Callable[[], pb.AwaitRecordingRequest],
        translate: Callable[[Any], ShardwellError],
    ) -> None:
        self._spans = spans
        self._unary = unary
        self._who = who
        super().__init__(self._await, translate, self._answered)

    def ensure(self) -> None:
        """Makes the call if it is not open. Never fails."""
        with contextlib.suppress(ShardwellError, ValueError):  # a shard that knows no such call
            super().ensure()

    def _await(self) -> Any:
        return self._unary("AwaitRecording").future(self._who(), wait_for_ready=True)

    def _answered(self, call: Any) -> None:
        recording = call.result().recording
        if recording:
            # gRPC's thread is not to be held up.
            with contextlib.suppress(RuntimeError):  # the system has no further one
                begin("shardwell-trace", partial(self._give, recording))

    def _give(self, recording: int) -> None:
        with contextlib.suppress(grpc.RpcError, ShardwellError, ValueError):  # it may lack them
            who = self._who()
            offset = clock_offset(self._unary("GetClock"), who.shard, _GIVE_S)
            process = self._spans.to_proto()
            process.worker_id = who.worker_id
            process.clock_offset_ns, process.clock_error_ns = offset
            request = pb.GiveSpansRequest(
                shard=who.shard, session=who.session, recording=recording, process=process
            )
            self._unary("GiveSpans")(request, timeout=_GIVE_S)
