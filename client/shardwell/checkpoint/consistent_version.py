"""Finds a version at which all shards can begin a snapshot, while training goes on.

Ask all shards for the newest version V; have all of them begin at V; when one is past it, begin
again a little later (V + 1, V + 2, V + 4, ...); when a later version was not reached soon, because
training paused, take the newest again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardwell.errors import LimitError, StepOrderError, WorkersMissingError
from shardwell.rpc.retry import Attempts

_FIRST_WAIT_S = 1.0
"""How long the first wait for a version lasts, which training may never reach; doubled each
time."""
_LIMIT_PAUSE_S = 0.25
_AHEAD_MAX = 2**20

TakenT = TypeVar("TakenT")


def known_first(known: int, ask: Callable[[], int]) -> Callable[[], int]:
    """Gives `known` at the first call, and at all others what `ask` returns then.

    A round trip less for what was heard of just now.
    """
    left = [known]
    return lambda: left.pop() if left else ask()


def at_one_version(
    attempt: Callable[[int, float], TakenT],
    newest_version: Callable[[], int],
    remaining_s: Callable[[], float],
    attempts: Attempts,
) -> TakenT:
    """What the first attempt that succeeds took.

    Args:
        attempt: Takes a version, and how long it may be waited for.
        newest_version: Asks all shards.
        remaining_s: Until the deadline; raises DeadlineError when it has passed.
        attempts: Attempts of the call.

    Raises:
        WorkersMissingError: some of the newest version waits for workers; names them.
        ShardwellError: whatever else an attempt raises.
    """
    ahead, later, wait_s = 0, 1, _FIRST_WAIT_S
    while True:
        version = newest_version() + ahead
        left_s = remaining_s()
        try:
            return attempt(version, min(wait_s, left_s / 2) if ahead else left_s)
        except StepOrderError:  # too late
            ahead, later = later, min(2 * later, _AHEAD_MAX)
        except WorkersMissingError:  # perhaps too early: training has ended
            if not ahead:
                raise
            ahead, wait_s = 0, 2 * wait_s
        except LimitError:  # perhaps of attempts that the shards have not seen the end of yet
            if remaining_s() <= _LIMIT_PAUSE_S:
                raise
            attempts.pause(_LIMIT_PAUSE_S)
