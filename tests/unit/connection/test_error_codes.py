"""Goal: an error that a shard raises reaches the user as the same error, and no RpcError ever does.

Method: the table below is written from types.proto's comments, not from the catalogue; calls are
fakes that carry what a wire would.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from shardwell import errors
from shardwell.connection.error_codes import ERROR_DETAIL_KEY, from_rpc_error, to_status
from shardwell.v1 import types_pb2

Code = grpc.StatusCode
WIRE: dict[str, tuple[type[errors.ShardwellError], grpc.StatusCode]] = {
    "INVALID_ARGUMENT": (errors.ArgumentError, Code.INVALID_ARGUMENT),
    "NON_FINITE": (errors.NonFiniteError, Code.INVALID_ARGUMENT),
    "DIVERGED": (errors.DivergedError, Code.FAILED_PRECONDITION),
    "CORRUPT_CHUNK": (errors.CorruptChunkError, Code.DATA_LOSS),
    "SPEC_MISMATCH": (errors.SpecMismatchError, Code.FAILED_PRECONDITION),
    "UNKNOWN_PARAMETER": (errors.UnknownParameterError, Code.NOT_FOUND),
    "UNKNOWN_TABLE": (errors.UnknownTableError, Code.NOT_FOUND),
    "NOT_INITIALIZED": (errors.NotInitializedError, Code.FAILED_PRECONDITION),
    "INIT_SUPERSEDED": (errors.InitSupersededError, Code.ABORTED),
    "WRONG_SHARD": (errors.WrongShardError, Code.FAILED_PRECONDITION),
    "STEP_ORDER": (errors.StepOrderError, Code.FAILED_PRECONDITION),
    "WORKER_ID_IN_USE": (errors.WorkerIdInUseError, Code.FAILED_PRECONDITION),
    "SESSION_UNKNOWN": (errors.SessionUnknownError, Code.UNAVAILABLE),
    "SESSION_ENDED": (errors.SessionEndedError, Code.FAILED_PRECONDITION),
    "SEATS_TAKEN": (errors.SeatsTakenError, Code.FAILED_PRECONDITION),
    "WORKERS_MISSING": (errors.WorkersMissingError, Code.DEADLINE_EXCEEDED),
    "LIMIT_EXCEEDED": (errors.LimitError, Code.RESOURCE_EXHAUSTED),
    "STOPPING": (errors.ShardUnavailableError, Code.UNAVAILABLE),
    "STORAGE": (errors.StorageError, Code.FAILED_PRECONDITION),
    "GROUP_MISMATCH": (errors.GroupMismatchError, Code.FAILED_PRECONDITION),
    "RANK_TAKEN": (errors.RankTakenError, Code.FAILED_PRECONDITION),
    "WORKER_LOST": (errors.WorkerLostError, Code.FAILED_PRECONDITION),
    "WORKER_UNREACHABLE": (errors.WorkerUnreachableError, Code.UNAVAILABLE),
    "COLLECTIVE_MISMATCH": (errors.CollectiveMismatchError, Code.FAILED_PRECONDITION),
    "UNAUTHENTICATED": (errors.AuthenticationError, Code.UNAUTHENTICATED),
    "PERMISSION_DENIED": (errors.AccessDeniedError, Code.PERMISSION_DENIED),
    "OTHER_INCARNATION": (errors.OtherIncarnationError, Code.FAILED_PRECONDITION),
    "VERSION_MISMATCH": (errors.VersionMismatchError, Code.FAILED_PRECONDITION),
    "INTERNAL": (errors.InternalError, Code.INTERNAL),
}
EXTRA: dict[str, dict[str, Any]] = {
    "NON_FINITE": {"element_index": 2**40},
    "DIVERGED": {"element_index": 7},
    "WORKERS_MISSING": {"missing_worker_ids": ("w1", "w2"), "missing_ranks": (0, 3)},
    "WORKER_LOST": {"rank": 0},
    "WORKER_ID_IN_USE": {"free_in_s": 1.5},
}


class FakeRpcError(grpc.RpcError):
    """A failed call, as grpcio raises it."""

    def __init__(
        self, code: grpc.StatusCode, details: str | None, metadata: tuple[Any, ...] | None = ()
    ) -> None:
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...] | None:
        return self._metadata


def received(error: grpc.RpcError, **known: Any) -> errors.ShardwellError:
    return from_rpc_error(error, "shard 5 at host:70", **{"shard_index": 5, **known})


def over_the_wire(error: errors.ShardwellError) -> errors.ShardwellError:
    status = to_status(error)
    noise = (("grpc-status-details-bin", b"\xff"), ("date", "today"))
    return received(FakeRpcError(status.code, status.details, noise + status.trailing_metadata))


def test_every_code_of_the_proto_is_in_the_table() -> None:
    codes = {
        name.removeprefix("ERROR_CODE_") for name in types_pb2.ErrorCode.DESCRIPTOR.values_by_name
    }
    assert codes == {"UNSPECIFIED", *WIRE}


@pytest.mark.parametrize("name", WIRE)
def test_an_error_comes_back_with_all_that_it_carries(name: str) -> None:
    kind, code = WIRE[name]
    extra = EXTRA.get(name, {})
    sent = kind("what; do this — π", shard_index=3, worker_id="w0", parameter="m", **extra)
    status = to_status(sent)
    assert (status.code, status.details) == (code, "what; do this — π")
    ((key, value),) = status.trailing_metadata
    assert key == ERROR_DETAIL_KEY == "shardwell-error-bin"
    detail = types_pb2.ErrorDetail.FromString(value)
    assert types_pb2.ErrorCode.Name(detail.code) == f"ERROR_CODE_{name}"
    assert detail.element_index == extra.get("element_index", -1)

    back = over_the_wire(sent)
    assert type(back) is kind
    assert back.message == str(back) == "what; do this — π"
    assert (back.shard_index, back.worker_id, back.parameter) == (3, "w0", "m")
    assert back.retryable == sent.retryable
    for attribute, want in extra.items():
        assert getattr(back, attribute) == want


@pytest.mark.parametrize("name", WIRE)
def test_what_an_error_does_not_know_stays_none(name: str) -> None:
    back = over_the_wire(WIRE[name][0]("what", shard_index=0))
    assert (back.shard_index, back.worker_id, back.parameter, back.rank) == (0, None, None, None)
    assert getattr(back, "element_index", -1) == -1
    assert getattr(back, "missing_worker_ids", ()) == ()
    assert getattr(back, "free_in_s", None) is None


@pytest.mark.parametrize("kind", [errors.ShardwellError, errors.ClosedError, errors.DeadlineError])
def test_what_a_shard_never_raises_is_internal(kind: type[errors.ShardwellError]) -> None:
    assert to_status(kind("what")).code is Code.INTERNAL
    assert type(over_the_wire(kind("what"))) is errors.InternalError


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.UNAVAILABLE, errors.ShardUnavailableError),
        (Code.CANCELLED, errors.ShardUnavailableError),
        (Code.DEADLINE_EXCEEDED, errors.DeadlineError),
        (Code.RESOURCE_EXHAUSTED, errors.LimitError),
        (Code.UNIMPLEMENTED, errors.WrongShardError),
        *(
            (code, errors.ShardUnavailableError)
            for code in Code
            if code.name
            in {"UNKNOWN", "INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND", "ABORTED", "DATA_LOSS"}
        ),
    ],
)
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        None,
        ((ERROR_DETAIL_KEY, b"\xff\xff"),),
        ((ERROR_DETAIL_KEY, b""),),
    ],
    ids=["empty", "none", "garbage", "unspecified"],
)
def test_a_status_that_is_not_a_shards_own(
    code: grpc.StatusCode, kind: type[errors.ShardwellError], metadata: Any
) -> None:
    back = received(FakeRpcError(code, "reason", metadata), parameter="model")
    assert type(back) is kind
    assert (back.shard_index, back.parameter) == (5, "model")
    assert "shard 5 at host:70" in back.message


def test_an_error_of_a_later_version_is_not_retried() -> None:
    detail = types_pb2.ErrorDetail(code=99, shard_index=5)
    metadata = ((ERROR_DETAIL_KEY, detail.SerializeToString()),)
    back = received(FakeRpcError(Code.ABORTED, "reason", metadata))
    assert type(back) is errors.InternalError
    assert (back.shard_index, back.retryable, back.message) == (5, False, "reason")


def test_a_damaged_length_is_a_broken_connection_and_no_limit() -> None:
    details = "Stream removed (CLIENT: Received message larger than max (16777231 vs. 1049600))"
    back = received(FakeRpcError(Code.RESOURCE_EXHAUSTED, details))
    assert type(back) is errors.ShardUnavailableError


@pytest.mark.parametrize("code", list(Code))
def test_no_status_is_without_an_error(code: grpc.StatusCode) -> None:
    back = received(FakeRpcError(code, None, None))
    assert isinstance(back, errors.ShardwellError)
    assert "shard 5 at host:70" in str(back)
