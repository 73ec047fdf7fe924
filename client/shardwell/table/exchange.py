"""One table's rows between a worker and all shards: one attempt of fetching, putting, or both.

A call's ids and gradients become messages, answers become rows. Everything leaves for all shards
before any answer is awaited. Whether another attempt is made, and from where on, is for the caller:
works know how far they have come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import NamedTuple

import grpc
import numpy as np

from shardwell.errors import (
    CorruptChunkError,
    NonFiniteError,
    ShardwellError,
    StepOrderError,
)
from shardwell.numerics.arguments import REFUSED_STEP
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell.process.spans import NO_STEP, now_ns
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel, ToldOf, went_on_elsewhere
from shardwell.rpc.stream import ShardStream
from shardwell.rpc.stream_pool import StreamPool, StreamSet
from shardwell.specs.deadlines import wait_milliseconds
from shardwell.specs.table import TableSpec
from shardwell.table.batch import ShardedIds, Span
from shardwell.table.gradient_sums import RowSums
from shardwell.traffic import Traffic
from shardwell.v1 import table_pb2 as pb
from shardwell.v1.trace_pb2 import (
    SPAN_KIND_DECODE,
    SPAN_KIND_ENCODE,
    SPAN_KIND_EXCHANGE,
    SPAN_KIND_GET,
    SPAN_KIND_PUT,
    SPAN_KIND_WAIT,
)
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.rows import ID_SIZE_BYTES, RowCodec

_LOG = logging.getLogger("shardwell")
_SHORT_BYTES_MAX = 64 * 1024
"""Of rows and their ids as they travel, which are sent in less time than a thread takes to be
woken."""


class RowPut:
    """One step's gradient on its way, and how far it has come, whatever becomes of connections.

    Args:
        ids: Of the rows.
        sums: Their gradients; None: the step is abandoned.
        step: This worker's.
        sample_count: See `Table.put_row_gradients`.
        row_count_max: Rows of one message.
    """

    def __init__(
        self,
        ids: ShardedIds,
        sums: RowSums | None,
        *,
        step: int,
        sample_count: int,
        row_count_max: int,
    ) -> None:
        self.ids = ids
        self.sums = sums
        self.step = step
        self.sample_count = sample_count
        self.counted_shards: set[int] = set()
        """Shards that have told that they counted all of the step."""
        self.is_sent = False
        """Whether any of it may have reached a shard."""
        self._row_count_max = row_count_max

    def rest(self, shard_index: int) -> list[Span]:
        """The parts of a shard that has not counted them all."""
        return [] if shard_index in self.counted_shards else self.parts(shard_index)

    def parts(self, shard_index: int) -> list[Span]:
        """What a shard is sent, part by part; at least one, which ends the step there."""
        start = self.ids.bounds[shard_index]
        return self.ids.messages(shard_index, self._row_count_max) or [Span(start, start)]

    def digest(self) -> tuple[int, ...]:
        """Tells what is sent from other steps."""
        return (self.sample_count, *(self.sums.digest() if self.sums is not None else ()))

    def element_index(self, shard_index: int, index: int) -> int:
        """What element of the array that the caller passed a shard means; -1 if that is not known.

        Args:
            shard_index: Which shard.
            index: row * dim + column in a message; which one is known only if there was one.
        """
        parts = self.parts(shard_index)
        if self.sums is None or len(parts) > 1:
            return -1
        return self.sums.element_index(parts[0], index)


class RowFetch:
    """Rows on their way, and how far they have come.

    Args:
        ids: Which rows.
        rows: (n, dim) float32, C-contiguous, filled.
        places: (n,): where in `rows` they go, by row; see `row_batches.SortedIds`.
        starts: (u + 1,): the same.
        row_count_max: Rows of one message.
        min_version: Steps that are to have closed.
        known_version: Steps that have closed on every shard, as this worker knows.
    """

    def __init__(
        self,
        ids: ShardedIds,
        rows: Float32,
        *,
        places: Ids,
        starts: Ids,
        row_count_max: int,
        min_version: int = 0,
        known_version: int = 0,
    ) -> None:
        self.ids = ids
        self.rows = rows
        self.places = places
        self.starts = starts
        self.min_version = min_version
        self.known_version = known_version
        self.max_version: int | None = None
        """The version that is wanted where a shard has it; None: the newest."""
        self.is_exact = False
        """Whether no further one can have."""
        self.version = math.inf
        """Steps that the rows which have come have seen, at least."""
        self._missing = {
            shard_index: ids.messages(shard_index, row_count_max) for shard_index in ids.shards()
        }

    def missing(self, shard_index: int) -> list[Span]:
        """What a shard has not answered yet, message by message."""
        return self._missing.get(shard_index, [])

    def answered(self, shard_index: int, version: int) -> None:
        """Notes that the first of them has come."""
        self.version = min(self.version, version)
        self._missing[shard_index] = self._missing[shard_index][1:]


class Asked(NamedTuple):
    """What one shard is asked in one attempt."""

    channel: ShardChannel
    parts: list[Span]
    """Of the gradient; none if it has counted them."""
    questions: list[Span]
    """Rows that are wanted, message by message."""

    @property
    def answer_count(self) -> int:
        """Messages that it is to answer with."""
        return bool(self.parts) + len(self.questions)


class RowTransfer:
    """How one table's rows are sent and taken. Any thread may use it; one at a time puts.

    Args:
        spec: The table.
        channels: The shards, in order.
        pool: Streams of the table's calls.
        worker_id: Whose calls they are.
        traffic: The client's, which counts them.
    """

    def __init__(
        self,
        spec: TableSpec,
        channels: list[ShardChannel],
        pool: StreamPool,
        *,
        worker_id: str,
        traffic: Traffic,
    ) -> None:
        self._spec = spec
        self._channels = channels
        self._pool = pool
        self._worker_id = worker_id
        self._traffic = traffic
        self._codec = RowCodec.of(spec)
        self._row_bytes = ID_SIZE_BYTES + self._codec.codec.item_size * spec.dim
        self._gradient_context = checksum.row_gradients_context(spec.name, worker_id)
        self._fetch_context = checksum.rows_fetch_context(spec.name)
        self._answer_context = checksum.rows_answer_context(spec.name)
        self._counted_context = checksum.rows_counted_context(spec.name)
        self.row_count_max = self._codec.row_count_max
        """Rows of one message that is sent; fewer, once the shards have said so."""
        self.superseded_part_count = 0
        """Parts that shards had counted with other rows or gradients; the caller makes it 0."""
        self.incarnation = 0
        """See OpenTableResponse; once the shards have said it."""
        self.tenure = 0
        """See TableOpen; the same."""

    def attempt(self, put: RowPut | None, fetch: RowFetch | None, attempts: Attempts) -> None:
        """Sends and fetches what is left of a call."""
        every = [
            Asked(
                channel,
                [] if put is None else put.rest(channel.shard_index),
                [] if fetch is None else fetch.missing(channel.shard_index),
            )
            for channel in self._channels
        ]
        asked = [one for one in every if one.answer_count]
        if asked:
            channels = [one.channel for one in asked]
            kind = SPAN_KIND_EXCHANGE if put is not None else SPAN_KIND_GET
            if fetch is None:
                kind = SPAN_KIND_PUT
            with (
                channels[0].spans.spanned(kind, self._spec.name, _step_of(put, fetch)),
                ToldOf(channels),
                self._pool.borrowed(attempts.rest_s) as streams,
            ):
                self._run(asked, streams, put, fetch, attempts)

    def _run(
        self,
        asked: list[Asked],
        streams: StreamSet,
        put: RowPut | None,
        fetch: RowFetch | None,
        attempts: Attempts,
    ) -> None:
        channels = [one.channel for one in asked]
        subject = (self._spec.name, self.incarnation, self.tenure)
        opened = streams.streams(channels, subject, attempts.rest_s)
        wait_ms = wait_milliseconds(attempts.rest_s)
        for one, (stream, opens) in zip(asked, opened, strict=True):
            if put is not None and one.parts:
                put.is_sent = True
            messages = self.messages(
                one, put, fetch, wait_ms, opens=opens, trace_parent=attempts.trace_parent
            )
            stream.submit(messages, is_short=self._is_short(one))
        name, step, at_ns = self._spec.name, _step_of(put, fetch), now_ns()
        # In turns, so that no shard's stream stands still while another's is read.
        for number in range(max(one.answer_count for one in asked)):
            for one, (stream, _) in zip(asked, opened, strict=True):
                if number >= one.answer_count:
                    continue
                message = self._read(one.channel, stream, streams, put)
                channel = one.channel
                at_ns = channel.spans.add(SPAN_KIND_WAIT, name, step, number, channel.name, at_ns)
                question = number - bool(one.parts)
                if question < 0:
                    assert put is not None
                    self.take_counted(one, message, put)
                else:
                    assert fetch is not None
                    self.take_rows(one, message, fetch, one.questions[question])
                at_ns = channel.spans.add(SPAN_KIND_DECODE, name, step, number, channel.name, at_ns)

    def _is_short(self, one: Asked) -> bool:
        """Whether what is asked and answered is less than a socket holds, and soon made."""
        row_count = sum(stop - start for start, stop in [*one.parts, *one.questions])
        return row_count * self._row_bytes <= _SHORT_BYTES_MAX

    def _read(
        self, channel: ShardChannel, stream: ShardStream, streams: StreamSet, put: RowPut | None
    ) -> bytes:
        """The next answer of a shard."""
        try:
            return stream.read()
        except grpc.RpcError as error:
            failed = streams.call_group.error_of(channel, error, table=self._spec.name)
            if isinstance(failed, NonFiniteError) and put is not None:
                assert failed.shard_index is not None
                failed.element_index = put.element_index(failed.shard_index, failed.element_index)
                failed.args = (f"{failed.message}; {REFUSED_STEP.format('table')}",)
            raise failed from None

    def messages(
        self,
        asked: Asked,
        put: RowPut | None,
        fetch: RowFetch | None,
        wait_timeout_ms: int,
        *,
        opens: bool,
        trace_parent: str = "",
    ) -> Iterator[bytes]:
        """What a shard is sent: parts of a gradient, then questions. On a thread of gRPC's."""
        header = pb.ExchangeRowsRequest()
        if opens:
            header.open.shard.CopyFrom(asked.channel.identity)
            header.open.table = self._spec.name
            header.open.worker_id = self._worker_id
            header.open.incarnation = self.incarnation
            header.open.session = asked.channel.session.number
            header.open.tenure = self.tenure
            checksum.seal(header.open)
        if put is not None:
            spans, peer = asked.channel.spans, asked.channel.name
            for index, span in enumerate(asked.parts):
                begin_ns = now_ns()
                if trace_parent and index == 0:
                    header.gradient.trace_parent = trace_parent
                message = self._part(header, put, asked, index, span, wait_timeout_ms)
                spans.add(SPAN_KIND_ENCODE, self._spec.name, put.step, index, peer, begin_ns)
                yield message
                header = pb.ExchangeRowsRequest()
        if fetch is not None:
            for span in asked.questions:
                header.fetch.min_version = fetch.min_version
                if fetch.max_version is not None:
                    header.fetch.max_version = fetch.max_version
                header.fetch.wait_timeout_ms = wait_timeout_ms
                ids = fetch.ids.ids[slice(*span)]
                start = checksum.rows_fetch(self._fetch_context, header.fetch)
                message = self._codec.encode(header, header.fetch.rows, ids, None, start=start)
                self._traffic.add_sent(len(message), 0)
                yield message
                header = pb.ExchangeRowsRequest()

    def _part(
        self,
        header: pb.ExchangeRowsRequest,
        put: RowPut,
        asked: Asked,
        index: int,
        span: Span,
        wait_timeout_ms: int,
    ) -> bytes:
        gradient = header.gradient
        gradient.step = put.step
        gradient.part_index = index
        gradient.end_of_step = index == len(asked.parts) - 1
        gradient.sample_count = put.sample_count
        gradient.wait_timeout_ms = wait_timeout_ms
        gradient.abandons = put.sums is None
        ids = put.ids.ids[slice(*span)]
        values = np.empty((0, self._spec.dim), np.float32)
        peak = None
        if put.sums is not None and ids.size:
            values, peak = put.sums.rows(span), put.sums.peak
        start = checksum.row_gradients(self._gradient_context, gradient)
        message = self._codec.encode(header, gradient.rows, ids, values, start=start, peak=peak)
        self._traffic.add_sent(len(message), values.size)
        return message

    def take_counted(self, asked: Asked, message: bytes, put: RowPut) -> None:
        """Reads that a shard has counted all of a step.

        Raises:
            CorruptChunkError: it says something else.
        """
        header, _ = framing.parse(pb.ExchangeRowsResponse, message)
        counted = header.counted
        count = counted.counted_part_count + counted.duplicate_part_count
        is_whole = count == len(asked.parts) or put.sums is None
        if not header.HasField("counted") or counted.step != put.step or not is_whole:
            raise self._unexpected(
                asked, header, f"step {put.step} counted in {len(asked.parts)} parts"
            )
        if checksum.rows_counted(self._counted_context, counted, header.version) != counted.crc32c:
            raise self._damaged(
                asked,
                f"answered for {self._spec.name!r}: the count of step {put.step} is damaged; call "
                "again",
            )
        self.superseded_part_count += counted.superseded_part_count
        put.counted_shards.add(asked.channel.shard_index)

    def take_rows(self, asked: Asked, message: bytes, fetch: RowFetch, span: Span) -> None:
        """Reads rows that a shard answers.

        Raises:
            CorruptChunkError: they are others than were asked for, or damaged.
            StepOrderError: the shard knows less than this worker does.
        """
        header, payload = framing.parse(pb.ExchangeRowsResponse, message)
        count = span.stop - span.start
        if not header.HasField("rows"):
            raise self._unexpected(asked, header, f"{count} rows")
        ids = fetch.ids.ids[slice(*span)]
        start = checksum.rows_answer(self._answer_context, ids, header.version)
        rows = header.rows
        try:
            if rows.row_count == count:
                self._codec.spread(
                    rows,
                    payload,
                    start=start,
                    places=fetch.places,
                    starts=fetch.starts,
                    first=span.start,
                    stop=span.stop,
                    into=fetch.rows,
                )
            else:  # which are not damaged, or that is what is told
                self._codec.open(rows, payload, start=start, with_ids=False, with_values=True)
        except ShardwellError as error:
            raise self._damaged(
                asked, f"answered for {self._spec.name!r}: {error.message}"
            ) from None
        if rows.row_count != count or header.version < fetch.min_version:
            or_later = "" if fetch.is_exact else " or later"
            raise self._unexpected(
                asked, header, f"{count} rows at version {fetch.min_version}{or_later}"
            )
        if fetch.is_exact and header.version > fetch.min_version:
            raise went_on_elsewhere(
                asked.channel,
                f"table {self._spec.name!r}",
                self._worker_id,
                expected=fetch.min_version,
                found=header.version,
                table=self._spec.name,
            )
        if header.version < fetch.known_version:
            raise StepOrderError(
                f"shard {asked.channel.shard_index} has rows of {self._spec.name!r} after "
                f"{header.version} steps, and this worker has seen {fetch.known_version}: the "
                "shard lost its memory; restore a checkpoint, or start the training again under "
                "another name",
                shard_index=asked.channel.shard_index,
                table=self._spec.name,
            )
        if fetch.max_version is not None and header.version > fetch.max_version:
            _LOG.warning(
                "table %r: step %d of worker %r was cut off, and shard %d has no longer the rows "
                "before it: a gradient of these is another than was counted in part",
                self._spec.name,
                fetch.max_version,
                self._worker_id,
                asked.channel.shard_index,
            )
        self._traffic.add_received(len(message), count * self._spec.dim)
        fetch.answered(asked.channel.shard_index, header.version)

    def _unexpected(
        self, asked: Asked, header: pb.ExchangeRowsResponse, expected: str
    ) -> CorruptChunkError:
        if header.HasField("rows"):
            got = f"{header.rows.row_count} rows at version {header.version}"
        else:
            counted = header.counted
            got = (
                f"step {counted.step} counted in "
                f"{counted.counted_part_count + counted.duplicate_part_count} parts"
            )
        return self._damaged(asked, f"answered {got} for {self._spec.name!r}; expected {expected}")

    def _damaged(self, asked: Asked, what: str) -> CorruptChunkError:
        """The error for an answer that can't be believed; `what` its shard has done."""
        shard_index = asked.channel.shard_index
        return CorruptChunkError(
            f"shard {shard_index} {what}", shard_index=shard_index, table=self._spec.name
        )


def _step_of(put: RowPut | None, fetch: RowFetch | None) -> int:
    """The step that a call is of, or whose effect it fetches."""
    if put is not None:
        return put.step
    return NO_STEP if fetch is None else fetch.min_version - 1
