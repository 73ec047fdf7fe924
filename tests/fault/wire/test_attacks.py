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
from shardwell.v1 import parameter_server_pb2 as pb
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
