"""Goal: rows are believed only where CRC, lengths, order, range and shard all fit.

Method: messages written by RowCodec are read by protobuf and NumPy alone, and opened; then each
header field and each property of ids is spoiled alone. The oracle of CRCs is bitwise, of placement
Python's integers.
"""

from __future__ import annotations

import dataclasses

import lz4.block
import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwell
from harness.oracles.codec import decoded, fp16_payload
from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics.codec import NonFiniteValueError
from shardwell.placement.rows import RowPlacement
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2 as pb
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES
from shardwell.wire.messages import MESSAGE_SIZE_MAX_BYTES, parse
from shardwell.wire.rows import (
    ROWS_PER_MESSAGE_MAX,
    RowCodec,
    check_ids,
    rows_per_message_max,
    rows_per_scan_message_max,
)

CODECS = ("fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4")
SPEC = TableSpec(
    name="t",
    row_count=1000,
    dim=6,
    optimizer=shardwell.Adam(),
    initializer=shardwell.Zeros(),
    worker_count=1,
    codec="fp32",
)


BEFORE = b"what the rows are for"
START = crc32.iscsi(BEFORE)


def spec_of(**fields: object) -> TableSpec:
    return dataclasses.replace(SPEC, **fields)


def gradient_of(rows: RowCodec, ids: np.ndarray, values: np.ndarray) -> tuple[pb.Rows, bytes]:
    header = pb.ExchangeRowsRequest(gradient=pb.RowGradients(step=7))
    sealed = rows.encode(header, header.gradient.rows, ids, values, start=START)
    message = pb.ExchangeRowsRequest.FromString(sealed)
    assert message.gradient.step == 7
    return message.gradient.rows, message.payload


def opened(
    rows: RowCodec, head: pb.Rows, payload: bytes, *, ids: bool = True, values: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    found = rows.open(
        head, np.frombuffer(payload, np.uint8), start=START, with_ids=ids, with_values=values
    )
    into = np.full((head.row_count if values else 0, rows.dim), np.nan, np.float32)
    rows.decode(found, into)
    return found.ids, into


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [0, 1, 2, 700])
@pytest.mark.parametrize("kind", ["random", "compressible"])
def test_the_payload_is_what_the_proto_says(codec, count, kind) -> None:
    """Ids first, values after them; and values alone, ids alone."""
    rows = RowCodec.of(spec_of(codec=codec))
    ids = np.arange(count) * 3
    random = np.random.default_rng(1)
    values = (
        random.standard_normal((count, 6)) if kind == "random" else np.full((count, 6), 0.5)
    ).astype(np.float32)
    head, payload = gradient_of(rows, ids, values)
    assert head.row_count == count
    assert head.crc32c == crc_of(head, payload)
    assert not head.lz4 or codec.endswith("lz4")
    if count == 700:  # exponents of fp16 can be compressed, whatever the values are
        does_shrink = kind == "compressible" or codec.startswith("fp16")
        assert head.lz4 == (codec.endswith("lz4") and does_shrink)
    np.testing.assert_array_equal(np.frombuffer(payload[: 8 * count], "<i8"), ids)
    packed = payload[8 * count :]
    if head.lz4:
        packed = lz4.block.decompress(packed, uncompressed_size=rows.codec.encoded_bytes(count * 6))
    stored = np.frombuffer(packed, np.uint8)
    expected = decoded(codec.removesuffix("+lz4"), stored, block_size=6).reshape(-1, 6)
    np.testing.assert_allclose(expected, values, rtol=2**-8)
    if codec.startswith("fp16"):  # a row is a block
        assert stored.tobytes() == fp16_payload(values.reshape(-1), 6).tobytes()
    found_ids, found = opened(rows, head, payload)
    np.testing.assert_array_equal(found_ids, ids)
    np.testing.assert_array_equal(found, expected)

    answer = pb.ExchangeRowsResponse(version=3)
    sealed = rows.encode(answer, answer.rows, None, values, start=START)
    message, body = parse(pb.ExchangeRowsResponse, sealed)
    found_ids, again = opened(rows, message.rows, body.tobytes(), ids=False)
    np.testing.assert_array_equal(again, expected)
    assert found_ids.size == 0
    fetch = pb.ExchangeRowsRequest()
    sealed = rows.encode(fetch, fetch.fetch.rows, ids, None, start=START)
    message, body = parse(pb.ExchangeRowsRequest, sealed)
    assert body.tobytes() == ids.astype("<i8").tobytes()
    found_ids, none = opened(rows, message.fetch.rows, body.tobytes(), values=False)
    np.testing.assert_array_equal(found_ids, ids)
    assert none.size == 0


@pytest.mark.parametrize("optimizer", [shardwell.SGD(learning_rate=1), shardwell.Adam()])
@pytest.mark.parametrize("codec", ["fp32", "fp16+lz4"])
@pytest.mark.parametrize("dim", [1, 3, 64, 1000, 65536])
def test_the_largest_messages_fit(dim, codec, optimizer) -> None:
    """Random values do not compress."""
    spec = spec_of(dim=dim, codec=codec, optimizer=optimizer)
    count = rows_per_message_max(spec)
    size = 8 + (4 * dim if codec == "fp32" else 2 * dim + 1)
    assert 1 <= count <= ROWS_PER_MESSAGE_MAX
    assert count * size <= PAYLOAD_SIZE_MAX_BYTES < (count + 1) * size or count == 65536
    values = np.random.default_rng(0).standard_normal((count, dim)).astype(np.float32)
    header = pb.ExchangeRowsRequest(
        open=pb.TableOpen(table="t" * 128, worker_id="w" * 128, session=2**64 - 1),
        gradient=pb.RowGradients(step=2**62, part_index=65535, sample_count=2**32 - 1),
    )
    header.open.shard.cluster_id = "c" * 128
    sealed = RowCodec.of(spec).encode(
        header, header.gradient.rows, np.arange(count), values, start=START
    )
    assert len(sealed) <= MESSAGE_SIZE_MAX_BYTES
    scan = rows_per_scan_message_max(spec)
    state = 24 + 4 * dim * (1 + len(optimizer.slot_names))
    assert 1 <= scan <= 65536
    assert scan * state <= PAYLOAD_SIZE_MAX_BYTES


def head_of(payload: bytes, fields: dict[str, object]) -> pb.Rows:
    """A header of two rows with `fields`, whose CRC fits it and `payload`, unless it is given."""
    rows = pb.Rows(**{"row_count": 2, **fields})
    rows.crc32c = fields.get("crc32c", crc_of(rows, payload))
    return rows


def crc_of(rows: pb.Rows, payload: bytes) -> int:
    """As types.proto has it."""
    numbers = (rows.row_count, rows.lz4)
    packed = b"".join((number % 2**64).to_bytes(8, "little") for number in numbers)
    return crc32.iscsi(BEFORE + packed + payload)


GOOD = np.arange(2).tobytes() + np.ones(12, np.float32).tobytes()


@pytest.mark.parametrize(
    ("payload", "fields", "kind", "text"),
    [
        (GOOD, {"crc32c": 1}, CorruptChunkError, "CRC32C of the header, the 64 payload bytes"),
        (GOOD[:-1], {}, CorruptChunkError, "the payload has 63 bytes"),
        (GOOD + b"0", {}, CorruptChunkError, "the payload has 65 bytes"),
        (b"", {}, CorruptChunkError, "the payload has 0 bytes"),
        (GOOD, {"row_count": 0}, CorruptChunkError, "the payload has 64 bytes"),
        (GOOD, {"row_count": 3}, CorruptChunkError, "3 ids are 24 bytes and their values 72"),
        (GOOD, {"row_count": 2**32 - 1}, ArgumentError, "at most 32768 rows.*got 4294967295"),
        (GOOD, {"lz4": True}, ArgumentError, "COMPRESSION_NONE"),
        (b"", {"row_count": 0, "lz4": True}, ArgumentError, "without values have lz4 false"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(payload, fields, kind, text) -> None:
    rows = RowCodec.of(SPEC)
    opened(rows, head_of(GOOD, {}), GOOD)
    with pytest.raises(kind, match=text):
        opened(rows, head_of(payload, fields), payload)


@pytest.mark.parametrize("packed", [b"", b"\xff" * 9, lz4.block.compress(bytes(47))])
def test_a_broken_block_is_refused(packed) -> None:
    rows = RowCodec.of(spec_of(codec="fp32+lz4"))
    payload = np.arange(2).tobytes() + packed
    with pytest.raises(CorruptChunkError, match="no LZ4 block of 48 bytes"):
        opened(rows, head_of(payload, {"lz4": True}), payload)
    short = payload[:7]
    with pytest.raises(CorruptChunkError, match="has 7 bytes"):
        opened(rows, head_of(short, {"lz4": True}), short)


def test_fetches_are_not_compressed() -> None:
    rows, payload = RowCodec.of(spec_of(codec="fp16")), np.arange(2).tobytes()
    with pytest.raises(ArgumentError, match="without values"):
        opened(rows, head_of(payload, {"lz4": True}), payload, values=False)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "fp16+lz4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused(codec, bad) -> None:
    spec = spec_of(codec=codec)
    values = np.ones((5, 6), np.float32)
    values[3, 2] = values[4, 0] = bad
    with pytest.raises(NonFiniteValueError) as refused:
        gradient_of(RowCodec.of(spec), np.arange(5), values)
    assert refused.value.index == 3 * 6 + 2
    lenient = RowCodec.of(dataclasses.replace(spec, allow_non_finite=True))
    head, payload = gradient_of(lenient, np.arange(5), values)
    strict = RowCodec.of(spec)
    found = strict.open(
        head, np.frombuffer(payload, np.uint8), start=START, with_ids=True, with_values=True
    )
    assert strict.first_non_finite(found) == 3 * 6 + 2
    assert lenient.first_non_finite(found) is None
    np.testing.assert_array_equal(opened(lenient, head, payload)[1], values)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([3, 2], "id 2 at place 1 follows 3"),
        ([1, 2, 2], "id 2 at place 2 follows 2"),
        ([-1, 2], "row id -1 is out of range; the table's ids are 0 to 999"),
        ([1, 1000, 1001], "row id 1000 is out of range"),
        ([2**63 - 1], "row id 9223372036854775807 is out of range"),
    ],
)
def test_ids_that_no_message_can_have(ids, text) -> None:
    placement = RowPlacement(1000, 1)
    check_ids(np.array([0, 5, 999]), placement, 0)
    check_ids(np.array([], np.int64), placement, 0)
    with pytest.raises(ArgumentError, match=text):
        check_ids(np.array(ids), placement, 0)


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30, unique=True),
    shard_count=st.integers(1, 5),
    keyed=st.booleans(),
)
def test_ids_of_another_shard_are_refused(keys, shard_count, keyed) -> None:
    if keyed:
        ids = sorted(keys)
        owners = [mix(key % 2**64) % shard_count for key in ids]
    else:
        ids = sorted({key % 2**62 for key in keys})
        owners = [(i + mix(i // shard_count) % shard_count) % shard_count for i in ids]
    placement = RowPlacement(None if keyed else 2**62, shard_count)
    for shard_index in range(shard_count):
        mine = [i for i, owner in zip(ids, owners, strict=True) if owner == shard_index]
        check_ids(np.array(mine, np.int64), placement, shard_index)
        first = next((i for i in ids if i not in mine), None)
        if first is not None:
            owner = owners[ids.index(first)]
            with pytest.raises(ArgumentError, match=f"row id {first} is on shard {owner} of"):
                check_ids(np.array(ids, np.int64), placement, shard_index)


# In one pass.


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [0, 1, 2, 700])
def test_rows_are_taken_as_they_are_opened(codec, count) -> None:
    rows = RowCodec.of(spec_of(codec=codec))
    values = np.random.default_rng(count).standard_normal((count, 6)).astype(np.float32) * 1e6
    head, payload = gradient_of(rows, np.arange(count) * 3, values)
    expected = opened(rows, head, payload)
    found, into, peak = rows.take(head, np.frombuffer(payload, np.uint8), start=START)
    assert found.ids.tolist() == expected[0].tolist()
    np.testing.assert_array_equal(into, expected[1])
    assert peak == np.abs(expected[1]).max(initial=0.0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("repeats", [1, 3])
def test_rows_are_spread_as_they_are_opened(codec, repeats) -> None:
    rows = RowCodec.of(spec_of(codec=codec))
    count, first = 90, 5
    values = np.random.default_rng(1).standard_normal((count, 6)).astype(np.float32)
    header = pb.ExchangeRowsResponse(version=7)
    message = rows.encode(header, header.rows, None, values, start=START)
    response, payload = parse(pb.ExchangeRowsResponse, message)
    expected = opened(rows, response.rows, payload.tobytes(), ids=False)[1]
    starts = np.arange(0, repeats * (first + count) + 1, repeats)
    places = np.random.default_rng(2).permutation(repeats * (first + count))
    where = {"places": places, "starts": starts, "first": first, "stop": first + count}
    into = np.full((places.size, 6), np.nan, np.float32)
    rows.spread(response.rows, payload, start=START, into=into, **where)
    for number, row in enumerate(expected, start=first):
        for place in places[starts[number] : starts[number + 1]]:
            np.testing.assert_array_equal(into[place], row)
    assert np.isnan(into).sum() == repeats * first * 6


@pytest.mark.parametrize("codec", ["fp16", "bf16+lz4"])
@pytest.mark.parametrize("field", ["crc32c", "lz4", "payload", "start", "length"])
def test_what_is_damaged_is_taken_and_spread_nowhere(codec, field) -> None:
    """With the errors of `open`, for which the messages are."""
    rows = RowCodec.of(spec_of(codec=codec))
    values = np.ones((8, 6), np.float32)
    header = pb.ExchangeRowsResponse(version=7)
    message = rows.encode(header, header.rows, None, values, start=START)
    response, payload = parse(pb.ExchangeRowsResponse, message)
    head, start, spoiled = response.rows, START, payload.copy()
    if field == "payload":
        spoiled[-1] ^= 1
    elif field == "length":
        spoiled = spoiled[:-2]
    elif field == "start":
        start += 1
    else:
        setattr(head, field, not head.lz4 if field == "lz4" else getattr(head, field) + 1)
    with pytest.raises((CorruptChunkError, ArgumentError)) as expected:
        rows.open(head, spoiled, start=start, with_ids=False, with_values=True)
    into = np.zeros((8, 6), np.float32)
    where = {"places": np.arange(8), "starts": np.arange(9), "first": 0, "stop": 8}
    with pytest.raises(type(expected.value)) as found:
        rows.spread(head, spoiled, start=start, into=into, **where)
    assert str(found.value) == str(expected.value)
    gradient, payload_with_ids = gradient_of(rows, np.arange(8), values)
    changed = np.frombuffer(payload_with_ids, np.uint8).copy()
    changed[-1] ^= 1
    with pytest.raises(CorruptChunkError, match="CRC32C"):
        rows.take(gradient, changed, start=START)
