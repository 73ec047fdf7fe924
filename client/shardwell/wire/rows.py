"""Rows on the wire: ids and values to a sealed message, and a payload to checked ids and bytes.

What chunks.py is for chunks; the form is table.proto's `Rows`. A payload is ids, or values, or
ids and then values; compression and scale are of the values alone, and what the CRC covers is
checksum.py's. `open` has checked all that it returns, except the ids' order and range, which
`check_ids` is for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import lz4.block
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from shardwell.errors import ArgumentError, CorruptChunkError
from shardwell.numerics import row_batches
from shardwell.numerics.codec import CODECS, Bytes, Float32, canonical_nans
from shardwell.placement.rows import Ids, RowPlacement
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2
from shardwell.wire import checksum
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES, unpacked
from shardwell.wire.messages import OutgoingMessage

ROWS_PER_MESSAGE_MAX = 65536
"""However small rows are: working memory of one message is bounded by it."""
ID_SIZE_BYTES = 8
_NO_IDS: Ids = np.empty(0, np.int64)


def rows_per_message_max(spec: TableSpec) -> int:
    """The rows that a message of a gradient, a fetch or its answer can have, compressed or not."""
    value_size = CODECS[spec.codec_name].in_blocks_of(spec.dim).encoded_bytes(spec.dim)
    return _fitting(ID_SIZE_BYTES + value_size)


def rows_per_scan_message_max(spec: TableSpec) -> int:
    """The rows that any message of ScanRows or LoadRows can have: with state, counts and steps."""
    return _fitting(3 * ID_SIZE_BYTES + 4 * (spec.dim + sum(spec.slot_widths)))


def _fitting(row_size_bytes: int) -> int:
    return min(PAYLOAD_SIZE_MAX_BYTES // row_size_bytes, ROWS_PER_MESSAGE_MAX)


class OpenedRows(NamedTuple):
    """The checked contents of a message."""

    ids: Ids
    """(n,) int64, read-only; empty where the payload has values alone."""
    values: Bytes
    """The codec's bytes of (n, dim) values, read-only; empty where the payload has ids alone."""


class RowCodec:
    """The form of one table's rows. Stateless; any thread may use it."""

    def __init__(self, spec: TableSpec, row_count_max: int) -> None:
        self.dim = spec.dim
        self.codec = CODECS[spec.codec_name].in_blocks_of(spec.dim)
        self.row_count_max = row_count_max
        self._lz4 = spec.lz4
        self._allow_non_finite = spec.allow_non_finite

    @staticmethod
    def of(spec: TableSpec) -> RowCodec:
        """Returns the codec of gradients, fetches and their answers."""
        return RowCodec(spec, rows_per_message_max(spec))

    @staticmethod
    def of_scans(spec: TableSpec) -> RowCodec:
        """Returns the codec of ScanRows: ids, or ids and unencoded values."""
        plain = dataclasses.replace(spec, codec="fp32", allow_non_finite=True)
        return RowCodec(plain, rows_per_scan_message_max(spec))

    def encode(
        self,
        header: Message,
        rows: table_pb2.Rows,
        ids: Ids | None,
        values: npt.NDArray[Any] | None,
        *,
        start: int,
    ) -> bytes:
        """Returns a sealed message of rows, whose Rows lie inside `header` and are filled in.

        `ids` are (n,) int64, any stride; `values` (n, dim), copied unless C-contiguous.
        NonFiniteValueError has row * dim + column as `index`.
        """
        count = len(ids) if ids is not None else 0 if values is None else len(values)
        rows.row_count = count
        id_size = 0 if ids is None else ID_SIZE_BYTES * count
        value_size = 0 if values is None else self.codec.encoded_bytes(self.dim * count)
        packed = b""
        if self._lz4 and value_size:
            assert values is not None
            plain = np.empty(value_size, np.uint8)
            self._write(values, plain, None)
            packed = lz4.block.compress(plain, mode="fast", store_size=False)
            rows.lz4 = len(packed) < value_size
            message = OutgoingMessage(header, id_size + min(len(packed), value_size))
            written = np.frombuffer(packed, np.uint8) if rows.lz4 else plain
            message.payload[id_size:] = written
        else:
            message = OutgoingMessage(header, id_size + value_size)
        payload = message.payload
        its_ids: Bytes | None = None
        if ids is not None:
            its_ids = payload[:id_size]
            its_ids.view(np.int64)[:] = ids
        if packed or not value_size:
            rows.crc32c = checksum.of_rows(start, rows, payload)
            return message.seal()
        assert values is not None

        into = payload[id_size:] if id_size else payload
        rows.crc32c = self._write(values, into, checksum.before_rows(start, count, its_ids))
        return message.seal()

    def _write(self, values: npt.NDArray[Any], payload: Bytes, crc: int | None) -> int:
        may = self._allow_non_finite
        return self.codec.encode(values.reshape(-1), payload, allow_non_finite=may, crc=crc)

    def open(
        self,
        rows: table_pb2.Rows,
        payload: Bytes,
        *,
        start: int,
        with_ids: bool,
        with_values: bool,
    ) -> OpenedRows:
        """Checks rows that came, before anything that their message says is used.

        CorruptChunkError: CRC or length do not fit, or an LZ4 block is broken. ArgumentError: too
        many rows, or compression that the spec does not allow.
        """
        checksum.check(rows, payload, checksum.of_rows(start, rows, payload))
        count = rows.row_count
        if count > self.row_count_max:
            raise ArgumentError(
                f"a message has at most {self.row_count_max} rows of this table; got {count}; "
                "send several"
            )
        id_size = ID_SIZE_BYTES * count if with_ids else 0
        value_size = self.codec.encoded_bytes(self.dim * count) if with_values else 0
        if not value_size and rows.lz4:
            raise ArgumentError("rows without values have lz4 false; got true")
        values = payload[id_size:]
        if rows.lz4 and payload.size >= id_size:
            values = unpacked(rows, values, value_size, is_allowed=self._lz4)
        if payload.size < id_size or values.size != value_size:
            got = f"{payload.size} bytes" + (", the values unpacked" if rows.lz4 else "")
            raise CorruptChunkError(
                f"rows: {count} ids are {id_size} bytes and their values {value_size} in "
                f"{self.codec.name}; the payload has {got}; check row_count, dim and codec"
            )
        ids = payload[:id_size].view(np.int64) if with_ids else _NO_IDS
        return OpenedRows(ids, values)

    def take(
        self, rows: table_pb2.Rows, payload: Bytes, *, start: int
    ) -> tuple[OpenedRows, Float32, float]:
        """Opens ids and values that came: `open`, `decode` and `peak`, in one pass if it can be."""
        count, codec = rows.row_count, self.codec
        id_size = ID_SIZE_BYTES * count
        is_plain = 0 < count <= self.row_count_max and not rows.lz4
        if is_plain and payload.size == id_size + codec.encoded_bytes(self.dim * count):
            ids, written = payload[:id_size], payload[id_size:]
            values = np.empty((count, self.dim), np.float32)
            before = checksum.before_rows(start, count, ids)
            bits, crc = codec.decode_looked(written, values.reshape(-1), before)
            checksum.check(rows, payload, crc)
            return OpenedRows(ids.view(np.int64), written), values, codec.peak_of_bits(bits)
        opened = self.open(rows, payload, start=start, with_ids=True, with_values=True)
        values = np.empty((count, self.dim), np.float32)
        self.decode(opened, values)
        return opened, values, self.peak(opened)

    def spread(
        self,
        rows: table_pb2.Rows,
        payload: Bytes,
        *,
        start: int,
        places: Ids,
        starts: Ids,
        first: int,
        stop: int,
        into: Float32,
    ) -> None:
        """Puts values of rows [first, stop) of a call where each of them belongs.

        `places` and `starts` are those of `row_batches.SortedIds`; `into` is of no use after an
        error.
        """
        count, codec = stop - first, self.codec
        is_plain = not rows.lz4 and payload.size == codec.encoded_bytes(self.dim * count)
        if is_plain and row_batches.can_spread():
            before = checksum.before_rows(start, count, None)
            reads = codec.reads(0, 1, 1.0)
            crc = row_batches.spread(reads, payload, places, starts, first, stop, into, before)
            checksum.check(rows, payload, crc)
            if self._allow_non_finite:
                spread = places[starts[first] : starts[stop]]
                values = into[spread]
                if canonical_nans(values):
                    into[spread] = values
            return
        opened = self.open(rows, payload, start=start, with_ids=False, with_values=True)
        assert rows.row_count == count
        values = np.empty((count, self.dim), np.float32)
        self.decode(opened, values)
        counts = np.diff(starts[first : stop + 1])
        into[places[starts[first] : starts[stop]]] = np.repeat(values, counts, axis=0)

    def decode(self, opened: OpenedRows, values: Float32) -> None:
        """Reads opened values into (n, dim) float32; each NaN is canonical."""
        self.codec.decode(opened.values, values.reshape(-1))
        if self._allow_non_finite:
            canonical_nans(values)

    def peak(self, opened: OpenedRows) -> float:
        """The largest magnitude of the values; infinity if one is not finite."""
        return self.codec.peak(opened.values) if opened.values.size else 0.0

    def first_non_finite(self, opened: OpenedRows) -> int | None:
        """The place, row * dim + column, of the first value that the spec refuses, or None."""
        if self._allow_non_finite or not opened.values.size:
            return None
        return self.codec.first_non_finite(opened.values)


def check_ids(ids: Ids, placement: RowPlacement, shard_index: int) -> None:
    """Refuses ids unless they ascend in this shard's range; ArgumentError names the first."""
    if row_batches.are_fit(ids, placement, shard_index):
        return
    ascends = ids[1:] > ids[:-1]
    if not ascends.all():
        place = int(np.argmin(ascends)) + 1
        raise ArgumentError(
            f"ids of a message must ascend without repeats; id {ids[place]} at place {place} "
            f"follows {ids[place - 1]}; sort them, and add up the gradients of an id"
        )
    if placement.row_count is not None and not 0 <= ids[0] <= ids[-1] < placement.row_count:
        bad = ids[0] if ids[0] < 0 else ids[np.searchsorted(ids, placement.row_count)]
        raise ArgumentError(
            f"row id {bad} is out of range; the table's ids are 0 to {placement.row_count - 1}"
        )
    if placement.shard_count > 1:
        shards = placement.shards_of(ids)
        is_elsewhere = shards != shard_index
        if is_elsewhere.any():
            place = int(np.argmax(is_elsewhere))
            raise ArgumentError(
                f"row id {ids[place]} is on shard {shards[place]} of {placement.shard_count}, and "
                f"was sent to shard {shard_index}; see table.proto for where rows are"
            )
