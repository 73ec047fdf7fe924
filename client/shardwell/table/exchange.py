"""One table's rows between a worker and all shards: one attempt of fetching, putting, or both.

A call's ids and gradients become messages, answers become rows. Everything leaves for all shards
before any answer is awaited. Whether another attempt is made, and from where on, is for the caller:
works know how far they have come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from typing_extensions import override

from shardwell.errors import (
    CorruptChunkError,
    NonFiniteError,
    OtherIncarnationError,
    ShardwellError,
)
from shardwell.numerics.arguments import REFUSED_STEP
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids
from shardwell.process.spans import NO_STEP, Traffic, now_ns
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel, went_on_elsewhere
from shardwell.specs.deadlines import wait_milliseconds
from shardwell.specs.table import TableSpec
from shardwell.steps import transfer
from shardwell.steps.opening import Opening
from shardwell.steps.transfer import SHORT_BYTES, Answer, StepTransfer
from shardwell.table.batch import RowSums, ShardedIds, Span
from shardwell.transport.stream_pool import StreamPool
from shardwell.v1 import table_pb2 as pb
from shardwell.v1.trace_pb2 import (
    SPAN_KIND_DECODE,
    SPAN_KIND_ENCODE,
    SPAN_KIND_EXCHANGE,
    SPAN_KIND_GET,
    SPAN_KIND_PUT,
)
from shardwell.wire import checksum
from shardwell.wire.rows import ID_SIZE_BYTES, RowCodec

_LOG = logging.getLogger("shardwell")


@dataclass(eq=False)
class RowPut:
    """One step's gradient on its way, over all attempts; `sums` None: the step is abandoned."""

    ids: ShardedIds
    sums: RowSums | None
    step: int
    sample_count: int
    row_count_max: int
    counted_shards: set[int] = field(default_factory=set)
    """Shards that have confirmed all of the step."""
    is_sent: bool = False
    """True once any of it may have reached a shard."""
    is_again: bool = False
    """True if some of it may have reached a shard in an earlier attempt."""
    outcomes: dict[int, pb.RowsOutcome] = field(default_factory=dict)
    """The outcome on each shard that has counted it, with elastic members."""

    def parts(self, shard_index: int) -> list[Span]:
        """Returns the parts for a shard; at least one, which ends the step there."""
        start = self.ids.bounds[shard_index]
        return self.ids.messages(shard_index, self.row_count_max) or [Span(start, start)]

    def is_late(self, shard_index: int) -> bool:
        """Returns True if a shard has answered that some of it came too late."""
        found = self.outcomes.get(shard_index)
        return found is not None and bool(found.late_part_indexes)

    def digest(self) -> tuple[int, ...]:
        """Returns numbers that tell it from other steps."""
        return (self.sample_count, *(self.sums.digest() if self.sums is not None else ()))

    def element_index(self, shard_index: int, index: int) -> int:
        """Returns the place in the caller's array of an element that a shard names; -1: unknown.

        `index` is row * dim + column in a message; which message is known only if there was one.
        """
        parts = self.parts(shard_index)
        if self.sums is None or len(parts) > 1:
            return -1
        return self.sums.element_index(parts[0], index)


@dataclass(eq=False)
class RowFetch:
    """Rows on their way, over all attempts."""

    ids: ShardedIds
    rows: Float32
    """(n, dim) float32, C-contiguous, filled."""
    places: Ids
    """With `starts` the places that each row has, as in `row_batches.SortedIds`."""
    starts: Ids
    row_count_max: int
    min_version: int = 0
    """Steps that are to have closed."""
    known_version: int = 0
    """Steps that have closed on every shard."""
    max_version: int | None = None
    """The version that is wanted where a shard has it; None: the newest."""
    is_exact: bool = False
    """True if no later version is accepted."""
    unless_late: bool = False
    """True if rows of a shard where the step was late may have any version."""
    every_shard: int = 0
    """The shards to ask, those without rows too; 0: only those with some."""
    _versions: dict[Span, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._messages = {
            shard_index: self.ids.messages(shard_index, self.row_count_max)
            for shard_index in self.ids.shards()
        }
        for shard_index in range(self.every_shard):  # spans of no rows, that differ
            self._messages.setdefault(shard_index, [Span(shard_index, shard_index)])

    @property
    def version(self) -> float:
        """The fewest steps that an arrived row has seen; infinite if none has arrived."""
        return min(self._versions.values(), default=math.inf)

    @property
    def shard_count(self) -> int:
        """The number of shards that are asked."""
        return len(self._messages)

    def missing(self, shard_index: int) -> list[Span]:
        """Returns the messages that a shard has not answered yet."""
        spans = self._messages.get(shard_index, [])
        return [span for span in spans if span not in self._versions] if self._versions else spans

    def answered(self, span: Span, version: int) -> None:
        """Notes that the rows of one message have come. Any thread."""
        self._versions[span] = version


class Asked(NamedTuple):
    """The content of one attempt for one shard."""

    channel: ShardChannel
    put: RowPut | None
    fetch: RowFetch | None
    parts: list[Span]
    questions: list[Span]
    step: int
    """The step that the call is of, or whose effect it fetches."""


Line: TypeAlias = transfer.Line[Asked]


class RowTransfer(StepTransfer[Asked]):
    """The way of one table's rows. Any thread may use it; one at a time puts."""

    _open_type = pb.TableOpen
    _answer_type = pb.ExchangeRowsResponse

    def __init__(
        self,
        opening: Opening[TableSpec, Any],
        pool: StreamPool,
        shards: Shards,
        traffic: Traffic,
    ) -> None:
        super().__init__(opening, pool, shards, traffic)
        spec = self._spec = opening.spec
        self._channels = shards.channels
        self._codec = RowCodec.of(spec)
        self._row_bytes = ID_SIZE_BYTES + self._codec.codec.item_size * spec.dim
        self._gradient_context = checksum.context(
            checksum.Kind.ROW_GRADIENTS, spec.name, opening.worker_id
        )
        self._fetch_context = checksum.context(checksum.Kind.ROWS_FETCH, spec.name)
        self._answer_context = checksum.context(checksum.Kind.ROWS_ANSWER, spec.name)
        self._counted_context = checksum.context(checksum.Kind.ROWS_COUNTED, spec.name)
        self._outcome_context = checksum.context(checksum.Kind.ROWS_OUTCOME, spec.name)
        self.row_count_max = self._codec.row_count_max
        """Rows of one message that is sent; fewer, once the shards have said so."""
        self.superseded_part_count = 0
        """Parts that shards had counted with other rows or gradients; the caller makes it 0."""

    def attempt(self, put: RowPut | None, fetch: RowFetch | None, attempts: Attempts) -> None:
        """Sends and fetches what is left of a call."""
        step = NO_STEP if fetch is None else fetch.min_version - 1
        step = step if put is None else put.step
        stretches: list[transfer.Stretch[Asked]] = []
        for channel in self._channels:
            index = channel.shard_index
            questions = [] if fetch is None else fetch.missing(index)
            parts = [] if put is None or index in put.counted_shards else put.parts(index)
            if put is not None and fetch is not None and fetch.unless_late and questions:
                parts = put.parts(index)  # counted parts count once, and their outcome comes anew
            asked = Asked(channel, put, fetch, parts, questions, step)
            if count := bool(parts) + len(questions):
                stretches.append((asked, 0, count))
        if not stretches:
            return
        kind = SPAN_KIND_GET
        if put is not None:
            kind = SPAN_KIND_PUT if fetch is None else SPAN_KIND_EXCHANGE
            put.is_again |= put.is_sent
        with self._lines(stretches, attempts, span_kind=kind, step=step) as lines:
            wait_ms = wait_milliseconds(attempts.rest_s)
            for line in lines:
                if put is not None and line.part.parts:
                    put.is_sent = True
                spans = [*line.part.parts, *line.part.questions]
                size_bytes = sum(stop - start for start, stop in spans) * self._row_bytes
                # What a socket holds, and is soon made, needs no thread of its own.
                is_short = size_bytes <= SHORT_BYTES
                line.stream.submit(self._messages(line, wait_ms), is_short=is_short)
            self._receive(lines, 0, step, self._take)

    @override
    def _explain(self, line: Line, error: NonFiniteError) -> None:
        put = line.part.put
        if put is not None:
            assert error.shard_index is not None
            error.element_index = put.element_index(error.shard_index, error.element_index)
            error.args = (f"{error.message}; {REFUSED_STEP.format('table')}",)

    def _messages(self, line: Line, wait_timeout_ms: int) -> Iterator[bytes]:
        """Yields a shard's messages: parts, then questions. On another thread, mostly."""
        asked, put = line.part, line.part.put
        header = pb.ExchangeRowsRequest()
        if line.opens:
            header.open.CopyFrom(self._stream_open(asked.channel))
        if put is not None:
            step, peer, last = put.step, asked.channel.name, len(asked.parts) - 1
            no_values = np.empty((0, self._spec.dim), np.float32)
            for index, span in enumerate(asked.parts):
                begin_ns, gradient = now_ns(), header.gradient
                gradient.step, gradient.part_index = step, index
                gradient.end_of_step = index == last
                gradient.sample_count = put.sample_count
                gradient.wait_timeout_ms = wait_timeout_ms
                gradient.abandons = put.sums is None
                ids = put.ids.ids[slice(*span)]
                values = no_values if put.sums is None or not ids.size else put.sums.rows(span)
                start = checksum.row_gradients(self._gradient_context, gradient)
                message = self._codec.encode(header, gradient.rows, ids, values, start=start)
                self._traffic.add_sent(len(message), values.size)
                self._spans.add(SPAN_KIND_ENCODE, self._name, step, index, peer, begin_ns)
                yield message
                header = pb.ExchangeRowsRequest()
        fetch = asked.fetch
        if fetch is not None:
            for span in asked.questions:
                header.fetch.min_version = self._min_version(asked, fetch)
                header.fetch.unless_late = fetch.unless_late and bool(asked.parts)
                if fetch.max_version is not None:
                    header.fetch.max_version = fetch.max_version
                header.fetch.wait_timeout_ms = wait_timeout_ms
                ids = fetch.ids.ids[slice(*span)]
                start = checksum.rows_fetch(self._fetch_context, header.fetch)
                message = self._codec.encode(header, header.fetch.rows, ids, None, start=start)
                self._traffic.add_sent(len(message), 0)
                yield message
                header = pb.ExchangeRowsRequest()

    def _take(self, line: Line, number: int, answer: Answer) -> None:
        """Takes an answer: first that the gradient was counted, if one was sent, then the rows."""
        asked, begin_ns = line.part, now_ns()
        question = number - bool(asked.parts)
        if question < 0:
            assert asked.put is not None
            self._take_counted(line, answer[0], asked.put)
        else:
            assert asked.fetch is not None
            self._take_rows(line, answer, asked.fetch, asked.questions[question])
        peer = asked.channel.name
        self._spans.add(SPAN_KIND_DECODE, self._name, asked.step, number, peer, begin_ns)

    def _take_counted(self, line: Line, header: pb.ExchangeRowsResponse, put: RowPut) -> None:
        asked, counted = line.part, header.counted
        count = counted.counted_part_count + counted.duplicate_part_count
        count += len(header.outcome.late_part_indexes)
        is_whole = count == len(asked.parts) or put.sums is None
        is_whole &= header.HasField("outcome") == self._spec.has_open_sets
        if not header.HasField("counted") or counted.step != put.step or not is_whole:
            parts = f"step {put.step} counted in {len(asked.parts)} parts"
            raise self._unexpected(line, header, parts)
        if checksum.rows_counted(self._counted_context, counted, header.version) != counted.crc32c:
            raise self._damaged(line, f"the count of step {put.step} is damaged; call again")
        if header.HasField("outcome"):
            self._take_outcome(line, header.outcome, put)
        self.superseded_part_count += counted.superseded_part_count
        put.counted_shards.add(asked.channel.shard_index)

    def _take_outcome(self, line: Line, found: pb.RowsOutcome, put: RowPut) -> None:
        shard_index = line.part.channel.shard_index
        part_count = len(put.parts(shard_index))
        is_whole = checksum.rows_outcome(self._outcome_context, found) == found.crc32c
        indexes = (*found.late_part_indexes, *found.superseded_part_indexes)
        if not is_whole or found.step != put.step or max(indexes, default=0) >= part_count:
            raise self._damaged(line, f"the outcome of step {put.step} is damaged; call again")
        put.outcomes[shard_index] = found

    @staticmethod
    def _min_version(asked: Asked, fetch: RowFetch) -> int:
        put = asked.put
        is_late = put is not None and put.is_late(asked.channel.shard_index)
        return 0 if is_late and fetch.unless_late else fetch.min_version

    def _take_rows(self, line: Line, answer: Answer, fetch: RowFetch, span: Span) -> None:
        """Reads rows of a shard, which may know fewer closed steps than this worker does."""
        asked = line.part
        header, payload, size_bytes = answer
        count = span.stop - span.start
        if not header.HasField("rows"):
            raise self._unexpected(line, header, f"{count} rows")
        if asked.put is not None and header.HasField("outcome"):
            self._take_outcome(line, header.outcome, asked.put)
        min_version = self._min_version(asked, fetch)
        ids = fetch.ids.ids[slice(*span)]
        start = checksum.rows_answer(self._answer_context, ids, header.version)
        rows = header.rows
        try:
            if rows.row_count == count and count:
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
            else:  # other ids or none; a damaged message raises
                self._codec.open(rows, payload, start=start, with_ids=False, with_values=True)
        except ShardwellError as error:
            del payload, answer  # which the error that is raised would hold
            raise self._damaged(line, error.message) from None
        if rows.row_count != count or header.version < min_version:
            or_later = "" if fetch.is_exact else " or later"
            expected = f"{count} rows at version {min_version}{or_later}"
            raise self._unexpected(line, header, expected)
        if fetch.is_exact and header.version > fetch.min_version:
            raise went_on_elsewhere(
                asked.channel,
                self._opening.what,
                self._opening.worker_id,
                expected=fetch.min_version,
                found=header.version,
                **self._opening.of,
            )
        if header.version < fetch.known_version:
            raise OtherIncarnationError(
                f"shard {asked.channel.shard_index} has rows of {self._spec.name!r} after "
                f"{header.version} steps, and this worker has seen {fetch.known_version}: the "
                "shard lost its memory; restore a checkpoint, or start the training again under "
                "another name",
                shard_index=asked.channel.shard_index,
                **self._opening.of,
            )
        if fetch.max_version is not None and header.version > fetch.max_version:
            _LOG.warning(
                "table %r: step %d of worker %r was cut off, and shard %d has no longer the rows "
                "before it: a gradient of these is another than was counted in part",
                self._spec.name,
                fetch.max_version,
                self._opening.worker_id,
                asked.channel.shard_index,
            )
        self._traffic.add_received(size_bytes, count * self._spec.dim)
        fetch.answered(span, header.version)

    def _unexpected(
        self, line: Line, header: pb.ExchangeRowsResponse, expected: str
    ) -> CorruptChunkError:
        counted = header.counted
        part_count = counted.counted_part_count + counted.duplicate_part_count
        got = f"step {counted.step} counted in {part_count} parts"
        if header.HasField("rows"):
            got = f"{header.rows.row_count} rows at version {header.version}"
        return self._damaged(line, f"{got}; expected {expected}")
