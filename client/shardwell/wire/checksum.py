"""The CRC32C of a message: of its payload, and all that gives the payload a meaning. Pure.

types.proto defines it, at `Chunk.crc32c`, from values alone, so that any language can compute it:

    context | fields of the message | fields of its Chunk or Rows | payload

The context is what the stream or call was opened for: a kind of message, a parameter or table, and
for gradients the worker. It does not travel: each side computes it from what it believes, so that
a payload that reaches another parameter, worker, step or call than it was meant for never fits.
Each kind of message has one function below, which writers and readers share. Messages without a
payload on which something depends have a CRC of all their fields.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from fastcrc import crc32
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from shardwell.errors import CorruptChunkError, VersionMismatchError, WrongShardError
from shardwell.numerics.codec import Bytes
from shardwell.placement.rows import Ids
from shardwell.specs.formats import WIRE, software_version
from shardwell.v1 import parameter_server_pb2, peer_pb2, table_pb2, types_pb2

CRC_FIELD = "crc32c"
WIRE_FIELD = "wire_version"
_FIRST = ("GetStatusRequest", "JoinGroupRequest")
"""Messages that versions without number answer, too, as no CRC covers their wire_version."""
_MASK = 2**64 - 1
_WIRE_MASK = 2**32 - 1
WIRE_VERSION = WIRE | (WIRE ^ _WIRE_MASK) << 32
_ZERO, _ONE = (number.to_bytes(8, "little") for number in (0, 1))
_DOUBLE = struct.Struct("<d")
_NUMBERS = tuple(struct.Struct(f"<{count}Q") for count in range(12))
# The same of fields whose types are known, for what each chunk has: a negative number's eight bytes
# are those of its remainder, and an absent rate is 0.0, whose bytes are zeros.
_GRADIENT_FIELDS = struct.Struct("<QQQdQ")
_CHUNK_FIELDS = struct.Struct("<QQQQ")


MessageT = TypeVar("MessageT", bound=Message)


class Kind(enum.IntEnum):
    """The first number of a context, and what the context has besides."""

    GRADIENT = 1
    """Of PutGradient, and of Exchange's requests: parameter, worker."""
    WEIGHTS = 2
    """Of answers of GetWeights and Exchange, which all workers share: parameter."""
    FIRST_WEIGHTS = 3
    SNAPSHOT = 4
    """Of answers of Snapshot: parameter."""
    ROW_GRADIENTS = 5
    """Of gradients in ExchangeRows: table, worker."""
    ROWS_FETCH = 6
    """Of ExchangeRows' requests for rows: table."""
    ROWS_ANSWER = 7
    """Of rows that ExchangeRows answers: table; see `rows_answer`."""
    ROWS_SCAN = 8
    """Of answers of ScanRows: table, content."""
    ROWS_LOAD = 9
    PEER_CHUNK = 10
    WEIGHTS_FETCH = 11
    """Of Exchange's requests for weights: parameter."""
    GRADIENT_CONTROL = 20
    ROWS_COUNTED = 21
    """Of ExchangeRows' answer to the end of a step: table."""
    OUTCOME = 22
    """Of outcomes of steps: parameter."""
    ROWS_OUTCOME = 23
    """Of outcomes of steps of rows: table."""


def extended(crc: int, *values: int | str) -> int:
    """A CRC32C that goes on over values, in the form that types.proto gives them."""
    packed = b"".join(
        _text(value) if isinstance(value, str) else _number(value) for value in values
    )
    return int(crc32.iscsi(packed, crc))


def _number(value: int) -> bytes:
    return (value & _MASK).to_bytes(8, "little")


def _counted_numbers(values: Sequence[int]) -> bytes:
    count = len(values)
    try:
        return struct.pack(f"<{count + 1}Q", count, *values)
    except struct.error:  # one is negative
        return _number(count) + b"".join(map(_number, values))


def _text(value: str | bytes) -> bytes:
    written = value.encode() if isinstance(value, str) else value
    return _number(len(written)) + written


@functools.lru_cache(maxsize=64)
def _listed(texts: tuple[str, ...]) -> bytes:
    return _number(len(texts)) + b"".join(map(_text, texts))


def _with_numbers(crc: int, *values: int) -> int:
    numbers = _NUMBERS[len(values)]
    try:
        packed = numbers.pack(*values)
    except struct.error:  # one is negative
        packed = numbers.pack(*[value & _MASK for value in values])
    return int(crc32.iscsi(packed, crc))


def _bits(value: float) -> int:
    return int.from_bytes(_DOUBLE.pack(value), "little")


def _optional(value: float | None) -> tuple[int, int]:
    return (0, 0) if value is None else (1, _bits(value))


def _optional_number(value: int | None) -> tuple[int, int]:
    return (0, 0) if value is None else (1, value)


def of_message(message: Any) -> int:
    """The CRC32C of a message without a payload: of its type, and all its fields but the CRC."""
    parts = [_text(message.DESCRIPTOR.full_name)]
    _append(message, parts)
    return int(crc32.iscsi(b"".join(parts)))


def seal(message: MessageT) -> MessageT:
    """The message, with version and CRC, if its type has them; changed in place."""
    fields = message.DESCRIPTOR.fields_by_name
    if WIRE_FIELD in fields:
        message.wire_version = WIRE_VERSION  # type: ignore[attr-defined]
    if CRC_FIELD in fields:
        message.crc32c = of_message(message)  # type: ignore[attr-defined]
    return message


def sealed(message: Message) -> bytes:
    """The bytes of a message whose CRC fits; see `seal`."""
    return bytes(seal(message).SerializeToString())


def check_sealed(message: Any) -> None:
    """Refuses a message of another version, and one whose type has a CRC, which does not fit."""
    fields = message.DESCRIPTOR.fields_by_name
    if WIRE_FIELD in fields:
        check_version(message)
    if CRC_FIELD not in fields:
        return
    found, expected = of_message(message), getattr(message, CRC_FIELD)
    if found != expected:
        cause = (
            f"it says {expected:#010x}, so it was damaged; make the call again"
            if expected
            else "it has none, so it was damaged, or another version of Shardwell sent it; run the "
            "same version everywhere"
        )
        raise CorruptChunkError(
            f"{message.DESCRIPTOR.name}: CRC32C of its fields is {found:#010x}; {cause}"
        )


def check_version(message: Any) -> None:
    """Refuses a message of another wire contract; a request without version by WrongShardError.

    Its sender knows no newer error.
    """
    word, name = message.wire_version, message.DESCRIPTOR.name
    if word == WIRE_VERSION:
        return
    number = word & _WIRE_MASK
    if word and word != number | (number ^ _WIRE_MASK) << 32:
        raise CorruptChunkError(f"{name}: its wire_version was damaged; make the call again")
    # Versions without number never have unknown fields, as which a damaged tag would leave it.
    has_crc = CRC_FIELD in message.DESCRIPTOR.fields_by_name
    if not word and (
        len(UnknownFieldSet(message))
        or (has_crc and message.crc32c not in (0, of_message(message)))
    ):
        raise CorruptChunkError(f"{name}: it has no wire_version, or was damaged; call again")
    is_answer = name.endswith("Response")
    version = str(number) if word else f"a version before {WIRE}"
    software = getattr(message, "software_version", "")
    by = software or ("another version" if word else "0.2.0 or earlier")
    raise (VersionMismatchError if word or is_answer else WrongShardError)(
        f"the {'server' if is_answer else 'client'} speaks {version} of the wire contract "
        f"(shardwell {by}), and the {'client' if is_answer else 'server'} {WIRE} (shardwell "
        f"{software_version()}): install one version of shardwell everywhere"
    )


def _append(message: Any, parts: list[bytes]) -> None:
    found = {field.number: value for field, value in message.ListFields()}
    for number, absent, is_repeated, has_presence, append in _fields(message.DESCRIPTOR):
        value = found.get(number)
        if value is None:
            parts.append(absent)
        elif is_repeated:
            parts.append(_number(len(value)))
            for each in value:
                append(each, parts)
        else:
            if has_presence:
                parts.append(_ONE)
            append(value, parts)


def _append_number(value: int, parts: list[bytes]) -> None:
    parts.append((value & _MASK).to_bytes(8, "little"))


def _append_numbers(values: Sequence[int], parts: list[bytes]) -> None:
    parts.append(_counted_numbers(values))


def _append_double(value: float, parts: list[bytes]) -> None:
    parts.append(_DOUBLE.pack(value))


def _append_text(value: str | bytes, parts: list[bytes]) -> None:
    parts.append(_text(value))


class _Field(NamedTuple):
    number: int
    absent: bytes
    is_repeated: bool
    has_presence: bool
    append: Callable[[Any, list[bytes]], None]


@functools.cache
def _fields(descriptor: Any) -> list[_Field]:
    found = []
    for field in sorted(descriptor.fields, key=lambda each: each.number):
        is_version = field.name == WIRE_FIELD
        if field.name == CRC_FIELD or (is_version and descriptor.name in _FIRST):
            continue
        append: Any = _append_numbers if field.is_repeated else _append_number
        if field.message_type is not None:
            append = _append
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            append = _append_text
        elif field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
            append = _append_double
        is_pair = field.has_presence and field.message_type is None
        absent = b"" if is_version else _ZERO * (1 + is_pair)
        # Repeated numbers are written at once.
        is_repeated = field.is_repeated and append is not _append_numbers
        found.append(_Field(field.number, absent, is_repeated, field.has_presence, append))
    return found


# Contexts: what a stream or call was opened for.

_CONTROL_CONTEXT = extended(0, Kind.GRADIENT_CONTROL)


@functools.lru_cache(maxsize=4096)
def context(kind: Kind, *of: int | str) -> int:
    """The context of messages of a kind; `of` is what the kind says."""
    return extended(0, kind, *of)


def first_weights_context(opening: parameter_server_pb2.InitWeightsRequest) -> int:
    """The context of InitWeights, whose first message is `opening`."""
    rate = opening.learning_rate if opening.HasField("learning_rate") else None
    return extended(
        0,
        Kind.FIRST_WEIGHTS,
        opening.open.parameter,
        opening.epoch,
        opening.version,
        *_optional(rate),
        opening.load_id,
        opening.array_count,
    )


def rows_load_context(opening: table_pb2.LoadRowsRequest) -> int:
    """The context of LoadRows, whose first message is `opening`."""
    rate = opening.learning_rate if opening.HasField("learning_rate") else None
    return extended(
        0,
        Kind.ROWS_LOAD,
        opening.open.table,
        opening.open.incarnation,
        opening.version,
        *_optional(rate),
        opening.load_id,
    )


def peer_context(
    group: str,
    generation: int,
    call: peer_pb2.CollectiveCall,
    ranks: Sequence[int],
    sample_counts: Sequence[int],
) -> int:
    """Returns the context of the chunks of one collective, with its ranks in order."""
    pairs = [number for pair in zip(ranks, sample_counts, strict=True) for number in pair]
    return extended(
        0,
        Kind.PEER_CHUNK,
        group,
        generation,
        call.call_index,
        call.operation,
        call.reduction,
        call.codec,
        call.element_count,
        call.root,
        len(ranks),
        *pairs,
    )


# Fields of messages, besides their Chunk or Rows. Each takes its context and goes on from there.


def gradient(context: int, header: types_pb2.GradientChunk) -> int:
    """Goes on over a chunk of a gradient."""
    fields = _GRADIENT_FIELDS.pack(
        header.step,
        header.sample_count,
        header.HasField("learning_rate"),
        header.learning_rate,
        header.after_refusal,
    )
    crc = int(crc32.iscsi(fields, context))
    factors = header.rate_factors
    if factors:
        crc = extended(crc, len(factors), *map(_bits, factors))
    return of_samples(crc, header.samples) if header.HasField("samples") else crc


def of_samples(crc: int, samples: types_pb2.StepSamples) -> int:
    """Goes on from the other fields of a chunk of a gradient over the samples that it names."""
    return int(crc32.iscsi(_text(samples.data) + _counted_numbers(samples.ranges), crc))


def gradient_control(header: types_pb2.GradientChunk) -> int:
    """The CRC of a gradient chunk's control fields, which may differ when it is sent again."""
    crc = _with_numbers(
        _CONTROL_CONTEXT, header.end_of_step, header.counts_only, header.wait_timeout_ms
    )
    return _with_numbers(crc, header.held_version) if header.HasField("held_version") else crc


def outcome(context: int, found: parameter_server_pb2.StepOutcome) -> int:
    """Goes on over the outcome of a step, and ends: it has no payload."""
    late = found.late_chunk_indexes
    head = (found.step, found.tenure_is_over, found.version, found.is_draining, len(late))
    crc = _with_numbers(context, *head)
    if late:
        crc = extended(crc, *late)
    crc = int(crc32.iscsi(_listed(tuple(found.contributor_ids)), crc))
    return extended(crc, True) if found.late_may_have_counted else crc


def weights(context: int, version: int, image: parameter_server_pb2.Image | None = None) -> int:
    """Goes on over a chunk of weights; with int8, `image` says how they are written."""
    crc = _with_numbers(context, version)
    if image is None:
        return crc
    return _with_numbers(crc, image.form, image.base_version, image.crc32c)


def weights_fetch(context: int, header: parameter_server_pb2.WeightsFetch) -> int:
    """Goes on over a question for weights, and ends: it has no payload."""
    most = header.max_version if header.HasField("max_version") else None
    crc = _with_numbers(context, header.min_version, header.in_arena, *_optional_number(most))
    held = header.held_versions
    return extended(crc, len(held), *held) if held else crc


def first_weights(context: int, array_index: int) -> int:
    """Goes on over a range of first weights."""
    return _with_numbers(context, array_index)


def snapshot(context: int, header: parameter_server_pb2.SnapshotResponse) -> int:
    """Goes on over a range of a snapshot."""
    crc = _with_numbers(context, header.version, header.array_index, _bits(header.learning_rate))
    crc = int(crc32.iscsi(_text(header.samples), crc)) if header.samples else crc
    if not header.state:
        return crc
    crc = _with_numbers(crc, header.state_step, header.state_page, header.state_page_count)
    return int(crc32.iscsi(_text(header.worker_id) + _text(header.state), crc))


def row_gradients(context: int, header: table_pb2.RowGradients) -> int:
    """Goes on over a part of a gradient of rows."""
    return _with_numbers(
        context,
        header.step,
        header.part_index,
        header.end_of_step,
        header.sample_count,
        header.abandons,
    )


def rows_fetch(context: int, header: table_pb2.RowsFetch) -> int:
    """Goes on over a question for rows."""
    most = header.max_version if header.HasField("max_version") else None
    is_more = (1,) if header.unless_late else ()
    return _with_numbers(context, header.min_version, *_optional_number(most), *is_more)


def rows_outcome(context: int, found: table_pb2.RowsOutcome) -> int:
    """Goes on over the outcome of a step of rows, and ends: it has no payload."""
    late, names = found.late_part_indexes, found.contributor_ids
    superseded = found.superseded_part_indexes
    head = (found.step, found.tenure_is_over, found.version, found.is_draining)
    indexes = (len(late), *late, len(superseded), *superseded)
    crc = extended(context, *head, *indexes, len(names), *names)
    return extended(crc, True) if found.late_may_have_counted else crc


def rows_answer(context: int, ids: Ids | Bytes, version: int) -> int:
    """Goes on over rows that are answered, or over their ids' bytes."""
    return _with_numbers(int(crc32.iscsi(ids.view("u1").data, context)), version)


def rows_counted(context: int, counted: table_pb2.RowsCounted, version: int) -> int:
    """Goes on over the count of a step, and the version beside it, and ends: it has no payload."""
    return _with_numbers(
        context,
        counted.step,
        counted.counted_part_count,
        counted.duplicate_part_count,
        counted.superseded_part_count,
        version,
    )


def rows_scan(context: int, header: table_pb2.ScanRowsResponse) -> int:
    """Goes on over rows of a scan."""
    return _with_numbers(context, header.version, _bits(header.learning_rate))


def rows_load(context: int, *, finish: bool) -> int:
    """Goes on over rows that are loaded."""
    return _with_numbers(context, finish)


def peer_chunk(context: int, stage: int) -> int:
    """Goes on over a chunk of a collective."""
    return _with_numbers(context, stage)


# The end of all: what tells how a payload is written, and the payload.


def before_payload(start: int, chunk: types_pb2.Chunk) -> int:
    """The CRC32C of a message with a Chunk as far as its payload; `start` has come so far."""
    fields = _CHUNK_FIELDS.pack(
        chunk.chunk_index,
        chunk.element_offset,
        chunk.element_count,
        chunk.lz4,
    )
    return int(crc32.iscsi(fields, start))


def of_chunk(start: int, chunk: types_pb2.Chunk, payload: Bytes) -> int:
    """The CRC32C of a message with a Chunk; `start` has come so far."""
    return int(crc32.iscsi(payload.data, before_payload(start, chunk)))


def before_rows(start: int, row_count: int, ids: Bytes | None, *, lz4: bool = False) -> int:
    """The CRC32C of a message with Rows as far as its values; `start` has come so far."""
    head = _with_numbers(start, row_count, lz4)
    return head if ids is None else int(crc32.iscsi(ids.data, head))


def of_rows(start: int, rows: table_pb2.Rows, payload: Bytes) -> int:
    """The CRC32C of a message with Rows; `start` has come so far."""
    return before_rows(start, rows.row_count, payload, lz4=rows.lz4)


def check(message: types_pb2.Chunk | table_pb2.Rows, payload: Bytes, found: int) -> None:
    """Refuses a message with a payload that was damaged, or meant for something else."""
    if found != message.crc32c:
        raise CorruptChunkError(
            f"{named(message)}: CRC32C of the header, the {payload.size} payload bytes and what "
            f"they were sent for is {found:#010x}; the message says {message.crc32c:#010x}, so it "
            "was damaged or is not for this stream; send it again"
        )


def named(message: types_pb2.Chunk | table_pb2.Rows) -> str:
    """The words of messages for a chunk or rows."""
    return f"chunk {message.chunk_index}" if isinstance(message, types_pb2.Chunk) else "rows"
