"""One parameter's bytes between a worker and the shards that own it: one attempt of each verb.

Gradients become messages, messages become weights. Every attempt ends with its calls ended, except
the streams of an exchange that succeeded, which are kept for the next. Whether another attempt is
made, and from which chunk on, is for the caller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

from typing_extensions import override

from shardwell.errors import NonFiniteError, ShardwellError
from shardwell.numerics.arguments import OF_PARAMETER, REFUSED_STEP, check_finite
from shardwell.numerics.codec import NonFiniteValueError
from shardwell.parameter.image import Image
from shardwell.parameter.values import Pieces
from shardwell.placement.readiness import Ranges
from shardwell.placement.slices import Slice
from shardwell.process.spans import Traffic, now_ns
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel, went_on_elsewhere
from shardwell.specs.deadlines import wait_milliseconds
from shardwell.specs.grouped_rate import factors_of
from shardwell.specs.parameter import ParameterSpec
from shardwell.steps import transfer
from shardwell.steps.opening import Opening
from shardwell.steps.transfer import SHORT_BYTES, Answer, StepTransfer
from shardwell.transport.arena import (
    BATCH_COUNT,
    Places,
    batch_count,
    payload_of,
    room_bytes,
    wanted_bytes,
)
from shardwell.transport.stream_pool import StreamPool
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.v1.trace_pb2 import (
    SPAN_KIND_DECODE,
    SPAN_KIND_ENCODE,
    SPAN_KIND_EXCHANGE,
    SPAN_KIND_GET,
    SPAN_KIND_PUT,
    SPAN_KIND_SEND,
)
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.chunks import ChunkCodec

_SQUARES_MAX = 16
"""Numbers of CloseStepResponse.squares: of 53 bits each, for sums of 2^-298 to below 2^310."""
_SHORT_ELEMENT_COUNT = SHORT_BYTES // 4
"""Elements of a slice whose messages and answers, of up to 4 bytes an element, are short."""

_LOOK_ELEMENT_COUNT = 1 << 20
"""The values that one thread looks at before others are woken for their part."""


@dataclass
class Gradient:
    """A gradient on its way, and the shards' answers to it, which attempts share."""

    values: Pieces
    step: int
    sample_count: int
    learning_rate: float | None
    samples: types_pb2.StepSamples | None = None
    """The samples that it was made from, of which the shards keep account."""
    looked_at: set[int] = field(default_factory=set)
    """Numbers of chunks that were found to be finite, over all parts in order."""
    after_refusal: bool = False
    """True if a shard refused another gradient of this step before."""
    superseded: set[Slice] = field(default_factory=set)
    """Ranges that a shard had counted before with other values, also in calls that failed."""
    late: set[Slice] = field(default_factory=set)
    """Ranges whose step had closed, or that were of a tenure that is over."""
    unknown: set[Slice] = field(default_factory=set)
    """Those of `late` that may have counted when an earlier attempt or call sent them."""
    outcomes: dict[int, pb.StepOutcome] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ShardSlice:
    """The part of this parameter on one shard that owns a slice of it."""

    channel: ShardChannel
    where: Slice
    chunk_element_count: int
    first_chunk: int
    """Chunks of all parts before this one."""

    @cached_property
    def chunks(self) -> list[Slice]:
        """The ranges of its chunks."""
        size = self.chunk_element_count
        return [self.where.chunk(index, size) for index in range(self.where.chunk_count(size))]


@dataclass
class Progress:
    """The progress of one gradient; it survives connections, and the next attempt goes on there."""

    row: int = 0
    """Every shard has answered its chunks before this one, of those that it is sent."""
    version: float = math.inf
    """The fewest updates that a chunk among them has seen."""
    version_max: int = 0
    counted_shards: set[int] = field(default_factory=set)


Line: TypeAlias = transfer.Line[ShardSlice]
Stretch: TypeAlias = transfer.Stretch[ShardSlice]


def _stride(count: int) -> int:
    """Returns the distance of two steps' first chunks: by the golden ratio, so that few meet."""
    return round(count * 0.382)


def _ask(line: Line, request: pb.ExchangeRequest) -> None:
    line.stream.submit(iter((request.SerializeToString(),)), is_short=True)


def _whole(parts: Sequence[ShardSlice]) -> list[Stretch]:
    return [(part, 0, len(part.chunks)) for part in parts]


class _Wanted(NamedTuple):
    weights: Pieces
    min_version: int
    step: int
    is_exchange: bool
    """True if versions must be `min_version` exactly, in synchronous mode."""


class Transfer(StepTransfer[ShardSlice]):
    """The way of one parameter's chunks.

    Any thread may fetch weights; the rest is for one thread at a time.
    """

    _open_type = types_pb2.StreamOpen
    _answer_type = pb.ExchangeResponse
    _aside = "superseded"
    _shares = True

    def __init__(
        self,
        opening: Opening[ParameterSpec, Any],
        pool: StreamPool,
        shards: Shards,
        traffic: Traffic,
    ) -> None:
        super().__init__(opening, pool, shards, traffic)
        spec = self._spec = opening.spec
        self.parts: list[ShardSlice] = []
        """The parts by shard; empty until the shards have said them."""
        self._rotates = spec.min_contributors > 0
        self._names_in_all = spec.has_open_sets
        self._codec = ChunkCodec.of(spec)
        self._gradient_context = checksum.context(
            checksum.Kind.GRADIENT, spec.name, opening.worker_id
        )
        self._fetch_context = checksum.context(checksum.Kind.WEIGHTS_FETCH, spec.name)
        self._outcome_context = checksum.context(checksum.Kind.OUTCOME, spec.name)
        self._weights_context = checksum.context(checksum.Kind.WEIGHTS, spec.name)
        self.image = Image(spec, self._weights_context) if spec.has_image else None
        self._closed_version = 0
        """Steps before it have closed everywhere, where they close by their norm."""
        self.non_finite_remedy = OF_PARAMETER
        self.refusal_remedy = REFUSED_STEP.format("parameter")

    def reopen(self, parts: list[ShardSlice]) -> None:
        """Takes the shards' current parts; their past may be another one."""
        self.parts, self._closed_version = parts, 0
        if self.image is not None:
            self.image.forget()

    def read(self, weights: Pieces, min_version: int, attempts: Attempts) -> int:
        """Fills `weights` and returns their version; makes attempts until one succeeds."""
        self.close_steps_before(min_version, attempts)
        return int(attempts.run(lambda: self.get_weights(weights, min_version, attempts)).version)

    def close_steps_before(self, version: int, attempts: Attempts) -> None:
        """Closes the step that leads to a version, if it needs a call; makes attempts, too."""
        if self._spec.closes_by_norm and version > self._closed_version:
            attempts.run(lambda: self.close_step(version - 1, attempts))
            self._closed_version = version

    def get_weights(
        self, weights: Pieces, min_version: int, attempts: Attempts, max_version: int | None = None
    ) -> Progress:
        """Fills `weights`; returns their versions. GetWeightsRequest explains `max_version`."""
        step = min_version - 1
        whole = _whole(self.parts)
        with self._lines(whole, attempts, SPAN_KIND_GET, step, reads=True) as lines:
            for line in lines:
                request = pb.ExchangeRequest()
                self._begin(request, line)
                fetch = request.fetch
                fetch.min_version = min_version
                fetch.wait_timeout_ms = wait_milliseconds(attempts.rest_s)
                fetch.in_arena = line.arena is not None
                if max_version is not None:
                    fetch.max_version = max_version
                if self.image is not None:
                    first, count = line.part.first_chunk, len(line.part.chunks)
                    held = self.image.held_versions(range(first, first + count))
                    fetch.held_versions.extend(held)
                    if max_version is None:  # else an older image is asked for, and replaces none
                        line.held.update((first + at, h - 1) for at, h in enumerate(held) if h)
                fetch.crc32c = checksum.weights_fetch(self._fetch_context, fetch)
                _ask(line, request)
            progress = Progress()
            self._fill(lines, progress, _Wanted(weights, min_version, step, is_exchange=False))
            return progress

    def check_finite(self, work: Gradient, stretches: Sequence[Stretch] | None = None) -> None:
        """Refuses chunks that are not finite; looks at all by default."""
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

    def _look(self, work: Gradient, stretch: Stretch) -> None:
        part, first, stop = stretch
        for index, where in enumerate(part.chunks[first:stop], first):
            number = part.first_chunk + index
            if number not in work.looked_at:
                check_finite(
                    f"gradient of {self._spec.name!r}",
                    work.values.read(where.offset, where.stop),
                    self._spec.name,
                    where.offset,
                    self.non_finite_remedy,
                    name_of=self._spec.element,
                )
                work.looked_at.add(number)

    def put_gradient(self, work: Gradient, progress: Progress, attempts: Attempts) -> None:
        """Sends a gradient to all shards that have not confirmed all of it."""
        parts = [
            part for part in self.parts if part.channel.shard_index not in progress.counted_shards
        ]
        stretches = _whole(parts)
        with self._lines(stretches, attempts, SPAN_KIND_PUT, work.step, work=work) as lines:
            self._send(lines, work, attempts, counts_only=True)
            for line in lines:
                answer, *_ = self._next(line)
                shard_index, chunk_count = line.part.channel.shard_index, len(line.part.chunks)
                counted = answer.counted.counted_chunk_count + answer.counted.duplicate_chunk_count
                is_intact = checksum.of_message(answer.counted) == answer.counted.crc32c
                if not (answer.HasField("counted") and is_intact and counted == chunk_count):
                    raise self._damaged(
                        line, f"{counted} of {chunk_count} chunks counted, or damaged; call again"
                    )
                if self._spec.has_open_sets:
                    self._note_outcome(line, answer.counted.outcome)
                progress.counted_shards.add(shard_index)

    def close_step(self, step: int, attempts: Attempts) -> None:
        """Closes a step that closes by its norm, once all workers have contributed.

        Safe to repeat, and for several clients at once: the first shard decides which norm counts.
        """
        answers = self._ask_to_close(self.parts, step, None, attempts)
        norm = next((answer.norm for answer in answers if answer.HasField("norm")), None)
        if norm is None:
            if not all(answer.squares for answer in answers):
                return  # all workers have gone on, so it is closed everywhere
            norm = math.sqrt(math.fsum(each for answer in answers for each in answer.squares))
        first, *others = self.parts
        (decided,) = self._ask_to_close([first], step, norm, attempts)
        if decided.HasField("norm"):
            self._ask_to_close(others, step, decided.norm, attempts)

    def _ask_to_close(
        self, parts: Sequence[ShardSlice], step: int, norm: float | None, attempts: Attempts
    ) -> list[pb.CloseStepResponse]:
        with self._lines([(part, 0, 0) for part in parts], attempts) as lines:
            for line in lines:
                request = pb.ExchangeRequest()
                self._begin(request, line)
                close = request.close
                close.shard.CopyFrom(line.part.channel.identity)
                close.parameter = self._spec.name
                close.incarnation = self._opening.incarnation
                close.step = step
                if norm is not None:
                    close.norm = norm
                close.wait_timeout_ms = wait_milliseconds(attempts.rest_s)
                checksum.seal(close)
                _ask(line, request)
            return [self._closed(line, self._next(line)[0]) for line in lines]

    def _closed(self, line: Line, answer: pb.ExchangeResponse) -> pb.CloseStepResponse:
        channel = line.part.channel
        if not answer.HasField("closed"):
            raise self._damaged(line, "no closed step, as was asked for; call again")
        closed = channel.received(answer.closed, parameter=self._spec.name)
        squares = closed.squares
        is_bounded = len(squares) <= _SQUARES_MAX and all(abs(each) < 2.0**400 for each in squares)
        is_alone = self._spec.allow_non_finite and list(map(str, squares)) in (["inf"], ["nan"])
        if not (is_alone or (is_bounded and math.fsum(squares) >= 0.0)):
            raise self._damaged(
                line,
                f"squares that add up to the sum of {squares[:3]}; at most {_SQUARES_MAX} numbers "
                "with a sum of at least 0 are expected; call again",
            )
        return closed

    def exchange(
        self,
        work: Gradient,
        weights: Pieces,
        progress: Progress,
        ranges: Ranges | None,
        attempts: Attempts,
    ) -> int:
        """Sends chunks of a gradient from `progress` on; fills `weights` with the results.

        Returns the fewest updates that a chunk has seen. `ranges` are chunk indexes of each part;
        None: all.
        """
        min_version = work.step + 1 if self._spec.mode == "sync" else 0
        if self._spec.has_open_sets:  # what was late before is late again, and said so
            progress.row, progress.version = 0, math.inf
        row = progress.row
        if ranges is None:
            ranges = [(0, len(part.chunks)) for part in self.parts]
        stretches = [
            (part, max(first, row), stop)
            for part, (first, stop) in zip(self.parts, ranges, strict=True)
            if max(first, row) < stop
        ]
        if not stretches:  # an attempt failed behind the last answer
            return int(progress.version)
        wanted = _Wanted(weights, min_version, work.step, is_exchange=True)
        with self._lines(stretches, attempts, SPAN_KIND_EXCHANGE, work.step, work=work) as lines:
            self._send(lines, work, attempts)
            return self._fill(lines, progress, wanted)

    @override
    def _room_bytes(self, part: ShardSlice, first: int, stop: int) -> int:
        if self._codec.lz4:
            return 0
        size_of = self._codec.codec.encoded_bytes
        chunks = part.chunks[first:stop]
        if self._rotates and chunks:  # any of them may be the first
            return wanted_bytes([size_of(chunks[0].size)] * len(chunks))
        return wanted_bytes([size_of(each.size) for each in chunks])

    def _chunk_index(self, line: Line, unit: int, step: int) -> int:
        """Returns the index of chunk `unit`; with a quorum, each step begins with another chunk.

        So a slow link does not lose the same layers in each step. All workers meet in the same
        chunks.
        """
        count = len(line.part.chunks)
        if line.stop - line.first != count:
            return unit
        return int((unit + step * _stride(count)) % count)

    def _send(
        self,
        lines: Sequence[Line],
        work: Gradient,
        attempts: Attempts,
        *,
        counts_only: bool = False,
    ) -> None:
        """Sends each line's chunks of a gradient, all of them finite.

        Where all is shared, or short, the encoder looks at the values as messages are made here,
        before any leaves. Elsewhere all values are looked at first, and messages made as they
        leave.
        """
        are_short = all(line.part.where.size <= _SHORT_ELEMENT_COUNT for line in lines)
        are_made_here = are_short or all(line.is_shared for line in lines)
        if not are_made_here:
            self.check_finite(work, [(line.part, line.first, line.stop) for line in lines])
        common = types_pb2.GradientChunk(
            step=work.step,
            sample_count=work.sample_count,
            wait_timeout_ms=wait_milliseconds(attempts.rest_s),
            counts_only=counts_only,
            after_refusal=work.after_refusal,
        )
        if work.learning_rate is not None:
            common.learning_rate = work.learning_rate
            common.rate_factors.extend(factors_of(work.learning_rate))
        if not are_made_here:
            for line in lines:
                line.stream.submit(self._messages(line, work, common, leaves=True))
            return
        if self._threads.count < 2 or are_short:
            made = [[*self._messages(line, work, common)] for line in lines]
        else:
            made = self._made_beside(lines, work, common)
        for line, messages in zip(lines, made, strict=True):
            is_short = line.part.where.size <= _SHORT_ELEMENT_COUNT
            is_short = is_short or sum(map(len, messages)) <= SHORT_BYTES
            line.stream.submit(iter(messages), is_short=is_short)

    def _made_beside(
        self,
        lines: Sequence[Line],
        work: Gradient,
        common: types_pb2.GradientChunk,
    ) -> list[list[bytes]]:
        pieces: list[list[list[bytes]]] = []
        with self._threads.spread() as spread:
            for line in lines:
                size = batch_count(line.stop - line.first)
                starts = range(line.first, line.stop, size)
                pieces.append([[] for _ in starts])
                for messages, start in zip(pieces[-1], starts, strict=True):
                    stretch = (start, min(start + size, line.stop))
                    # Made where the list takes them, which is on the other thread.
                    spread.give(messages.extend, self._messages(line, work, common, stretch))
        return [list(itertools.chain.from_iterable(made)) for made in pieces]

    def _begin(self, request: pb.ExchangeRequest, line: Line) -> None:
        if line.opens:
            request.open.CopyFrom(self._stream_open(line.part.channel))
        arena = line.arena
        if arena is not None and not arena.is_announced:
            request.arena, arena.is_announced = arena.token, True

    def _messages(
        self,
        line: Line,
        work: Gradient,
        common: types_pb2.GradientChunk,
        stretch: tuple[int, int] | None = None,
        *,
        leaves: bool = False,
    ) -> Iterator[bytes]:
        """Yields a line's chunks of a gradient; on another thread, mostly.

        With `leaves` each is sent when it is made: its values were looked at before.
        """
        part, arena = line.part, line.arena
        spans, name, peer = self._spans, self._name, part.channel.name
        size_of = self._codec.codec.encoded_bytes
        first, last = line.first, line.stop - 1
        begin, stop = stretch or (first, line.stop)
        places = batch = None
        if arena is not None:  # all chunks before the last have one size
            batch = framing.Batch(pb.ExchangeRequest, batch_count(line.stop - first))
            before = (begin - first) * room_bytes(size_of(part.chunks[0].size))
            places = Places(arena.memory, before)
        bare = start = checksum.gradient(self._gradient_context, common)
        samples = work.samples
        named = bare if samples is None else checksum.of_samples(bare, samples)
        for unit in range(begin, stop):
            at_ns = now_ns()
            index = self._chunk_index(line, unit, work.step) if self._rotates else unit
            where = part.chunks[index]
            header = pb.ExchangeRequest(gradient=common)
            gradient = header.gradient
            # Where no step closes without a worker, shards ask no other chunk.
            if samples is not None and (where.offset == 0 or self._names_in_all):
                gradient.samples.CopyFrom(samples)
                start = named
            else:
                start = bare
            chunk = gradient.chunk
            if unit == first:
                self._begin(header, line)
            gradient.end_of_step = unit == last
            held = None if self.image is None else self.image.held(part.first_chunk + index)
            if held is not None:
                gradient.held_version = line.held[part.first_chunk + index] = held
            gradient.control_crc32c = checksum.gradient_control(gradient)
            room = None if places is None else places.room(size_of(where.size))
            try:
                message = self._codec.encode(
                    header,
                    chunk,
                    where,
                    index,
                    work.values.read(where.offset, where.stop),
                    start=start,
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
            if batch is None:
                yield message
            else:
                yield from batch.add(message, waits=shared_bytes > 0)
            if leaves:
                spans.add(SPAN_KIND_SEND, name, work.step, index, peer, at_ns)
        if batch is not None:
            yield from batch.rest()

    @override
    def _explain(self, line: Line, error: NonFiniteError) -> None:
        error.args = (f"{error.message}; {self.refusal_remedy}",)

    def _fill(self, lines: Sequence[Line], progress: Progress, wanted: _Wanted) -> int:
        """Reads all chunks of weights behind `progress`, and notes its progress there."""
        first, stop = progress.row, max((line.stop for line in lines), default=0)
        versions: dict[int, list[int]] = {row: [] for row in range(first, stop)}
        try:
            self._receive(lines, first, wanted.step, partial(self._decode, wanted, versions))
        finally:
            for row, come in versions.items():
                if len(come) < sum(line.first <= row < line.stop for line in lines):
                    break
                if come:
                    progress.version = min(progress.version, *come)
                    progress.version_max = max(progress.version_max, *come)
                progress.row = row + 1
        return int(progress.version)

    @override
    def _take_aside(self, line: Line, answer: pb.ExchangeResponse) -> None:
        part, found = line.part, answer.superseded
        indexes = found.chunk_indexes
        is_whole = checksum.of_message(found) == found.crc32c
        if not is_whole or not indexes or max(indexes) >= len(part.chunks):
            raise self._damaged(line, "what it had counted before is damaged; call again")
        if line.work is not None:
            line.work.superseded.update(part.chunks[index] for index in indexes)

    def _note_outcome(self, line: Line, found: pb.StepOutcome) -> None:
        part, work = line.part, line.work
        indexes = found.late_chunk_indexes
        is_whole = checksum.outcome(self._outcome_context, found) == found.crc32c
        if not is_whole or (indexes and max(indexes) >= len(part.chunks)):
            raise self._damaged(line, "what it counted is damaged; call again")
        if work is None:
            return
        late = [part.chunks[index] for index in indexes]
        work.late.update(late)
        if found.late_may_have_counted:
            work.unknown.update(late)
        work.outcomes[part.channel.shard_index] = found

    def _decode(
        self,
        wanted: _Wanted,
        versions: dict[int, list[int]],
        line: Line,
        unit: int,
        answer: Answer,
    ) -> None:
        """Writes a checked chunk of weights, on any thread, and adds its version to `versions`."""
        part, begin_ns = line.part, now_ns()
        header, payload, size_bytes = answer
        index = unit
        ends_open_step = self._spec.has_open_sets and wanted.is_exchange and unit == line.stop - 1
        if header.HasField("outcome"):
            self._note_outcome(line, header.outcome)
        elif ends_open_step:
            raise self._damaged(line, "the end of a step, and not what it counted; call again")
        if self._rotates and wanted.is_exchange:
            index = self._chunk_index(line, unit, wanted.step)
        where = part.chunks[index]
        chunk: types_pb2.Chunk = header.chunk
        try:
            payload = payload_of(chunk, payload, None if line.arena is None else line.arena.memory)
            with wanted.weights.writing(where.offset, where.stop) as values:
                version = int(header.version)
                if self.image is not None:
                    number = part.first_chunk + index
                    known = line.held.get(number)
                    version = self.image.take(number, where, header, payload, values, known)
                else:
                    start = checksum.weights(self._weights_context, header.version)
                    self._codec.read(chunk, payload, start, where, values)
        except ShardwellError as error:
            del payload, answer  # which the error that is raised would hold
            raise self._damaged(line, error.message) from None
        min_version = wanted.min_version
        exact = wanted.is_exchange and self._spec.mode == "sync"
        if self._spec.has_open_sets:  # its step may have closed without this worker, or not yet
            exact, min_version = False, min_version - wanted.is_exchange
        if chunk.chunk_index != index or header.version < min_version:
            raise self._damaged(
                line,
                f"chunk {chunk.chunk_index} at version {header.version}; expected chunk {index} at "
                f"version {min_version}{'' if exact else ' or later'}",
            )
        if exact and header.version > min_version:  # a later step closes with this worker only
            raise went_on_elsewhere(
                part.channel,
                self._opening.what,
                self._opening.worker_id,
                expected=min_version,
                found=header.version,
                **self._opening.of,
            )
        shared_bytes = chunk.shared.size
        self._traffic.add_received(size_bytes + shared_bytes, where.size, shared_bytes)
        versions[unit].append(version)
        self._spans.add(
            SPAN_KIND_DECODE, self._name, wanted.step, index, part.channel.name, begin_ns
        )
