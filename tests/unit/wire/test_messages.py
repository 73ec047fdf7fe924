"""Goal: framed messages are plain protobuf, payloads are aligned, and garbage ends in one error.

Method: protobuf's own parser is the oracle, both ways: what we seal it must read, what it writes we
must read, and whatever bytes both accept they must agree on.
"""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwell.errors import CorruptChunkError
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.wire import messages as framing

TYPES = [
    pb.ExchangeRequest,
    pb.ExchangeResponse,
    pb.PutGradientRequest,
    pb.GetWeightsResponse,
    pb.InitWeightsRequest,
]
names = st.text(max_size=140)
uint32s = st.integers(0, 2**32 - 1)
uint64s = st.integers(0, 2**64 - 1)

identities = st.builds(
    types_pb2.ShardIdentity, cluster_id=names, shard_index=uint32s, shard_count=uint32s
)
opens = st.builds(types_pb2.StreamOpen, shard=identities, parameter=names, worker_id=names)
chunks = st.builds(
    types_pb2.Chunk,
    chunk_index=uint32s,
    element_offset=uint64s,
    element_count=uint32s,
    crc32c=uint32s,
    lz4=st.booleans(),
)
gradients = st.builds(
    types_pb2.GradientChunk,
    chunk=chunks,
    step=uint64s,
    sample_count=uint32s,
    wait_timeout_ms=uint32s,
    end_of_step=st.booleans(),
)
headers = st.one_of(
    st.builds(pb.ExchangeRequest, open=st.none() | opens, gradient=st.none() | gradients),
    st.builds(pb.PutGradientRequest, open=st.none() | opens, gradient=st.none() | gradients),
    st.builds(pb.InitWeightsRequest, open=st.none() | opens, epoch=uint64s, chunk=chunks),
    st.builds(pb.GetWeightsResponse, chunk=st.none() | chunks, version=uint64s),
    st.builds(pb.ExchangeResponse, chunk=st.none() | chunks, version=uint64s),
)
BATCHED = [pb.ExchangeRequest, pb.ExchangeResponse, pb.PutGradientRequest, pb.GetWeightsResponse]
payloads = st.binary(max_size=300) | st.integers(0, 70_000).map(
    lambda n: bytes(range(256)) * (n // 256)
)


def sealed(header: Message, payload: bytes) -> bytes:
    message = framing.OutgoingMessage(header, len(payload))
    message.payload[:] = np.frombuffer(payload, np.uint8)
    return message.seal()


def without_payload(message: Message) -> Message:
    bare = type(message)()
    bare.CopyFrom(message)
    bare.ClearField("payload")
    bare.ClearField("padding")
    return bare


def varint(value: int, *, excess_bytes: int = 0) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    for _ in range(excess_bytes):
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


def check_same_as_protobuf(header_type: type[Message], message: bytes) -> None:
    """Asserts the fuzz contract: success or CorruptChunkError, and no disagreement."""
    try:
        whole = header_type.FromString(message)
    except DecodeError:
        whole = None
    try:
        header, payload = framing.parse(header_type, message)
    except CorruptChunkError:
        return
    if whole is not None:
        assert payload.tobytes() == whole.payload
        assert without_payload(header) == without_payload(whole)
        assert header.padding in (b"", whole.padding)
        assert not header.payload


@settings(deadline=None)
@given(header=headers, payload=payloads)
def test_a_sealed_message_is_protobuf_and_aligned(header: Message, payload: bytes) -> None:
    message = sealed(header, payload)
    assert (len(message) - len(payload)) % framing.ALIGNMENT_BYTES == 0
    whole = type(header).FromString(message)
    assert whole.payload == payload
    assert not any(whole.padding)
    assert without_payload(whole) == header

    parsed, found = framing.parse(type(header), message)
    assert found.tobytes() == payload
    assert found.dtype == np.uint8
    assert without_payload(parsed) == header
    assert not parsed.payload
    if payload:
        assert found.ctypes.data % framing.ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 127, 128, 16383, 16384, 2**20])
def test_payload_sizes_around_their_lengths_length(size: int) -> None:
    payload = np.random.default_rng(size).bytes(size)
    message = sealed(pb.ExchangeResponse(version=3), payload)
    assert pb.ExchangeResponse.FromString(message).payload == payload
    assert len(message) <= framing.MESSAGE_SIZE_MAX_BYTES
    assert framing.parse(pb.ExchangeResponse, message)[1].tobytes() == payload


def test_a_header_may_be_completed_after_the_payload_was_reserved() -> None:
    for size in (0, 1, 5, 100, 126, 127, 128, 129, 140):
        header = pb.ExchangeRequest(
            open=types_pb2.StreamOpen(parameter="p" * size),
            gradient=types_pb2.GradientChunk(chunk=types_pb2.Chunk(chunk_index=1), step=2**63),
        )
        message = framing.OutgoingMessage(header, 40)
        message.payload[:] = 7
        header.gradient.chunk.crc32c = 2**32 - 1
        header.gradient.chunk.lz4 = True
        whole = pb.ExchangeRequest.FromString(message.seal())
        assert whole.payload == bytes([7] * 40)
        assert without_payload(whole) == header


def test_payloads_are_read_only_and_large_ones_are_views() -> None:
    payload = bytes(range(200)) * 200
    message = sealed(pb.ExchangeResponse(version=1), payload)
    found = framing.parse(pb.ExchangeResponse, message)[1]
    assert np.shares_memory(found, np.frombuffer(message, np.uint8))
    assert not found.flags.writeable

    for padding in range(40):
        plain = pb.ExchangeResponse(version=1, padding=bytes(padding), payload=payload)
        found = framing.parse(pb.ExchangeResponse, plain.SerializeToString())[1]
        assert not found.flags.writeable


@settings(deadline=None)
@given(header=headers, padding=st.binary(max_size=40), payload=payloads)
def test_messages_of_other_writers(header: Message, padding: bytes, payload: bytes) -> None:
    whole = type(header)()
    whole.CopyFrom(header)
    whole.padding = padding
    whole.payload = payload
    parsed, found = framing.parse(type(header), whole.SerializeToString())
    assert found.tobytes() == payload
    assert without_payload(parsed) == header
    if payload:
        assert found.ctypes.data % framing.ALIGNMENT_BYTES == 0


@settings(deadline=None)
@given(header=headers, padding=st.binary(max_size=40), payload=payloads)
def test_a_payload_that_is_not_last(header: Message, padding: bytes, payload: bytes) -> None:
    first = b"\x7a" + varint(len(payload)) + payload
    rest = header.SerializeToString() + b"\x72" + varint(len(padding)) + padding
    parsed, found = framing.parse(type(header), first + rest)
    assert found.tobytes() == payload
    assert without_payload(parsed) == header


UNKNOWN = {
    "varint": varint(9 << 3 | 0) + varint(2**63),
    "fixed64": varint(9 << 3 | 1) + bytes(8),
    "bytes": varint(9 << 3 | 2) + varint(3) + b"abc",
    "fixed32": varint(9 << 3 | 5) + bytes(4),
    "group": varint(9 << 3 | 3) + varint(1 << 3) + varint(5) + varint(9 << 3 | 4),
    "large number": varint(1000 << 3 | 2) + varint(2) + b"\x7a\x00",
    "payload's number, another type": varint(15 << 3 | 0) + varint(4),
}


@pytest.mark.parametrize("field", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_fields_are_passed_over(field: bytes) -> None:
    payload = b"\x01\x02\x03\x04" * 9
    plain = pb.ExchangeResponse(version=300, payload=payload).SerializeToString()
    for message in (field + plain, plain + field, field + plain[:3] + field + plain[3:]):
        assert pb.ExchangeResponse.FromString(message).payload == payload
        header, found = framing.parse(pb.ExchangeResponse, message)
        assert (header.version, found.tobytes()) == (300, payload)


def test_a_field_with_a_long_number_is_not_taken_for_a_payload() -> None:
    """Read byte by byte as short tags, this field would end in a payload of one byte."""
    inside = bytes(61) + b"\x7a\x01a"
    message = varint(1000 << 3 | 2) + varint(len(inside)) + inside
    assert pb.ExchangeResponse.FromString(message).payload == b""
    assert framing.parse(pb.ExchangeResponse, message)[1].size == 0


def test_the_last_of_several_payloads_counts_as_in_protobuf() -> None:
    one, two = b"\x7a\x03abc", b"\x7a\x02xy"
    for message in (one + two, two + one, one + b"\x10\x05" + two, one + two + b"\x10\x05"):
        found = framing.parse(pb.ExchangeResponse, message)[1]
        assert found.tobytes() == pb.ExchangeResponse.FromString(message).payload


FAKE_FIELDS = {
    "padding": 14 << 3 | 2,
    "a batch": 3 << 3 | 2,
    "an unknown field": 9 << 3 | 2,
    "an earlier payload": 15 << 3 | 2,
}


@pytest.mark.parametrize("tag", FAKE_FIELDS.values(), ids=FAKE_FIELDS)
@pytest.mark.parametrize("follows", [b"", b"\x10\x05"], ids=["payload last", "payload not last"])
def test_a_field_that_looks_as_if_a_large_payload_began_in_it(tag: int, follows: bytes) -> None:
    """Its last bytes are a payload's tag, and a size that reaches to the message's end."""
    payload = bytes(range(256)) * 200
    last = b"\x7a" + varint(len(payload)) + payload + follows
    inside = b"zz\x7a" + varint(len(last))
    message = b"\x10\x07" + bytes((tag, len(inside))) + inside + last
    whole = pb.ExchangeResponse.FromString(message)
    assert whole.payload == payload
    header, found = framing.parse(pb.ExchangeResponse, message)
    assert found.tobytes() == payload
    assert without_payload(header) == without_payload(whole)
    assert not header.payload


@pytest.mark.parametrize("excess_bytes", [1, 2, 3, 4, 5, 8, 9])
def test_lengths_written_longer_than_needed(excess_bytes: int) -> None:
    message = b"\x10\x05\x7a" + varint(4, excess_bytes=excess_bytes) + b"abcd"
    check_same_as_protobuf(pb.ExchangeResponse, message)


@pytest.mark.parametrize("header_type", TYPES)
def test_a_message_without_payload(header_type: type[Message]) -> None:
    header, payload = framing.parse(header_type, b"")
    assert header == header_type()
    assert payload.size == 0


def test_a_cut_message_is_refused_or_has_no_payload() -> None:
    header = pb.ExchangeRequest(
        open=types_pb2.StreamOpen(parameter="model", worker_id="w0"),
        gradient=types_pb2.GradientChunk(chunk=types_pb2.Chunk(crc32c=99), step=4),
    )
    payload = bytes(range(100))
    message = sealed(header, payload)
    for size in range(len(message)):
        check_same_as_protobuf(pb.ExchangeRequest, message[:size])
        try:
            _, found = framing.parse(pb.ExchangeRequest, message[:size])
        except CorruptChunkError:
            continue
        assert found.size == 0


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        b"\x00",
        b"\x7a",
        b"\x7a\x05abc",
        b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x7a" + b"\xff" * 20,
        b"\x0a\x7f",
        b"\x0b",
        b"\x0c",
        b"\x07\x00",
        b"\x09\x00",
        b"\x02\x00\x7a\x01a",
    ],
)
def test_garbage_is_refused(message: bytes) -> None:
    with pytest.raises(CorruptChunkError, match=r"shardwell\.v1\.ExchangeRequest.*send"):
        framing.parse(pb.ExchangeRequest, message)


@settings(deadline=None, max_examples=400)
@given(header_type=st.sampled_from(TYPES), message=st.binary(max_size=80))
@example(header_type=pb.ExchangeResponse, message=b"\x7a\x00\x7a\x01a")
def test_a_message_of_any_bytes_is_read_as_protobuf_reads_it(
    header_type: type[Message], message: bytes
) -> None:
    check_same_as_protobuf(header_type, message)


@settings(deadline=None, max_examples=400)
@given(header=headers, payload=st.binary(max_size=60), data=st.data())
def test_a_message_with_bytes_changed(header: Message, payload: bytes, data: st.DataObject) -> None:
    message = bytearray(sealed(header, payload))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(message) - 1))
        change = data.draw(st.sampled_from(["flip", "drop", "insert"]))
        if change == "flip":
            message[place] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "drop" and len(message) > 1:
            del message[place]
        else:
            message.insert(place, data.draw(st.sampled_from([0x7A, 0x72, 0x0A, 0xFF, 0])))
    check_same_as_protobuf(type(header), bytes(message))


# Several messages in one.


@pytest.mark.parametrize("header_type", BATCHED)
@given(
    waits=st.lists(st.booleans(), max_size=20),
    count=st.integers(1, 5),
)
def test_messages_that_leave_as_one_are_read_one_by_one(
    header_type: type[Message], waits: list[bool], count: int
) -> None:
    name = "version" if header_type in (pb.ExchangeResponse, pb.GetWeightsResponse) else "arena"
    sent = [header_type(**{name: number + 1}).SerializeToString() for number in range(len(waits))]
    batch = framing.Batch(header_type, count)
    left = [each for m, w in zip(sent, waits, strict=True) for each in batch.add(m, waits=w)]
    left += batch.rest()
    assert not list(batch.rest())
    found = [each for message in left for each in framing.parse_all(header_type, message)]
    assert [header.SerializeToString() for header, _, _ in found] == sent
    assert [size for _, _, size in found] == [len(message) for message in sent]
    longest = max((len(list(framing.parse_all(header_type, each))) for each in left), default=0)
    assert longest <= count
    if waits and not any(waits):
        assert left == sent


def test_what_a_batch_may_not_be() -> None:
    one = pb.ExchangeResponse(version=1).SerializeToString()
    nested = pb.ExchangeResponse(batch=[one, one]).SerializeToString()
    for batch, says in [
        (pb.ExchangeResponse(batch=[one], version=1), "nothing besides"),
        (pb.ExchangeResponse(batch=[one], payload=b"x"), "nothing besides"),
        (pb.ExchangeResponse(batch=[one] * 65), "a batch of 65 messages"),
        (pb.ExchangeResponse(batch=[one, nested]), "a batch in a batch"),
        (pb.ExchangeResponse(batch=[b"\xff"]), "that are no"),
    ]:
        with pytest.raises(CorruptChunkError, match=says):
            list(framing.parse_all(pb.ExchangeResponse, batch.SerializeToString()))
