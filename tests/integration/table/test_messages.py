"""Every kind of bad message about a table is refused by what is wrong with it, and changes nothing.

Method: a good message is spoiled in one field, or one property of its ids, at a time, and sent as a
worker in any language might; afterwards the good one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from harness.wire_client import crc as wire_crc
from harness.wire_client.table import WireTable, owner, table_spec
from harness.wire_client.worker import CALL_TIMEOUT_S, WireWorker, error_detail
from shardwell.v1 import table_pb2 as pb
from shardwell.v1 import types_pb2 as types

INVALID, LOST, STEP = (
    (types.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
    (types.ERROR_CODE_CORRUPT_CHUNK, grpc.StatusCode.DATA_LOSS),
    (types.ERROR_CODE_STEP_ORDER, grpc.StatusCode.FAILED_PRECONDITION),
)
NON_FINITE = (types.ERROR_CODE_NON_FINITE, grpc.StatusCode.INVALID_ARGUMENT)
WRONG_SHARD = (types.ERROR_CODE_WRONG_SHARD, grpc.StatusCode.FAILED_PRECONDITION)
UNKNOWN = (types.ERROR_CODE_UNKNOWN_TABLE, grpc.StatusCode.NOT_FOUND)
Spoil = Callable[[pb.ExchangeRowsRequest], Any]

MINE = [i for i in range(100) if owner(i, 100, 2) == 0][:3]
THEIRS = next(i for i in range(100) if owner(i, 100, 2) == 1 and i > MINE[-1])


def rows_of(message: pb.ExchangeRowsRequest) -> pb.Rows:
    return message.gradient.rows if message.HasField("gradient") else message.fetch.rows


def sealed(message: pb.ExchangeRowsRequest) -> None:
    """Its CRC fits it again."""
    if message.HasField("fetch"):
        wire_crc.seal(message, wire_crc.ROWS_FETCH, "t")
    else:
        wire_crc.seal(message, wire_crc.ROW_GRADIENTS, "t", "w0")


def with_fields(**fields: Any) -> Spoil:
    """Other values in Rows; the CRC fits them, unless it is one of them."""

    def spoil(message: pb.ExchangeRowsRequest) -> None:
        for name, value in fields.items():
            setattr(rows_of(message), name, value)
        if "crc32c" not in fields:
            sealed(message)

    return spoil


def with_gradient(**fields: Any) -> Spoil:
    """Other values in RowGradients."""

    def spoil(message: pb.ExchangeRowsRequest) -> None:
        for name, value in fields.items():
            setattr(message.gradient, name, value)
        sealed(message)

    return spoil


def with_payload(change: Callable[[bytes], bytes]) -> Spoil:
    """Other bytes, with the CRC that fits them."""

    def spoil(message: pb.ExchangeRowsRequest) -> None:
        message.payload = change(message.payload)
        sealed(message)

    return spoil


def with_ids(*ids: int) -> Spoil:
    return with_payload(lambda payload: np.array(ids, "<i8").tobytes() + payload[8 * len(ids) :])


def with_value(place: int, value: float) -> Spoil:
    def change(payload: bytes) -> bytes:
        values = np.frombuffer(payload[24:], "<f4").copy()
        values[place] = value
        return payload[:24] + values.tobytes()

    return with_payload(change)


IDS = {
    "unsorted": (with_ids(MINE[1], MINE[0], MINE[2]), "must ascend"),
    "repeated": (with_ids(MINE[0], MINE[0], MINE[2]), "must ascend without repeats"),
    "negative": (with_ids(-1, MINE[0], MINE[1]), "row id -1 is out of range"),
    "past the end": (with_ids(MINE[0], MINE[1], 100), r"row id 100 is out of range.*0 to 99"),
    "of another shard": (
        with_ids(MINE[0], MINE[1], THEIRS),
        f"row id {THEIRS} is on shard 1 of 2, and was sent to shard 0",
    ),
}
SPOILED: dict[str, tuple[Spoil, tuple[Any, Any], str]] = {
    **{name: (spoil, INVALID, text) for name, (spoil, text) in IDS.items()},
    "CRC": (with_fields(crc32c=7), LOST, "CRC32C of the header, the 60 payload bytes"),
    "flipped bit": (lambda m: setattr(m, "payload", b"\1" + m.payload[1:]), LOST, "CRC32C"),
    "short": (with_payload(lambda payload: payload[:-1]), LOST, "the payload has 59 bytes"),
    "long": (with_payload(lambda payload: payload + b"0"), LOST, "the payload has 61 bytes"),
    "empty": (with_payload(lambda payload: b""), LOST, "the payload has 0 bytes"),
    "fewer rows": (with_fields(row_count=2), LOST, "2 ids are 16 bytes"),
    "no rows": (with_fields(row_count=0), LOST, "0 ids are 0 bytes"),
    "too many rows": (with_fields(row_count=2**32 - 1), INVALID, "at most 52428 rows"),
    "compressed": (with_fields(lz4=True), INVALID, "COMPRESSION_NONE"),
    "NaN": (with_value(4, np.nan), NON_FINITE, f"column 1 of row id {MINE[1]} is not finite"),
    "infinity": (with_value(8, -np.inf), NON_FINITE, f"column 2 of row id {MINE[2]}"),
    "later step": (with_gradient(step=1), STEP, "sent step 1, which was not its next"),
    "huge step": (with_gradient(step=2**64 - 1), INVALID, "step must be at most"),
    "later part": (with_gradient(part_index=1), STEP, "sent part 1 of step 0"),
    "huge part": (with_gradient(part_index=65536), INVALID, "part_index must be below 65536"),
    "last part without an end": (
        with_gradient(part_index=65535, end_of_step=False),
        INVALID,
        "the last part says end_of_step",
    ),
    "samples": (with_gradient(sample_count=2**24 + 1), INVALID, "sample_count must be at most"),
    "abandons with rows": (with_gradient(abandons=True), INVALID, "no rows; got .* 3 rows"),
    "both": (lambda m: m.fetch.SetInParent(), INVALID, "`gradient` or `fetch`, not both"),
}


def refused(call: Any) -> tuple[tuple[int, grpc.StatusCode], str, types.ErrorDetail]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    detail = error_detail(caught.value)
    return (detail.code, caught.value.code()), str(caught.value.details()), detail


@pytest.mark.parametrize("name", SPOILED)
def test_bad_row_gradients_are_refused(cluster, name) -> None:
    spoil, expected, text = SPOILED[name]
    with WireWorker(cluster(2).target, "w0") as connection:
        table = WireTable(connection, table_spec())
        (good,) = table.parts(MINE, np.ones((3, 3)))
        spoiled = pb.ExchangeRowsRequest.FromString(good.SerializeToString())
        spoil(spoiled)
        found, message, detail = refused(table.stream(0, [spoiled]))
        assert found == expected
        assert_matches(text, message)
        if expected == NON_FINITE:
            assert detail.element_index == (4 if name == "NaN" else 8)
            assert detail.table == "t"
        (status, _) = table.status()
        assert (status.row_count, status.version, status.counted_row_count) == (0, 0, 0)
        (answer,) = table.stream(0, [good])
        assert answer.counted.counted_part_count == 1


def assert_matches(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=text):
        raise ValueError(message)


FETCHES = {
    **{name: (spoil, INVALID, text) for name, (spoil, text) in IDS.items()},
    "CRC": (with_fields(crc32c=7), LOST, "CRC32C of the header, the 24 payload bytes"),
    "short": (with_payload(lambda payload: payload[:-1]), LOST, "the payload has 23 bytes"),
    "with values": (with_payload(lambda payload: payload * 2), LOST, "the payload has 48 bytes"),
    "too many rows": (with_fields(row_count=2**20), INVALID, "at most 52428 rows"),
    "compressed": (with_fields(lz4=True), INVALID, "rows without values have lz4 false"),
}


@pytest.mark.parametrize("name", FETCHES)
def test_bad_fetches_are_refused(cluster, name) -> None:
    spoil, expected, text = FETCHES[name]
    with WireWorker(cluster(2).target, "w0") as connection:
        table = WireTable(connection, table_spec())
        message = table.fetch(MINE)
        spoil(message)
        found, details, _ = refused(table.stream(0, [message]))
        assert found == expected
        assert_matches(text, details)


OPENINGS: dict[str, tuple[Spoil, tuple[Any, Any], str]] = {
    "none": (lambda m: m.ClearField("open"), INVALID, "first message must have `open`"),
    "no worker": (lambda m: m.open.ClearField("worker_id"), INVALID, "worker_id"),
    "bad worker": (lambda m: setattr(m.open, "worker_id", "a b"), INVALID, "worker_id"),
    "unknown": (lambda m: setattr(m.open, "table", "u"), UNKNOWN, "no table 'u'; open it first"),
    "shard": (lambda m: setattr(m.open.shard, "shard_index", 1), WRONG_SHARD, "this is shard 0"),
    "cluster": (lambda m: setattr(m.open.shard, "cluster_id", "x"), WRONG_SHARD, "of cluster 'x'"),
    "payload": (lambda m: setattr(m, "payload", b"1"), LOST, "neither `gradient` nor `fetch`"),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_bad_openings_of_tables_are_refused(cluster, name) -> None:
    spoil, expected, text = OPENINGS[name]
    with WireWorker(cluster(2).target, "w0") as connection:
        table = WireTable(connection, table_spec())
        message = pb.ExchangeRowsRequest(open=table.opening(0))
        spoil(message)
        found, details, _ = refused(
            table.stubs[0].ExchangeRows(iter([message]), timeout=CALL_TIMEOUT_S)
        )
        assert found == expected
        assert_matches(text, details)


def test_a_stream_goes_on_with_another_table_between_steps(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as connection:
        first = WireTable(connection, table_spec("first"))
        second = WireTable(connection, table_spec("second", dim=2))
        (put,) = first.parts([1, 2], np.ones((2, 3)))
        ask = second.fetch([1])
        ask.open.CopyFrom(second.opening(0))
        again = first.fetch([2])
        again.open.CopyFrom(first.opening(0))
        counted, zeros, rows = first.stream(0, [put, ask, again])
        assert counted.counted.counted_part_count == 1
        np.testing.assert_array_equal(second.read(zeros, [1]), 0)
        np.testing.assert_array_equal(first.read(rows, [2]), -1)


def test_a_stream_keeps_its_table_during_a_step(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as connection:
        table = WireTable(connection, table_spec())
        parts = table.parts([1, 2], np.ones((2, 3)), rows_per_part=1)
        parts[1].open.CopyFrom(table.opening(0))
        found, details, _ = refused(table.stream(0, parts))
        assert found == INVALID
        assert "in the middle of a step" in details


def test_samples_are_the_same_in_all_parts(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as connection:
        table = WireTable(connection, table_spec())
        parts = table.parts([1, 2], np.ones((2, 3)), rows_per_part=1, sample_count=2)
        parts[1].gradient.sample_count = 3
        table.seal(parts[1])
        found, details, _ = refused(table.stream(0, parts))
        assert found == INVALID
        assert "step 0 of 'w0' began with 2, part 1 has 3" in details


SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "a/b"}, "table name"),
    "dim": ({"dim": 0}, "dim"),
    "row_count": ({"row_count": 2**62 + 1}, "row_count"),
    "codec": ({"codec": 0}, "codec"),
    "mode": ({"mode": 0}, "mode"),
    "workers": ({"worker_count": 0}, "worker_count"),
    "no rule": ({"optimizer": types.Optimizer()}, "optimizer.rule must be set"),
    "dense rule": (
        {"optimizer": types.Optimizer(rms_prop=types.RmsProp(learning_rate=1, epsilon=1))},
        "optimizer of a table",
    ),
    "no initializer": ({"initializer": pb.Initializer()}, "initializer.kind must be set"),
    "bounds": (
        {"initializer": pb.Initializer(uniform=pb.Uniform(low=1, high=0))},
        "Uniform.high",
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_bad_specs_of_tables_are_refused(cluster, name) -> None:
    fields, text = SPECS[name]
    with WireWorker(cluster(1).target, "w0") as connection:
        with pytest.raises(grpc.RpcError) as caught:
            WireTable(connection, table_spec(**{"worker_count": 1, **fields}))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert_matches(text, str(caught.value.details()))


def test_another_spec_gets_the_differences(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as connection:
        table = WireTable(connection, table_spec())
        with pytest.raises(grpc.RpcError) as caught:
            WireTable(connection, table_spec(dim=4))
        detail = error_detail(caught.value)
        assert detail.code == types.ERROR_CODE_SPEC_MISMATCH
        assert detail.table == "t"
        assert_matches("dim: 3 exists, 4 was asked for", str(caught.value.details()))
        assert not table.open()[0].created


def test_scans_of_unknown_content_are_refused(cluster) -> None:
    with WireWorker(cluster(1).target, "w0") as connection:
        table = WireTable(connection, table_spec())
        for content in (0, 9):
            with pytest.raises(grpc.RpcError) as caught:
                table.scan(content)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert_matches("content must be", str(caught.value.details()))


@pytest.mark.parametrize("method", ["EvictRows", "SetTableLearningRate", "ScanRows"])
def test_calls_about_an_unknown_table(cluster, method) -> None:
    with WireWorker(cluster(1).target, "w0") as connection:
        table = WireTable(connection, table_spec())
        kind = getattr(pb, f"{method}Request")
        request = kind(shard=connection.identities[0], table="other")
        with pytest.raises(grpc.RpcError) as caught:
            list(getattr(table.stubs[0], method)(request, timeout=CALL_TIMEOUT_S))
        detail = error_detail(caught.value)
        assert (detail.code, detail.table) == (types.ERROR_CODE_UNKNOWN_TABLE, "other")
        request.shard.cluster_id = "x"
        with pytest.raises(grpc.RpcError) as caught:
            list(getattr(table.stubs[0], method)(request, timeout=CALL_TIMEOUT_S))
        assert error_detail(caught.value).code == types.ERROR_CODE_WRONG_SHARD
