"""One catalogue of errors for both sides: exception, wire code and gRPC status.

The service turns an exception into a status with `to_status`; the SDK turns the status back into
the same exception with `from_rpc_error`. `grpc.RpcError` never reaches a user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from shardwell import errors
from shardwell.v1 import types_pb2

_NAMES_SIZE_MAX_BYTES = 2048
_RANK_COUNT_MAX = 512
ERROR_DETAIL_KEY = "shardwell-error-bin"
_DAMAGED_LENGTH = "Received message larger than max"
"""The words of gRPC for a message that is longer than any that Shardwell sends."""

_CATALOGUE: list[tuple[type[errors.ShardwellError], types_pb2.ErrorCode, grpc.StatusCode]] = [
    # Kinds before their bases: the first that fits is taken.
    (errors.NonFiniteError, types_pb2.ERROR_CODE_NON_FINITE, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.DivergedError, types_pb2.ERROR_CODE_DIVERGED, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ArgumentError, types_pb2.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.CorruptChunkError, types_pb2.ERROR_CODE_CORRUPT_CHUNK, grpc.StatusCode.DATA_LOSS),
    (
        errors.SpecMismatchError,
        types_pb2.ERROR_CODE_SPEC_MISMATCH,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (
        errors.UnknownParameterError,
        types_pb2.ERROR_CODE_UNKNOWN_PARAMETER,
        grpc.StatusCode.NOT_FOUND,
    ),
    (errors.UnknownTableError, types_pb2.ERROR_CODE_UNKNOWN_TABLE, grpc.StatusCode.NOT_FOUND),
    (
        errors.NotInitializedError,
        types_pb2.ERROR_CODE_NOT_INITIALIZED,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (errors.InitSupersededError, types_pb2.ERROR_CODE_INIT_SUPERSEDED, grpc.StatusCode.ABORTED),
    (errors.WrongShardError, types_pb2.ERROR_CODE_WRONG_SHARD, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StepOrderError, types_pb2.ERROR_CODE_STEP_ORDER, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SeatsTakenError, types_pb2.ERROR_CODE_SEATS_TAKEN, grpc.StatusCode.FAILED_PRECONDITION),
    (
        errors.WorkersMissingError,
        types_pb2.ERROR_CODE_WORKERS_MISSING,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ),
    (errors.LimitError, types_pb2.ERROR_CODE_LIMIT_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StorageError, types_pb2.ERROR_CODE_STORAGE, grpc.StatusCode.FAILED_PRECONDITION),
    (
        errors.WorkerIdInUseError,
        types_pb2.ERROR_CODE_WORKER_ID_IN_USE,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (
        errors.SessionUnknownError,
        types_pb2.ERROR_CODE_SESSION_UNKNOWN,
        grpc.StatusCode.UNAVAILABLE,
    ),
    (errors.ShardUnavailableError, types_pb2.ERROR_CODE_STOPPING, grpc.StatusCode.UNAVAILABLE),
    (
        errors.GroupMismatchError,
        types_pb2.ERROR_CODE_GROUP_MISMATCH,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (errors.RankTakenError, types_pb2.ERROR_CODE_RANK_TAKEN, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.WorkerLostError, types_pb2.ERROR_CODE_WORKER_LOST, grpc.StatusCode.FAILED_PRECONDITION),
    (
        errors.WorkerUnreachableError,
        types_pb2.ERROR_CODE_WORKER_UNREACHABLE,
        grpc.StatusCode.UNAVAILABLE,
    ),
    (
        errors.CollectiveMismatchError,
        types_pb2.ERROR_CODE_COLLECTIVE_MISMATCH,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (
        errors.AuthenticationError,
        types_pb2.ERROR_CODE_UNAUTHENTICATED,
        grpc.StatusCode.UNAUTHENTICATED,
    ),
    (
        errors.AccessDeniedError,
        types_pb2.ERROR_CODE_PERMISSION_DENIED,
        grpc.StatusCode.PERMISSION_DENIED,
    ),
    (
        errors.SessionEndedError,
        types_pb2.ERROR_CODE_SESSION_ENDED,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (
        errors.OtherIncarnationError,
        types_pb2.ERROR_CODE_OTHER_INCARNATION,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (
        errors.VersionMismatchError,
        types_pb2.ERROR_CODE_VERSION_MISMATCH,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    (errors.InternalError, types_pb2.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL),
]
_BY_CODE = {code: kind for kind, code, _ in _CATALOGUE}


class Status(NamedTuple):
    """The end of a failed call."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def to_status(error: errors.ShardwellError) -> Status:
    """The status that tells a client of `error`."""
    _, _, status_code = _entry_of(error)
    detail = to_detail(error)
    return Status(status_code, error.message, ((ERROR_DETAIL_KEY, detail.SerializeToString()),))


def to_detail(error: errors.ShardwellError) -> types_pb2.ErrorDetail:
    """The fields of `error` besides its text, as a message."""
    _, code, _ = _entry_of(error)
    return types_pb2.ErrorDetail(
        code=code,
        shard_index=error.shard_index or 0,
        parameter=error.parameter or "",
        table=error.table or "",
        worker_id=error.worker_id or "",
        element_index=getattr(error, "element_index", -1),
        missing_worker_ids=_bounded(getattr(error, "missing_worker_ids", ())),
        rank=error.rank,
        missing_ranks=getattr(error, "missing_ranks", ())[:_RANK_COUNT_MAX],
        init_epoch=getattr(error, "init_epoch", 0),
        free_in_ms=_milliseconds(getattr(error, "free_in_s", None)),
    )


def _entry_of(
    error: errors.ShardwellError,
) -> tuple[type[errors.ShardwellError], types_pb2.ErrorCode, grpc.StatusCode]:
    return next((entry for entry in _CATALOGUE if isinstance(error, entry[0])), _CATALOGUE[-1])


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


def _bounded(worker_ids: Sequence[str]) -> list[str]:
    """Keeps as many as trailing metadata can carry: gRPC cuts it off, message and all, at 8 KiB."""
    kept, size = [], 0
    for worker_id in worker_ids:
        size += len(worker_id) + 2
        if size > _NAMES_SIZE_MAX_BYTES:
            break
        kept.append(worker_id)
    return kept


def from_rpc_error(
    error: grpc.RpcError,
    *,
    shard_index: int | None,
    address: str,
    parameter: str | None = None,
    table: str | None = None,
    role: str | None = None,
) -> errors.ShardwellError:
    """Returns the Shardwell error of a failed call, on behalf of a parameter or a table.

    A Shardwell server says with every error which of ours it is. A status that does not, of
    whatever code, is gRPC's own, and tells of the connection: bytes that were damaged or lost on
    their way make nearly every code there is.
    """
    code, details = error.code(), error.details() or ""
    detail = _detail_of(error)
    if detail is not None and detail.code:
        return from_detail(detail, details)
    of: dict[str, Any] = {"shard_index": shard_index, "parameter": parameter, "table": table}
    where = f"{role or f'shard {shard_index}'} at {address}"
    match code:
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _DAMAGED_LENGTH not in details:
            return errors.LimitError(f"{where} is at a limit: {details}", **of)
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return errors.ShardUnavailableError(
                f"{where} can't be reached or went away ({details or code.name}); "
                "check that it runs, then call again",
                **of,
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineError(
                f"{where} did not answer within the deadline; "
                "check its load, the network, and whether its process was stopped, "
                "or raise timeout_s",
                **of,
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return errors.WrongShardError(
                f"{where} is no Shardwell shard of this version: {details}",
                **of,
            )
        case _:
            return errors.ShardUnavailableError(
                f"the connection to {where} broke ({code.name}: {details}); call again, and check "
                "the network if it breaks again",
                **of,
            )


def from_detail(detail: types_pb2.ErrorDetail, message: str) -> errors.ShardwellError:
    """The exception that `to_detail` was given; InternalError if its code is unknown."""
    where: dict[str, Any] = {
        "shard_index": detail.shard_index,
        "worker_id": detail.worker_id or None,
        "parameter": detail.parameter or None,
        "table": detail.table or None,
        "rank": detail.rank if detail.HasField("rank") else None,
    }
    kind = _BY_CODE.get(detail.code, errors.InternalError)
    if kind in (errors.NonFiniteError, errors.DivergedError):
        return kind(message, element_index=detail.element_index, **where)
    if kind is errors.InitSupersededError:
        return errors.InitSupersededError(message, init_epoch=detail.init_epoch, **where)
    if kind is errors.WorkerIdInUseError:
        free_in_s = detail.free_in_ms / 1000 if detail.HasField("free_in_ms") else None
        return errors.WorkerIdInUseError(message, free_in_s=free_in_s, **where)
    if kind is errors.WorkersMissingError:
        return errors.WorkersMissingError(
            message,
            missing_worker_ids=tuple(detail.missing_worker_ids),
            missing_ranks=tuple(detail.missing_ranks),
            **where,
        )
    return kind(message, **where)


def _detail_of(error: grpc.RpcError) -> types_pb2.ErrorDetail | None:
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == ERROR_DETAIL_KEY:
            try:
                return types_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None
