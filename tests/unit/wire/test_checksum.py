"""Goal: a CRC covers all that types.proto says, so two sides that differ in anything disagree.

Method: contexts and fields are computed from the table in types.proto by other code, and each value
is changed alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastcrc import crc32
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from harness.wire_client import crc as wire_crc
from harness.wire_client.table import table_spec
from harness.wire_client.worker import sgd, spec
from shardwell.errors import CorruptChunkError
from shardwell.v1 import group_pb2, peer_pb2, session_pb2, table_pb2, types_pb2
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum

LARGE = 2**64 - 1
PAYLOAD = np.frombuffer(b"payload", np.uint8)
CHUNK = types_pb2.Chunk(chunk_index=7, element_offset=LARGE, element_count=2**32 - 1, lz4=True)
ROWS = table_pb2.Rows(row_count=2**32 - 1, lz4=True)
CALL = peer_pb2.CollectiveCall(
    call_index=3,
    operation=peer_pb2.OPERATION_ALL_REDUCE,
    reduction=peer_pb2.REDUCTION_MEAN,
    codec=types_pb2.CODEC_FP16,
    element_count=2**40,
    root=1,
)
OPENING = pb.InitWeightsRequest(
    open=types_pb2.StreamOpen(parameter="p"),
    epoch=LARGE,
    version=4,
    learning_rate=0.5,
    load_id=LARGE - 1,
    array_count=3,
)
LOADING = table_pb2.LoadRowsRequest(
    open=table_pb2.TableOpen(table="t", incarnation=9), version=4, load_id=LARGE
)
IDS = np.array([-1, 2**62], np.int64)

GRADIENT = types_pb2.GradientChunk(
    chunk=CHUNK, step=LARGE, sample_count=5, wait_timeout_ms=6, end_of_step=True
)
ROW_GRADIENTS = table_pb2.RowGradients(
    rows=ROWS,
    step=1,
    part_index=2,
    end_of_step=True,
    sample_count=3,
    wait_timeout_ms=4,
    abandons=True,
)
FETCH = table_pb2.RowsFetch(rows=ROWS, min_version=8, wait_timeout_ms=9)
SNAPSHOT = pb.SnapshotResponse(chunk=CHUNK, version=3, array_index=2, learning_rate=1e-300)
WITH_ACCOUNT = pb.SnapshotResponse(chunk=CHUNK, version=3, samples="{ö}".encode())
OF_SAMPLES = types_pb2.GradientChunk(
    chunk=CHUNK, step=1, samples=types_pb2.StepSamples(data="träin", ranges=[0, 5, 7, LARGE])
)
SCAN = table_pb2.ScanRowsResponse(rows=ROWS, version=3, learning_rate=-0.0)

# Of each kind: what the shard and the SDK compute, the message, and its context by the .proto.
KINDS: dict[str, tuple[Callable[[], int], Any, tuple[Any, ...]]] = {
    "gradient": (
        lambda: checksum.gradient(
            checksum.context(checksum.Kind.GRADIENT, "p", "wörker"), GRADIENT
        ),
        pb.PutGradientRequest(gradient=GRADIENT),
        (1, "p", "wörker"),
    ),
    "gradient of samples": (
        lambda: checksum.gradient(checksum.context(checksum.Kind.GRADIENT, "p", "w"), OF_SAMPLES),
        pb.PutGradientRequest(gradient=OF_SAMPLES),
        (1, "p", "w"),
    ),
    "weights": (
        lambda: checksum.weights(checksum.context(checksum.Kind.WEIGHTS, "p"), LARGE),
        pb.ExchangeResponse(chunk=CHUNK, version=LARGE),
        (2, "p"),
    ),
    "first weights": (
        lambda: checksum.first_weights(checksum.first_weights_context(OPENING), 2),
        pb.InitWeightsRequest(chunk=CHUNK, array_index=2),
        (3, "p", LARGE, 4, 1, 0.5, LARGE - 1, 3),
    ),
    "snapshot": (
        lambda: checksum.snapshot(checksum.context(checksum.Kind.SNAPSHOT, "p"), SNAPSHOT),
        SNAPSHOT,
        (4, "p"),
    ),
    "snapshot with an account": (
        lambda: checksum.snapshot(checksum.context(checksum.Kind.SNAPSHOT, "p"), WITH_ACCOUNT),
        WITH_ACCOUNT,
        (4, "p"),
    ),
    "row gradients": (
        lambda: checksum.row_gradients(
            checksum.context(checksum.Kind.ROW_GRADIENTS, "t", "w"), ROW_GRADIENTS
        ),
        table_pb2.ExchangeRowsRequest(gradient=ROW_GRADIENTS),
        (5, "t", "w"),
    ),
    "fetch": (
        lambda: checksum.rows_fetch(checksum.context(checksum.Kind.ROWS_FETCH, "t"), FETCH),
        table_pb2.ExchangeRowsRequest(fetch=FETCH),
        (6, "t"),
    ),
    "answer": (
        lambda: checksum.rows_answer(checksum.context(checksum.Kind.ROWS_ANSWER, "t"), IDS, 5),
        table_pb2.ExchangeRowsResponse(rows=ROWS, version=5),
        (7, "t", IDS.astype("<i8").tobytes()),
    ),
    "scan": (
        lambda: checksum.rows_scan(checksum.context(checksum.Kind.ROWS_SCAN, "t", 3), SCAN),
        SCAN,
        (8, "t", 3),
    ),
    "load": (
        lambda: checksum.rows_load(checksum.rows_load_context(LOADING), finish=True),
        table_pb2.LoadRowsRequest(rows=ROWS, finish=True),
        (9, "t", 9, 4, 0, 0, LARGE),
    ),
    "peer's chunk": (
        lambda: checksum.peer_chunk(checksum.peer_context("g", 12, CALL, [0, 2], [5, 6]), 2),
        peer_pb2.ReceiveChunksResponse(chunk=CHUNK, stage=peer_pb2.STAGE_FINAL),
        (10, "g", 12, 3, 1, 2, 2, 2**40, 1, 2, 0, 5, 2, 6),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_proto_says(kind: str) -> None:
    start, message, context = KINDS[kind]
    head = wire_crc.head_of(message)
    of = checksum.of_chunk if isinstance(head, types_pb2.Chunk) else checksum.of_rows
    message.payload = PAYLOAD.tobytes()
    assert of(start(), head, PAYLOAD) == wire_crc.crc_of(message, *context)


def test_no_two_kinds_are_alike() -> None:
    starts = [start() for start, _, _ in KINDS.values()]
    assert len(set(starts)) == len(starts)


def test_whatever_ranks_differ_in_their_chunks_do_not_fit() -> None:
    def changed(**fields: Any) -> peer_pb2.CollectiveCall:
        call = peer_pb2.CollectiveCall()
        call.CopyFrom(CALL)
        for name, value in fields.items():
            setattr(call, name, value)
        return call

    calls = [
        changed(),
        changed(call_index=4),
        changed(operation=peer_pb2.OPERATION_REDUCE),
        changed(reduction=peer_pb2.REDUCTION_SUM),
        changed(codec=types_pb2.CODEC_BF16),
        changed(element_count=1),
        changed(root=0),
    ]
    found = [checksum.peer_context("g", 1, call, [0, 1, 2], [5, 6, 7]) for call in calls]
    for group, generation, ranks, counts in (
        ("h", 1, [0, 1, 2], [5, 6, 7]),
        ("g", 2, [0, 1, 2], [5, 6, 7]),
        ("g", 1, [0, 1, 3], [5, 6, 7]),
        ("g", 1, [0, 1], [5, 6]),
        ("g", 1, [0, 1, 2], [5, 6, 3]),
    ):
        found.append(checksum.peer_context(group, generation, CALL, ranks, counts))
    assert len(set(found)) == len(found)


def test_names_do_not_run_into_one_another() -> None:
    names = ["a", "ab", "abc", "b", "bc", "c", ""]
    pairs = list(itertools.product(names, names))
    assert len({checksum.context(checksum.Kind.GRADIENT, *pair) for pair in pairs}) == len(pairs)


MESSAGES = [
    pb.SetLearningRateRequest(parameter="wörter", learning_rate=0.1, from_step=0),
    pb.SetLearningRateRequest(parameter="wörter", learning_rate=0.1),
    pb.CloseStepResponse(squares=[2.5, -0.5]),
    pb.CloseStepResponse(norm=2.5),
    pb.ConfirmInitRequest(shard=types_pb2.ShardIdentity(shard_index=1), epoch=LARGE),
    pb.ClaimInitRequest(parameter="p", worker_id="w", wait_timeout_ms=3, above_epoch=2**62),
    table_pb2.EvictRowsRequest(table="t", older_than_step=LARGE),
    table_pb2.SetTableLearningRateRequest(table="t", learning_rate=-0.0, from_step=2),
    pb.CreateParameterRequest(spec=spec("p", 6, optimizer=sgd(0.5)), session=LARGE),
    pb.CreateParameterRequest(spec=spec("p", 6, optimizer=sgd(0.25)), session=LARGE),
    table_pb2.OpenTableRequest(spec=table_spec("t", 9, 2), worker_id="w"),
    table_pb2.OpenTableRequest(spec=table_spec("t", None, 2), worker_id="w"),
    session_pb2.AttendRequest(worker_id="w", session=LARGE, host="h", pid=2**32 - 1),
    session_pb2.EndSessionRequest(session=LARGE),
    types_pb2.StreamOpen(parameter="p", worker_id="w", session=LARGE, tenure=1),
    table_pb2.TableOpen(table="t", worker_id="w", session=LARGE, tenure=1),
    pb.GetStatusResponse(
        shard=types_pb2.ShardIdentity(cluster_id="c"),
        uptime_s=0.5,
        parameters=[pb.ParameterStatus(wait=types_pb2.StepWait(open_for_s=0.0)), {}],
    ),
    group_pb2.JoinGroupRequest(rank=1, lost_ranks=[2, 3]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: each.DESCRIPTOR.name)
def test_a_message_without_a_payload_is_what_the_proto_says(message: Any) -> None:
    found = checksum.of_message(message)
    assert found == wire_crc.of_message(message)
    changed = type(message)()
    changed.CopyFrom(message)
    changed.crc32c = 5
    assert checksum.of_message(changed) == found
    if hasattr(changed, "shard"):
        changed.shard.shard_count += 1
    elif hasattr(changed, "norm"):
        changed.norm += 1
    else:
        changed.rank += 1
    assert checksum.of_message(changed) != found


@pytest.mark.parametrize(
    ("service", "method"),
    [
        (service.full_name, method.name)
        for file in (pb, table_pb2, session_pb2, group_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ],
)
def test_every_message_without_a_payload_has_one(service: str, method: str) -> None:
    """Of whatever call, in either direction: else one flipped bit is believed."""
    found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
    for kind in (found.input_type, found.output_type):
        names = set(kind.fields_by_name)
        assert not names or names & {"crc32c", "payload"}, kind.full_name


CONTROL = types_pb2.GradientChunk(end_of_step=True, counts_only=True, wait_timeout_ms=2**32 - 1)


def test_what_a_chunk_says_besides_is_covered_beside_it() -> None:
    """It may differ when a chunk is sent again, whose own CRC must not."""
    changed = [types_pb2.GradientChunk() for _ in range(4)]
    changed[1].end_of_step = changed[2].counts_only = True
    changed[3].wait_timeout_ms = 1
    found = [checksum.gradient_control(each) for each in (CONTROL, *changed)]
    assert found == [wire_crc.of_control(each) for each in (CONTROL, *changed)]
    assert len(set(found)) == len(found)
    context = checksum.context(checksum.Kind.GRADIENT, "p", "w")
    assert len({checksum.gradient(context, each) for each in changed}) == 1


def test_the_count_of_a_step_covers_the_version_beside_it() -> None:
    found, large, small = set(), (0, LARGE), (0, 1)
    cases = itertools.product("tu", large, large, small, small, small)
    for table, version, step, counted, repeated, superseded in cases:
        answer = table_pb2.ExchangeRowsResponse(
            counted=table_pb2.RowsCounted(
                step=step,
                counted_part_count=counted,
                duplicate_part_count=repeated,
                superseded_part_count=superseded,
            ),
            version=version,
        )
        context = checksum.context(checksum.Kind.ROWS_COUNTED, table)
        crc = checksum.rows_counted(context, answer.counted, answer.version)
        assert crc == wire_crc.of_counted(table, answer)
        found.add(crc)
    assert len(found) == 64


def test_a_message_is_sealed_and_looked_at() -> None:
    message = pb.ConfirmInitRequest(parameter="p", epoch=3)
    with pytest.raises(CorruptChunkError, match=r"ConfirmInitRequest: CRC32C .* damaged"):
        checksum.check_sealed(message)
    checksum.check_sealed(pb.ConfirmInitRequest.FromString(checksum.sealed(message)))
    assert checksum.sealed(pb.ReportResponse()) == b""  # which has none
    checksum.check_sealed(pb.ReportResponse())


def test_those_that_differ_in_presence_alone_differ() -> None:
    assert len({checksum.of_message(each) for each in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize(
    "message",
    [
        pb.GetStatusRequest(parameter="net"),
        pb.GetStatusResponse(software_version="0.2.0", uptime_s=1.5),
        session_pb2.AttendRequest(worker_id="w", session=LARGE),
        group_pb2.JoinGroupRequest(rank=1),
        group_pb2.JoinGroupResponse(generation=5),
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_no_flipped_bit_makes_another_version(message: Any) -> None:
    """One is what ends a client; a damaged message is sent again."""
    sent = checksum.sealed(message)
    for bit in range(8 * len(sent)):
        spoilt = bytearray(sent)
        spoilt[bit // 8] ^= 1 << bit % 8
        try:
            found = type(message).FromString(bytes(spoilt))
        except DecodeError:
            continue
        if not _is_same(found, message):
            with pytest.raises(CorruptChunkError):
                checksum.check_sealed(found)


def _is_same(found: Any, sent: Any) -> bool:
    """Whether a flipped bit left the fields as they were, as in a number that is unknown."""
    copy = type(sent)()
    copy.CopyFrom(found)
    copy.DiscardUnknownFields()
    return bool(copy == sent)


def test_the_examples_of_the_contract() -> None:
    """Bytes and CRCs that types.proto shows are those of the messages that it names."""
    comments = (Path(__file__).parents[3] / "protos/shardwell/v1/types.proto").read_text()
    rows = re.findall(r"^//   ((?:[0-9a-f]{2,}(?: |$))+)", comments, re.MULTILINE)
    shown = bytes.fromhex("".join(rows))
    shard = types_pb2.ShardIdentity(cluster_id="c", shard_index=1, shard_count=2)
    examples: list[Any] = [
        pb.SetLearningRateRequest(
            shard=shard, parameter="net", learning_rate=0.5, from_step=3, incarnation=7
        ),
        pb.GetContributionsResponse(
            sets=[pb.ContributorSet(chunk_indexes=[2, 5], worker_ids=["w0"])]
        ),
    ]
    for message, crc in zip(
        examples, re.findall(r"whose CRC is (0x[0-9a-f]{8})", comments), strict=True
    ):
        covered = wire_crc.bytes_of(message)
        assert shown.startswith(covered)
        shown = shown[len(covered) :]
        assert crc32.iscsi(covered) == int(crc, 16) == checksum.of_message(message)
    optimizer = sgd(0.5)
    assert shown == (1).to_bytes(8, "little") + wire_crc.fields_of(optimizer)
