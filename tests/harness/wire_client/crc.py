"""The CRC of messages, computed from what the .proto files say: no code of the SDK's.

A context is given as values: `seal(message, 1, "model", "w0")` for a gradient's chunk. "The CRC" in
types.proto has them all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
from fastcrc import crc32

GRADIENT, WEIGHTS, FIRST_WEIGHTS, SNAPSHOT = 1, 2, 3, 4
ROW_GRADIENTS, ROWS_FETCH, ROWS_ANSWER, ROWS_SCAN, ROWS_LOAD, PEER_CHUNK = 5, 6, 7, 8, 9, 10
WEIGHTS_FETCH = 11
WIRE_VERSION = 0xFFFFFFFB00000004

_NO_TYPE = SimpleNamespace(fields_by_name=())

Value = int | float | str | bytes


def seal(message: Any, *context: Value) -> Any:
    """The message, whose CRC fits now, and what it opens; changed in place."""
    head_of(message).crc32c = crc_of(message, *context)
    return seal_around(message)


def seal_around(message: Any) -> Any:
    """A message of a stream, in which the CRCs of `open` and of a chunk's control fields fit."""
    fields = message.DESCRIPTOR.fields_by_name
    if "open" in fields and message.HasField("open"):
        seal_message(message.open)
    is_gradient = "gradient" in fields and message.HasField("gradient")
    if is_gradient and hasattr(message.gradient, "control_crc32c"):
        message.gradient.control_crc32c = of_control(message.gradient)
    return message


def of_message(request: Any) -> int:
    """What the CRC of a request without a payload should be."""
    return crc32.iscsi(bytes_of(request))


def bytes_of(message: Any) -> bytes:
    """What the CRC of a message without a payload is of."""
    return _packed(message.DESCRIPTOR.full_name) + fields_of(message)


def fields_of(message: Any) -> bytes:
    """The part of it that a message within another one is."""
    return b"".join(map(_packed, _all_fields(message)))


def _all_fields(message: Any) -> list[Value]:
    values: list[Value] = []
    for number in sorted(message.DESCRIPTOR.fields_by_number):
        field = message.DESCRIPTOR.fields_by_number[number]
        is_version = field.name == "wire_version"
        if field.name == "crc32c" or (is_version and not message.wire_version):
            continue
        if is_version and message.DESCRIPTOR.name in ("GetStatusRequest", "JoinGroupRequest"):
            continue
        found = getattr(message, field.name)
        each = list(found) if field.is_repeated else [found]
        if field.is_repeated:
            values.append(len(each))
        elif field.has_presence:
            values.append(message.HasField(field.name))
            if field.message_type and not message.HasField(field.name):
                each = []
        for one in each:
            if isinstance(one, bytes):  # as a string
                values.append(struct.pack("<Q", len(one)))
            values += _all_fields(one) if field.message_type else [one]
    return values


def seal_message(message: Any) -> Any:
    """A message without a payload, with version and CRC that fit now; changed in place."""
    if "wire_version" in message.DESCRIPTOR.fields_by_name:
        message.wire_version = WIRE_VERSION
    if "crc32c" in message.DESCRIPTOR.fields_by_name:
        message.crc32c = of_message(message)
    return message


class Sealing(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Gives requests without a payload their CRC, and looks at that of their answers.

    Of messages with a payload, only what `seal_around` says.
    """

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return _checked(continuation(details, _sealed(request)))

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details, _sealed(request))

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return _checked(continuation(details, _sealed_around(requests)))

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details, _sealed_around(requests))


def _sealed(request: Any) -> Any:
    return seal_message(request) if hasattr(request, "DESCRIPTOR") else request  # no garbage


def _sealed_around(requests: Iterable[Any]) -> Iterator[Any]:
    for request in requests:
        yield seal_around(request) if hasattr(request, "DESCRIPTOR") else request


def _checked(call: Any) -> Any:
    """A call, whose answer has a CRC that fits, if it has one."""
    if call.done() and call.exception() is None:  # of one that goes on, its caller sees
        answer = call.result()
        if "crc32c" in getattr(answer, "DESCRIPTOR", _NO_TYPE).fields_by_name:
            assert answer.crc32c == of_message(answer), answer
    return call


def fits(message: Any, *context: Value) -> bool:
    """Whether a message's CRC does."""
    found: int = head_of(message).crc32c
    return found == crc_of(message, *context)


def crc_of(message: Any, *context: Value) -> int:
    """What a message's CRC should be."""
    head = head_of(message)
    names = _HEADS[type(head).__name__]
    values = [*context, *_fields(message), *(getattr(head, name) for name in names)]
    return crc32.iscsi(b"".join(map(_packed, values)) + message.payload)


def of_control(gradient: Any) -> int:
    """What control_crc32c of a chunk of a gradient should be."""
    values = (20, gradient.end_of_step, gradient.counts_only, gradient.wait_timeout_ms)
    return crc32.iscsi(b"".join(map(_packed, values)))


def of_counted(table: str, answer: Any) -> int:
    """What the CRC of the count in an ExchangeRowsResponse should be."""
    counted = answer.counted
    parts = (
        counted.counted_part_count,
        counted.duplicate_part_count,
        counted.superseded_part_count,
    )
    return crc32.iscsi(b"".join(map(_packed, (21, table, counted.step, *parts, answer.version))))


def of_fetch(parameter: str, fetch: Any) -> int:
    """What the CRC of a WeightsFetch should be."""
    values = (WEIGHTS_FETCH, parameter, fetch.min_version, fetch.in_arena)
    values += (fetch.HasField("max_version"), fetch.max_version)
    return crc32.iscsi(b"".join(map(_packed, values)))


def optional(message: Any, name: str) -> tuple[int, float]:
    """A field that may be absent, as a context has it."""
    return (1, getattr(message, name)) if message.HasField(name) else (0, 0)


def first_weights(opening: Any) -> tuple[Value, ...]:
    """The context of InitWeights, of its first message."""
    return (
        FIRST_WEIGHTS,
        opening.open.parameter,
        opening.epoch,
        opening.version,
        *optional(opening, "learning_rate"),
        opening.load_id,
        opening.array_count,
    )


def rows_load(opening: Any) -> tuple[Value, ...]:
    """The context of LoadRows, of its first message."""
    return (
        ROWS_LOAD,
        opening.open.table,
        opening.open.incarnation,
        opening.version,
        *optional(opening, "learning_rate"),
        opening.load_id,
    )


def head_of(message: Any) -> Any:
    """The Chunk or Rows of a message."""
    for outer in ("gradient", "fetch"):
        if outer in message.DESCRIPTOR.fields_by_name and message.HasField(outer):
            message = getattr(message, outer)
    return message.chunk if "chunk" in message.DESCRIPTOR.fields_by_name else message.rows


_HEADS = {
    "Chunk": ("chunk_index", "element_offset", "element_count", "lz4"),
    "Rows": ("row_count", "lz4"),
}
_FIELDS = {
    "GradientChunk": (
        "step",
        "sample_count",
        "learning_rate?",
        "after_refusal",
        "rate_factors*",
        "samples~",
    ),
    "GetWeightsResponse": ("version",),
    "ExchangeResponse": ("version",),
    "InitWeightsRequest": ("array_index",),
    "SnapshotResponse": ("version", "array_index", "learning_rate", "samples~"),
    "RowGradients": (
        "step",
        "part_index",
        "end_of_step",
        "sample_count",
        "abandons",
    ),
    "RowsFetch": ("min_version", "max_version?", "unless_late!"),
    "ExchangeRowsResponse": ("version",),
    "ScanRowsResponse": ("version", "learning_rate"),
    "LoadRowsRequest": ("finish",),
    "ReceiveChunksResponse": ("stage",),
}


def _fields(message: Any) -> list[Value]:
    for outer in ("gradient", "fetch"):
        if outer in message.DESCRIPTOR.fields_by_name and message.HasField(outer):
            message = getattr(message, outer)
    values: list[Value] = []
    for name in _FIELDS[type(message).__name__]:
        if name.endswith("*"):  # which none of them is nothing of
            found = list(getattr(message, name[:-1]))
            values += [len(found), *found] if found else []
        elif name.endswith("!"):  # which is nothing of what is false
            values += [1] if getattr(message, name[:-1]) else []
        elif name == "samples~":  # which is nothing where there are none
            values += _samples(message)
        elif name.endswith("?"):
            values += optional(message, name[:-1])
        else:
            values.append(getattr(message, name))
    return values


def _samples(message: Any) -> list[Value]:
    found = message.samples
    if isinstance(found, bytes):
        return [len(found), found] if found else []
    return [found.data, len(found.ranges), *found.ranges] if message.HasField("samples") else []


def _packed(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, float):
        return struct.pack("<d", value)
    return (int(value) % 2**64).to_bytes(8, "little")
