"""Errors of a slice that are raised in more than one place."""

from __future__ import annotations

from shardwell.errors import NonFiniteError, WorkersMissingError
from shardwell.row_placement import Ids
from shardwell.specs import ParameterSpec
from shardwell.table_spec import TableSpec
from shardwell_server.shard.ledger import StepLedger
from shardwell_server.shard.patience import Patience
from shardwell_server.shard.table_ledger import TableLedger


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
    named = _names(missing, unknown, "parameter")
    return WorkersMissingError(
        f"parameter {spec.name!r}: waited {patience.timeout_s:g} s for version {version} "
        f"of chunk {chunk_index}, which is at {step}; missing of "
        f"{spec.worker_count} workers: {named or 'none (asynchronous)'}; "
        "start them, or raise timeout_s",
        missing_worker_ids=tuple(missing),
        parameter=spec.name,
    )


def non_finite_row(spec: TableSpec, ids: Ids, place: int, what: str) -> NonFiniteError:
    """The same for rows; `place` is row * dim + column among `ids`."""
    row, column = divmod(place, spec.dim)
    return NonFiniteError(
        f"{what}, table {spec.name!r}: column {column} of row id {ids[row]} is not finite; "
        "lower the learning rate or clip, or open with allow_non_finite=True",
        element_index=place,
        table=spec.name,
    )


def table_workers_missing(
    spec: TableSpec, ledger: TableLedger, version: int, patience: Patience
) -> WorkersMissingError:
    """Why a table has not reached `version`."""
    missing, unknown = ledger.missing(ledger.version)
    return WorkersMissingError(
        f"table {spec.name!r}: waited {patience.timeout_s:g} s for version {version}, and it is at "
        f"{ledger.version}; missing of {spec.worker_count} workers: "
        f"{_names(missing, unknown, 'table') or 'none'}; start them, or raise timeout_s",
        missing_worker_ids=tuple(missing),
        table=spec.name,
    )


def _names(missing: list[str], unknown_count: int, what: str) -> str:
    """Those who are missing, of many some."""
    named = ", ".join(repr(worker_id) for worker_id in missing[:8])
    if len(missing) > 8:
        named += f" and {len(missing) - 8} more"
    if unknown_count:
        named += (" and " if named else "") + f"{unknown_count} that never opened the {what}"
    return named
