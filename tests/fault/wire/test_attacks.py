"""Requests that break the .proto: each ends with its status and ErrorDetail, and changes nothing.

Method: a victim parameter with known weights, in the middle of a step that one worker has
contributed to; after each attack the step closes with the weights of undisturbed training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from harness.polling import PATIENCE_S
from harness.tokens import bearing
from harness.wire_client import crc as wire_crc
from harness.wire_client.worker import (
    WireParameter,
    WireWorker,
    block_of,
    encode,
    error_detail,
    sgd,
    spec,
)
from shardwell.specs.parameter import STEP_MAX
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import session_pb2, session_pb2_grpc
from shardwell.v1 import types_pb2 as types

SIZE = 40
SERVICE = "/shardwell.v1.ParameterServerService/"
GRADIENT_KINDS = {"PutGradient": pb.PutGradientRequest, "Exchange": pb.ExchangeRequest}
OK_GRADIENT = np.arange(SIZE, dtype=np.float32)

Change = Callable[[Any], None]


@pytest.fixture(params=["fp32", "fp16"])
def victim(cluster, request) -> Iterator[WireParameter]:
    """A parameter of two workers on one shard; `one` has contributed step 0."""
    codec = {"fp32": types.CODEC_FP32, "fp16": types.CODEC_FP16}[request.param]
    target = cluster(1, chunk_size_bytes=64).target
    fields = {"codec": codec, "optimizer": sgd(1.0), "worker_count": 2}
    with WireWorker(target, "one") as one, WireWorker(target, "two") as two:
        first = one.create(spec("m", SIZE, **fields))
        first.init(np.full(SIZE, 8))
        first.push(OK_GRADIENT)
        one.end_session()
        parameter = two.create(spec("m", SIZE, **fields))
        yield parameter
        np.testing.assert_array_equal(parameter.pull(), 8)
        np.testing.assert_array_equal(parameter.exchange(OK_GRADIENT), 8 - OK_GRADIENT)


def _send(victim: WireParameter, method: str, messages: list[Any]) -> grpc.RpcError:
    """Sends a stream that is to be refused; the refusal."""

    def send() -> None:
        answer = getattr(victim.worker.stubs[0], method)(iter(messages), timeout=PATIENCE_S)
        if method == "Exchange":
            list(answer)

    with pytest.raises(grpc.RpcError) as caught:
        send()
    return caught.value


def _send_bytes(victim: WireParameter, method: str, message: bytes) -> grpc.RpcError:
    """Sends bytes where a message is expected; the refusal."""
    channel, path = victim.worker.channels[0], SERVICE + method

    def send() -> None:
        if method == "Exchange":
            list(channel.stream_stream(path)(iter([message]), timeout=PATIENCE_S))
        elif method in ("PutGradient", "InitWeights"):
            channel.stream_unary(path)(iter([message]), timeout=PATIENCE_S)
        elif method == "GetWeights":
            list(channel.unary_stream(path)(message, timeout=PATIENCE_S))
        else:
            channel.unary_unary(path)(message, timeout=PATIENCE_S)

    with pytest.raises(grpc.RpcError) as caught:
        send()
    return caught.value


def _expect(error: grpc.RpcError, status: str, code: str) -> None:
    assert error.code().name == status, error.details()
    detail = error_detail(error)
    assert types.ErrorCode.Name(detail.code) == f"ERROR_CODE_{code}"
    assert detail.shard_index == 0
    assert error.details()


def _seal(message: Any) -> None:
    wire_crc.seal(message, wire_crc.GRADIENT, "m", "two")


def _rewrite(message: Any, payload: bytes) -> None:
    message.payload = payload
    _seal(message)


def _set(**fields: Any) -> Change:
    def change(message: Any) -> None:
        for name, value in fields.items():
            setattr(message.gradient.chunk, name, value)
        if "crc32c" not in fields:
            _seal(message)

    return change


def _set_gradient(**fields: Any) -> Change:
    def change(message: Any) -> None:
        for name, value in fields.items():
            setattr(message.gradient, name, value)
        _seal(message)

    return change


def _flip_payload(message: Any) -> None:
    message.payload = bytes((message.payload[0] ^ 1,)) + message.payload[1:]


INVALID = ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
CORRUPT = ("DATA_LOSS", "CORRUPT_CHUNK")

# What the .proto says of each: Chunk.element_count: "Must agree with chunk_index and
# element_offset: INVALID_ARGUMENT if not"; Chunk.crc32c: "DATA_LOSS if it does not fit".
BROKEN_CHUNKS: dict[str, tuple[Change, tuple[str, str]]] = {
    "wrong crc": (_set(crc32c=12345), CORRUPT),
    "flipped payload": (_flip_payload, CORRUPT),
    "no payload": (lambda message: message.ClearField("payload"), CORRUPT),
    "short payload": (lambda m: _rewrite(m, m.payload[:-2]), CORRUPT),
    "long payload": (lambda m: _rewrite(m, m.payload + b"\0\0\0\0"), CORRUPT),
    "index beyond the slice": (_set(chunk_index=3000), INVALID),
    "index of another chunk": (_set(chunk_index=2), INVALID),
    "largest index": (_set(chunk_index=2**32 - 1), INVALID),
    "wrong offset": (_set(element_offset=1), INVALID),
    "largest offset": (_set(element_offset=2**64 - 1), INVALID),
    "wrong count": (_set(element_count=8), INVALID),
    "largest count": (_set(element_count=2**32 - 1), INVALID),
    "compressed": (_set(lz4=True), INVALID),
    "too many samples": (_set_gradient(sample_count=2**24 + 1), INVALID),
    "most samples": (_set_gradient(sample_count=2**32 - 1), INVALID),
    "a step ahead": (_set_gradient(step=2), ("FAILED_PRECONDITION", "STEP_ORDER")),
    "the last step": (_set_gradient(step=2**63 - 1), ("FAILED_PRECONDITION", "STEP_ORDER")),
    "beyond the last step": (_set_gradient(step=2**64 - 1), ("FAILED_PRECONDITION", "STEP_ORDER")),
    "no chunk": (lambda m: m.gradient.ClearField("chunk"), CORRUPT),
    "no gradient": (lambda m: m.ClearField("gradient"), CORRUPT),
}


@pytest.mark.sampled(27)
@pytest.mark.parametrize("method", GRADIENT_KINDS)
@pytest.mark.parametrize("kind", BROKEN_CHUNKS)
def test_a_broken_first_chunk(victim, method, kind) -> None:
    change, expected = BROKEN_CHUNKS[kind]
    messages = victim.gradient_messages(GRADIENT_KINDS[method], 0, OK_GRADIENT)
    change(messages[0])
    _expect(_send(victim, method, messages), *expected)


@pytest.mark.parametrize("method", GRADIENT_KINDS)
def test_a_broken_last_chunk_leaves_the_earlier_counted(victim, method) -> None:
    messages = victim.gradient_messages(GRADIENT_KINDS[method], 0, OK_GRADIENT)
    _flip_payload(messages[-1])
    _expect(_send(victim, method, messages), *CORRUPT)
    again = victim.gradient_messages(pb.PutGradientRequest, 0, OK_GRADIENT)
    answer = victim.worker.stubs[0].PutGradient(iter(again), timeout=PATIENCE_S)
    assert (answer.counted_chunk_count, answer.duplicate_chunk_count) == (1, len(again) - 1)
    victim.next_step = 1
    np.testing.assert_array_equal(victim.pull(min_version=1), 8 - OK_GRADIENT)
    _restart_like_before(victim)


def _restart_like_before(victim: WireParameter) -> None:
    """Brings the fixture's ending about: a step that closes on weights of 8."""
    with WireWorker(victim.worker.target, "one") as one:
        other = one.create(victim.spec)
        other.push(-OK_GRADIENT)
        victim.push(-OK_GRADIENT)
        other.push(OK_GRADIENT)


@pytest.mark.parametrize("method", GRADIENT_KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_change_nothing(victim, method, value) -> None:
    messages = victim.gradient_messages(GRADIENT_KINDS[method], 0, OK_GRADIENT)
    chunk = messages[0].gradient.chunk
    values = OK_GRADIENT[: chunk.element_count].copy()
    values[5] = value
    payload = encode(values, victim.spec.codec, block_of(victim.spec.size))
    _rewrite(messages[0], payload)
    error = _send(victim, method, messages)
    _expect(error, "INVALID_ARGUMENT", "NON_FINITE")
    assert error_detail(error).element_index == 5
    assert error_detail(error).parameter == "m"


@pytest.mark.sampled(29)
@pytest.mark.parametrize("method", ["PutGradient", "Exchange", "InitWeights"])
@pytest.mark.parametrize(
    "change",
    ["no open", "empty worker", "bad worker", "no shard", "wrong index", "wrong count",
     "wrong cluster", "unknown parameter"],
)  # fmt: skip
def test_a_broken_open(victim, method, change) -> None:
    if method == "InitWeights":
        message: Any = pb.InitWeightsRequest(open=victim.open(0), epoch=1)
    else:
        message = victim.gradient_messages(GRADIENT_KINDS[method], 0, OK_GRADIENT)[0]
    expected = ("FAILED_PRECONDITION", "WRONG_SHARD")
    opening = message.open
    match change:
        case "no open":
            message.ClearField("open")
            expected = INVALID
        case "empty worker":
            opening.worker_id = ""
            expected = INVALID
        case "bad worker":
            opening.worker_id = "a/../b"
            expected = INVALID
        case "no shard":
            opening.ClearField("shard")
        case "wrong index":
            opening.shard.shard_index = 1
        case "wrong count":
            opening.shard.shard_count = 2
        case "wrong cluster":
            opening.shard.cluster_id = "other"
        case "unknown parameter":
            opening.parameter = "other"
            expected = ("NOT_FOUND", "UNKNOWN_PARAMETER")
    _expect(_send(victim, method, [message]), *expected)


def test_an_empty_stream_of_gradients_counts_nothing(victim) -> None:
    answer = victim.worker.stubs[0].PutGradient(iter([]), timeout=PATIENCE_S)
    assert (answer.counted_chunk_count, answer.duplicate_chunk_count) == (0, 0)
    assert list(victim.worker.stubs[0].Exchange(iter([]), timeout=PATIENCE_S)) == []
    opening = pb.ExchangeRequest(open=victim.open(0))
    assert list(victim.worker.stubs[0].Exchange(iter([opening]), timeout=PATIENCE_S)) == []


def test_unknown_fields_are_ignored(victim) -> None:
    """A later version's fields: before, inside and after what this one knows."""
    messages = [
        message.SerializeToString()
        for message in victim.gradient_messages(pb.PutGradientRequest, 0, OK_GRADIENT)
    ]
    unknown = b"\xa2\x06\x03abc" + b"\xa8\x06\x05"  # field 100: bytes; field 101: a varint
    path = SERVICE + "PutGradient"
    for before, after in ((unknown, b""), (b"", unknown), (unknown, unknown)):
        call = victim.worker.channels[0].stream_unary(
            path, response_deserializer=pb.PutGradientResponse.FromString
        )
        answer = call(iter([before + message + after for message in messages]), timeout=PATIENCE_S)
        assert answer.counted_chunk_count + answer.duplicate_chunk_count == len(messages)
    victim.next_step = 1
    np.testing.assert_array_equal(victim.pull(min_version=1), 8 - OK_GRADIENT)
    _restart_like_before(victim)


@pytest.mark.sampled(25)
@pytest.mark.parametrize("method", ["PutGradient", "Exchange", "InitWeights"])
@pytest.mark.parametrize(
    "garbage",
    [b"\xff", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x7a\x10abc", b"\x0b", bytes(64),
     b"\x0a\x02\x0a\x50", b"GET / HTTP/1.1\r\n\r\n", b"\x72" + b"\xff" * 20],
    ids=repr,
)  # fmt: skip
def test_garbage_instead_of_a_message(victim, method, garbage) -> None:
    _expect(_send_bytes(victim, method, garbage), *CORRUPT)


@pytest.mark.parametrize(
    "method", ["CreateParameter", "ClaimInit", "SetLearningRate", "GetStatus", "GetWeights"]
)
def test_garbage_instead_of_a_request(victim, method) -> None:
    """Every failed call carries ErrorDetail, says the .proto."""
    error = _send_bytes(victim, method, b"\x0a\xff\xff\xff\xff\x0f")
    error_detail(error)
    assert error.code() in (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INVALID_ARGUMENT)


def test_an_empty_message_has_no_open(victim) -> None:
    for method in ("PutGradient", "Exchange", "InitWeights"):
        _expect(_send_bytes(victim, method, b""), *INVALID)


def test_a_method_that_does_not_exist(victim) -> None:
    error = _send_bytes(victim, "Destroy", b"")
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", GRADIENT_KINDS)
def test_a_refused_stranger_takes_no_seat(victim, method) -> None:
    """The second seat is free; a third worker whose only chunk is refused must not hold it."""
    with WireWorker(victim.worker.target, "stranger") as worker:
        stranger = worker.create(victim.spec)
        messages = stranger.gradient_messages(GRADIENT_KINDS[method], 0, OK_GRADIENT)
        _flip_payload(messages[0])
        _expect(_send(stranger, method, messages), *CORRUPT)


# No message about members changes what its sender has no part in, or a step that is open. Method:
# as above; the victims are an elastic parameter with one member, and one of a fixed
# crew, both in the middle of a step.


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
