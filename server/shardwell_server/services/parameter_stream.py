"""One call's chunks of a parameter: gradients in, each answered or counted; weights out.

PutGradient, GetWeights and Exchange are made of this. States of an Exchange: between steps, where
it may be opened anew, share other memory, or be asked for weights; in a step, from a chunk of a
gradient until one that ends the step. Answers leave in the order of their chunks: those that are
ready as messages come, all of them before anything that follows a step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

from shardwell.errors import ArgumentError, CorruptChunkError, ShardUnavailableError
from shardwell.numerics.codec import Bytes
from shardwell.process.shared_memory import SharedMemory
from shardwell.process.telemetry import StepSpans
from shardwell.specs.names import check_name
from shardwell.transport.arena import BATCH_COUNT, Places, batch_count, payload_of, shared_message
from shardwell.transport.arena_offers import ArenaOffers
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.messages import Room
from shardwell_server.access.rights import Right
from shardwell_server.services.calls import LONG, Call, Handling, Read
from shardwell_server.shard.deadline import NotYet, RequestDeadline, deadline_of, until
from shardwell_server.shard.members import Contributor
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.shard import Shard
from shardwell_server.shard.step_tracker import Seat

_SHORT_ELEMENT_COUNT = 131_072
"""Of a slice that is counted and encoded in about the time that it takes to wake a thread and let
it in beside the loop's."""
_SLOW_ELEMENT_COUNT = 16_384
"""The same where payloads are compressed, or a file is mapped, which may take several times as
long."""
_Request: TypeAlias = tuple[pb.ExchangeRequest, Bytes, int]
"""A message's header, its payload, and bytes of the message."""
CloseStep: TypeAlias = Callable[[pb.CloseStepRequest, Call], Handling]
"""What closes a step that is clipped: the handler of that call."""


class ParameterStream:
    """Of one call. `put_gradient`, `exchange` or `weights` is its handler.

    Args:
        shard: Whose parameters.
        arenas: Memory that clients share.
        call: The call.
    """

    def __init__(self, shard: Shard, arenas: ArenaOffers, call: Call) -> None:
        self._shard = shard
        self._arenas = arenas
        self._call = call
        self._is_spread = shard.core_threads.count > 1
        """Whether other threads may count its chunks and make its answers."""
        self._source: _GradientSource | None = None
        """Who opened it, and for what."""
        self._arena: SharedMemory | None = None
        self._is_between_steps = True
        self._pending: deque[_Pending] = deque()
        self._beside: dict[int, Future[bool]] = {}
        """Chunks of the message that is being served which other threads count, by index."""
        self._made: deque[Future[tuple[bytes, int]]] = deque()
        """Answers that other threads make, those that are due first."""
        self._counted = pb.PutGradientResponse()
        """Chunks that are counted alone: of this step, or of a call that only does that."""

    # Handlers.

    def put_gradient(self) -> Handling:
        """Counts a gradient, chunk by chunk; says how many."""
        message = yield Read.NEXT_STEP
        while message is not None:
            for request, payload, _ in framing.parse_all(pb.PutGradientRequest, message):
                if self._source is None:
                    self._source = self._opened(request)
                    self._arena = arena_of(self._arenas, request.arena)
                    self._source.contributor()
                if not _has_gradient(request, payload):
                    continue
                contributor = self._source.contributor()
                payload = payload_of(request.gradient.chunk, payload, self._arena)
                is_new = yield from self._take(
                    self._source,
                    contributor,
                    request.gradient,
                    payload,
                    self._deadline(request.gradient),
                )
                self._note(is_new=is_new)
            del message, request, payload  # not to be held while there is no other
            message = yield Read.NEXT
        if self._source is not None:
            self._source.parameter.make_durable()
            self._source.spans.end()
            if (superseded := self._source.superseded()) is not None:
                self._counted.superseded.CopyFrom(superseded)
        return self._counted

    def exchange(self, close_step: CloseStep) -> Handling:
        """Does what each message asks for; the stream goes on from step to step."""
        try:
            while True:
                message = yield Read.NEXT_STEP if self._is_between_steps else Read.NEXT
                if message is None:
                    break
                requests: Iterable[_Request] = framing.parse_all(pb.ExchangeRequest, message)
                if self._is_spread:
                    requests = [*requests]
                    self._count_beside(requests)
                for request, payload, _ in requests:
                    yield from self._serve(request, payload, close_step)
                del message, request, payload, requests  # not to be held while answers wait
                if self._source is not None:
                    yield from self._answers(self._source.parameter, all_=self._is_between_steps)
                    if self._is_between_steps:
                        self._source.spans.end()
                        # Whatever this step was.
                        self._call.is_short = self._is_short(self._source.parameter)
            if self._source is not None:
                yield from self._answers(self._source.parameter, all_=True)
        finally:
            if self._beside or self._made:
                self._end_beside()

    def weights(
        self,
        parameter: ParameterSlice,
        asked: pb.GetWeightsRequest | pb.WeightsFetch,
        deadline: RequestDeadline,
        arena: SharedMemory | None,
    ) -> Handling:
        """All weights, chunk by chunk, each once it has seen so many updates."""
        min_version = asked.min_version
        max_version = asked.max_version if asked.HasField("max_version") else None
        places = None if arena is None else Places(arena)
        # GetWeightsResponse has the same fields.
        batch = framing.Batch(pb.ExchangeResponse, batch_count(parameter.chunk_count))
        for index in range(parameter.chunk_count):
            if not parameter.is_ready(index, min_version):
                yield from batch.rest()
            message = yield from until(
                parameter.weights_message, index, min_version, deadline, max_version
            )
            parameter.make_durable()  # nobody goes on from what could still be lost
            count_payload(self._shard, self._call, sent=len(message))
            shared_bytes = 0
            if places is not None:
                message, shared_bytes = shared_message(pb.ExchangeResponse, message, places.room)
            yield from batch.add(message, waits=shared_bytes > 0)
        yield from batch.rest()

    # A message of an exchange.

    def _count_beside(self, requests: Sequence[_Request]) -> None:
        """Has threads that are free count chunks of a message, beside the others.

        Where nothing is left to be decided: the stream is open, its worker has its seat, and these
        are chunks of one step, each once. Chunks are counted in any order, as chunks of several
        workers are; answers leave in theirs.
        """
        source = self._source
        if len(requests) < 2 or self._call.is_short or source is None:
            return
        if any(request.HasField("open") or request.arena for request, _, _ in requests):
            return
        contributor = source.contributor() if _has_gradient(*requests[0][:2]) else None
        if contributor is None or contributor.seat is None:
            return
        first = requests[0][0].gradient
        indexes = {first.chunk.chunk_index}
        for request, payload, _ in requests[1:]:
            gradient = request.gradient
            is_again = gradient.chunk.chunk_index in indexes
            if is_again or gradient.step != first.step or not gradient.chunk.HasField("shared"):
                return
            indexes.add(gradient.chunk.chunk_index)
            future = self._shard.core_threads.offer(
                self._count_one, source.parameter, contributor, gradient, payload
            )
            if future is None:
                return
            self._beside[gradient.chunk.chunk_index] = future

    def _count_one(
        self,
        parameter: ParameterSlice,
        contributor: Contributor[Seat],
        gradient: types_pb2.GradientChunk,
        payload: Bytes,
    ) -> bool:
        """Counts a chunk of a gradient, beside others; see `ParameterSlice.contribute`."""
        _check_control(gradient)
        payload = payload_of(gradient.chunk, payload, self._arena)
        return parameter.contribute(contributor, gradient, payload, self._deadline(gradient))

    def _end_beside(self) -> None:
        """Returns when no other thread works for this call."""
        beside: list[Future[Any]] = [*self._beside.values(), *self._made]
        self._beside.clear()
        self._made.clear()
        for future in beside:
            error = None if future.cancel() else future.exception()
            if isinstance(error, NotYet):
                error.forget()

    def _serve(
        self, request: pb.ExchangeRequest, payload: Bytes, close_step: CloseStep
    ) -> Handling:
        call, source = self._call, self._source
        if self._is_between_steps and self._pending and source is not None:
            yield from self._answers(source.parameter, all_=True)  # of the step before
        was_short = call.is_short
        if source is None or request.HasField("open"):
            self._check_between_steps("`open`")
            source = self._source = self._opened(request)
            call.is_short = self._is_short(source.parameter)
        if request.arena:
            self._check_between_steps("`arena`")
            self._arena = arena_of(self._arenas, request.arena)
        if request.HasField("fetch") or request.HasField("close"):
            self._check_between_steps("`fetch` or `close`", is_in_step=request.HasField("gradient"))
            if was_short and not call.is_short:
                yield LONG
            yield from self._asked(source.parameter, request, close_step)
        if not _has_gradient(request, payload):
            return
        # However short the message; for a snapshot, what it changes is written to a file.
        is_long = request.gradient.trace_parent or source.parameter.snapshots.pending
        if was_short and (is_long or not call.is_short):
            yield LONG
        yield from self._exchanged(source, request.gradient, payload)

    def _check_between_steps(self, what: str, *, is_in_step: bool = False) -> None:
        if is_in_step or not self._is_between_steps:
            raise ArgumentError(f"{what} came in the middle of a step; end it first")

    def _exchanged(
        self, source: _GradientSource, gradient: types_pb2.GradientChunk, payload: Bytes
    ) -> Handling:
        """Counts a chunk of a gradient, and owes its answer."""
        chunk, parameter = gradient.chunk, source.parameter
        contributor, deadline = source.contributor(), self._deadline(gradient)
        payload = payload_of(chunk, payload, self._arena)
        is_new = yield from self._take(source, contributor, gradient, payload, deadline)
        self._is_between_steps = gradient.end_of_step
        if gradient.counts_only:
            self._note(is_new=is_new)
        else:
            version = gradient.step + 1 if parameter.spec.mode == "sync" else 0
            room = Room(chunk.shared.offset, payload) if chunk.HasField("shared") else None
            self._pending.append(_Pending(chunk.chunk_index, version, deadline, room))
            if len(self._pending) > 2 * parameter.chunk_count:
                raise ArgumentError(
                    f"{len(self._pending)} chunks were sent without end_of_step, of "
                    f"{parameter.chunk_count}; read the answers first"
                )
        superseded = source.superseded() if self._is_between_steps else None
        if superseded is not None:
            yield pb.ExchangeResponse(superseded=superseded).SerializeToString()
        if self._is_between_steps and self._counted.ByteSize():
            yield from self._answers(parameter, all_=True)
            parameter.make_durable()
            yield pb.ExchangeResponse(counted=checksum.seal(self._counted)).SerializeToString()
            self._counted.Clear()

    def _asked(
        self, parameter: ParameterSlice, request: pb.ExchangeRequest, close_step: CloseStep
    ) -> Handling:
        """What is asked for besides gradients."""
        if request.HasField("close") and request.HasField("fetch"):
            raise ArgumentError("a message has `fetch` and `close`; send two")
        if request.HasField("close"):
            checksum.check_sealed(request.close)
            if request.close.parameter != parameter.spec.name:
                raise ArgumentError(
                    f"`close` names {request.close.parameter!r:.80} on a stream of "
                    f"{parameter.spec.name!r}; open that one first"
                )
            closed = yield from close_step(request.close, self._call)
            yield pb.ExchangeResponse(closed=closed).SerializeToString()
        if request.HasField("fetch"):
            fetch = request.fetch
            context = checksum.weights_fetch_context(parameter.spec.name)
            if checksum.weights_fetch(context, fetch) != fetch.crc32c:
                raise CorruptChunkError("a fetch of weights is damaged; send it again")
            deadline = deadline_of(self._shard, self._call, fetch.wait_timeout_ms / 1000)
            arena = self._arena if fetch.in_arena else None
            yield from self.weights(parameter, fetch, deadline, arena)

    def _answers(self, parameter: ParameterSlice, *, all_: bool) -> Handling:
        """The weights that are due, in order: those that are ready, or all."""
        pending = self._pending
        batch = framing.Batch(pb.ExchangeResponse, BATCH_COUNT)
        while pending:
            first = pending[0]
            is_ready = parameter.is_ready(first.chunk_index, first.version)
            if not is_ready and not all_:
                break
            if not is_ready:
                yield from batch.rest()
            begun = self._made.popleft() if self._made else None
            if self._is_spread and len(pending) > 1 and not self._made:
                self._make_beside(parameter)
            message, size_bytes = yield from until(_answer, parameter, first, begun=begun)
            parameter.make_durable()  # it acknowledges a gradient
            pending.popleft()
            count_payload(self._shard, self._call, sent=size_bytes)
            yield from batch.add(message, waits=first.room is not None)
        yield from batch.rest()

    def _make_beside(self, parameter: ParameterSlice) -> None:
        """Has threads that are free make answers behind the next, as far as they are ready."""
        if self._call.is_short:
            return
        for each in itertools.islice(self._pending, 1, None):
            if each.room is None or not parameter.is_ready(each.chunk_index, each.version):
                return
            future = self._shard.core_threads.offer(_answer, parameter, each)
            if future is None:
                return
            self._made.append(future)

    # What handlers share.

    def _opened(self, request: Any) -> _GradientSource:
        """Whoever opens it, of whom nothing is asked yet but that it may read."""
        parameter = opened(self._shard, request, self._call, Right.READ)
        return _GradientSource(self._shard, parameter, request.open, self._call)

    def _deadline(self, gradient: types_pb2.GradientChunk) -> RequestDeadline:
        return deadline_of(self._shard, self._call, gradient.wait_timeout_ms / 1000)

    def _take(
        self,
        source: _GradientSource,
        contributor: Contributor[Seat],
        gradient: types_pb2.GradientChunk,
        payload: Bytes,
        deadline: RequestDeadline,
    ) -> Generator[NotYet, Any, bool]:
        """Counts a chunk of a gradient; False: it had been counted before."""
        _check_control(gradient)
        count_payload(self._shard, self._call, received=payload.size)
        source.step = gradient.step
        if gradient.trace_parent:
            self._call.is_short = False  # whoever exports spans may take any time
            source.spans.begin(gradient.trace_parent, gradient.step)
        begun = self._beside.pop(gradient.chunk.chunk_index, None)
        return until(
            source.parameter.contribute, contributor, gradient, payload, deadline, begun=begun
        )

    def _note(self, *, is_new: bool) -> None:
        self._counted.counted_chunk_count += is_new
        self._counted.duplicate_chunk_count += not is_new

    def _is_short(self, parameter: ParameterSlice) -> bool:
        """Whether all that a stream does takes less time than a thread to be woken.

        A step that closes by its norm writes that into a file.
        """
        is_fast = parameter.storage.is_in_memory and not parameter.spec.lz4
        return (
            parameter.where.size <= (_SHORT_ELEMENT_COUNT if is_fast else _SLOW_ELEMENT_COUNT)
            and self._shard.config.durability.is_process
            and not parameter.spec.closes_by_norm
        )


def opened(shard: Shard, request: Any, call: Call, right: Right) -> ParameterSlice:
    """The parameter that a stream's first message names."""
    if not request.HasField("open"):
        raise ArgumentError("a stream's first message must have `open`; it is missing")
    checksum.check_sealed(request.open)
    shard.check_identity(request.open.shard)
    check_name("worker_id", request.open.worker_id)
    call.check(right, "parameter", request.open.parameter)
    return shard.parameters.opened(request.open.parameter, request.open.incarnation)


def arena_of(arenas: ArenaOffers, token: int) -> SharedMemory | None:
    """The arena of a token; None where there is none to be."""
    memory = arenas.take(token) if token else None
    if token and memory is None:
        raise ShardUnavailableError(
            f"no arena of token {token:#x} is here, as after a restart; call again"
        )
    return memory


def count_payload(shard: Shard, call: Call, *, received: int = 0, sent: int = 0) -> None:
    """Counts payload."""
    shard.traffic.add(received=received, sent=sent)
    call.add_bytes(received + sent)


def _has_gradient(request: Any, payload: Bytes) -> bool:
    """Whether a message has a chunk of a gradient; one that only opens a stream has none."""
    has_gradient: bool = request.HasField("gradient")
    if payload.size and not has_gradient:
        raise CorruptChunkError("a message has a payload and no `gradient`; send it again")
    return has_gradient


class _Pending(NamedTuple):
    """An answer that a stream is owed."""

    chunk_index: int
    version: int
    """The least that it may have."""
    deadline: RequestDeadline
    room: Room | None
    """Where its payload goes; None: into the message."""


def _check_control(gradient: types_pb2.GradientChunk) -> None:
    """Refuses a chunk of which more than its payload was damaged.

    Raises:
        CorruptChunkError: it was.
    """
    if checksum.gradient_control(gradient) != gradient.control_crc32c:
        raise CorruptChunkError(
            "end_of_step, counts_only or wait_timeout_ms of a chunk is damaged; send it again"
        )


def _answer(parameter: ParameterSlice, due: _Pending) -> tuple[bytes, int]:
    """An answer as it leaves, and its size with its payload; see `weights_message`."""
    message = parameter.weights_message(due.chunk_index, due.version, due.deadline)
    room = due.room
    if room is None:
        return message, len(message)
    shared, _ = shared_message(pb.ExchangeResponse, message, lambda size_bytes: room)
    return shared, len(message)


class _GradientSource:
    """Who opened a stream, and where its gradients go."""

    def __init__(
        self, shard: Shard, parameter: ParameterSlice, opening: types_pb2.StreamOpen, call: Call
    ) -> None:
        self.parameter = parameter
        """What it is about."""
        self.spans = StepSpans(
            shard.spans,
            shard.config.shard_index,
            opening.worker_id,
            {"parameter": parameter.spec.name},
        )
        """OpenTelemetry's, of its steps."""
        self.step = 0
        """Of the last gradient."""
        self._sessions = shard.sessions
        self._opening = opening
        self._call = call
        self._contributor: Contributor[Seat] | None = None

    def superseded(self) -> pb.SupersededChunks | None:
        """Chunks of the step that had been counted with other values; None: there are none."""
        indexes = [] if self._contributor is None else self._contributor.superseded
        if not indexes:
            return None
        found = pb.SupersededChunks(step=self.step, chunk_indexes=indexes)
        found.crc32c = checksum.of_message(found)
        indexes.clear()
        return found

    def contributor(self) -> Contributor[Seat]:
        """Whose gradients it brings; whoever only reads needs neither right nor session for that.

        Raises:
            AccessDeniedError, ShardUnavailableError: it may not, or its session is not known.
        """
        if self._contributor is None:
            opening, call = self._opening, self._call
            call.check(Right.CONTRIBUTE, "parameter", opening.parameter)
            session = self._sessions.check(opening.session, opening.worker_id, call.principal.name)
            call.session = session.number
            self._contributor = Contributor(opening.worker_id, session, opening.tenure)
        return self._contributor
