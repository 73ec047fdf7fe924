"""One parameter's bytes between a worker and the shards that own it: one attempt of each verb.

Gradients become messages, messages become weights. Every attempt ends with its calls ended, except
the streams of an exchange that succeeded, which are kept for the next. Whether another attempt is
made, and from which chunk on, is for the caller.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import grpc

from shardwell.errors import (
    CorruptChunkError,
    NonFiniteError,
    ShardwellError,
)
from shardwell.numerics.arguments import OF_PARAMETER, REFUSED_STEP, finite_peak
from shardwell.numerics.codec import Bytes, NonFiniteValueError
from shardwell.numerics.scratch import thread_scratch
from shardwell.parameter.pieces import Pieces
from shardwell.placement.readiness import Ranges
from shardwell.placement.slices import Slice
from shardwell.process.spans import Spanned, now_ns
from shardwell.process.spread import CoreThreads
from shardwell.rpc.arena import (
    BATCH_COUNT,
    Arena,
    Places,
    batch_count,
    payload_of,
    room_bytes,
    wanted_bytes,
)
from shardwell.rpc.call_group import CallGroup
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel, ToldOf, went_on_elsewhere
from shardwell.rpc.stream import ShardStream
from shardwell.rpc.stream_pool import StreamPool
from shardwell.specs.deadlines import wait_milliseconds
from shardwell.specs.learning_rate import factors_of
from shardwell.specs.parameter import ParameterSpec
from shardwell.traffic import Traffic
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.v1.trace_pb2 import (
    SPAN_KIND_DECODE,
    SPAN_KIND_ENCODE,
    SPAN_KIND_EXCHANGE,
    SPAN_KIND_GET,
    SPAN_KIND_PUT,
    SPAN_KIND_SEND,
    SPAN_KIND_WAIT,
)
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import ChunkCodec

_SHORT_ELEMENT_COUNT = 16_384
"""Of a slice that is encoded in less time than a thread takes to be woken, and whose messages and
answers, of up to 4 bytes an element, are less than what a socket holds."""
_SHORT_BYTES = 4 * _SHORT_ELEMENT_COUNT
"""Of messages that are made, and whose answers are no larger: less than what a socket holds."""

_LOOK_ELEMENT_COUNT = 1 << 20
"""Of values that one thread has looked at before others are woken for their part."""

_Answer: TypeAlias = tuple[pb.ExchangeResponse, Bytes, int]
"""Header, payload, and bytes of the message."""


@dataclass
class Gradient:
    """A gradient on its way."""

    values: Pieces
    step: int
    sample_count: int
    learning_rate: float | None
    """From its step on; None: as it is."""
    peaks: dict[int, float] = field(default_factory=dict)
    """Largest magnitudes of chunks that were looked at, by number: of all parts, in order."""
    after_refusal: bool = False
    """Whether a shard refused a part of the step's gradient before, and this is another one."""
    is_clipped: bool = False
    """Whether the worker has scaled it down to its largest norm, or found that it need not."""


class ShardSlice:
    """What this parameter is on one shard that owns a slice of it."""

    def __init__(
        self, channel: ShardChannel, where: Slice, chunk_element_count: int, first_chunk: int
    ) -> None:
        self.channel = channel
        self.where = where
        self.chunk_element_count = chunk_element_count
        self.first_chunk = first_chunk
        """How many chunks the parts before this one have."""
        self.chunks = [
            where.chunk(index, chunk_element_count)
            for index in range(where.chunk_count(chunk_element_count))
        ]


@dataclass
class Progress:
    """How far one gradient has come, whatever becomes of its connections: attempts go on there."""

    row: int = 0
    """Every shard has answered its chunks before this one, of those that it is sent."""
    version: float = math.inf
    """The fewest updates that a chunk among them has seen."""
    version_max: int = 0
    """The most."""
    counted_shards: set[int] = field(default_factory=set)
    """Shards that have told that they counted the whole gradient."""


@dataclass
class _Line:
    """One shard in one attempt."""

    part: ShardSlice
    first: int
    """The first chunk that is sent or asked for."""
    stop: int
    """The one behind the last."""
    stream: ShardStream
    opens: bool
    """Whether the first message must say what the stream is for."""
    arena: Arena | None
    """What the stream shares with the shard, as long as the attempt lasts."""
    is_shared: bool
    """Whether all payloads of the attempt have room there."""

    def ask(self, request: pb.ExchangeRequest) -> None:
        """Sends a question."""
        self.stream.submit(iter((request.SerializeToString(),)), is_short=True)


_Stretch: TypeAlias = tuple[ShardSlice, int, int]
"""A part, its first chunk that is sent or asked for, and the one behind the last."""


def _whole(parts: Sequence[ShardSlice]) -> list[_Stretch]:
    return [(part, 0, len(part.chunks)) for part in parts]


class _Wanted(NamedTuple):
    """What a call wants of weights."""

    weights: Pieces
    """(size,), filled."""
    min_version: int
    """The version that is waited for."""
    step: int
    """After which they are wanted."""
    is_exchange: bool
    """Whether versions must be `min_version` exactly, in synchronous mode."""


class _Lines(NamedTuple):
    """All shards in one attempt."""

    lines: list[_Line]
    call_group: CallGroup


class Transfer:
    """How one parameter's chunks are sent and taken.

    Any thread may fetch weights; the rest is for one thread at a time.

    Args:
        spec: The parameter.
        pool: Streams of its exchanges.
        worker_id: Whose calls they are.
        traffic: The client's, which counts them.
        threads: What takes pieces of their work.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        pool: StreamPool,
        *,
        worker_id: str,
        traffic: Traffic,
        threads: CoreThreads,
    ) -> None:
        self._spec = spec
        self._threads = threads
        self._pool = pool
        self._worker_id = worker_id
        self._traffic = traffic
        self.parts: list[ShardSlice] = []
        """Where the elements are, in the order of the shards; once the shards have said it."""
        self._codec = ChunkCodec.of(spec)
        self._gradient_context = checksum.gradient_context(spec.name, worker_id)
        self._fetch_context = checksum.weights_fetch_context(spec.name)
        self._weights_context = checksum.weights_context(spec.name)
        self.tenure = 0
        """See StreamOpen; once the shards have said it."""
        self.incarnation = 0
        """The same."""
        self.superseded: set[Slice] = set()
        """Ranges that a shard had counted before with other values; the caller empties it."""
        self.non_finite_remedy = OF_PARAMETER
        """What NonFiniteError advises about a gradient that was not sent."""
        self.refusal_remedy = REFUSED_STEP.format("parameter")
        """What it advises beside what a shard says that has refused a part."""

    def get_weights(
        self, weights: Pieces, min_version: int, attempts: Attempts, max_version: int | None = None
    ) -> Progress:
        """Fills `weights`; returns the versions of their chunks.

        `max_version`: see GetWeightsRequest.
        """
        with (
            self._spanned(SPAN_KIND_GET, min_version - 1),
            self._lines(_whole(self.parts), attempts, reads=True) as to,
        ):
            for line in to.lines:
                request = pb.ExchangeRequest()
                self._begin(request, line)
                fetch = request.fetch
                fetch.min_version = min_version
                fetch.wait_timeout_ms = wait_milliseconds(attempts.rest_s)
                fetch.in_arena = line.arena is not None
                if max_version is not None:
                    fetch.max_version = max_version
                fetch.crc32c = checksum.weights_fetch(self._fetch_context, fetch)
                line.ask(request)
            progress = Progress()
            self._receive(to, weights, min_version, progress, step=min_version - 1)
            return progress

    def check_finite(self, work: Gradient, stretches: Sequence[_Stretch] | None = None) -> None:
        """Notes the peaks of chunks, or of all, and refuses what is not finite.

        Raises:
            NonFiniteError: a value is not.
        """
        if self._spec.allow_non_finite:
            return
        every = _whole(self.parts) if stretches is None else stretches
        if sum(part.where.size for part, _, _ in every) < _LOOK_ELEMENT_COUNT:
            for stretch in every:
                self._look(work, stretch)
            return
        with self._threads.spread() as spread:
            for part, first, stop in every:
                for start in range(first, stop, BATCH_COUNT):
                    spread.give(self._look, work, (part, start, min(start + BATCH_COUNT, stop)))

    def _look(self, work: Gradient, stretch: _Stretch) -> None:
        """Notes the peaks of chunks, on any thread; see `check_finite`."""
        part, first, stop = stretch
        for index, where in enumerate(part.chunks[first:stop], first):
            number = part.first_chunk + index
            if number not in work.peaks:
                work.peaks[number] = finite_peak(
                    f"gradient of {self._spec.name!r}",
                    work.values.read(where.offset, where.stop),
                    self._spec.name,
                    where.offset,
                    self.non_finite_remedy,
                    name_of=self._spec.element,
                )

    def put_gradient(self, work: Gradient, progress: Progress, attempts: Attempts) -> None:
        """Sends a gradient to all shards that have not told yet that they counted all of it.

        Raises:
            NonFiniteError: some of it is not finite; nothing was sent.
            ShardwellError: see `Parameter.put_gradient`.
        """
        parts = [
            part for part in self.parts if part.channel.shard_index not in progress.counted_shards
        ]
        with self._spanned(SPAN_KIND_PUT, work.step), self._lines(_whole(parts), attempts) as to:
            self._send(to, work, attempts, counts_only=True)
            for line in to.lines:
                answer = self._answer(to, line)
                if answer.HasField("superseded"):
                    self._note_superseded(line.part, answer.superseded)
                    answer = self._answer(to, line)
                shard_index, chunk_count = line.part.channel.shard_index, len(line.part.chunks)
                counted = answer.counted.counted_chunk_count + answer.counted.duplicate_chunk_count
                is_intact = checksum.of_message(answer.counted) == answer.counted.crc32c
                if not (answer.HasField("counted") and is_intact and counted == chunk_count):
                    raise self._damaged(
                        line.part,
                        f"counted {counted} of {chunk_count} chunks of {self._spec.name!r}, or its "
                        "answer was damaged; call again",
                    )
                progress.counted_shards.add(shard_index)

    def close_step(self, step: int, attempts: Attempts) -> None:
        """Closes a step that closes by its norm, once all workers have contributed.

        Safe to repeat, and for several clients at once: the first shard decides which norm counts.
        """
        answers = self._ask_to_close(self.parts, step, None, attempts)
        norm = next((answer.norm for answer in answers if answer.HasField("norm")), None)
        if norm is None:
            if not all(answer.HasField("squared_norm") for answer in answers):
                return  # all workers have gone on, so it is closed everywhere
            norm = math.sqrt(math.fsum(answer.squared_norm for answer in answers))
        first, *others = self.parts
        (decided,) = self._ask_to_close([first], step, norm, attempts)
        if decided.HasField("norm"):
            self._ask_to_close(others, step, decided.norm, attempts)

    def _ask_to_close(
        self, parts: Sequence[ShardSlice], step: int, norm: float | None, attempts: Attempts
    ) -> list[pb.CloseStepResponse]:
        """Asks some shards at once."""
        with self._lines([(part, 0, 0) for part in parts], attempts) as to:
            for line in to.lines:
                request = pb.ExchangeRequest()
                self._begin(request, line)
                close = request.close
                close.shard.CopyFrom(line.part.channel.identity)
                close.parameter = self._spec.name
                close.incarnation = self.incarnation
                close.step = step
                if norm is not None:
                    close.norm = norm
                close.wait_timeout_ms = wait_milliseconds(attempts.rest_s)
                checksum.seal(close)
                line.ask(request)
            return [self._closed(line, self._answer(to, line)) for line in to.lines]

    def _closed(self, line: _Line, answer: pb.ExchangeResponse) -> pb.CloseStepResponse:
        """What a shard says of a step that is to close."""
        channel = line.part.channel
        if not answer.HasField("closed"):
            raise self._damaged(
                line.part,
                f"was to close a step of {self._spec.name!r}, and answered something else; call "
                "again",
            )
        return channel.received(answer.closed, self._spec.name)

    def exchange(
        self,
        work: Gradient,
        weights: Pieces,
        progress: Progress,
        ranges: Ranges | None,
        attempts: Attempts,
    ) -> int:
        """Sends chunks of a gradient, from `progress` on; fills `weights` with what comes of them.

        Returns the fewest updates that a chunk has seen.

        Args:
            work: The gradient.
            weights: (size,), filled.
            progress: See `_receive`.
            ranges: Which chunks of each part; None: all.
            attempts: Of the call.

        Raises:
            NonFiniteError: some of these chunks is not finite; nothing of them was sent.
            ShardwellError: see `Parameter.exchange`.
        """
        min_version = work.step + 1 if self._spec.mode == "sync" else 0
        stretches = _whole(self.parts)
        if ranges is not None:
            stretches = [(p, *r) for (p, _, _), r in zip(stretches, ranges, strict=True)]
        stretches = [
            (part, max(first, progress.row), stop)
            for part, first, stop in stretches
            if max(first, progress.row) < stop
        ]
        if not stretches:  # an attempt failed behind the last answer
            return int(progress.version)
        with (
            self._spanned(SPAN_KIND_EXCHANGE, work.step),
            self._lines(stretches, attempts) as to,
        ):
            self._send(to, work, attempts)
            return self._receive(
                to, weights, min_version, progress, step=work.step, is_exchange=True
            )

    def _spanned(self, kind: int, step: int) -> Spanned:
        """Notes how long the block took."""
        return self.parts[0].channel.spans.spanned(kind, self._spec.name, step)

    @contextlib.contextmanager
    def _lines(
        self,
        stretches: Sequence[_Stretch],
        attempts: Attempts,
        *,
        reads: bool = False,
    ) -> Iterator[_Lines]:
        """A stream to the shard of each part, for some of its chunks, in the order given.

        Streams that are opened only to read share no memory and end with the call: who only reads,
        or waits for weights beside its own steps, uses up nothing that others need.
        """
        channels = [part.channel for part, _, _ in stretches]
        lines: list[_Line] = []
        with ToldOf(channels), self._pool.borrowed(attempts.rest_s) as streams:
            subject = (self._spec.name, self.incarnation, self.tenure)
            streams.only_reads = reads and streams.is_new
            opened = streams.streams(channels, subject, attempts.rest_s)
            try:
                for stretch, (stream, opens) in zip(stretches, opened, strict=True):
                    room_bytes = 0 if streams.only_reads else self._room_bytes(*stretch)
                    arena = stream.arena(room_bytes, attempts.rest_s)
                    is_shared = arena is not None and arena.has_room(room_bytes)
                    lines.append(_Line(*stretch, stream, opens, arena, is_shared))
                yield _Lines(lines, streams.call_group)
            finally:
                for line in lines:  # whoever keeps the error keeps no memory with it
                    line.arena = None

    def _room_bytes(self, part: ShardSlice, first: int, stop: int) -> int:
        """What an arena needs for chunks [first, stop); 0: nothing is to be shared."""
        if self._spec.lz4:
            return 0
        item_size = self._codec.codec.item_size
        return wanted_bytes([each.size * item_size for each in part.chunks[first:stop]])

    def _send(
        self,
        to: _Lines,
        work: Gradient,
        attempts: Attempts,
        *,
        counts_only: bool = False,
    ) -> None:
        """Sends each line's chunks of a gradient, all of them finite.

        Where everything is shared, or short, the messages are made here: whoever encodes looks at
        the values in the same pass, and nothing has left by then. Elsewhere all values are looked
        at, and messages made as they leave.
        """
        are_short = all(line.part.where.size <= _SHORT_ELEMENT_COUNT for line in to.lines)
        are_made_here = are_short or all(line.is_shared for line in to.lines)
        if not are_made_here:
            self.check_finite(work, [(line.part, line.first, line.stop) for line in to.lines])
        common = types_pb2.GradientChunk(
            step=work.step,
            sample_count=work.sample_count,
            wait_timeout_ms=wait_milliseconds(attempts.rest_s),
            counts_only=counts_only,
            learning_rate=work.learning_rate,
            after_refusal=work.after_refusal,
            rate_factors=factors_of(work.learning_rate),
        )
        trace_parent = attempts.trace_parent
        if not are_made_here:
            for line in to.lines:
                line.stream.submit(self._messages(line, work, common, trace_parent, leaves=True))
            return
        if self._threads.count < 2 or are_short:
            made = [[*self._messages(line, work, common, trace_parent)] for line in to.lines]
        else:
            made = self._made_beside(to.lines, work, common, trace_parent)
        for line, messages in zip(to.lines, made, strict=True):
            is_short = line.part.where.size <= _SHORT_ELEMENT_COUNT
            is_short = is_short or sum(map(len, messages)) <= _SHORT_BYTES
            line.stream.submit(iter(messages), is_short=is_short)

    def _made_beside(
        self,
        lines: Sequence[_Line],
        work: Gradient,
        common: types_pb2.GradientChunk,
        trace_parent: str,
    ) -> list[list[bytes]]:
        """Each line's messages, made by all threads that are free.

        Raises:
            NonFiniteError: a value is not finite; of several, the first is named.
        """
        pieces: list[list[list[bytes]]] = []
        with self._threads.spread() as spread:
            for line in lines:
                size = batch_count(line.stop - line.first)
                starts = range(line.first, line.stop, size)
                pieces.append([[] for _ in starts])
                for messages, start in zip(pieces[-1], starts, strict=True):
                    stretch = (start, min(start + size, line.stop))
                    spread.give(self._make, messages, line, work, common, trace_parent, stretch)
        return [list(itertools.chain.from_iterable(made)) for made in pieces]

    def _make(
        self,
        messages: list[bytes],
        line: _Line,
        work: Gradient,
        common: types_pb2.GradientChunk,
        trace_parent: str,
        stretch: tuple[int, int],
    ) -> None:
        """Adds some of a line's messages."""
        messages += self._messages(line, work, common, trace_parent, stretch)

    def _begin(self, request: pb.ExchangeRequest, line: _Line) -> None:
        """Says what the first message of a call has to say about its stream."""
        if line.opens:
            request.open.CopyFrom(self._opening(line.part.channel))
        arena = line.arena
        if arena is not None and not arena.is_announced:
            request.arena, arena.is_announced = arena.token, True

    def _messages(
        self,
        line: _Line,
        work: Gradient,
        common: types_pb2.GradientChunk,
        trace_parent: str,
        stretch: tuple[int, int] | None = None,
        *,
        leaves: bool = False,
    ) -> Iterator[bytes]:
        """A line's chunks of a gradient; on another thread, mostly.

        Args:
            line: The shard, and its chunks.
            work: The gradient.
            common: What the chunks have in common.
            trace_parent: Of the call.
            stretch: The first chunk that is made, and the one behind the last; None: all.
            leaves: Whether each is sent when it is made: its values were looked at before.
        """
        part, arena = line.part, line.arena
        scratch = thread_scratch()
        spans, name, peer = part.channel.spans, self._spec.name, part.channel.name
        item_size = self._codec.codec.item_size
        first, last = line.first, line.stop - 1
        begin, stop = stretch or (first, line.stop)
        batch = framing.Batch(pb.ExchangeRequest, batch_count(line.stop - first))
        places = None
        if arena is not None:  # all chunks before the last have one size
            before = (begin - first) * room_bytes(part.chunks[first].size * item_size)
            places = Places(arena.memory, before)
        start = checksum.gradient(self._gradient_context, common)
        for index in range(begin, stop):
            at_ns = now_ns()
            where = part.chunks[index]
            header = pb.ExchangeRequest(gradient=common)
            gradient = header.gradient
            chunk = gradient.chunk
            if index == first:
                self._begin(header, line)
                gradient.trace_parent = trace_parent
            gradient.end_of_step = index == last
            gradient.control_crc32c = checksum.gradient_control(gradient)
            room = None if places is None else places.room(where.size * item_size)
            try:
                message = self._codec.encode(
                    header,
                    chunk,
                    where,
                    index,
                    work.values.read(where.offset, where.stop),
                    scratch,
                    start=start,
                    peak=work.peaks.get(part.first_chunk + index),
                    is_exact=True,
                    room=room,
                )
            except NonFiniteValueError as error:
                if not leaves:
                    self.check_finite(work, [(part, index, index + 1)])  # says so
                # The caller changed the array meanwhile.
                raise NonFiniteError(
                    f"gradient of {self._spec.name!r}: "
                    f"{self._spec.element(where.offset + error.index)} became "
                    f"{error.value} while it was sent; do not write to it before the call returns",
                    element_index=where.offset + error.index,
                    parameter=self._spec.name,
                ) from None
            shared_bytes = chunk.shared.size
            self._traffic.add_sent(len(message) + shared_bytes, where.size, shared_bytes)
            at_ns = spans.add(SPAN_KIND_ENCODE, name, work.step, index, peer, at_ns)
            yield from batch.add(message, waits=shared_bytes > 0)
            if leaves:
                spans.add(SPAN_KIND_SEND, name, work.step, index, peer, at_ns)
        yield from batch.rest()

    def _read(self, to: _Lines, line: _Line) -> bytes:
        """The next message of a shard; blocks."""
        try:
            return line.stream.read()
        except grpc.RpcError as error:
            failed = to.call_group.error_of(line.part.channel, error, parameter=self._spec.name)
            if isinstance(failed, NonFiniteError):
                failed.args = (f"{failed.message}; {self.refusal_remedy}",)
            raise failed from None

    def _answer(self, to: _Lines, line: _Line) -> pb.ExchangeResponse:
        """The same without a payload."""
        message = self._read(to, line)  # whose error may be another shard's
        try:
            return framing.parse(pb.ExchangeResponse, message)[0]
        except CorruptChunkError as error:
            raise self._damaged(
                line.part, f"answered for {self._spec.name!r}: {error.message}"
            ) from None

    def _receive(
        self,
        to: _Lines,
        weights: Pieces,
        min_version: int,
        progress: Progress,
        *,
        step: int,
        is_exchange: bool = False,
    ) -> int:
        """Reads every chunk of every line, in turns, so that no shard's stream stands still.

        All clients read shard by shard within a chunk index, in the same order, whichever chunks
        their calls have; with it, a shard that waits until its answer is taken can never be part of
        a circle of waits (docs/adr/0033-pieces.md).

        Args:
            to: What to read, in the order of the shards.
            weights: (size,), filled.
            min_version: The version that is waited for.
            progress: Where to begin; then, after an error too, how far it came.
            step: After which the weights are wanted.
            is_exchange: Whether versions must be `min_version` exactly.

        Returns:
            The fewest updates that a chunk has seen.

        Raises:
            ShardwellError: see `Parameter.get_weights`.
        """
        stop = max((line.stop for line in to.lines), default=0)
        read_ahead: list[deque[_Answer]] = [deque() for _ in to.lines]
        name, at_ns = self._spec.name, now_ns()
        wanted = _Wanted(weights, min_version, step, is_exchange)
        first, spread = progress.row, None
        versions: list[list[int]] = []  # of the chunks that have come, by row
        try:
            for index in range(first, stop):
                versions.append([])
                for line, answers in zip(to.lines, read_ahead, strict=True):
                    if not line.first <= index < line.stop:
                        continue
                    channel = line.part.channel
                    while not answers or answers[0][0].HasField("superseded"):
                        if answers:
                            header, *_ = answers.popleft()
                            self._note_superseded(line.part, header.superseded)
                            continue
                        message = self._read(to, line)
                        at_ns = channel.spans.add(
                            SPAN_KIND_WAIT, name, step, index, channel.name, at_ns
                        )
                        answers.extend(framing.parse_all(pb.ExchangeResponse, message))
                    answer = answers.popleft()
                    if answers and self._threads.count > 1:  # this thread has more to do
                        spread = spread or self._threads.spread()
                        spread.give(self._decode, versions[-1], line, index, answer, wanted)
                        at_ns = now_ns()
                    else:
                        at_ns = self._decode(versions[-1], line, index, answer, wanted)
        finally:
            try:
                if spread is not None:
                    spread.wait()
            finally:
                self._note_progress(to, progress, versions)
        for line, answers in zip(to.lines, read_ahead, strict=True):
            if answers:
                raise self._damaged(
                    line.part,
                    f"answered more chunks of {self._spec.name!r} than it was asked for; call "
                    "again",
                )
        return int(progress.version)

    def _note_progress(
        self, to: _Lines, progress: Progress, versions: Sequence[Sequence[int]]
    ) -> None:
        """Notes the rows that have come whole, of those from `progress` on."""
        for index, row in enumerate(versions, progress.row):
            if len(row) < sum(line.first <= index < line.stop for line in to.lines):
                return
            if row:
                progress.version = min(progress.version, *row)
                progress.version_max = max(progress.version_max, *row)
            progress.row = index + 1

    def _note_superseded(self, part: ShardSlice, found: pb.SupersededChunks) -> None:
        """Notes what a shard says that it had counted before with other values.

        Raises:
            CorruptChunkError: that was damaged.
        """
        indexes = found.chunk_indexes
        is_whole = checksum.of_message(found) == found.crc32c
        if not is_whole or not indexes or max(indexes) >= len(part.chunks):
            raise self._damaged(
                part,
                f"answered for {self._spec.name!r} which chunks it had counted before, and the "
                "answer is damaged; call again",
            )
        self.superseded.update(part.chunks[index] for index in indexes)

    def _decode(
        self,
        versions: list[int],
        line: _Line,
        index: int,
        answer: _Answer,
        wanted: _Wanted,
    ) -> int:
        """Checks a chunk of weights and writes it where it belongs; returns when that was done.

        Its version is added to `versions`.
        """
        part, begin_ns = line.part, now_ns()
        header, payload, size_bytes = answer
        where = part.chunks[index]
        chunk: types_pb2.Chunk = header.chunk
        try:
            payload = payload_of(chunk, payload, None if line.arena is None else line.arena.memory)
            start = checksum.weights(self._weights_context, header.version)
            with wanted.weights.writing(where.offset, where.stop) as values:
                self._codec.read(chunk, payload, start, where, values)
        except ShardwellError as error:
            del payload, answer  # whoever keeps the error keeps no memory with it
            raise self._damaged(
                part, f"answered for {self._spec.name!r}: {error.message}"
            ) from None
        min_version = wanted.min_version
        exact = wanted.is_exchange and self._spec.mode == "sync"
        if chunk.chunk_index != index or header.version < min_version:
            raise self._damaged(
                part,
                f"answered chunk {chunk.chunk_index} at version {header.version} of "
                f"{self._spec.name!r}; expected chunk {index} at version {min_version}"
                f"{'' if exact else ' or later'}",
            )
        if exact and header.version > min_version:  # a later step closes with this worker only
            raise went_on_elsewhere(
                part.channel,
                f"parameter {self._spec.name!r}",
                self._worker_id,
                expected=min_version,
                found=header.version,
                parameter=self._spec.name,
            )
        shared_bytes = chunk.shared.size
        self._traffic.add_received(size_bytes + shared_bytes, where.size, shared_bytes)
        versions.append(int(header.version))
        channel = part.channel
        return channel.spans.add(
            SPAN_KIND_DECODE, self._spec.name, wanted.step, index, channel.name, begin_ns
        )

    def _damaged(self, part: ShardSlice, what: str) -> CorruptChunkError:
        """The error for an answer that can't be believed; `what` its shard has done."""
        shard_index = part.channel.shard_index
        return CorruptChunkError(
            f"shard {shard_index} {what}", shard_index=shard_index, parameter=self._spec.name
        )

    def _opening(self, channel: ShardChannel) -> types_pb2.StreamOpen:
        opening = types_pb2.StreamOpen(
            shard=channel.identity,
            parameter=self._spec.name,
            worker_id=self._worker_id,
            session=channel.session.number,
            tenure=self.tenure,
            incarnation=self.incarnation,
        )
        return checksum.seal(opening)
