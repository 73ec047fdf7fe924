"""Errors of a slice that are raised in more than one place."""

from __future__ import annotations

from shardwell.errors import NonFiniteError, WorkersMissingError
from shardwell.specs import ParameterSpec
from shardwell_server.shard.ledger import StepLedger
from shardwell_server.shard.patience import Patience


def non_finite(spec: ParameterSpec, element_index: int, what: str) -> NonFiniteError:
    """The error for a value that is not finite, `what` saying whose."""
    return NonFiniteError(
        f"{what}, parameter {spec.name!r}: element {element_index} is not finite; "
        "lower the learning rate or clip, or open with allow_non_finite=True",
        element_index=element_index,
        parameter=spec.name,
    )


def workers_missing(
    spec: ParameterSpec, ledger: StepLedger, chunk_index: int, version: int, patience: Patience
) -> WorkersMissingError:
    """Why a chunk has not reached `version`."""
    step = ledger.records[chunk_index].version
    missing, unknown = ledger.missing(step, chunk_index)
    named = ", ".join(repr(worker_id) for worker_id in missing[:8])
    if len(missing) > 8:
        named += f" and {len(missing) - 8} more"
    if unknown:
        named += (" and " if named else "") + f"{unknown} that never opened the parameter"
    return WorkersMissingError(
        f"parameter {spec.name!r}: waited {patience.timeout_s:g} s for version {version} "
        f"of chunk {chunk_index}, which is at {step}; missing of "
        f"{spec.worker_count} workers: {named or 'none (asynchronous)'}; "
        "start them, or raise timeout_s",
        missing_worker_ids=tuple(missing),
        parameter=spec.name,
    )
