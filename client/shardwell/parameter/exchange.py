"""One parameter's bytes between a worker and the shards that own it: one attempt of each verb.

Gradients become messages, messages become weights. Every attempt ends with its calls ended, except
the streams of an exchange that succeeded, which are kept for the next. Whether another attempt is
made, and from which chunk on, is for the caller.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from shardwell.errors import (
    CorruptChunkError,
    NonFiniteError,
    ShardwellError,
)
from shardwell.numerics.arguments import finite_peak, wait_milliseconds
from shardwell.numerics.codec import Bytes, NonFiniteValueError
from shardwell.numerics.scratch import thread_scratch
from shardwell.parameter.pieces import Pieces
from shardwell.placement.slices import Slice
from shardwell.process.shared_memory import HEAD_BYTES
from shardwell.process.spans import Spanned, now_ns
from shardwell.rpc.arena import Arena, Places, batch_count, payload_of, wanted_bytes
from shardwell.rpc.call_group import CallGroup
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel, told_of, went_on_elsewhere
from shardwell.rpc.stream_pool import StreamPool
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

_Answer: TypeAlias = tuple[pb.ExchangeResponse, Bytes, int]
"""Header, payload, and bytes of the message."""
_Answers: TypeAlias = Iterator[_Answer]


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
    """Every shard has answered its chunks before this one."""
    version: float = math.inf
    """The fewest updates that a chunk among them has seen."""
    counted_shards: set[int] = field(default_factory=set)
    """Shards that have told that they counted the whole gradient."""


class Transfer:
    """How one parameter's chunks are sent and taken.

    Any thread may fetch weights; the rest is for one thread at a time.

    Args:
        spec: The parameter.
        pool: Streams of its exchanges.
        worker_id: Whose calls they are.
        traffic: The client's, which counts them.
    """

    def __init__(
        self, spec: ParameterSpec, pool: StreamPool, *, worker_id: str, traffic: Traffic
    ) -> None:
        self._spec = spec
        self._pool = pool
        self._worker_id = worker_id
        self._traffic = traffic
        self.parts: list[ShardSlice] = []
        """Where the elements are, in the order of the shards; once the shards have said it."""
        self._codec = ChunkCodec.of(spec)
        self._gradient_context = checksum.gradient_context(spec.name, worker_id)
        self._weights_context = checksum.weights_context(spec.name)
        self.tenure = 0
        """See StreamOpen; once the shards have said it."""

    def get_weights(self, weights: Pieces, min_version: int, attempts: Attempts) -> int:
        """Fills `weights`; returns the fewest updates that a chunk of them has seen."""
        parts = self.parts
        with (
            self._spanned(SPAN_KIND_GET, min_version - 1),
            self._lent(parts, attempts) as arenas,
            CallGroup() as call_group,
        ):
            calls = [
                call_group.add(
                    part.channel,
                    part.channel.get_weights(
                        pb.GetWeightsRequest(
                            shard=part.channel.identity,
                            parameter=self._spec.name,
                            worker_id=self._worker_id,
                            min_version=min_version,
                            wait_timeout_ms=wait_milliseconds(attempts.rest_s),
                            arena=0 if arena is None else arena.token,
                        ),
                        timeout=attempts.rest_s,
                    ),
                )
                for part, arena in zip(parts, arenas, strict=True)
            ]
            return self._receive(
                parts,
                weights,
                lambda number: next(calls[number], b""),
                min_version,
                call_group,
                Progress(),
                step=min_version - 1,
                arenas=arenas,
            )

    def check_finite(self, work: Gradient, first: int = 0, stop: int | None = None) -> None:
        """Notes the peaks of rows [first, stop), and refuses what is not finite.

        Raises:
            NonFiniteError: a value is not.
        """
        if self._spec.allow_non_finite:
            return
        for part in self.parts:
            for index, where in enumerate(part.chunks[first:stop], first):
                number = part.first_chunk + index
                if number not in work.peaks:
                    work.peaks[number] = finite_peak(
                        f"gradient of {self._spec.name!r}",
                        work.values.read(where.offset, where.stop),
                        self._spec.name,
                        where.offset,
                        told=self._spec.element,
                    )

    def put_gradient(self, work: Gradient, progress: Progress, attempts: Attempts) -> None:
        """Sends a gradient to all shards that have not told yet that they counted all of it.

        Raises:
            NonFiniteError: some of it is not finite; nothing was sent.
            ShardwellError: see `Parameter.put_gradient`.
        """
        failures: list[BaseException] = []
        parts = [
            part for part in self.parts if part.channel.shard_index not in progress.counted_shards
        ]
        with (
            self._spanned(SPAN_KIND_PUT, work.step),
            self._lent(parts, attempts) as arenas,
            CallGroup() as call_group,
        ):
            outgoing = self._outgoing(
                pb.PutGradientRequest, parts, work, [True] * len(parts), arenas, attempts
            )
            calls = [
                call_group.add(
                    part.channel,
                    part.channel.put_gradient.future(
                        _guarded(messages, failures), timeout=attempts.rest_s
                    ),
                )
                for part, (messages, _) in zip(parts, outgoing, strict=True)
            ]
            for part, call in zip(parts, calls, strict=True):
                answer = self._result(call_group, part, call)
                if failures:
                    raise failures[0]
                counted = answer.counted_chunk_count + answer.duplicate_chunk_count
                if counted != len(part.chunks):
                    raise CorruptChunkError(
                        f"shard {part.channel.shard_index} counted {counted} of "
                        f"{len(part.chunks)} chunks of {self._spec.name!r}; call again",
                        shard_index=part.channel.shard_index,
                        parameter=self._spec.name,
                    )
                progress.counted_shards.add(part.channel.shard_index)

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
        with CallGroup() as call_group:
            calls = []
            for part in parts:
                request = pb.CloseStepRequest(
                    shard=part.channel.identity,
                    parameter=self._spec.name,
                    step=step,
                    norm=norm,
                    wait_timeout_ms=wait_milliseconds(attempts.rest_s),
                )
                call = part.channel.start(
                    "CloseStep", request, pb.CloseStepResponse, timeout_s=attempts.rest_s
                )
                calls.append(call_group.add(part.channel, call))
            return [
                self._result(call_group, part, call)
                for part, call in zip(parts, calls, strict=True)
            ]

    def _result(self, call_group: CallGroup, part: ShardSlice, call: Any) -> Any:
        """What one call of several returns; the error is that of the one that failed first."""
        try:
            return part.channel.received(call.result(), self._spec.name)
        except (grpc.RpcError, grpc.FutureCancelledError):
            channel, error = call_group.failure(part.channel, call)
            raise channel.translate(error, self._spec.name) from None

    @property
    def row_count(self) -> int:
        """The most chunks that a shard has. A row is the chunk of that index of every shard."""
        return max(len(part.chunks) for part in self.parts)

    def exchange(
        self, work: Gradient, weights: Pieces, progress: Progress, stop: int, attempts: Attempts
    ) -> int:
        """Sends a gradient, from `progress` to row `stop`; fills `weights` with what comes of it.

        Returns the fewest updates that a chunk has seen.

        Raises:
            NonFiniteError: some of these rows is not finite; nothing of them was sent.
            ShardwellError: see `Parameter.exchange`.
        """
        min_version = work.step + 1 if self._spec.mode == "sync" else 0
        parts = [part for part in self.parts if len(part.chunks) > progress.row]
        channels = [part.channel for part in parts]
        with (
            self._spanned(SPAN_KIND_EXCHANGE, work.step),
            told_of(channels),
            self._pool.borrowed(attempts.rest_s) as streams,
            _emptied() as arenas,
        ):
            opened = streams.streams(channels, (self._spec.name, self.tenure), attempts.rest_s)
            for part, (stream, _) in zip(parts, opened, strict=True):
                room = self._room_bytes(part, progress.row, stop)
                arenas.append(stream.arena(room, attempts.rest_s))
            opens = [is_new for _, is_new in opened]
            outgoing = self._outgoing(
                pb.ExchangeRequest, parts, work, opens, arenas, attempts, progress.row, stop
            )
            for (stream, _), (messages, is_short) in zip(opened, outgoing, strict=True):
                stream.submit(messages, is_short=is_short)
            return self._receive(
                parts,
                weights,
                lambda number: opened[number][0].read(),
                min_version,
                streams.call_group,
                progress,
                step=work.step,
                stop=stop,
                is_exchange=True,
                arenas=arenas,
            )

    def _spanned(self, kind: int, step: int) -> Spanned:
        """Notes how long the block took."""
        return self.parts[0].channel.spans.spanned(kind, self._spec.name, step)

    @contextlib.contextmanager
    def _lent(
        self, parts: Sequence[ShardSlice], attempts: Attempts
    ) -> Iterator[list[Arena | None]]:
        """An arena for each part, where there is one."""
        channels = [part.channel for part in parts]
        with told_of(channels), contextlib.ExitStack() as stack, _emptied() as arenas:
            for part in parts:
                room = self._room_bytes(part, 0, None)
                lent = part.channel.arenas.lent(room, attempts.rest_s)
                arenas.append(stack.enter_context(lent))
            yield arenas

    def _room_bytes(self, part: ShardSlice, first: int, stop: int | None) -> int:
        """What an arena needs for chunks [first, stop); 0: nothing is to be shared."""
        if self._spec.lz4:
            return 0
        item_size = self._codec.codec.item_size
        return wanted_bytes([each.size * item_size for each in part.chunks[first:stop]])

    def _outgoing(
        self,
        header_type: Any,
        parts: Sequence[ShardSlice],
        work: Gradient,
        opens: Sequence[bool],
        arenas: Sequence[Arena | None],
        attempts: Attempts,
        first: int = 0,
        stop: int | None = None,
    ) -> list[tuple[Iterator[bytes], bool]]:
        """Messages for each part with chunks [first, stop) of a gradient, all of them finite.

        Where everything is shared, they are made here: whoever encodes looks at the values in the
        same pass, and nothing has left by then. Elsewhere all values are looked at, and messages
        made as they leave.

        Returns:
            By part, its messages, and whether they and their answers are few and small.
        """
        wait_ms = wait_milliseconds(attempts.rest_s)
        are_shared = all(
            arena is not None and arena.memory.size_bytes >= HEAD_BYTES + room > HEAD_BYTES
            for arena, room in (
                (arena, self._room_bytes(part, first, stop))
                for part, arena in zip(parts, arenas, strict=True)
            )
        )
        if not are_shared:
            self.check_finite(work, first, stop)
        outgoing: list[tuple[Iterator[bytes], bool]] = []
        for part, is_new, arena in zip(parts, opens, arenas, strict=True):
            messages = self._messages(
                header_type,
                part,
                work,
                wait_ms,
                opens=is_new,
                first=first,
                stop=stop,
                arena=arena,
                leaves=not are_shared,
                trace_parent=attempts.trace_parent,
            )
            is_short = part.where.size <= _SHORT_ELEMENT_COUNT
            if are_shared:
                made = list(messages)
                messages, is_short = iter(made), sum(map(len, made)) <= _SHORT_BYTES
            outgoing.append((messages, is_short))
        return outgoing

    def _messages(
        self,
        header_type: Any,
        part: ShardSlice,
        work: Gradient,
        wait_timeout_ms: int,
        *,
        opens: bool,
        first: int = 0,
        stop: int | None = None,
        arena: Arena | None = None,
        leaves: bool = True,
        trace_parent: str = "",
    ) -> Iterator[bytes]:
        """Chunks [first, stop) of a gradient for one shard; runs on a thread of gRPC's.

        With `leaves` each is sent when it is made: its values were looked at before.
        """
        scratch = thread_scratch()
        places = None if arena is None else Places(arena.memory)
        last = len(part.chunks[:stop]) - 1
        batch = framing.Batch(header_type, batch_count(last + 1 - first))
        spans, name, peer = part.channel.spans, self._spec.name, part.channel.name
        for index in range(first, last + 1):
            at_ns = now_ns()
            where = part.chunks[index]
            header = header_type()
            if opens and index == first:
                header.open.CopyFrom(self._opening(part.channel))
            if arena is not None and not arena.is_announced:
                header.arena, arena.is_announced = arena.token, True
            room = None
            if places is not None:
                room = places.room(where.size * self._codec.codec.item_size)
            gradient = header.gradient
            gradient.step = work.step
            gradient.sample_count = work.sample_count
            gradient.wait_timeout_ms = wait_timeout_ms
            gradient.end_of_step = index == last
            if trace_parent and index == first:
                gradient.trace_parent = trace_parent
            if work.learning_rate is not None:
                gradient.learning_rate = work.learning_rate
            try:
                message = self._codec.encode(
                    header,
                    gradient.chunk,
                    where,
                    index,
                    work.values.read(where.offset, where.stop),
                    scratch,
                    start=checksum.gradient(self._gradient_context, gradient),
                    peak=work.peaks.get(part.first_chunk + index),
                    is_exact=True,
                    room=room,
                )
            except NonFiniteValueError as error:
                if not leaves:
                    self.check_finite(work, index, index + 1)  # says so
                # The caller changed the array meanwhile.
                raise NonFiniteError(
                    f"gradient of {self._spec.name!r}: "
                    f"{self._spec.element(where.offset + error.index)} became "
                    f"{error.value} while it was sent; do not write to it before the call returns",
                    element_index=where.offset + error.index,
                    parameter=self._spec.name,
                ) from None
            shared_bytes = gradient.chunk.shared.size
            self._traffic.add_sent(len(message) + shared_bytes, where.size, shared_bytes)
            at_ns = spans.add(SPAN_KIND_ENCODE, name, work.step, index, peer, at_ns)
            yield from batch.add(message, waits=shared_bytes > 0)
            if leaves:
                spans.add(SPAN_KIND_SEND, name, work.step, index, peer, at_ns)
        yield from batch.rest()

    def _receive(
        self,
        parts: Sequence[ShardSlice],
        weights: Pieces,
        read: Callable[[int], bytes],
        min_version: int,
        call_group: CallGroup,
        progress: Progress,
        *,
        step: int,
        stop: int | None = None,
        is_exchange: bool = False,
        arenas: Sequence[Arena | None],
    ) -> int:
        """Reads every chunk of every part, in turns, so that no shard's stream stands still.

        All clients read shard by shard within a chunk index, in the same order; with it, a shard
        that waits until its answer is taken can never be part of a circle of waits.

        Args:
            parts: What to read, in the order of the shards.
            weights: (size,), filled.
            read: The next message of a part, by its place in `parts`; blocks.
            min_version: The version that is waited for.
            call_group: The calls that are read from.
            progress: Where to begin; then, after an error too, how far it came.
            step: After which the weights are wanted.
            stop: Before which row to end; None: the last.
            is_exchange: Whether versions must be `min_version` exactly.
            arenas: What each part's stream shares with its shard.

        Returns:
            The fewest updates that a chunk has seen.

        Raises:
            ShardwellError: see `Parameter.get_weights`.
        """
        stop = self.row_count if stop is None else stop
        read_ahead: list[_Answers] = [iter(()) for _ in parts]
        name, at_ns = self._spec.name, now_ns()
        while progress.row < stop:
            index, version = progress.row, progress.version
            for number, part in enumerate(parts):
                if index < len(part.chunks):
                    answer = next(read_ahead[number], None)
                    if answer is None:
                        try:
                            message = read(number)
                        except grpc.RpcError as error:
                            raise call_group.error_of(
                                part.channel, error, parameter=self._spec.name
                            ) from None
                        channel = part.channel
                        at_ns = channel.spans.add(
                            SPAN_KIND_WAIT, name, step, index, channel.name, at_ns
                        )
                        read_ahead[number] = framing.parse_all(pb.ExchangeResponse, message)
                        answer = next(read_ahead[number])
                    found = self._decode(
                        part,
                        index,
                        answer,
                        weights,
                        min_version,
                        is_exchange=is_exchange,
                        arena=arenas[number],
                    )
                    version = min(version, found)
                    channel = part.channel
                    at_ns = channel.spans.add(
                        SPAN_KIND_DECODE, name, step, index, channel.name, at_ns
                    )
            progress.row, progress.version = index + 1, version
        for part, answers in zip(parts, read_ahead, strict=True):
            if next(answers, None) is not None:
                raise CorruptChunkError(
                    f"shard {part.channel.shard_index} answered more chunks of "
                    f"{self._spec.name!r} than it was asked for; call again",
                    shard_index=part.channel.shard_index,
                    parameter=self._spec.name,
                )
        return int(progress.version)

    def _decode(
        self,
        part: ShardSlice,
        index: int,
        answer: _Answer,
        weights: Pieces,
        min_version: int,
        *,
        is_exchange: bool,
        arena: Arena | None,
    ) -> int:
        """Checks a chunk of weights and writes it where it belongs; returns its version."""
        header, payload, size_bytes = answer
        where = part.chunks[index]
        chunk: types_pb2.Chunk = header.chunk
        try:
            payload = payload_of(chunk, payload, None if arena is None else arena.memory)
            start = checksum.weights(self._weights_context, header.version)
            with weights.writing(where.offset, where.stop) as values:
                self._codec.read(chunk, payload, start, where, values)
        except ShardwellError as error:
            del payload, answer  # whoever keeps the error keeps no memory with it
            raise CorruptChunkError(
                f"shard {part.channel.shard_index} answered for {self._spec.name!r}: "
                f"{error.message}",
                shard_index=part.channel.shard_index,
                parameter=self._spec.name,
            ) from None
        exact = is_exchange and self._spec.mode == "sync"
        if chunk.chunk_index != index or header.version < min_version:
            raise CorruptChunkError(
                f"shard {part.channel.shard_index} answered chunk {chunk.chunk_index} at version "
                f"{header.version} of {self._spec.name!r}; expected chunk {index} at version "
                f"{min_version}{'' if exact else ' or later'}",
                shard_index=part.channel.shard_index,
                parameter=self._spec.name,
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
        return int(header.version)

    def _opening(self, channel: ShardChannel) -> types_pb2.StreamOpen:
        return types_pb2.StreamOpen(
            shard=channel.identity,
            parameter=self._spec.name,
            worker_id=self._worker_id,
            session=channel.session.number,
            tenure=self.tenure,
        )


@contextlib.contextmanager
def _emptied() -> Iterator[list[Arena | None]]:
    """A list for the block; whoever keeps the error that ends it keeps no memory with it."""
    arenas: list[Arena | None] = []
    try:
        yield arenas
    finally:
        arenas.clear()


def _guarded(messages: Iterator[bytes], failures: list[BaseException]) -> Iterator[bytes]:
    """Ends a stream early when a message can't be made, and keeps the reason for the caller."""
    try:
        yield from messages
    except Exception as error:
        failures.append(error)
