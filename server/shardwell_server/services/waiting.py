"""How long a request may wait: what it asks for, within its deadline and the shard's limit."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from shardwell_server.shard.patience import Patience
from shardwell_server.shard.shard import Shard

_ANSWER_MARGIN_S = 0.25
"""An answer that names the missing leaves that long before the client's gRPC deadline."""


def patience_of(shard: Shard, context: grpc.ServicerContext, timeout_s: float) -> Patience:
    """The patience of a call, or of a message on a stream.

    Args:
        shard: Which answers.
        context: The call.
        timeout_s: What it asks for; 0: no longer than its deadline.
    """
    remaining_s = context.time_remaining()
    bound_s = shard.config.limits.wait_max_s
    if remaining_s is not None:
        bound_s = min(bound_s, max(remaining_s - _ANSWER_MARGIN_S, 0.0))
    return Patience(
        min(timeout_s, bound_s) if timeout_s else bound_s,
        is_active=context.is_active,
        is_stopping=shard.is_stopping,
    )


def wanted(shard: Shard, context: grpc.ServicerContext) -> Callable[[], bool]:
    """Whether somebody still reads an answer that may take as long as the call; any thread."""
    remaining_s = context.time_remaining()
    bound_s = shard.config.limits.wait_max_s
    deadline_s = time.monotonic() + (bound_s if remaining_s is None else remaining_s)
    return lambda: context.is_active() and time.monotonic() < deadline_s
