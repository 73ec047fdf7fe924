"""The time that a call may take, and the part of it that each side waits for others. Pure.

The timeout is the caller's: for so long others are waited for, and then the error comes that names
the missing. So that it arrives, the call goes on a little longer where no answer has come:

    caller      timeout_s, checked by `check_timeout`
    worker      asks a shard, or rank 0, to wait for `wait_milliseconds(timeout_s)`, which is all of
                it, and for the answer until `with_answer(timeout_s)`
    shard       answers `SHARD_MARGIN_S` before the deadline of gRPC, and within its own limit

`shard.deadline` of the service has how a request waits on a shard; `rpc.retry.Attempts` counts what
its attempts have left of a call's time on the worker.
"""

from __future__ import annotations

import math
from typing import Any

from shardwell.errors import ArgumentError

DURATION_S_MAX = 30 * 86400.0
"""The longest time that can be asked for: waits that take it overflow in no library below."""
TIMEOUT_S_MIN = 0.001
"""Deadlines travel in milliseconds."""
ANSWER_S = 2.0
"""The time of an answer on its way between busy machines; of a short wait, a quarter."""
SHARD_MARGIN_S = 0.25
"""The time of an answer that names the missing, from a shard to the client's gRPC."""


def check_duration(
    what: str, seconds: Any, low_s: float = 0.0, high_s: float = DURATION_S_MAX
) -> float:
    """Returns a length of time in seconds; NaN and infinity are none."""
    good = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not good or not low_s <= seconds <= high_s:
        raise ArgumentError(
            f"{what} must be a number of seconds from {low_s:g} to {high_s:.8g}; got "
            f"{seconds!r:.80}"
        )
    return float(seconds)


def check_timeout(timeout_s: Any, what: str = "timeout_s") -> float:
    """Returns the time that a call may take: a length of time that is not 0."""
    return check_duration(what, timeout_s, TIMEOUT_S_MIN)


def less_margin(timeout_s: float, margin_s: float) -> float:
    """A timeout less a margin for the answer; of a short timeout, less a quarter."""
    return timeout_s - min(margin_s, timeout_s / 4)


def with_answer(timeout_s: float) -> float:
    """The deadline of a call that waits for others: their answer names the missing."""
    return timeout_s + min(ANSWER_S, timeout_s / 4)


def wait_milliseconds(timeout_s: float) -> int:
    """A wait as it travels: at least 1, because 0 would mean none."""
    return max(math.ceil(timeout_s * 1000), 1)
