"""Errors of a slice that are raised in more than one place.

They advise what every caller can do, in whatever language: the SDK adds what its callers have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

from shardwell.errors import (
    DivergedError,
    NonFiniteError,
    WorkerIdInUseError,
    WorkersMissingError,
)
from shardwell.placement.rows import Ids
from shardwell.rpc.session import Session
from shardwell.specs.members import Elastic
from shardwell.specs.parameter import ParameterSpec, TrainingSpec
from shardwell.specs.table import TableSpec
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.members import Rivals
from shardwell_server.shard.step_tracker import StepTracker


class Ends(Protocol):
    """What a step tracker says of workers that have ended in order."""

    elastic: Elastic | None
    """Limits of elastic members; None: a fixed crew."""
    ended: dict[str, int]
    """Workers with a seat whose sessions have ended in order, the first one first."""
    rivals: dict[str, Rivals]
    """Clients that asked for a seat whose owner is connected, by its worker."""

    def ended_among(self, worker_ids: Iterable[str]) -> tuple[list[str], float]:
        """The workers that have ended in order, and for how long they may be expected back."""

    def shared_ids(self) -> tuple[dict[str, Rivals], float]:
        """Workers as which two clients would contribute, and when there may be more."""

    def ids_of_several(self) -> dict[str, list[Session]]:
        """The connected clients of each worker that has more than one."""


class TableSteps(Ends, Protocol):
    """What a table's step tracker says of its open step."""

    version: int
    """Steps that are closed; the number of the open one."""

    def missing(self, step: int) -> tuple[list[str], int]:
        """Workers that have not ended `step`, and how many more never opened the table."""


_OF_DIVERGED = "restore a checkpoint from before, and lower the learning rate or clip gradients"


def non_finite(
    spec: ParameterSpec, element_index: int, what: str, advice: str = "mend it and send it again"
) -> NonFiniteError:
    """The error for a value that is not finite, `what` saying whose."""
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
    """The error for a gradient that optimizer state can't take.

    Args:
        what: The parameter or table.
        place: Where in it.
        whose: The gradient.
        slot_name: The array of state.
        too_large: "gradient", or "weight decay" where it is what that adds.
        ending: How the step is ended now.
        element_index: The place as errors carry it.
        where: The parameter or table as errors carry it.
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
    """The error for a weight, or what else `what` says, that is not finite any more."""
    found = non_finite(spec, element_index, f"{what} at version {version}", _OF_DIVERGED)
    return DivergedError(found.message, element_index=element_index, parameter=spec.name)


def workers_missing(
    spec: ParameterSpec,
    tracker: StepTracker,
    chunk_index: int,
    version: int,
    deadline: RequestDeadline,
) -> WorkersMissingError:
    """Why a chunk has not reached `version`."""
    step = tracker.records[chunk_index].version
    missing, unknown = tracker.missing(step, chunk_index)
    more = "more to reach min_count" if spec.members is not None else ""
    named = _names(missing, unknown, more or "that never opened the parameter")
    named += _shared_words(tracker) if unknown and not more else ""
    none = "none (asynchronous)"
    if spec.closes_by_norm:
        none = "none: the next call of a worker closes it"
    return WorkersMissingError(
        f"parameter {spec.name!r}: waited {deadline.timeout_s:g} s for version {version} "
        f"of chunk {chunk_index}, which is at {step}; missing of "
        f"{spec.crew}: {named or none}; start them, or raise timeout_s",
        missing_worker_ids=tuple(missing),
        parameter=spec.name,
    )


def check_ended(spec: ParameterSpec, tracker: StepTracker, chunk_index: int) -> float:
    """Refuses to wait for a chunk's open step that needs a worker which has ended in order.

    Returns:
        In how many seconds a request that waits is to look again; math.inf: no sooner than that
        something changes.

    Raises:
        WorkersMissingError: names the workers that ended.
    """
    if _can_go_on(tracker):
        return math.inf
    record = tracker.records[chunk_index]
    if tracker.is_decided(record):
        return math.inf
    missing, unknown_count = tracker.missing(record.version, chunk_index)
    what = f"parameter {spec.name!r}: step {record.version} of chunk {chunk_index}"
    spare_count = spec.worker_count - (spec.min_contributors or spec.worker_count)
    return _check_missing(
        spec, tracker, missing, unknown_count, what, spare_count, parameter=spec.name
    )


def non_finite_row(
    spec: TableSpec, ids: Ids, place: int, what: str, advice: str = "mend it and send it again"
) -> NonFiniteError:
    """The same for rows; `place` is row * dim + column among `ids`."""
    row, column = divmod(place, spec.dim)
    return NonFiniteError(
        f"{what}, table {spec.name!r}: column {column} of row id {ids[row]} is not finite; "
        f"{advice}",
        element_index=place,
        table=spec.name,
    )


def diverged_row(spec: TableSpec, ids: Ids, place: int, version: int) -> DivergedError:
    """The same as `diverged`; `place` is row * dim + column among `ids`."""
    found = non_finite_row(spec, ids, place, f"weights at version {version}", _OF_DIVERGED)
    return DivergedError(found.message, table=spec.name)


def table_workers_missing(
    spec: TableSpec, tracker: TableSteps, version: int, deadline: RequestDeadline
) -> WorkersMissingError:
    """Why a table has not reached `version`."""
    missing, unknown = tracker.missing(tracker.version)
    more = "more to reach min_count" if spec.members is not None else ""
    named = _names(missing, unknown, more or "that never opened the table")
    named += _shared_words(tracker) if unknown and not more else ""
    return WorkersMissingError(
        f"table {spec.name!r}: waited {deadline.timeout_s:g} s for version {version}, and it is at "
        f"{tracker.version}; missing of {spec.crew}: "
        f"{named or 'none'}; start them, or raise timeout_s",
        missing_worker_ids=tuple(missing),
        table=spec.name,
    )


def check_table_ended(spec: TableSpec, tracker: TableSteps) -> float:
    """The same as `check_ended`, for the open step of a table."""
    if _can_go_on(tracker):
        return math.inf
    missing, unknown_count = tracker.missing(tracker.version)
    what = f"table {spec.name!r}: step {tracker.version}"
    return _check_missing(spec, tracker, missing, unknown_count, what, 0, table=spec.name)


def _can_go_on(tracker: Ends) -> bool:
    """Whether no worker is known to be missing for good; no step awaits a member that has left."""
    return tracker.elastic is not None or not (tracker.ended or tracker.rivals)


def _check_missing(
    spec: TrainingSpec,
    tracker: Ends,
    missing: list[str],
    unknown_count: int,
    what: str,
    spare_count: int,
    **where: Any,
) -> float:
    """Refuses to wait for workers that can't come; see `check_ended`."""
    shared, look_s = tracker.shared_ids()
    if unknown_count > spare_count and shared:
        worker_id, rivals = next(iter(shared.items()))
        raise WorkerIdInUseError(
            f"{what} waits for {unknown_count} more of {spec.crew}, and two clients are worker "
            f"{worker_id!r}: {rivals.words}; give each worker an id of its own",
            worker_id=worker_id,
            **where,
        )
    return min(look_s, _check_ended(tracker, missing, what, spare_count, **where))


def _check_ended(
    tracker: Ends, missing: list[str], what: str, spare_count: int, **where: Any
) -> float:
    """The same of a step that closes without `spare_count` workers."""
    ended, rest_s = tracker.ended_among(missing)
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


def _shared_words(tracker: Ends) -> str:
    """Which clients share an id, for a message that names a worker which never came."""
    for worker_id, sessions in tracker.ids_of_several().items():
        clients = " and ".join(map(str, sessions[:8]))
        return f" ({clients} are all worker {worker_id!r}: give each worker an id of its own)"
    return ""


def _names(missing: list[str], unknown_count: int, unknown: str) -> str:
    """The missing workers, of many some; and the number of `unknown` ones."""
    named = ", ".join(repr(worker_id) for worker_id in missing[:8])
    if len(missing) > 8:
        named += f" and {len(missing) - 8} more"
    if unknown_count:
        named += (" and " if named else "") + f"{unknown_count} {unknown}"
    return named
