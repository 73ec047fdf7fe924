"""Goal: no message about members changes what its sender has no part in, or a step that is open.

Method: as in test_attacks.py; the victims are an elastic parameter with one member, and one of a
fixed crew, both in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from harness.polling import PATIENCE_S
from harness.tokens import bearing
from harness.wire_client.worker import WireParameter, WireWorker, error_detail, sgd, spec
from shardwell.specs.parameter import STEP_MAX
from shardwell.v1 import session_pb2, session_pb2_grpc
from shardwell.v1 import types_pb2 as types

SIZE = 40
GRADIENT = np.arange(SIZE, dtype=np.float32)
ELASTIC = types.ElasticMembers(min_count=1, max_count=4, member_return_s=60, member_lease_s=60)


@pytest.fixture
def target(cluster: Any) -> str:
    found: str = cluster(1, chunk_size_bytes=64).target
    return found


@pytest.fixture
def crew(target: str) -> Iterator[WireParameter]:
    """Two fixed workers, of whom `one` has contributed; the step closes as ever after an attack."""
    fields = {"codec": types.CODEC_FP32, "optimizer": sgd(1.0), "worker_count": 2}
    with WireWorker(target, "one") as one, WireWorker(target, "two") as two:
        first = one.create(spec("crew", SIZE, **fields))
        first.init(np.full(SIZE, 8))
        first.push(GRADIENT)
        yield first
        second = two.create(spec("crew", SIZE, **fields))
        np.testing.assert_array_equal(second.exchange(GRADIENT), 8 - GRADIENT)
        first.next_step = 1
        first.push(GRADIENT)  # it has its seat as before
        np.testing.assert_array_equal(second.exchange(GRADIENT), 8 - 2 * GRADIENT)


@pytest.fixture
def member(target: str) -> Iterator[WireParameter]:
    """An elastic member that is awaited from step 0 on; an attack does not change that."""
    fields = {"codec": types.CODEC_FP32, "optimizer": sgd(1.0), "worker_count": 4}
    with WireWorker(target, "m") as worker:
        made = worker.create(spec("open", SIZE, **fields, members=ELASTIC))
        made.init(np.full(SIZE, 8))
        answers = worker.open_parameter(made.spec, take_seat=True, tenure=7)
        assert {answer.tenure for answer in answers} == {7}
        made.tenure = 7
        yield made
        answers = worker.open_parameter(made.spec, take_seat=True, tenure=7, from_step=0)
        assert {answer.tenure for answer in answers} == {7}
        made.push(GRADIENT)
        np.testing.assert_array_equal(made.pull(min_version=1), 8 - GRADIENT)


def heartbeat(worker: WireWorker, *ended: session_pb2.EndedTenure, **fields: Any) -> Any:
    stub = session_pb2_grpc.SessionServiceStub(worker.channels[0])
    request = session_pb2.HeartbeatRequest(
        shard=worker.identities[0], session=worker.session, ended=ended
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return stub.Heartbeat(request, timeout=PATIENCE_S)


def refused(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def incarnation_of(parameter: WireParameter) -> int:
    return parameter.worker.open_parameter(parameter.spec)[0].incarnation


@pytest.mark.parametrize("tenure", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("worker_id", ["one", "two", "", "x" * 5000])
def test_no_heartbeat_ends_a_seat_of_a_fixed_crew(
    crew: WireParameter, worker_id: str, tenure: int
) -> None:
    ended = session_pb2.EndedTenure(
        parameter="crew", incarnation=incarnation_of(crew), worker_id=worker_id, tenure=tenure
    )
    heartbeat(crew.worker, ended)


@pytest.mark.parametrize(
    "fields",
    [
        {"tenure": 6},
        {"tenure": 0},
        {"worker_id": "n"},
        {"worker_id": ""},
        {"parameter": "other"},
        {"parameter": "", "table": "open"},
        {"parameter": ""},
        {"incarnation": 1},
    ],
)
def test_ending_an_unknown_tenure_changes_nothing(
    member: WireParameter, fields: dict[str, Any]
) -> None:
    values = {
        "parameter": "open",
        "incarnation": incarnation_of(member),
        "worker_id": "m",
        "tenure": 7,
        **fields,
    }
    heartbeat(member.worker, session_pb2.EndedTenure(**values))


def test_too_many_tenures_are_refused(member: WireParameter) -> None:
    ended = session_pb2.EndedTenure(
        parameter="open", incarnation=incarnation_of(member), worker_id="m", tenure=7
    )
    error = refused(lambda: heartbeat(member.worker, *[ended] * 1025))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1024" in error.details()


def test_a_damaged_heartbeat_is_refused(member: WireParameter, target: str) -> None:
    request = session_pb2.HeartbeatRequest(
        shard=member.worker.identities[0], session=member.worker.session, crc32c=12345
    )
    request.ended.add(parameter="open", incarnation=incarnation_of(member), worker_id="m", tenure=7)
    with bearing(grpc.insecure_channel(target)) as channel:  # which does not seal it
        stub = session_pb2_grpc.SessionServiceStub(channel)
        error = refused(lambda: stub.Heartbeat(request, timeout=PATIENCE_S))
    assert error.code() is grpc.StatusCode.DATA_LOSS


def test_who_is_not_known_may_say_that_it_lives(member: WireParameter) -> None:
    """It changes nothing, and tells of nothing that it has no part in."""
    assert not heartbeat(member.worker, session=1).ended


@pytest.mark.parametrize("from_step", [STEP_MAX + 1, 2**63, 2**64 - 1])
def test_a_first_step_that_never_comes_is_refused(member: WireParameter, from_step: int) -> None:
    def ask() -> None:
        member.worker.open_parameter(member.spec, take_seat=True, tenure=7, from_step=from_step)

    error = refused(ask)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "from_step" in error.details()


def test_a_seat_without_a_tenure_is_refused(member: WireParameter) -> None:
    error = refused(lambda: member.worker.open_parameter(member.spec, take_seat=True, tenure=0))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tenure" in error.details()


def test_a_seat_of_another_session_is_refused(member: WireParameter, target: str) -> None:
    with WireWorker(target, "m") as other:
        error = refused(lambda: other.open_parameter(member.spec, take_seat=True, tenure=9))
        assert error_detail(error).code == types.ERROR_CODE_WORKER_ID_IN_USE
        # Nor by its tenure, which it can't know.
        other_parameter = other.create(member.spec)
        other_parameter.tenure = 7
        pushed = refused(lambda: other_parameter.push(GRADIENT))
        assert error_detail(pushed).code == types.ERROR_CODE_WORKER_ID_IN_USE


def test_a_gradient_of_a_step_that_is_not_its_next_is_refused(member: WireParameter) -> None:
    member.next_step = 5
    error = refused(lambda: member.push(GRADIENT))
    assert error_detail(error).code == types.ERROR_CODE_STEP_ORDER
    member.next_step = 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"members": types.ElasticMembers(min_count=0, max_count=4)}, "min_count"),
        ({"members": types.ElasticMembers(min_count=5, max_count=4)}, "min_count"),
        ({"members": types.ElasticMembers(min_count=1, max_count=0)}, "max_count"),
        ({"members": types.ElasticMembers(min_count=1, max_count=2**32 - 1)}, "max_count"),
        ({"members": ELASTIC, "worker_count": 3}, "worker_count"),
        ({"min_contributors": 5}, "min_contributors"),
        ({"min_contributors": 1, "grace_s": float("nan")}, "grace_s"),
    ],
)
def test_a_spec_that_can_not_be_is_refused(target: str, fields: dict[str, Any], named: str) -> None:
    values = {"codec": types.CODEC_FP32, "optimizer": sgd(1.0), "worker_count": 4, **fields}
    with WireWorker(target, "w") as worker:
        error = refused(lambda: worker.open_parameter(spec("bad", SIZE, **values)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in error.details()
