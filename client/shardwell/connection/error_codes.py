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
_Code = grpc.StatusCode


class _Entry(NamedTuple):
    kind: type[errors.ShardwellError]
    code_name: str
    status: grpc.StatusCode

    @property
    def code(self) -> str:
        return f"ERROR_CODE_{self.code_name}"


_CATALOGUE = [
    # Kinds before their bases: the first that fits is taken.
    _Entry(errors.NonFiniteError, "NON_FINITE", _Code.INVALID_ARGUMENT),
    _Entry(errors.DivergedError, "DIVERGED", _Code.FAILED_PRECONDITION),
    _Entry(errors.ArgumentError, "INVALID_ARGUMENT", _Code.INVALID_ARGUMENT),
    _Entry(errors.CorruptChunkError, "CORRUPT_CHUNK", _Code.DATA_LOSS),
    _Entry(errors.SpecMismatchError, "SPEC_MISMATCH", _Code.FAILED_PRECONDITION),
    _Entry(errors.UnknownParameterError, "UNKNOWN_PARAMETER", _Code.NOT_FOUND),
    _Entry(errors.UnknownTableError, "UNKNOWN_TABLE", _Code.NOT_FOUND),
    _Entry(errors.NotInitializedError, "NOT_INITIALIZED", _Code.FAILED_PRECONDITION),
    _Entry(errors.InitSupersededError, "INIT_SUPERSEDED", _Code.ABORTED),
    _Entry(errors.WrongShardError, "WRONG_SHARD", _Code.FAILED_PRECONDITION),
    _Entry(errors.StepOrderError, "STEP_ORDER", _Code.FAILED_PRECONDITION),
    _Entry(errors.SeatsTakenError, "SEATS_TAKEN", _Code.FAILED_PRECONDITION),
    _Entry(errors.WorkersMissingError, "WORKERS_MISSING", _Code.DEADLINE_EXCEEDED),
    _Entry(errors.LimitError, "LIMIT_EXCEEDED", _Code.RESOURCE_EXHAUSTED),
    _Entry(errors.StorageError, "STORAGE", _Code.FAILED_PRECONDITION),
    _Entry(errors.WorkerIdInUseError, "WORKER_ID_IN_USE", _Code.FAILED_PRECONDITION),
    _Entry(errors.SessionUnknownError, "SESSION_UNKNOWN", _Code.UNAVAILABLE),
    _Entry(errors.ShardUnavailableError, "STOPPING", _Code.UNAVAILABLE),
    _Entry(errors.GroupMismatchError, "GROUP_MISMATCH", _Code.FAILED_PRECONDITION),
    _Entry(errors.RankTakenError, "RANK_TAKEN", _Code.FAILED_PRECONDITION),
    _Entry(errors.WorkerLostError, "WORKER_LOST", _Code.FAILED_PRECONDITION),
    _Entry(errors.WorkerUnreachableError, "WORKER_UNREACHABLE", _Code.UNAVAILABLE),
    _Entry(errors.CollectiveMismatchError, "COLLECTIVE_MISMATCH", _Code.FAILED_PRECONDITION),
    _Entry(errors.AuthenticationError, "UNAUTHENTICATED", _Code.UNAUTHENTICATED),
    _Entry(errors.AccessDeniedError, "PERMISSION_DENIED", _Code.PERMISSION_DENIED),
    _Entry(errors.SessionEndedError, "SESSION_ENDED", _Code.FAILED_PRECONDITION),
    _Entry(errors.OtherIncarnationError, "OTHER_INCARNATION", _Code.FAILED_PRECONDITION),
    _Entry(errors.VersionMismatchError, "VERSION_MISMATCH", _Code.FAILED_PRECONDITION),
    _Entry(errors.InternalError, "INTERNAL", _Code.INTERNAL),
]
_BY_CODE = {types_pb2.ErrorCode.Value(each.code): each for each in _CATALOGUE}


class Status(NamedTuple):
    """The end of a failed call."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def to_status(error: errors.ShardwellError) -> Status:
    """The status that tells a client of `error`."""
    detail = to_detail(error).SerializeToString()
    return Status(_entry_of(error).status, error.message, ((ERROR_DETAIL_KEY, detail),))


def to_detail(error: errors.ShardwellError) -> types_pb2.ErrorDetail:
    """The fields of `error` besides its text, as a message."""
    free_in_s: float | None = getattr(error, "free_in_s", None)
    return types_pb2.ErrorDetail(
        code=_entry_of(error).code,
        shard_index=error.shard_index or 0,
        parameter=error.parameter or "",
        table=error.table or "",
        worker_id=error.worker_id or "",
        element_index=getattr(error, "element_index", -1),
        missing_worker_ids=_bounded(getattr(error, "missing_worker_ids", ())),
        rank=error.rank,
        missing_ranks=getattr(error, "missing_ranks", ())[:_RANK_COUNT_MAX],
        init_epoch=getattr(error, "init_epoch", 0),
        free_in_ms=None if free_in_s is None else int(free_in_s * 1000),
    )


def _entry_of(error: errors.ShardwellError) -> _Entry:
    return next((entry for entry in _CATALOGUE if isinstance(error, entry.kind)), _CATALOGUE[-1])


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
    who: str,
    **where: Any,
) -> errors.ShardwellError:
    """Returns the Shardwell error of a failed call to `who`, which carries `where`.

    A Shardwell server names its error. Any other status is gRPC's own, and is about the connection:
    bytes that were damaged or lost on their way make nearly every code that exists.
    """
    code, details = error.code(), error.details() or ""
    detail = _detail_of(error)
    if detail is not None and detail.code:
        return from_detail(detail, details)
    match code:
        case _Code.RESOURCE_EXHAUSTED if _DAMAGED_LENGTH not in details:
            return errors.LimitError(f"{who} is at a limit: {details}", **where)
        case _Code.UNAVAILABLE | _Code.CANCELLED:
            return errors.ShardUnavailableError(
                f"{who} can't be reached or went away ({details or code.name}); "
                "check that it runs, then call again",
                **where,
            )
        case _Code.DEADLINE_EXCEEDED:
            return errors.DeadlineError(
                f"{who} did not answer within the deadline; "
                "check its load, the network, and whether its process was stopped, "
                "or raise timeout_s",
                **where,
            )
        case _Code.UNIMPLEMENTED:
            return errors.WrongShardError(
                f"{who} is no Shardwell shard of this version: {details}",
                **where,
            )
        case _:
            return errors.ShardUnavailableError(
                f"the connection to {who} broke ({code.name}: {details}); call again, and check "
                "the network if it breaks again",
                **where,
            )


def from_detail(detail: types_pb2.ErrorDetail, message: str) -> errors.ShardwellError:
    """The exception that `to_detail` was given; InternalError if its code is unknown."""
    found: dict[str, Any] = {
        "shard_index": detail.shard_index,
        "worker_id": detail.worker_id or None,
        "parameter": detail.parameter or None,
        "table": detail.table or None,
        "rank": detail.rank if detail.HasField("rank") else None,
        "element_index": detail.element_index,
        "init_epoch": detail.init_epoch,
        "free_in_s": detail.free_in_ms / 1000 if detail.HasField("free_in_ms") else None,
        "missing_worker_ids": tuple(detail.missing_worker_ids),
        "missing_ranks": tuple(detail.missing_ranks),
    }
    kind = _BY_CODE.get(detail.code, _CATALOGUE[-1]).kind
    return kind(message, **{name: each for name, each in found.items() if hasattr(kind, name)})


def _detail_of(error: grpc.RpcError) -> types_pb2.ErrorDetail | None:
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == ERROR_DETAIL_KEY:
            try:
                return types_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None
