"""Errors of a slice that are raised in more than one place.

They advise what every caller can do, in whatever language: the SDK adds what its callers have.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

from shardwell.errors import (
    DivergedError,
    NonFiniteError,
    WorkerIdInUseError,
    WorkersMissingError,
)
from shardwell.placement.rows import Ids
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell_server.shard.crews import Crew, Tracker, names_of
from shardwell_server.shard.deadline import Changes, RequestDeadline

_OF_DIVERGED = "restore a checkpoint from before, and lower the learning rate or clip gradients"


def non_finite(
    spec: ParameterSpec, element_index: int, what: str, advice: str = "mend it and send it again"
) -> NonFiniteError:
    """Returns the error for a value that is not finite; `what` says whose."""
    return NonFiniteError(
        f"{what}, parameter {spec.name!r}: {spec.element(element_index)} is not finite; {advice}",
        element_index=element_index,
        parameter=spec.name,
    )


def state_overflow(
    what: str,
    place: str,
    whose: str,
    slot_name: str,
    *,
    too_large: str,
    ending: str,
    element_index: int,
    **where: Any,
) -> NonFiniteError:
    """Returns the error for a gradient that optimizer state can't take.

    `whose` gradient it is, and how the step is `ending` now, are clauses of its message;
    `too_large` is "gradient", or "weight decay" where it is what that adds.
    """
    cause, advice = {
        "gradient": ("it is so large", "clip gradients"),
        "weight decay": (
            "what weight decay adds to it is so large, because weights are,",
            "restore a checkpoint and lower the learning rate",
        ),
    }[too_large]
    return NonFiniteError(
        f"{whose}, {what}: {cause} that the optimizer's {slot_name!r} of {place} would be "
        f"infinite for good; this part of it is not counted, and others may be; {advice}, and "
        f"{ending}",
        element_index=element_index,
        **where,
    )


def diverged(
    spec: ParameterSpec, element_index: int, version: int, what: str = "weights"
) -> DivergedError:
    """Returns the error for a weight, or another `what`, that is not finite any more."""
    found = non_finite(spec, element_index, f"{what} at version {version}", _OF_DIVERGED)
    return DivergedError(found.message, element_index=element_index, parameter=spec.name)


def non_finite_row(
    spec: TableSpec, ids: Ids, place: int, what: str, advice: str = "mend it and send it again"
) -> NonFiniteError:
    """Returns `non_finite` of rows; `place` is row * dim + column among `ids`."""
    row, column = divmod(place, spec.dim)
    return NonFiniteError(
        f"{what}, table {spec.name!r}: column {column} of row id {ids[row]} is not finite; "
        f"{advice}",
        element_index=place,
        table=spec.name,
    )


def diverged_row(spec: TableSpec, ids: Ids, place: int, version: int) -> DivergedError:
    """Returns `diverged` of rows; `place` is row * dim + column among `ids`."""
    found = non_finite_row(spec, ids, place, f"weights at version {version}", _OF_DIVERGED)
    return DivergedError(found.message, table=spec.name)


def await_version(
    tracker: Tracker[Any],
    version: int,
    changes: Changes,
    deadline: RequestDeadline,
    chunk_index: int | None = None,
) -> NoReturn:
    """Has a request wait until a chunk, or a table, has seen `version` updates; the lock is held.

    Raises:
        NotYet: the request is to be made again; see `RequestDeadline.wait`.
        WorkersMissingError: its time is over, or the open step needs a worker that has ended.
        WorkerIdInUseError: the open step needs a worker, and two clients share one worker's id.
    """
    spec, crew, step = tracker.spec, tracker.crew, tracker.version_of(chunk_index)
    kind, of = ("table", "") if chunk_index is None else ("parameter", f" of chunk {chunk_index}")
    where: dict[str, Any] = {kind: spec.name}
    look_s = math.inf
    if crew.may_wait_in_vain and any(tracker.open_parts(chunk_index)):
        what = f"{kind} {spec.name!r}: step {step}{of}"
        look_s = _check_missing(tracker, *crew.missing(step, chunk_index), what, **where)
    deadline.wait(changes, look_s=look_s)
    missing, unknown_count = crew.missing(step, chunk_index)
    is_known = not crew.comes_and_goes
    unknown = f"that never opened the {kind}" if is_known else "more to reach min_count"
    named = names_of(missing)
    if unknown_count:
        named += f"{' and ' if named else ''}{unknown_count} {unknown}"
        named += _shared_words(crew) if is_known else ""
    if not named:
        named = "none: the next call of a worker closes it"
        if not crew.is_sync:
            named = "none (asynchronous)"
    raise WorkersMissingError(
        f"{kind} {spec.name!r}: waited {deadline.timeout_s:g} s for version {version}"
        f"{f'{of}, which' if of else ', and it'} is at {step}; missing of {spec.crew}: {named}; "
        "start them, or raise timeout_s",
        missing_worker_ids=tuple(missing),
        **where,
    )


def _check_missing(
    tracker: Tracker[Any], missing: list[str], unknown_count: int, what: str, **where: Any
) -> float:
    """Refuses to wait for workers that can't come; returns seconds until the next look."""
    spec, crew = tracker.spec, tracker.crew
    spare_count = spec.worker_count - (spec.min_contributors or spec.worker_count)
    shared, look_s = crew.shared_ids()
    if unknown_count > spare_count and shared:
        worker_id, rivals = next(iter(shared.items()))
        raise WorkerIdInUseError(
            f"{what} waits for {unknown_count} more of {spec.crew}, and two clients are worker "
            f"{worker_id!r}: {rivals.words}; give each worker an id of its own",
            worker_id=worker_id,
            **where,
        )
    ended, rest_s = crew.ended_among(missing)
    if len(ended) <= spare_count:
        return look_s
    if not rest_s:
        one = len(ended) == 1
        named = names_of(ended)
        cause = "its client was closed" if one else "their clients were closed"
        cure = f"a worker with worker_id {named}" if one else "workers with those worker_ids"
        raise WorkersMissingError(
            f"{what} waits for {named}, which ended in order ({cause}), and can't close without; "
            f"start {cure} and make this call again, or give all workers the same number of "
            "steps",
            missing_worker_ids=tuple(ended),
            **where,
        )
    return min(look_s, rest_s)


def _shared_words(crew: Crew[Any]) -> str:
    for worker_id, sessions in crew.ids_of_several().items():
        clients = " and ".join(map(str, sessions[:8]))
        return f" ({clients} are all worker {worker_id!r}: give each worker an id of its own)"
    return ""
