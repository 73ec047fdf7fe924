"""A worker's seat: taken over from a process that is gone, or is about to be noticed as gone.

An older client of this process gives its seat up at once: a cell of a notebook was run again.

In asynchronous mode it has a tenure, see session.proto.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shardwell.errors import StepOrderError, WorkerIdInUseError
from shardwell.rpc.retry import Attempts

TAKE_OVER_S = 2.0
"""A connected process's seat is asked for again so long: a kill is not noticed at the instant."""
_PAUSE_S_FIRST, _PAUSE_S_MAX = 0.05, 0.5
"""Between two questions; doubled each time. A shard logs each that it refuses."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class CrewSteps:
    """The steps of the workers of a fixed crew in a parameter or table."""

    next_steps: Mapping[str, int]
    """By worker id, of each worker with a seat."""
    version: int
    """The next step of a worker without one."""
    has_room: bool
    is_restored: bool
    """True if its first weights or rows came from a checkpoint, maybe of another step."""


def claim_seat(
    attempts: Attempts,
    take: Callable[[], ResultT],
    run: Callable[[Attempts, Callable[[], ResultT]], ResultT] = Attempts.run,
) -> ResultT:
    """Returns the result of `take`, repeated while another process's end may not be noticed yet."""
    began_with_s = attempts.remaining_s
    pause_s = _PAUSE_S_FIRST
    while True:
        try:
            return run(attempts, take)
        except WorkerIdInUseError as error:
            if attempts.replace_older():
                continue
            rest_s = attempts.remaining_s
            if rest_s <= 0 or (error.free_in_s is None and began_with_s - rest_s > TAKE_OVER_S):
                raise
        attempts.pause(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def common_tenure(tenures: Iterable[int]) -> int:
    """The tenure of a worker's seats on all shards; 0: it has none, or they are not of one."""
    first, *others = tenures
    return first if all(tenure == first for tenure in others) else 0


def was_cut_off(worker_id: str, ahead: CrewSteps, behind: CrewSteps) -> bool:
    """Returns True if a worker's process ended between its steps of two parameters or tables.

    In a loop that makes a step of both, a worker is one step further in `ahead` after the first of
    the two. It is always so where they began a step apart; there, it is two steps further then.
    """
    apart = [
        step - behind.next_steps.get(each, behind.version)
        for each, step in ahead.next_steps.items()
        if each != worker_id and (each in behind.next_steps or behind.has_room)
    ]
    if any(each <= 0 for each in apart):
        return True
    # Where all others are where this worker is, they tell nothing.
    is_restored = ahead.is_restored or behind.is_restored
    return not is_restored and not any(each >= 2 for each in apart)


def check_next_step(
    what: str, next_step: int, opened_at: int, *, took_over: bool, lost_seat: bool, **where: Any
) -> None:
    """Refuses to go on where steps were counted, or the seat given away, since it was opened.

    An earlier process's last step may have been under way: this process sends that step then, and
    each chunk of it counts once. It can't know of more steps.
    """
    if lost_seat:
        raise StepOrderError(
            f"{what}: the seat that this worker had when it opened it at step {opened_at} was "
            "given to another one; open it again and go on as a new worker, at its next_step",
            **where,
        )
    if took_over and next_step > opened_at + 1:
        raise StepOrderError(
            f"{what}: another process of this worker contributed up to step {next_step - 1} after "
            f"this one had opened it at step {opened_at}; open it again and go on at its next_step",
            **where,
        )
