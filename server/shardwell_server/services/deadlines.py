"""How long a request may wait: what it asks for, within its deadline and the shard's limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwell_server.services.calls import Call
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.shard import Shard

_ANSWER_MARGIN_S_MAX = 0.25
"""An answer that names the missing leaves so long before the client's gRPC deadline; of short ones,
a quarter."""


def deadline_of(shard: Shard, call: Call, timeout_s: float) -> RequestDeadline:
    """The deadline of a call, or of a message on a stream.

    Args:
        shard: Which answers.
        call: The call.
        timeout_s: What it asks for; 0: no longer than its deadline.
    """
    remaining_s = call.remaining_s
    bound_s = shard.config.limits.wait_max_s
    if remaining_s is not None:
        margin_s = min(_ANSWER_MARGIN_S_MAX, remaining_s / 4)
        bound_s = min(bound_s, max(remaining_s - margin_s, 0.0))
    return RequestDeadline(
        min(timeout_s, bound_s) if timeout_s else bound_s,
        wake=call.wake,
        is_stopping=shard.ends_waits,
    )


def wanted(shard: Shard, call: Call) -> Callable[[], bool]:
    """Whether somebody still reads an answer that may take as long as the call; any thread."""
    remaining_s = call.remaining_s
    bound_s = shard.config.limits.wait_max_s
    deadline_s = time.monotonic() + (bound_s if remaining_s is None else remaining_s)
    return lambda: call.is_active and time.monotonic() < deadline_s
