"""Errors of a slice that are raised in more than one place.

They advise what every caller can do, in whatever language: the SDK adds what its callers have.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from shardwell.errors import (
    DivergedError,
    NonFiniteError,
    WorkerIdInUseError,
    WorkersMissingError,
)
from shardwell.placement.rows import Ids
from shardwell.specs.parameter import ParameterSpec, TrainingSpec
from shardwell.specs.table import TableSpec
from shardwell_server.shard.crews import Crew
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.step_tracker import StepTracker


class TableSteps(Protocol):
    """A table's step tracker."""

    version: int
    crew: Crew[Any]


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


def workers_missing(
    spec: ParameterSpec,
    tracker: StepTracker,
    chunk_index: int,
    version: int,
    deadline: RequestDeadline,
) -> WorkersMissingError:
    """Returns the error of a chunk that has not reached `version` in time."""
    step = tracker.records[chunk_index].version
    none = "none (asynchronous)"
    if spec.closes_by_norm:
        none = "none: the next call of a worker closes it"
    return _missing(
        spec,
        tracker.crew,
        tracker.crew.missing(step, chunk_index),
        f"version {version} of chunk {chunk_index}, which is at {step}",
        deadline,
        none,
        parameter=spec.name,
    )


def check_ended(spec: ParameterSpec, tracker: StepTracker, chunk_index: int) -> float:
    """Refuses to wait for a chunk's open step that needs a worker which has ended in order.

    Returns the seconds until a request that waits is to look again; math.inf: only after a change.
    """
    crew, record = tracker.crew, tracker.records[chunk_index]
    if not crew.may_wait_in_vain or tracker.is_decided(record):
        return math.inf
    what = f"parameter {spec.name!r}: step {record.version} of chunk {chunk_index}"
    spare_count = spec.worker_count - (spec.min_contributors or spec.worker_count)
    missing = crew.missing(record.version, chunk_index)
    return _check_missing(spec, crew, missing, what, spare_count, parameter=spec.name)


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


def table_workers_missing(
    spec: TableSpec, tracker: TableSteps, version: int, deadline: RequestDeadline
) -> WorkersMissingError:
    """Returns the error of a table that has not reached `version` in time."""
    crew, missing = tracker.crew, tracker.crew.missing(tracker.version)
    where = f"version {version}, and it is at {tracker.version}"
    return _missing(spec, crew, missing, where, deadline, "none", table=spec.name)


def check_table_ended(spec: TableSpec, tracker: TableSteps) -> float:
    """Refuses to wait for a table's open step: as `check_ended`."""
    crew, step = tracker.crew, tracker.version
    if not crew.may_wait_in_vain:
        return math.inf
    what = f"table {spec.name!r}: step {step}"
    return _check_missing(spec, crew, crew.missing(step), what, 0, table=spec.name)


def _missing(
    spec: TrainingSpec,
    crew: Crew[Any],
    lacks: tuple[list[str], int],
    where: str,
    deadline: RequestDeadline,
    none: str,
    **of: str,
) -> WorkersMissingError:
    missing, unknown = lacks
    ((kind, name),) = of.items()
    is_known = not crew.comes_and_goes
    named = _names(
        missing, unknown, f"that never opened the {kind}" if is_known else "more to reach min_count"
    )
    if unknown and is_known:
        named += _shared_words(crew)
    return WorkersMissingError(
        f"{kind} {name!r}: waited {deadline.timeout_s:g} s for {where}; missing of {spec.crew}: "
        f"{named or none}; start them, or raise timeout_s",
        missing_worker_ids=tuple(missing),
        **of,
    )


def _check_missing(
    spec: TrainingSpec,
    crew: Crew[Any],
    lacks: tuple[list[str], int],
    what: str,
    spare_count: int,
    **where: Any,
) -> float:
    missing, unknown_count = lacks
    shared, look_s = crew.shared_ids()
    if unknown_count > spare_count and shared:
        worker_id, rivals = next(iter(shared.items()))
        raise WorkerIdInUseError(
            f"{what} waits for {unknown_count} more of {spec.crew}, and two clients are worker "
            f"{worker_id!r}: {rivals.words}; give each worker an id of its own",
            worker_id=worker_id,
            **where,
        )
    return min(look_s, _check_ended(crew, missing, what, spare_count, **where))


def _check_ended(
    crew: Crew[Any], missing: list[str], what: str, spare_count: int, **where: Any
) -> float:
    """Refuses to wait for a step that closes without `spare_count` workers."""
    ended, rest_s = crew.ended_among(missing)
    if len(ended) <= spare_count:
        return math.inf
    if not rest_s:
        one = len(ended) == 1
        named = _names(ended, 0, "")
        cause = "its client was closed" if one else "their clients were closed"
        cure = f"a worker with worker_id {named}" if one else "workers with those worker_ids"
        raise WorkersMissingError(
            f"{what} waits for {named}, which ended in order ({cause}), and can't close without; "
            f"start {cure} and make this call again, or give all workers the same number of "
            "steps",
            missing_worker_ids=tuple(ended),
            **where,
        )
    return rest_s


def _shared_words(crew: Crew[Any]) -> str:
    for worker_id, sessions in crew.ids_of_several().items():
        clients = " and ".join(map(str, sessions[:8]))
        return f" ({clients} are all worker {worker_id!r}: give each worker an id of its own)"
    return ""


def _names(missing: list[str], unknown_count: int, unknown: str) -> str:
    named = ", ".join(repr(worker_id) for worker_id in missing[:8])
    if len(missing) > 8:
        named += f" and {len(missing) - 8} more"
    if unknown_count:
        named += (" and " if named else "") + f"{unknown_count} {unknown}"
    return named
